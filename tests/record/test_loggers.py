"""Loggers show a run's curves where the user wants them, and never a secret or a say in the run."""

import base64
import csv
import json
import re
import struct
import sys
from pathlib import Path

import pytest
import wandb
from omegaconf import OmegaConf
from wandb.proto import wandb_internal_pb2

from dlion.errors import UserError
from dlion.suite.compare.dashboard import specification
from dlion.suite.record.loggers import (
    Logger,
    Recording,
    check_logger,
    make_logger,
    why_not_sync,
)
from tests.record.wandb_server import serving
from tests.support.runs import ROOT, train

CONFIG = {"optimizer": {"name": "dlion_mavo", "lr": 1e-3}, "workers": 4, "seed": 7}
ROW = {"step": 5, "epoch": 0.5, "seconds": 1.0, "train_loss": 2.0, "sent_bytes": 1000}
ROW |= {"sent_bits_per_parameter": 80, "seconds_per_step": 0.2, "gradient_norm": 3.0}
ROW |= {"learning_rate": 1e-3}
TESTED = {**ROW, "step": 10, "sent_bits_per_parameter": 160, "test_loss": 1.5, "test_accuracy": 0.4}
LATER = {**TESTED, "step": 15, "test_accuracy": 0.3}
KEY = "0123456789abcdef0123456789abcdef01234567"


def node(name: str = "wandb", **options):
    return OmegaConf.merge(OmegaConf.load(ROOT / f"conf/logger/{name}.yaml"), options)


def start(directory: Path, logger=None, **options):
    given = {"config": CONFIG, "directory": directory, "rows": [], "group": "all seeds"}
    return make_logger(logger or node(), Recording(**given | options))


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user who has never logged in, with nothing in the environment."""
    for name in ("API_KEY", "MODE", "PROJECT", "ENTITY", "DIR", "RUN_GROUP", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    yield monkeypatch
    wandb.teardown()


def log_in(monkeypatch, tmp_path, host: str) -> None:
    """Leave the files that `wandb login --host` leaves."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "settings").write_text(f"[default]\nbase_url = http://{host}\n")
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")


def records(directory: Path):
    """The records of the offline run: blocks of 32 KiB, records of crc, length and type."""
    (file,) = directory.rglob("offline-run-*/run-*.wandb")
    data, place, buffer = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        buffer += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            buffer = b""
            yield record


def history(directory: Path):
    rows = [record.history.item for record in records(directory) if record.HasField("history")]
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows
    ]


def test_an_offline_run_holds_curves_against_steps_and_bits_and_no_secret(nobody, tmp_path, capsys):
    secret = "hunter2-planted"
    nobody.setenv("SOME_TOKEN", secret)
    nobody.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "wandb_id").write_text("")  # as a power cut leaves it
    config = {**CONFIG, "logger": {"api_key": secret, "nested": [{"password": secret}]}}
    logger = node(project="p", group="g", tags=["t"])
    logger = start(run, logger, config=config, rows=[ROW])
    logger.log(TESTED)
    logger.log(LATER)
    logger.finish({"test_accuracy": 0.3})
    out, err = capsys.readouterr()
    assert f"wandb sync {tmp_path}/elsewhere/wandb/offline-run" in out and "warning" not in err
    metrics = {r.metric.name: r.metric for r in records(tmp_path) if r.HasField("metric")}
    assert metrics["test/accuracy"].step_metric == "step"
    assert metrics["test/accuracy"].summary.max and metrics["test/accuracy"].summary.last
    assert metrics["test_vs_bits/accuracy"].step_metric == "sent_bits_per_parameter"
    assert metrics["test_vs_bits/loss"].step_metric == "sent_bits_per_parameter"
    rows = history(tmp_path)
    assert [row["step"] for row in rows] == [5, 10, 15]
    assert rows[1]["sent_bits_per_parameter"] == 160
    assert rows[1]["test_vs_bits/accuracy"] == 0.4
    for curve in ("learning_rate", "seconds_per_step", "gradient_norm"):
        assert rows[0][curve] == ROW[curve]
    (shown,) = [record.run for record in records(tmp_path) if record.HasField("run")]
    assert (shown.run_group, shown.project, list(shown.tags)) == ("g", "p", ["t"])
    assert shown.display_name == "dlion_mavo-n4-s7"
    assert shown.run_id == (run / "wandb_id").read_text() != ""
    panels = json.dumps(specification("me", "p")["report"])
    drawn = set(re.findall(r'"((?:train|test|test_vs_bits)/\w+|sent_\w+)"', panels))
    assert len(drawn) >= 6 and drawn <= set().union(*rows)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files and not [p for p in files if secret.encode() in p.read_bytes()]


