"""Input of the training loop: a checked configuration and loaded data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dlion import __version__
from dlion.suite.data import Data, Sharding
from dlion.suite.settings import TRAITS
from dlion.suite.training.checkpoint import Checkpoint, identity
from dlion.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run: its model, data and workers.

    Attributes:
        config: the resolved configuration.
        workers: how the n workers are spread. Before the processes have joined each other this is
            process 0's view, without a group; each process that trains replaces it by its own.
        device: ``cpu`` or ``cuda``.
        backend: ``gloo`` or ``nccl``.
        steps: number of optimizer steps.
        data: loaded once; forked processes share it.
        sharding: which samples each worker trains on.
        output_dir: directory in which the run is recorded.
        rate: bits per second of emulated links; None on the machine's own network.
        resume: checkpoint to resume from; None: start at step 0.
        lighthouse: HOST:PORT of that of an elastic run; None: workers do not change.
        start_barrier: the processes of an elastic run wait here for one another before they begin.
        begun: shared by these, in which each that has the state of the run writes 1.
    """

    config: DictConfig
    workers: Workers
    device: str
    backend: str
    steps: int
    data: Data
    sharding: Sharding
    output_dir: Path
    rate: int | None = None
    resume: Checkpoint | None = None
    lighthouse: str | None = None
    start_barrier: Any = None
    begun: Any = None


def everyones_settings(job: Job) -> dict[str, Any]:
    """Return the settings that all processes of a run need the same values of."""
    whens = {name: job.config[name] for name, traits in TRAITS.items() if traits.traffic}
    whens["optimizer.exchange"] = job.config.optimizer.get("exchange")
    samples = {"number of samples": [job.data.train_size, job.data.test_size]}
    others = {"steps": job.steps, **whens, **samples, "dlion version": __version__}
    return {**identity(job.config), **others}
