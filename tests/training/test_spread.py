"""A run is the same to the bit however its workers are spread over processes."""

import json

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from dlion.data import Sharding, TextData
from dlion.data.digits import digits
from dlion.launch.environment import join_process_group
from dlion.launch.local import run_processes
from dlion.launch.runner import work
from dlion.training import Job, train
from dlion.workers import Workers
from tests.conftest import ROOT

METHODS = sorted(p.stem for p in (ROOT / "conf" / "optimizer").glob("*.yaml"))


class Net(torch.nn.Module):
    """BatchNorm and dropout: whatever may leak between virtual workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 40),
            torch.nn.BatchNorm1d(40),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(40, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def net(data) -> Net:
    return Net()


def _job(method: str, processes: int, data, directory) -> Job:
    optimizer = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{method}.yaml")
    if method == "lion_cub":
        optimizer.momentum_sync = 2
    config = OmegaConf.create(
        {
            "optimizer": optimizer,
            "model": {"name": "net", "_target_": "tests.training.test_spread.net"},
            "dataset": {"name": "digits"},
            "schedule": {"warmup_steps": 2, "final": 0.0},
            "logger": {"name": "none"},
            "batch_size": 16,
            "accumulate": 2,  # all but the last backward pass wait
            "precision": "float32",
            "seed": 3,
            "threads": 1,
            "profile": False,
            "box": False,
            "overlap": processes > 1,  # which must not change a bit either
            "bucket_cap_mb": 0.005,
            "eval_every": 6,
            "log_every": 3,
            "check_replicas_every": 3,
            "checkpoint_every": None,
            "keep_checkpoints": 1,
        }
    )
    sharding = Sharding(data.train_size, 8, 16, 3, "partition")
    return Job(config, processes, 8 // processes, "cpu", "gloo", 6, data, sharding, directory)


def _train_all(processes: int, data, directory) -> None:
    join_process_group("gloo")
    for method in METHODS:
        train(_job(method, processes, data, directory / method), Workers.current(8 // processes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every method gives, for 1, 2, 4 and 8 processes."""
    data, found = digits(), {}
    for processes in (1, 2, 4, 8):
        directory = tmp_path_factory.mktemp(f"spread{processes}")
        run_processes(processes, _train_all, processes, data, directory)
        for method in METHODS:
            summary = json.loads((directory / method / "summary.json").read_text())
            rows = (directory / method / "metrics.jsonl").read_text().splitlines()
            for row in (last := json.loads(rows[-1]), summary):
                for timing in ("seconds", "seconds_per_step", "processes"):
                    row.pop(timing, None)
            found[method, processes] = (summary, last)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_spread_gives_the_same_bits(runs, method):
    expected = runs[method, 1]
    assert expected[0]["sent_bytes_per_step"] > 0
    for processes in (2, 4, 8):
        assert runs[method, processes] == expected


def test_methods_differ(runs):
    assert len({runs[m, 1][0]["parameters_sha256"] for m in METHODS}) == len(METHODS)


def _diverge(data, directory) -> None:
    import os

    job = _job("dlion_mavo", 2, data, directory)
    if os.environ["RANK"] == "1":
        job.config.optimizer.lr = 0.5
    work(job)


def test_replicas_that_drift_apart_are_named(tmp_path):
    with pytest.raises(RuntimeError, match="process 1 holds other parameters than process 0"):
        run_processes(2, _diverge, digits(), tmp_path)


def test_text_runs_report_a_loss_only(tmp_path):
    text = torch.frombuffer(bytearray(b"to be or not to be " * 400), dtype=torch.uint8)
    data = TextData(text, text[:1000], 256, 16)
    job = _job("g_lion", 1, data, tmp_path)
    job.config.model = {"name": "gpt", "_target_": "dlion.models.gpt", "dim": 16, "depth": 1}
    run_processes(1, work, job)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_accuracy"] is None
    assert 0 < summary["test_loss"] < 6
