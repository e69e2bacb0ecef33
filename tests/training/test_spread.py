"""A run is the same to the bit however its workers are spread over processes."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from dlion import methods
from dlion.suite.config import instantiate
from dlion.suite.data import Sharding, TextData
from dlion.suite.data.digits import digits
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.launch.runner import work
from dlion.suite.training import Job, train
from dlion.suite.training.agreement import VOTES
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.support.runs import record

pytestmark = pytest.mark.slow

WORKERS = 4
# by processes: without hardships and with them; without, test_checkpoint.py resumes in two
KINDS = {1: ("", "-hard"), WORKERS: ("-hard",)}
METHODS = sorted(p.stem for p in (ROOT / "conf" / "optimizer").glob("*.yaml"))
MEASURED = {name for name, method in methods.METHODS.items() if issubclass(method.cls, VOTES)}


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


def net(data, **_) -> Net:
    return Net()


def half_frozen(data, **_) -> Net:
    model = Net()
    model.layers[1].requires_grad_(False)
    return model


HARD = {
    "participation": 0.75,
    "local_steps": 2,
    "nonfinite": "skip",
    "precision": "bf16_stochastic",
    "faults": {"byzantine": 2, "attack": "random", "scale": 3.0, "stale_steps": 1, "drop": 0.2},
}


def _optimizer(method: str):
    node = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{method}.yaml")
    if method in ("lion_cub", "sign_muon_avg"):
        node.momentum_sync = 2
    if method == "sign_muon_avg":
        node.sync_wire = "int8"
    if method == "onebit_adam":
        node.warmup_steps = 3
    if method in ("diloco", "muloco", "sparseloco"):
        node.local_steps = 4  # the last round is cut off
    return node


def _job(method: str, processes: int, data, directory, more: dict | None = None) -> Job:
    config = OmegaConf.merge(
        OmegaConf.load(ROOT / "conf" / "config.yaml"),
        {
            "hydra": None,
            "optimizer": _optimizer(method),
            "model": {"name": "net", "_target_": "tests.training.test_spread.net"},
            "dataset": {"name": "digits"},
            "schedule": {"warmup_steps": 2, "final": 0.0},
            "logger": {"name": "none", "_target_": "dlion.suite.record.loggers.Logger"},
            "batch_size": 16,
            "accumulate": 2,  # all but the last backward pass wait
            "seed": 3,
            "overlap": processes > 1,  # which must not change a bit either
            "bucket_cap_mb": 0.005,
            "eval_every": 6,
            "log_every": 3,
            "check_replicas_every": 3,
            "agreement": method in MEASURED,
            "output_dir": str(directory),
            **(more or {}),
        },
    )
    mode = "dirichlet" if more else "partition"
    sharding = Sharding(data.train_size, WORKERS, 16, 3, mode, data.labels, 0.3)
    return Job(
        config=config,
        workers=Workers(processes=processes, local=WORKERS // processes),
        device="cpu",
        backend="gloo",
        steps=6,
        data=data,
        sharding=sharding,
        output_dir=directory,
    )


def _train_all(processes: int, data, directory) -> None:
    join_process_group("gloo")
    for method in METHODS:
        for kind in KINDS[processes]:
            more = HARD if kind else None
            if more and method in ("diloco", "muloco", "sparseloco"):
                more = more | {"local_steps": 1}  # it has its own
            job = _job(method, processes, data, directory / f"{method}{kind}", more)
            train(replace(job, workers=Workers.current(WORKERS // processes)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every method gives, by its name with the kind of run, and the number of processes."""
    for method in METHODS:  # what is imported and compiled here is so in all processes
        params = [torch.nn.Parameter(torch.zeros(8, 8))]
        instantiate(_optimizer(method), params, workers=Workers(local=2)).prepare()
    data, found = digits(), {}
    for processes in KINDS:
        directory = tmp_path_factory.mktemp(f"spread{processes}")
        run_processes(processes, _train_all, processes, data, directory)
        for run in directory.iterdir():
            found[run.name, processes] = record(run)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_spread_gives_the_same_bits(runs, method):
    alone, spread = (runs[f"{method}-hard", processes] for processes in KINDS)
    assert alone[0]["sent_bytes_per_step"] > 0
    assert spread == alone


def test_agreement_is_measured_where_there_are_votes(runs):
    for (name, _), (_, rows) in runs.items():
        measured = [row["step"] for row in rows if "agreement" in row]
        assert measured == ([6] if name.removesuffix("-hard") in MEASURED else [])


def test_methods_differ(runs):
    hashes = {summary["parameters_sha256"] for summary, _ in runs.values()}
    assert len(hashes) == 2 * len(METHODS)


def test_who_is_absent_sends_less(runs):
    for method in METHODS:
        all_of_them, some = (runs[name, 1][0] for name in (method, f"{method}-hard"))
        assert some["sent_bytes_per_step"] < all_of_them["sent_bytes_per_step"]


def test_text_runs_report_a_loss_only(tmp_path):
    text = torch.frombuffer(bytearray(b"to be or not to be " * 400), dtype=torch.uint8)
    data = TextData(text, text[:1000], 256, 16)
    job = _job("g_lion", 1, data, tmp_path)
    job.config.model = {"name": "gpt", "_target_": "dlion.suite.models.gpt", "dim": 16, "depth": 1}
    run_processes(1, work, job)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_accuracy"] is None
    assert 0 < summary["test_loss"] < 6
