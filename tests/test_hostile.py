"""Whatever comes in from outside is refused in one sentence, and none of it is ever executed."""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dlion.config import explain, settle
from dlion.data import cifar10, prepared_text
from dlion.errors import RunFailed, UserError
from dlion.exchange import Channel, SparseMean
from dlion.launch.check import check_settings
from dlion.launch.environment import join_process_group
from dlion.launch.local import run_processes
from dlion.training.checkpoint import Checkpoint, find
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.data.formats import write_cifar
from tests.runs import start, wait_for_workers

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
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
refused = contextlib.suppress(UserError)  # anything else is a failure


@fuzzed
@given(
    name=st.sampled_from(
        ["workers", "batch_size", "steps", "epochs", "processes", "timeout", "seed", "local_steps",
         "participation", "local_lr", "precision", "max_restarts", "faults.byzantine",
         "faults.drop", "faults.scale", "faults.attack"]
    ),
    value=st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
)  # fmt: skip
def test_values_of_any_kind(name, value):
    config = OmegaConf.load(ROOT / "conf" / "config.yaml")
    config.optimizer = {"name": "dlion_mavo", "weight_decay": 0.0}
    config.dataset = {"name": "digits"}
    OmegaConf.update(config, name, value)
    with refused:
        check_settings(config)


@settings(parent=fuzzed, max_examples=15)
@given(
    key=st.sampled_from(["workers", "optimizer.lr", "optimizer", "x.y", "+z"]) | TEXT, value=TEXT
)
def test_whatever_is_typed(key, value):
    with refused, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        try:
            config = compose("config", [f"{key}={value}"], return_hydra_config=True)
        except HydraException as error:
            assert explain(error)
        else:
            check_settings(settle(config, config.hydra))


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A finished run of two workers, and its identity."""
    directory = tmp_path_factory.mktemp("hostile") / "run"
    overrides = ["dataset=digits", "workers=2", "processes=1", "steps=4", "checkpoint_every=2"]
    run = start(*overrides, f"output_dir={directory}")
    assert run.communicate(timeout=120) and run.returncode == 0
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


@pytest.mark.parametrize(("label", "image"), [(11, None), (-1, None), (1, b"no image")])
def test_labels_and_images_that_are_none(tmp_path, label, image):
    write_cifar(tmp_path)
    for file in tmp_path.rglob("*.parquet"):
        rows = pyarrow.parquet.read_table(file).to_pylist()
        for row in rows:
            row["label"] = label
            row["img"]["bytes"] = image or row["img"]["bytes"]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(UserError, match=r"labels outside 0 .. 9|is not one"):
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


def _another_length() -> None:
    faulthandler.disable()  # the process aborts, as it should
    join_process_group("gloo", 10)
    size = 60 if dist.get_rank() else 100
    Channel(Workers.current()).gather(torch.zeros(1, size, dtype=torch.uint8))


def test_a_message_of_another_length_ends_the_run():
    with pytest.raises(RunFailed, match=r"process [01] "):
        run_processes(2, _another_length)


@pytest.mark.parametrize("change", ["count", "index"])
def test_entries_that_there_are_not_are_refused(change):
    exchange = SparseMean(Channel(Workers(local=2)), 100)
    for i in range(2):
        exchange.post(i, torch.tensor([3, 60]), torch.tensor([1.0, 2.0]))
    parts, counts = exchange._posts[1]
    if change == "count":
        exchange._posts[1] = (parts, counts + 1000)
    else:
        exchange._posts[1] = ([torch.full_like(part, 127) for part in parts], counts)
    with pytest.raises(RuntimeError, match=r"a worker (announced|sent)"):
        exchange(0)


def test_processes_that_were_told_different_things_say_so(tmp_path):
    (tmp_path / "train.sh").write_text(
        f"exec {sys.executable} {ROOT / 'train.py'} dataset=digits workers=2 steps=3 logger=none"
        f" optimizer.lr=1e-$((RANK + 3)) output_dir={tmp_path / 'run'}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--no-python", "bash", str(tmp_path / "train.sh")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "process 1 was started with another optimizer than process 0" in done.stderr


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
    long = ["workers=2", "steps=100000"]
    alone = start(*long, "processes=2", f"output_dir={tmp_path / 'alone'}")
    found = _listening([alone.pid, *wait_for_workers(alone)])
    slurm = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    tasks = [
        start(
            *(*long, f"output_dir={tmp_path / 'slurm'}"),
            env=slurm | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(2)
    ]
    wait_for_workers(tasks[0])
    found |= _listening([task.pid for task in tasks])
    for process in (alone, *tasks):
        process.kill()
        process.communicate()
    assert found == {"0100007F"}  # 127.0.0.1


def test_planted_secrets_reach_nothing_that_is_written(tmp_path):
    secret, key = "planted-a1b2c3", 40 * "b"
    env = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": ""}
    env |= dict.fromkeys(("MY_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), secret)
    command = [sys.executable, "train.py", "dataset=digits", "workers=2", "steps=3"]
    report = [sys.executable, "-m", "dlion.compare.report", str(tmp_path / "run")]
    options = {"cwd": ROOT, "env": os.environ | env, "capture_output": True, "timeout": 120}
    outputs = [subprocess.run([*command, f"output_dir={tmp_path / 'run'}"], **options)]
    shutil.copytree(tmp_path / "run", tmp_path / "run" / "other", symlinks=True)
    config = tmp_path / "run" / "other" / ".hydra" / "config.yaml"  # somebody else's may ask for it
    asking, count = re.subn(r"\n  lr: .*", "\n  lr: ${oc.env:MY_TOKEN}", config.read_text())
    assert count == 1
    config.write_text(asking)
    outputs.append(subprocess.run([*report, "-o", str(tmp_path / "report.html")], **options))
    assert [done.returncode for done in outputs] == [0, 0], outputs
    written = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(written) > 8
    for text in (*written, *(done.stdout + done.stderr for done in outputs)):
        assert secret.encode() not in text and key.encode() not in text
