"""Whatever comes in from outside is refused in one sentence, and none of it is ever executed."""

import contextlib
import faulthandler
import io
import json
import re
import runpy
import shutil
import signal
import socket
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dlion.errors import RunFailed, UserError
from dlion.exchange import Channel
from dlion.suite.data import cifar10, prepared_text
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.settings import check_values
from dlion.suite.training.checkpoint import Checkpoint, find
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.data.formats import write_cifar
from tests.support.properties import HealthCheck, example, given, settings, st
from tests.support.runs import python, start, train

pytestmark = pytest.mark.slow

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FACTS = {
    "dtype": "uint16",
    "tokens": {"train": 100, "val": 100},
    "vocabulary": 100,
    "documents": 1,
    "of": 1,
    "held_out": 2000,
    "origin": "here",
}
fuzzed = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
refused = contextlib.suppress(UserError)  # anything else is a failure


# settings that must be whole numbers, and the least of each
WHOLE_NUMBERS = {
    "workers": 1,
    "batch_size": 1,
    "epochs": 1,
    "timeout": 1,
    "seed": 0,
    "local_steps": 1,
    "max_restarts": 0,
}
OTHER_SETTINGS = [
    "steps",
    "processes",
    "participation",
    "local_lr",
    "precision",
    "faults.byzantine",
    "faults.drop",
    "faults.deaths",
    "faults.away",
    "faults.scale",
    "faults.attack",
]


LONGEST = 1_000_000  # seconds that a timeout may take


@fuzzed
@given(
    name=st.sampled_from([*WHOLE_NUMBERS, *OTHER_SETTINGS]),
    value=st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
)
@example(name="workers", value=1)
@example(name="seed", value=0)
@example(name="workers", value=True)
@example(name="timeout", value=1_000_001)
def test_values_of_any_kind(name, value):
    config = OmegaConf.load(ROOT / "conf" / "config.yaml")
    for group in ("optimizer", "model", "dataset", "schedule", "network", "logger"):
        config[group] = {"name": "of no interest here"}
    OmegaConf.update(config, name, value)
    try:
        check_values(config)
        accepted = True
    except UserError:
        accepted = False
    if name in WHOLE_NUMBERS:
        most = LONGEST if name == "timeout" else 2**63 - 1
        assert accepted == (type(value) is int and WHOLE_NUMBERS[name] <= value <= most)


@contextlib.contextmanager
def _interrupts_as_before():
    """Undo what train.py, which thinks that this process is its own, does to Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@settings(parent=fuzzed, max_examples=10)
@given(
    key=st.sampled_from(["workers", "optimizer.lr", "optimizer", "x.y", "+z"])
    | TEXT.filter(lambda key: not key.startswith("-")),
    value=TEXT,
)
@example(key="workers", value="4")
@example(key="worker", value="4")
def test_whatever_is_typed(key, value):
    refused_anyway = "seed=-1"
    with (
        _interrupts_as_before(),
        mock.patch.object(sys, "argv", ["train.py", f"{key}={value}", refused_anyway]),
        contextlib.redirect_stderr(io.StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    GlobalHydra.instance().clear()
    line = printed.getvalue()
    assert ended.value.code == 2 and line.startswith("error: ") and "Traceback" not in line
    if (key, value) == ("workers", "4"):  # this one is accepted
        assert refused_anyway in line
    if key in ("worker", "x.y"):
        named = f"{key} is not a setting" in line or "x is not a setting" in line
        assert named or "cannot read" in line


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A finished run of two workers, and its identity."""
    directory = tmp_path_factory.mktemp("hostile") / "run"
    small = ["dataset=digits", "model=linear", "logger=none", "workers=2", "processes=1"]
    train(*small, "steps=4", "checkpoint_every=2", f"output_dir={directory}", code=0)
    state = json.loads((directory / "checkpoint" / "step-00000004" / "state.json").read_text())
    return directory, state["run"]


@fuzzed
@given(data=st.data())
def test_a_checkpoint_of_any_content(run_directory, tmp_path, data):
    directory, identity = run_directory
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory / "checkpoint", copy / "checkpoint")
    last = copy / "checkpoint" / "step-00000004"
    file = last / data.draw(st.sampled_from(sorted(p.name for p in last.iterdir())))
    content = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "random", "json"]))
    if kind == "cut":
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    elif kind == "flip":
        at = data.draw(st.integers(0, len(content) - 1))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif kind == "random":
        file.write_bytes(data.draw(st.binary(max_size=200)))
    else:
        state = json.loads((last / "state.json").read_text())
        state[data.draw(st.sampled_from(sorted(state)))] = data.draw(JSON)
        (last / "state.json").write_text(json.dumps(state))
    found, complaints = find(copy, identity)
    assert isinstance(found, Checkpoint)
    assert (found.directory == last) == (not complaints)
    if file.name != "state.json":
        assert complaints or kind == "json"


def test_no_pickle_is_loaded(run_directory, tmp_path):
    directory, identity = run_directory
    shutil.copytree(directory / "checkpoint", tmp_path / "checkpoint")
    canary = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return Path.touch, (canary,)

    for file in tmp_path.glob("checkpoint/*/*.safetensors"):
        torch.save(Evil(), file)
    with pytest.raises(UserError, match="no checkpoint can be used"):
        find(tmp_path, identity)
    assert not canary.exists()


