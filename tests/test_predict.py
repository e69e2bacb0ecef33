"""The cost model: its limits, its directions, its units, and bytes that are really sent."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dlion import optim
from dlion.errors import UserError
from dlion.suite import predict
from dlion.workers import Workers

METHODS = predict.METHODS
SETTING = predict.Setting(parameters=1e8, workers=16, rate=1e9, compute=0.5)
RUNS = {
    "g_lion": optim.GLion,
    "dlion_mavo": optim.DLion,
    "dlion_avg": partial(optim.DLion, aggregation="avg"),
    "lion_cub_2": partial(optim.LionCub, bits=2, ties="zero"),
    "lion_cub_4": partial(optim.LionCub, bits=4, ties="zero"),
}

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize(
    ("n", "exchange"), [(2, "direct"), (4, "direct"), (6, "direct"), (6, "grid"), (16, "grid")]
)
@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_the_optimizer_sends_the_predicted_bytes(name, n, exchange):
    way = {} if METHODS[name].largest is None else {"exchange": exchange}
    d = 320 * n * 50  # whole words and whole groups of five trits for every worker
    param = torch.nn.Parameter(torch.randn(d))
    optimizer = RUNS[name]([param], lr=1e-3, workers=Workers(local=n), **way)
    for worker in range(n):
        param.grad = torch.randn(d)
        optimizer.collect(worker)
    optimizer.step()
    setting = predict.Setting(d, n, rate=None, compute=0.0, exchange=exchange)
    sent = optimizer.channel.traffic.sent_bytes / n
    headers = 32 * n  # bytes at most, those of n messages each way
    predicted = predict.payload_bytes(METHODS[name], setting)
    assert predicted <= sent * 1.0001
    assert sent - predicted <= headers


@each_method
def test_without_computing_a_step_is_its_exchange(method):
    setting = replace(SETTING, compute=0.0, speed=1e12)
    exchange = predict.exchange_seconds(method, setting)
    assert predict.step_seconds(method, setting) == pytest.approx(exchange)


@each_method
def test_one_worker_sends_nothing_and_only_computes(method):
    alone = replace(SETTING, workers=1, speed=1e12)
    assert predict.payload_bytes(method, alone) == 0
    assert predict.step_seconds(method, alone) == pytest.approx(alone.compute)


@each_method
def test_on_a_link_without_limit_only_the_hosts_work_is_left(method):
    free = replace(SETTING, rate=None, latency=0.0, message=0.0, host=0.0, speed=1e12)
    assert predict.step_seconds(method, free) == pytest.approx(free.compute)


@each_method
@pytest.mark.parametrize("rate", [1e7, 1e9, 1e12])
def test_a_step_is_never_shorter_than_compute_or_wire(method, rate):
    setting = replace(SETTING, rate=rate)
    wire = 8 * predict.payload_bytes(method, setting) / rate
    assert predict.step_seconds(method, setting) >= max(setting.compute, wire)


@each_method
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rate", [1e12, 1e10, 1e9, 1e8, 1e7]),
        ("workers", [1, 2, 4, 16, 256]),
        ("parameters", [1e6, 1e8, 1e10]),
        ("compute", [0.0, 0.1, 10.0]),
        ("latency", [0.0, 1e-3, 1.0]),
        ("message", [0.0, 1e-4, 1.0]),
        ("host", [0.0, 1e-9, 1e-5]),
        ("speed", [100.0, 1.0, 0.1]),
    ],
)
def test_a_step_only_grows_with_what_makes_it_harder(method, name, values):
    steps = [predict.step_seconds(method, replace(SETTING, **{name: v})) for v in values]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


@each_method
def test_on_a_slow_link_time_is_payload_over_rate(method):
    """8 bits a byte, bits per second, seconds."""
    rate = 1e5
    setting = replace(SETTING, rate=rate, compute=0.0, latency=0.0)
    wire = predict.HEADERS * 8 * predict.payload_bytes(method, setting) / rate
    assert predict.step_seconds(method, setting) == pytest.approx(wire, rel=1e-3)


def test_messages_leave_one_by_one_where_that_is_faster():
    voted = METHODS["dlion_mavo"]
    slow = replace(SETTING, parameters=1e7, rate=1e7, workers=4)
    one_by_one, at_once = (replace(slow, one_by_one=value) for value in (True, False))
    steps = [predict.step_seconds(voted, s) for s in (slow, one_by_one, at_once)]
    assert steps[0] == steps[1] < 0.9 * steps[2]
    small = replace(slow, parameters=1e6)  # whose messages do not tell
    assert predict.step_seconds(voted, small) == predict.step_seconds(
        voted, replace(small, one_by_one=False)
    )


def test_messages_that_are_many_and_far_cost_their_waits():
    voted = METHODS["dlion_mavo"]
    crowd = replace(SETTING, workers=1024, message=1e-3)
    assert predict.step_seconds(voted, crowd) > crowd.buckets * 2 * 1023 * 1e-3
    far = replace(SETTING, latency=1.0)
    assert predict.step_seconds(voted, far) > 2 * far.buckets


def test_a_grid_pays_where_messages_are_many_and_not_where_the_link_is_slow():
    voted, dense = METHODS["dlion_mavo"], METHODS["g_lion"]
    crowd = replace(SETTING, workers=1024, rate=1e11, exchange="grid")
    assert predict.shape_of(voted, crowd) == (8, 8, 16)
    assert predict.shape_of(dense, crowd) == (1024,)  # sums of floats depend on their order
    direct, auto = (replace(crowd, exchange=exchange) for exchange in ("direct", "auto"))
    assert predict.exchange_seconds(voted, crowd) < predict.exchange_seconds(voted, direct) / 5
    assert predict.exchange_seconds(voted, auto) <= predict.exchange_seconds(voted, crowd)
    slow = replace(SETTING, workers=8, rate=1e7, exchange="auto")
    assert predict.shape_of(voted, slow) == (8,)


def test_what_a_step_waits_for_is_named():
    voted = METHODS["dlion_mavo"]
    assert predict.bottleneck(voted, replace(SETTING, compute=100.0)) == "compute"
    assert predict.bottleneck(voted, replace(SETTING, rate=1e6)) == "bandwidth"
    crowd = replace(SETTING, parameters=1e5, compute=1e-3, workers=1024)
    assert predict.bottleneck(voted, crowd) == "messages"


def test_the_table_fits_into_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    predict.main(["--parameters", "1e12", "--workers", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if any(name in line for name in METHODS)]
    assert len(rows) == len(METHODS) and all("compute" in row for row in rows)
    assert len(lines) == 2 + len(METHODS) + 4 and "…" not in "".join(lines)


def test_the_command_answers_and_says_what_it_assumes(capsys, tmp_path):
    predict.main(["--parameters", "1e9", "--workers", "8", "--rate", "10gbit"])
    *table, assumed = capsys.readouterr().out.splitlines()
    assert all(name in "".join(table) for name in METHODS)
    assert assumed.startswith("assumed, as nothing else was typed: --compute 1 --latency 0.0002")
    predict.main(["-o", str(tmp_path / "curves")])
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--rate fast", "fast is not a rate"),
        ("--message 1e308", "1e308 is not a number from 0 to 1e+06"),
        ("--buckets 1e9", "1e9 is not a whole number from 1 to 10000"),
        ("--parameters 1.5", "1.5 is not a whole number"),
        ("--check nowhere.json", "nowhere.json is not a file"),
        ("-o curves.jpg", "curves.jpg is no picture: choose .png, .svg, .pdf"),
    ],
)
def test_wrong_numbers_and_names_are_refused(capsys, typed, told):
    with pytest.raises(SystemExit) as refused:
        predict.main(typed.split())
    assert refused.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in (b"# Text", b"\xff" * 10_000, b"[1]"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(UserError, match=r"a does not hold whole steps") as refused:
            predict.main(["--check", str(tmp_path / "a")])
        assert len(str(refused.value)) < 300
