"""Wrong values are found here, before any process starts."""

import math
import os
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from dlion import data as datasets
from dlion import models
from dlion.config import make
from dlion.data import Data, Sharding
from dlion.errors import UserError
from dlion.launch.environment import RankInfo, restarted
from dlion.launch.network import check_possible
from dlion.machine import cores
from dlion.optim.base import NONFINITE
from dlion.record.runs import holds_run
from dlion.training.checkpoint import Checkpoint, find, identity
from dlion.training.faults import ATTACKS
from dlion.training.job import Job
from dlion.training.precision import PRECISIONS
from dlion.units import parse_rate
from dlion.workers import Workers


def check(config: DictConfig, output_dir: Path, place: RankInfo | None) -> Job:
    """Check all of a configuration.

    Raises:
        UserError: one sentence about the first thing that is wrong.
    """
    check_numbers(config)
    check_output(config, output_dir)
    device = _device(config.device)
    processes = _processes(config, device, place)
    backend = config.backend or ("nccl" if device == "cuda" else "gloo")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"backend={backend} is unknown: choose gloo or nccl")
    if backend == "nccl":
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        here = place.local_processes if place else processes
        if here > gpus:
            raise UserError(
                f"backend=nccl needs a GPU for each process, but {here} processes share {gpus}:"
                f" type processes={gpus} (virtual workers share a GPU) or backend=gloo"
                if gpus
                else "backend=nccl needs device=cuda: type backend=gloo"
            )
    data = datasets.load(config.dataset)
    sharding = Sharding(
        data.train_size,
        config.workers,
        config.batch_size,
        config.seed,
        config.dataset.sharding,
        labels=data.labels,
        alpha=config.dataset.get("alpha", 1.0),
    )
    if config.accumulate > sharding.smallest_batch:
        raise UserError(
            f"accumulate={config.accumulate} cuts batches of {sharding.smallest_batch} samples into"
            f" more parts: type accumulate={sharding.smallest_batch} or less"
        )
    epochs = config.epochs * sharding.steps_per_epoch
    steps = config.steps or -(-epochs // config.local_steps)
    _check_method(config, data, device)
    return Job(
        config=config,
        workers=Workers(processes=processes, local=config.workers // processes),
        device=device,
        backend=backend,
        steps=steps,
        data=data,
        sharding=sharding,
        output_dir=output_dir,
        rate=_rate(config, backend, place),
        resume=_resume(config, output_dir, steps),
    )


def check_output(config: DictConfig, output_dir: Path) -> None:
    """Refuse to write over another run."""
    if holds_another(config, output_dir):
        raise UserError(
            f"{output_dir} holds another run: choose another directory with output_dir=DIR, or type"
            " resume=auto to go on with it"
        )


def holds_another(config: DictConfig, output_dir: Path) -> bool:
    """Whether a run was recorded there that this one does not go on with."""
    return resuming(config, output_dir) != "auto" and holds_run(output_dir)


def resuming(config: DictConfig, output_dir: Path) -> str | None:
    """``resume``; what SLURM or torchrun has started anew goes on by itself."""
    if restarted() and (config.resume is None or holds_run(output_dir)):
        return "auto"
    return config.resume


def latest_checkpoint(config: DictConfig, directory: Path) -> Checkpoint | None:
    """The checkpoint to go on from; later ones that cannot be used are named."""
    found, complaints = find(directory, identity(config))
    for complaint in complaints:
        print(f"left out: {complaint}", file=sys.stderr)
    return found


def _resume(config: DictConfig, output_dir: Path, steps: int) -> Checkpoint | None:
    where = resuming(config, output_dir)
    if where is None:
        return None
    found = latest_checkpoint(config, output_dir if where == "auto" else Path(where).expanduser())
    if found is None and where != "auto":
        raise UserError(f"resume={config.resume} holds no checkpoint: give a run's directory")
    if found is not None and found.progress.step >= steps:
        raise UserError(
            f"{found.directory} is after step {found.progress.step}, nothing is left of {steps}"
            f" steps: type steps=N with more"
        )
    return found


def check_numbers(config: DictConfig) -> None:
    """Check what can be checked by looking at the values alone."""
    smallest = {
        "workers": 1,
        "batch_size": 1,
        "accumulate": 1,
        "threads": 1,
        "eval_every": 1,
        "log_every": 1,
        "check_replicas_every": 0,
        "keep_checkpoints": 1,
        "max_restarts": 0,
        "timeout": 1,
        "local_steps": 1,
        "faults.byzantine": 0,
        "faults.stale_steps": 1,
        "seed": 0,
    }
    if config.steps is None:
        smallest["epochs"] = 1
    else:
        smallest["steps"] = 1
    for name in ("processes", "checkpoint_every", "stop_after"):
        if config[name] is not None:
            smallest[name] = 1
    for name, least in smallest.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(
                f"{name}={value} is not possible: give a whole number, at least {least}"
            )
    _check_faults(config)
    if config.box and not config.optimizer.get("weight_decay"):
        raise UserError(
            "box=true, but without weight decay there is no box: type optimizer.weight_decay=1"
        )
    if config.nonfinite not in (None, *NONFINITE):
        raise UserError(
            f"nonfinite={config.nonfinite} is unknown: choose {', '.join(NONFINITE)} or null"
        )
    if config.precision not in PRECISIONS:
        raise UserError(f"precision={config.precision} is unknown: choose {', '.join(PRECISIONS)}")
    if config.processes is not None and config.workers % config.processes:
        fitting = [p for p in range(1, config.workers + 1) if config.workers % p == 0]
        raise UserError(
            f"workers={config.workers} cannot be spread evenly over processes={config.processes}:"
            f" processes may be {', '.join(map(str, fitting))}"
        )


def _check_faults(config: DictConfig) -> None:
    ranges = {
        "participation": (0, 1, "above 0, at most 1"),
        "local_lr": (0, math.inf, "above 0"),
        "faults.scale": (0, math.inf, "above 0"),
    }
    for name, (low, high, allowed) in ranges.items():
        value = OmegaConf.select(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low < value <= high:
            raise UserError(f"{name}={value} is not possible: give a number {allowed}")
    faults = config.faults
    if not isinstance(faults.drop, (int, float)) or not 0 <= faults.drop < 1:
        raise UserError(
            f"faults.drop={faults.drop} is not possible: give a probability, 0 or more and below 1"
        )
    if faults.attack not in ATTACKS:
        raise UserError(f"faults.attack={faults.attack} is unknown: choose {', '.join(ATTACKS)}")
    if faults.byzantine > config.workers:
        raise UserError(
            f"faults.byzantine={faults.byzantine} of workers={config.workers} cannot lie: type"
            f" faults.byzantine={config.workers} or less"
        )


def _device(asked: str | None) -> str:
    # asks the driver without starting CUDA, which must not happen before a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    there = torch.cuda.is_available()
    if asked is None:
        return "cuda" if there else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UserError(f"device={asked} is unknown: choose cpu or cuda")
    if asked == "cuda" and not there:
        raise UserError("device=cuda, but torch finds no GPU on this machine: type device=cpu")
    return asked


def _rate(config: DictConfig, backend: str, place: RankInfo | None) -> int | None:
    """Bits per second of the emulated links, None for the machine's own network."""
    if config.network.rate is None:
        return None
    rate = parse_rate(config.network.rate)
    if place is not None:
        raise UserError(
            f"network={config.network.name} needs train.py to start its own processes, but"
            f" {place.source} started them: type network=none"
        )
    if backend != "gloo":
        raise UserError(
            "an emulated network carries gloo only, as GPUs of one machine would talk past it: type"
            " backend=gloo, or network=none"
        )
    check_possible()
    return rate


def _processes(config: DictConfig, device: str, place: RankInfo | None) -> int:
    if place is None:
        if config.processes is not None:
            return config.processes
        room = torch.cuda.device_count() if device == "cuda" else cores()
        return max(p for p in range(1, room + 1) if config.workers % p == 0)
    if config.processes not in (None, place.processes):
        raise UserError(
            f"processes={config.processes}, but {place.source} started {place.processes}: leave"
            " processes out"
        )
    if config.workers % place.processes:
        raise UserError(
            f"workers={config.workers} cannot be spread evenly over the {place.processes} processes"
            f" that {place.source} started: give a multiple of {place.processes}"
        )
    return place.processes


def _check_method(config: DictConfig, data: Data, device: str) -> None:
    """Build model and optimizer without memory: whatever they refuse, they refuse here."""
    with torch.device("meta"):
        model = models.build(config.model, data)
    try:
        optimizer = make(
            config.optimizer,
            model.named_parameters(),
            workers=Workers(local=config.workers),
            seed=config.seed,
            bucket_cap_mb=config.bucket_cap_mb,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer={config.optimizer.name}: {error}") from error
    if device == "cpu":
        optimizer.prepare()  # compiled once, before the fork, not by every process