@settings(parent=fuzzed, max_examples=25)
@given(at=st.floats(0, 0.999), noise=st.binary(min_size=1, max_size=40), test=st.booleans())
def test_damaged_tables_of_images(tmp_path, at, noise, test):
    folder = tmp_path / "cifar"
    shutil.rmtree(folder, ignore_errors=True)
    write_cifar(folder)
    file = next(folder.rglob("test-*.parquet" if test else "train-*.parquet"))
    content = file.read_bytes()
    place = int(at * len(content))
    file.write_bytes(content[:place] + noise + content[place + len(noise) :])
    with refused:
        assert cifar10(str(folder)).train_y.min() >= 0


@pytest.mark.parametrize(
    ("label", "image"), [(11, None), (-1, None), (0.5, None), (1, b"no image")]
)
def test_labels_and_images_that_are_none(tmp_path, label, image):
    write_cifar(tmp_path)
    for file in tmp_path.rglob("*.parquet"):
        rows = pyarrow.parquet.read_table(file).to_pylist()
        for row in rows:
            row["label"] = label
            row["img"]["bytes"] = image or row["img"]["bytes"]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(UserError, match=r"labels outside 0 .. 9|whole numbers|not a picture"):
        cifar10(str(tmp_path))


@fuzzed
@given(facts=JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(FACTS, JSON)))
def test_facts_about_tokens(tmp_path, facts):
    for part in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{part}.bin")
    (tmp_path / "tokens.json").write_text(json.dumps(FACTS))
    assert prepared_text(str(tmp_path), context=8).vocabulary == 100
    mixed = FACTS | facts if isinstance(facts, dict) else facts
    (tmp_path / "tokens.json").write_text(json.dumps(mixed))
    with refused:
        prepared_text(str(tmp_path), context=8)


@pytest.mark.parametrize("vocabulary", [0, 10**9, 70_000])
def test_a_vocabulary_that_no_model_can_have(tmp_path, vocabulary):
    (tmp_path / "tokens.json").write_text(json.dumps(FACTS | {"vocabulary": vocabulary}))
    with pytest.raises(UserError, match=r"tokens.json is damaged"):
        prepared_text(str(tmp_path), context=8)


def _another_length() -> None:
    faulthandler.disable()  # the process aborts, as it should
    join_process_group("gloo", 10)
    size = 60 if dist.get_rank() else 100
    Channel(Workers.current()).gather(torch.zeros(1, size, dtype=torch.uint8))


def test_a_message_of_another_length_ends_the_run():
    with pytest.raises(RunFailed, match=r"process [01] "):
        run_processes(2, _another_length)


def _slurm(job: int, task: int) -> dict[str, str]:
    """What SLURM tells one of two tasks of a step."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
    }


def test_processes_with_different_settings_say_so(tmp_path):
    small = ["dataset=digits", "logger=none", "workers=2", "steps=3", f"output_dir={tmp_path}"]
    first, second = (
        start(*small, f"optimizer.lr={rate}", f"eval_every={steps}", env=_slurm(7, task))
        for task, (rate, steps) in enumerate((("1e-3", 2), ("1e-4", 3)))
    )
    done = second.wait()
    first.kill()
    assert done.returncode == 1
    assert (
        "(optimizer.lr is 0.0001 here and 0.001 there, eval_every is 3 here and 2 there)"
        in done.stderr
    )


def _listening(pids: list[int]) -> set[str]:
    """Addresses, as the kernel writes them, at which processes accept connections."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables in /proc")
def test_nobody_else_can_connect(tmp_path):
    long = ["logger=none", "workers=2", "steps=100000"]
    alone = start(*long, "processes=2", f"output_dir={tmp_path / 'alone'}")
    name = {"MASTER_ADDR": socket.gethostname()}  # as batch scripts often have it
    slurm = [*long, f"output_dir={tmp_path / 'slurm'}"]
    tasks = [start(*slurm, env=_slurm(8, i) | name) for i in range(2)]
    found = _listening([alone.pid, *alone.workers()])
    tasks[0].workers()
    found |= _listening([task.pid for task in tasks])
    for run in (alone, *tasks):
        run.kill()
    assert found == {"0100007F"}  # 127.0.0.1


def test_planted_secrets_reach_nothing_that_is_written(tmp_path):
    secret, key = "planted-a1b2c3", 40 * "b"
    env = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": ""}
    env |= dict.fromkeys(("MY_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), secret)
    outputs = [
        train("dataset=digits", "workers=2", "steps=3", f"output_dir={tmp_path / 'run'}", env=env)
    ]
    shutil.copytree(tmp_path / "run", tmp_path / "run" / "other", symlinks=True)
    config = tmp_path / "run" / "other" / ".hydra" / "config.yaml"  # somebody else's may ask for it
    asking, count = re.subn(r"\n  lr: .*", "\n  lr: ${oc.env:MY_TOKEN}", config.read_text())
    assert count == 1
    config.write_text(asking)
    report = ["-m", "dlion", "report", tmp_path / "run", "-o", tmp_path / "report.html"]
    outputs.append(python(*report, env=env))
    assert [done.returncode for done in outputs] == [0, 0], outputs
    written = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(written) > 8
    printed = [(done.stdout + done.stderr).encode() for done in outputs]
    for text in (*written, *printed):
        assert secret.encode() not in text and key.encode() not in text
