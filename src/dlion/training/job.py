"""What the training loop is handed: a checked configuration and loaded data."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from dlion.data import Data, Sharding
from dlion.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """A checked run: what to train, where, and on what.

    Attributes:
        config: the resolved configuration.
        processes, local: P processes with so many virtual workers each.
        device: ``cpu`` or ``cuda``.
        backend: ``gloo`` or ``nccl``.
        steps: optimizer steps.
        data: loaded once; forked processes share it.
        output_dir: where the run is recorded.
        rate: bits per second of emulated links; None on the machine's own network.
        resume: where to go on; None: at the beginning.
        stop_after: end after so many steps, as an interruption would; None: do not.
    """

    config: DictConfig
    processes: int
    local: int
    device: str
    backend: str
    steps: int
    data: Data
    sharding: Sharding
    output_dir: Path
    rate: int | None = None
    resume: Checkpoint | None = None
    stop_after: int | None = None