def test_after_a_login_the_server_gets_the_rows_that_it_lacks(nobody, tmp_path, capsys):
    with serving(sent={"step": 5}) as server:
        log_in(nobody, tmp_path, server.host)
        for name in ("PROJECT", "ENTITY", "RUN_GROUP"):
            nobody.setenv(f"WANDB_{name}", f"my-{name}")
        logger = start(tmp_path, rows=[ROW, TESTED])
        logger.log(LATER)
        logger.finish({"test_accuracy": 0.3})
        assert why_not_sync() is None
    assert "does not answer" in why_not_sync()
    assert [row["step"] for row in server.rows] == [10, 15]
    assert server.rows[0]["test_vs_bits/accuracy"] == 0.4
    assert server.summary["run/test_accuracy"] == 0.3
    assert server.summary["test/accuracy"] == {"max": 0.4, "last": 0.3}
    run = server.runs[0]
    named = (run["project"], run["entity"], run["groupName"], run["name"])
    assert named == ("my-PROJECT", "my-ENTITY", "my-RUN_GROUP", (tmp_path / "wandb_id").read_text())
    assert server.credentials == {"Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()}
    out, err = capsys.readouterr()
    assert f"shown in Weights & Biases: http://{server.host}" in out and "wandb sync" not in out
    assert KEY not in out + err


def test_a_server_that_falls_silent_costs_a_warning_and_no_row(nobody, tmp_path, capsys):
    with serving(silent=True) as server:
        log_in(nobody, tmp_path, server.host)
        nobody.setenv("WANDB_INIT_TIMEOUT", "1")
        logger = start(tmp_path, node(mode="online"))
        logger.log(ROW)
        logger.finish(None)
    out, err = capsys.readouterr()
    assert err.count("warning: Weights & Biases is recorded offline") == 1 and KEY not in out + err
    assert f"wandb sync {tmp_path}/wandb/offline-run" in out
    assert [row["step"] for row in history(tmp_path)] == [5]
    (shown,) = [record.run for record in records(tmp_path) if record.HasField("run")]
    assert (shown.project, shown.run_group) == ("dlion", "all seeds")


def test_a_broken_logger_is_one_warning(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for name in ("wandb", "csv"):
        logger = start(blocked, node(name))
        logger.log(ROW)
        logger.finish({})
        assert capsys.readouterr().err.count(f"warning: logger={name} is off: ") == 1


class OwnLogger(Logger):
    """Writes what it is told of a run."""

    def __init__(self, recording: Recording, /):
        self.file = recording.directory / "told"
        self.told = [recording.group, [row["step"] for row in recording.rows]]

    def log(self, row):
        self.told.append(row["step"])

    def finish(self, summary):
        self.file.write_text(json.dumps([*self.told, summary and summary["steps"]]))


@pytest.mark.slow
def test_a_logger_of_ones_own_sees_a_run_and_its_group_of_seeds(tmp_path):
    def told(name: str, *overrides: str, code: int = 0):
        own = f"logger._target_={OwnLogger.__module__}.OwnLogger"
        small = ["dataset=digits", "model=linear", "workers=2", "processes=1", "log_every=1"]
        settings = [*small, "logger=none", own, f"output_dir={tmp_path / name}", *overrides]
        train(*settings, code=code)
        return json.loads((tmp_path / name / "told").read_text())

    first = told("0", "steps=2", "seed=0", "stop_after=1", code=75)
    assert first == [first[0], [], 1, None]
    assert told("0", "steps=2", "seed=0", "resume=auto") == [first[0], [1], 2, 2]
    assert told("1", "steps=2", "seed=1")[0] == first[0] != told("more", "steps=3")[0]


@pytest.mark.parametrize("logger", [node("none"), node(mode="disabled")])
def test_no_logger_writes_nothing(tmp_path, logger):
    logger = start(tmp_path, logger)
    logger.log(ROW)
    logger.finish({})
    assert not list(tmp_path.iterdir())


def test_the_table_has_all_rows_of_a_run_that_is_resumed(tmp_path):
    def steps_and_accuracies():
        with (tmp_path / "metrics.csv").open(newline="") as file:
            return [(row["step"], row.get("test_accuracy")) for row in csv.DictReader(file)]

    first = start(tmp_path, node("csv"))
    for row in (ROW, TESTED, LATER):
        first.log(row)
    assert steps_and_accuracies() == [("5", ""), ("10", "0.4"), ("15", "0.3")]
    resumed = start(tmp_path, node("csv"), rows=[ROW, TESTED])
    assert steps_and_accuracies() == [("5", ""), ("10", "0.4")]
    resumed.log({**LATER, "train_loss": float("nan"), "gradient_norm": None})
    resumed.finish({})
    assert steps_and_accuracies() == [("5", ""), ("10", "0.4"), ("15", "0.3")]


def test_tensorboard_shows_what_was_measured_last(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    check_logger(node("tensorboard"))
    first = start(tmp_path, node("tensorboard"))
    for row in (ROW, TESTED, LATER):
        first.log(row)
    first.finish(None)
    resumed = start(tmp_path, node("tensorboard"), rows=[ROW, {**TESTED, "test_accuracy": 0.2}])
    resumed.log({**LATER, "test_accuracy": 0.5})
    resumed.finish({})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, round(event.value, 4)) for event in events.Scalars("test/accuracy")]
    assert shown == [(10, 0.2), (15, 0.5)]
    assert {"learning_rate", "gradient_norm", "seconds_per_step"} <= set(events.Tags()["scalars"])


def test_tensorboard_without_its_package_is_refused_before_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install tensorboard"):
        check_logger(node("tensorboard"))


@pytest.mark.parametrize(
    "variable, value, options",
    [
        ("WANDB_MODE", "banana", {}),
        ("WANDB_RESUME", "banana", {}),
        ("WANDB_HTTP_TIMEOUT", "abc", {}),
        ("WANDB_RUN_ID", "a b/c", {}),
        ("WANDB_BASE_URL", "wandb.example.com", {}),
        ("WANDB_PROJECT", "a/b", {}),
        ("logger.project", "a#b", {"project": "a#b"}),
        ("logger.tags", "x" * 65, {"tags": ["x" * 65]}),
        ("logger._target_", "json.loads", {"_target_": "json.loads"}),
    ],
)
def test_what_wandb_would_refuse_is_refused_before_the_start(nobody, variable, value, options):
    check_logger(node())
    if not options:
        nobody.setenv(variable, value)
    with pytest.raises(UserError, match=re.escape(f"{variable}={value} ")):
        check_logger(node(**options))


def test_no_folder_of_wandb_stays_behind(tmp_path):
    (tmp_path / "temporary").mkdir()
    settings = ["steps=1", "workers=1", "dataset=digits", "model=linear"]
    env = {"TMPDIR": str(tmp_path / "temporary"), "WANDB_MODE": "offline"}
    train(*settings, f"output_dir={tmp_path / 'run'}", env=env, code=0)
    assert not list((tmp_path / "temporary").glob("*wandb*"))
