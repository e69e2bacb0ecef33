"""``elastic=true``: workers of train.py come and go. Real processes, a real lighthouse, SIGKILL."""

import functools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlion.suite.data import Dealing, Sharding
from dlion.suite.launch.start_barrier import StartBarrier
from tests.conftest import ROOT
from tests.data.formats import write_classes
from tests.support.runs import Run, assert_all_gone, record, start, train, until

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow

SETTINGS = ["dataset=digits", "model=linear", "logger=none", "workers=3", "log_every=5"]
SMALL = [*SETTINGS, "steps=12", "eval_every=6"]
STEPS = 200


def lines(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are whole."""
    file = directory / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def events(directory: Path) -> list[str]:
    return [row["event"] for row in lines(directory) if "event" in row]


def wait(run: Run, what: Callable[[], Any]) -> Any:
    return until(what, lambda: run.stdout + run.stderr)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose workers do not change."""
    directory = tmp_path_factory.mktemp("plain")
    train(*SMALL, "processes=1", f"output_dir={directory}", code=0)
    return directory


ELASTIC = [*SMALL, "elastic=true", "elastic.min_workers=3"]


def test_without_failures_a_run_has_the_bits_of_one_whose_workers_do_not_change(
    plain: Path, tmp_path: Path
) -> None:
    train(*ELASTIC, f"output_dir={tmp_path}", code=0)
    (before, rows), (summary, there) = record(plain), record(tmp_path)
    assert summary["parameters_sha256"] == before["parameters_sha256"]
    assert [row.pop("workers") for row in there] == [3] * len(rows)
    total = [row.pop("sent_bytes_of_all") for row in there]
    assert total == [3 * row["sent_bytes"] for row in rows]
    for row, same in zip(there, rows, strict=True):
        assert row == pytest.approx(same, nan_ok=True)


def test_a_run_resumes_with_as_many_workers_or_others(plain: Path, tmp_path: Path) -> None:
    first = train(*ELASTIC, "stop_after=7", f"output_dir={tmp_path / 'a'}", code=75)
    assert "stopped after step 7" in first.stderr
    resume = [*SMALL, "elastic=true", "resume=auto"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(*resume, "elastic.min_workers=3", f"output_dir={tmp_path / 'a'}", code=0)
    (before, rows), (summary, there) = record(plain), record(tmp_path / "a")
    assert summary["parameters_sha256"] == before["parameters_sha256"]
    for key in ("step", "train_loss", "sent_bytes"):
        assert [row[key] for row in there] == pytest.approx([row[key] for row in rows])
    fixed = [*SMALL, "resume=auto", "processes=1", f"output_dir={tmp_path / 'b'}"]
    refused = train(*fixed, code=2)
    assert "its workers come and go: type elastic=true" in refused.stderr
    more = train(*resume, "processes=4", f"output_dir={tmp_path / 'b'}", code=0)
    assert "the own state of 3 of these 4 workers: the others begin with" in more.stderr
    assert [row["step"] for row in lines(tmp_path / "b")] == [5, 6, 10, 12]


def test_a_run_goes_on_when_its_lighthouse_is_started_again(tmp_path: Path) -> None:
    command = ["-m", "dlion", "lighthouse", "--bind"]
    lighthouse = Run([*command, "127.0.0.1:0"])
    address = wait(lighthouse, lambda: re.search(r"lighthouse at (\S+);", lighthouse.stdout))[1]
    words = [*SETTINGS, "processes=2", "steps=1000000", f"elastic.lighthouse={address}"]
    run = start(*words, f"output_dir={tmp_path / 'run'}")
    try:
        wait(run, lambda: len(lines(tmp_path / "run")) > 3)
        lighthouse.kill()
        time.sleep(1)  # both workers have asked it in vain
        lighthouse = Run([*command, address])
        before = len(lines(tmp_path / "run"))
        wait(run, lambda: len(lines(tmp_path / "run")) > before + 3)
        run.send_signal(signal.SIGINT)
        assert run.wait().returncode == 130
    finally:
        run.kill()
        lighthouse.kill()
    assert not events(tmp_path / "run"), "nobody has left"


def test_workers_die_join_and_leave(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    env = {"MARKER": str(hurry)}
    common = [*SETTINGS, "model._target_=tests.training.slow.model", f"steps={STEPS}"]
    common += ["eval_every=20"]
    here = tmp_path / "run"
    run = start(*common, "elastic=true", "max_restarts=1", f"output_dir={here}", env=env)
    try:
        workers = sorted(run.workers())[1:]  # the first is the lighthouse
        address = re.search(r"elastic\.lighthouse=(\S+)", run.stdout)
        assert address is not None
        joins = [*common, f"elastic.lighthouse={address[1]}"]
        wait(run, lambda: lines(here))
        os.kill(workers[0], signal.SIGKILL)  # it has the record
        wait(run, lambda: {"left", "joined"} <= {*events(here)})
        (again,) = {*run.workers()[1:]} - {*workers}
        os.kill(again, signal.SIGKILL)
        wait(run, lambda: events(here).count("left") >= 2)
        wrong = start(*joins, "optimizer.lr=0.5", f"output_dir={tmp_path / 'wrong'}", env=env)
        second = start(*joins, f"output_dir={tmp_path / 'second'}", env=env)
        third = start(*joins, f"output_dir={tmp_path / 'third'}", env=env)
        refused = wrong.wait()
        assert refused.returncode == 1
        assert "than the run that it joins (optimizer.lr is 0.5 here and " in refused.stderr
        wait(run, lambda: lines(here)[-1]["workers"] == 4)
        third.send_signal(signal.SIGINT)
        gone = third.wait()
        assert gone.returncode == 130 and "stopped after step" in gone.stderr
        wait(run, lambda: lines(here)[-1]["workers"] == 3)
        hurry.touch()
        done, with_others = run.wait(), second.wait()
    finally:
        hurry.touch()
    assert done.returncode == with_others.returncode == 0, done.stderr + with_others.stderr
    assert "process 0 was killed by SIGKILL; it is started again" in done.stderr
    assert "process 0 was killed by SIGKILL; 2 here continue" in done.stderr
    summary = json.loads((here / "summary.json").read_text())
    assert f"parameters {summary['parameters_sha256']}" in with_others.stdout
    rows = [row for row in lines(here) if "event" not in row]
    assert [row["step"] for row in rows] == [*range(5, STEPS + 1, 5)]
    assert {2, 3, 4} <= {line["workers"] for line in lines(here)}
    assert all("test_accuracy" in row for row in rows if row["step"] % 20 == 0)
    named = {row["worker"] for row in lines(here) if row.get("event") == "left"}
    assert len(named) >= 2 and any(name.endswith(f"-{workers[0]}") for name in named)
    assert not (tmp_path / "second").exists(), "a worker without the record leaves no folder"


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_worker_that_was_stopped_as_the_run_ended_changes_nothing(
    tmp_path: Path, comes_back: bool
) -> None:
    hurry, here = tmp_path / "hurry", tmp_path / "run"
    model = "model._target_=tests.training.slow.model"
    words = [*SETTINGS, model, "elastic=true", "steps=60", f"output_dir={here}"]
    run = start(*words, env={"MARKER": str(hurry)})
    try:
        wait(run, lambda: len(lines(here)) > 2)
        late = max(run.workers())  # another has the record
        os.kill(late, signal.SIGSTOP)
        wait(run, lambda: "left" in events(here))
        hurry.touch()
        wait(run, (here / "summary.json").exists)
        before = lines(here), (here / "summary.json").read_text()
        if comes_back:
            os.kill(late, signal.SIGCONT)
        done = run.wait()
    finally:
        hurry.touch()
        run.kill()
    assert done.returncode == 0, done.stderr
    assert ("is stopped (SIGSTOP, or a debugger) as the run has ended" in done.stderr) != comes_back
    assert (lines(here), (here / "summary.json").read_text()) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_waits_for_the_others_begins_without_one_that_dies_as_it_waits(how: int) -> None:
    context = multiprocessing.get_context("fork")
    barrier = StartBarrier(3, patience=30.0)
    processes = [context.Process(target=barrier.wait, args=(number,)) for number in range(3)]
    try:
        for process in processes[:2]:
            process.start()
        time.sleep(0.5)  # both wait
        os.kill(processes[0].pid or 0, how)
        processes[2].start()
        for process in processes[1:]:
            process.join(20)
        assert [process.exitcode for process in processes[1:]] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_a_worker_that_is_told_to_leave_does_not_end_those_who_have_come_back(
    tmp_path: Path,
) -> None:
    hurry, here = tmp_path / "hurry", tmp_path / "run"
    settings = [*SETTINGS, "model._target_=tests.training.slow.model", "steps=40", "workers=2"]
    settings += ["elastic=true", "max_restarts=1", f"output_dir={here}"]
    run = start(*settings, env={"MARKER": str(hurry)})
    try:
        first, second = sorted(run.workers())[1:]  # the lighthouse comes before
        os.kill(second, signal.SIGKILL)
        wait(run, lambda: events(here)[-1:] == ["joined"])
        os.kill(first, signal.SIGTERM)
        wait(run, lambda: events(here)[-1:] == ["left"])
    finally:
        hurry.touch()
    done = run.wait()
    assert done.returncode == 0, done.stderr
    assert "process 0 has left, as SIGTERM asked; 1 here continue" in done.stderr
    assert lines(here)[-1]["step"] == 40


@pytest.mark.parametrize("other", ["m", "m" * 64])
def test_machines_may_have_one_name_or_long_ones(tmp_path: Path, other: str) -> None:
    hurry, here = tmp_path / "hurry", tmp_path / "run"
    env = {"MARKER": str(hurry), "HOST_NAME": "m"}
    common = [*SETTINGS, "model._target_=tests.training.container.model", "steps=40"]
    common += ["checkpoint_every=5", "workers=1"]
    run = start(*common, "elastic=true", f"output_dir={here}", env=env)
    try:
        run.workers()
        address = re.search(r"elastic\.lighthouse=(\S+)", run.stdout)
        assert address is not None
        joins = [*common, f"elastic.lighthouse={address[1]}", f"output_dir={tmp_path / 'second'}"]
        second = start(*joins, env=env | {"HOST_NAME": other})
        wait(run, lambda: "joined" in events(here))
    finally:
        hurry.touch()
    done, with_others = run.wait(), second.wait()
    assert done.returncode == with_others.returncode == 0, done.stderr + with_others.stderr
    assert "warning" not in done.stderr + with_others.stderr, "each has a folder of its own"
    assert "finished: step 40" in with_others.stdout
    assert not (tmp_path / "second").exists()


def test_a_worker_that_joins_from_a_checkpoint_or_with_other_data_is_compared_too(
    tmp_path: Path,
) -> None:
    pictures = tmp_path / "pictures"
    write_classes(pictures, ("train", "test"))
    common = ["dataset=images", f"dataset.path={pictures}", "model=linear", "logger=none"]
    common += ["workers=1", "batch_size=2", "steps=100000"]
    before, here = tmp_path / "before", tmp_path / "run"
    train(*common, "seed=1", "elastic=true", "stop_after=1", f"output_dir={before}", code=75)
    run = start(*common, "elastic=true", f"output_dir={here}")
    run.workers()
    address = re.search(r"elastic\.lighthouse=(\S+)", run.stdout)
    assert address is not None
    joins = [*common, f"elastic.lighthouse={address[1]}"]
    resumed = train(*joins, "seed=1", f"resume={before}", f"output_dir={tmp_path / 'a'}", code=1)
    assert "the run that it joins (seed is 1 here and 0 in the run)" in resumed.stderr
    (pictures / "train" / "cats" / "0.PNG").unlink()
    fewer = train(*joins, f"output_dir={tmp_path / 'b'}", code=1)
    assert "(number of samples is [15, 16] here and [16, 16] in the run)" in fewer.stderr
    run.send_signal(signal.SIGINT)
    assert run.wait().returncode == 130


def test_a_checkpoint_does_not_wait_for_the_dead_and_is_whole_when_they_come_back(
    tmp_path: Path,
) -> None:
    here = tmp_path / "run"
    settings = ["model._target_=tests.training.dying.model", "elastic=true", "max_restarts=1"]
    settings += ["checkpoint_every=6", "keep_checkpoints=9", f"output_dir={here}"]
    done = train(*SMALL, *settings, "steps=24", code=0, env={"MARKER": str(tmp_path / "died")})
    assert "process 1 was killed by SIGKILL; it is started again" in done.stderr
    assert "warning" not in done.stderr
    assert events(here).count("left") == 1, "the one that waits is not left behind"
    kept = sorted(path.name for path in (here / "checkpoint").iterdir())
    assert kept == [f"step-{step:08}" for step in (6, 12, 18, 24)]
    files = json.loads((here / "checkpoint" / "step-00000012" / "state.json").read_text())["files"]
    assert files.keys() == {"common.safetensors", *(f"worker-0000{i}.safetensors" for i in (0, 2))}


def test_a_round_of_local_steps_that_a_death_breaks_is_continued(tmp_path: Path) -> None:
    faulty = ["optimizer=diloco", "optimizer.local_steps=3", "check_replicas_every=1"]
    faulty += ["model._target_=tests.launch.faulty.model", f"output_dir={tmp_path}"]
    done = train(*SMALL, "elastic=true", *faulty, code=0, env={"FAULT": "forward:5"})
    assert "process 1 was killed by SIGKILL" in done.stderr
    found = [(row["step"], row.get("event"), row["workers"]) for row in lines(tmp_path)]
    assert found == [(6, None, 2), (9, "left", 2), (12, None, 2)]


@pytest.mark.parametrize("optimizer", ["dlion_mavo", "g_adamw", "diloco optimizer.local_steps=3"])
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_gradient_that_is_not_finite_concerns_its_worker_alone(
    tmp_path: Path, optimizer: str, nonfinite: str
) -> None:
    settings = ["elastic=true", "elastic.min_workers=1", f"nonfinite={nonfinite}"]
    settings += f"optimizer={optimizer}".split()
    settings += ["model._target_=tests.launch.faulty.model", f"output_dir={tmp_path}"]
    done = train(*SMALL, *settings, code=0, env={"FAULT": "nan:5"})
    last = lines(tmp_path)[-1]
    assert last["step"] == 12 and math.isfinite(last["train_loss"] + last["test_loss"])
    said = r"process 1 failed: the gradient of \w+ is not finite on worker 1 in step 5: .*; 2 here"
    if nonfinite == "stop":
        assert re.search(said, done.stderr), done.stderr
        assert "Traceback" not in done.stderr and last["workers"] == 2
    else:
        assert (last["workers"], last["skipped"]) == (3, 1)
        (line,) = done.stderr.splitlines()
        assert re.match(
            r"warning: the gradient of \w+ is not finite in step 5: nonfinite=skip", line
        )


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    run = start(*SETTINGS, "steps=100000", "elastic=true", f"output_dir={tmp_path}")
    processes = run.workers()
    run.send_signal(signal.SIGINT)
    done = run.wait()
    assert done.returncode == 130
    assert re.search(r"stopped after step \d+; to resume: .*elastic", done.stderr), done.stderr
    assert_all_gone(processes)


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["partition", "replicate"])
def test_samples_are_dealt_once_however_workers_change(mode: str) -> None:
    size, batch = 500, 8
    dealing = Dealing(lambda n: Sharding(size, n, batch, 0, mode), size, batch, 0)
    numbers = torch.Generator().manual_seed(0)
    seen: dict[int, list[int]] = {}
    for step in range(400):
        if step % 5 == 0:
            count = int(torch.randint(1, 8, (), generator=numbers))
        dealt = torch.cat([dealing.indices(worker, count) for worker in range(count)])
        dealing.taken(count)
        seen.setdefault(dealing.state[0], []).extend(dealt.tolist())
    if mode == "replicate":
        return
    *whole, _ = seen.values()
    assert len(whole) > 3
    for epoch in whole:
        assert len(set(epoch)) == len(epoch) > size - 8 * batch / 2


@pytest.mark.quick
def test_an_epoch_may_have_hundreds_of_changes() -> None:
    size = 3000
    deal = functools.partial(Sharding, size, batch_size=1, seed=0, mode="partition")
    dealing = Dealing(deal, size, 1, 0)
    seen: list[int] = []
    for step in range(300):
        count = 8 + step % 2
        seen += torch.cat([dealing.indices(worker, count) for worker in range(count)]).tolist()
        dealing.taken(count)
    assert dealing.state[0] == 0
    assert len({*seen}) == len(seen) == 2550
    assert dealing.epochs == pytest.approx(2550 / 3000, abs=1e-3)
    new = Dealing(deal, size, 1, 0)  # of a worker that joins now
    new.state = dealing.state
    assert torch.equal(new.indices(3, 8), dealing.indices(3, 8))


@pytest.mark.parametrize(
    ("typed", "who"),
    [
        (["train.py", *SMALL, "elastic=true"], "elastic=true"),
        (["-m", "dlion", "lighthouse"], "a lighthouse"),
    ],
)
def test_without_torchft_one_sentence_says_what_to_install(
    typed: list[str], who: str, tmp_path: Path
) -> None:
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith("torchft"):
            (tmp_path / path.name).symlink_to(path)
    python = Path(sys.base_prefix) / "bin" / "python3"  # which has no packages of its own
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"}
    done = subprocess.run([python, *typed], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    needs = f"error: {who} needs torchft, which is not installed: type pip install 'dlion[elastic]'"
    assert done.stderr.splitlines()[-1] == needs
