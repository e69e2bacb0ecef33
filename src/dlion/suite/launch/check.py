"""Checks all settings of a run before any process starts."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlion.elastic import check_method
from dlion.elastic.joining import check_torchft
from dlion.elastic.lighthouse import check_lighthouse
from dlion.elastic.worker import check_dealt
from dlion.errors import TrainingFailed, UserError
from dlion.methods.inner import INNER
from dlion.optim import LocalUpdate
from dlion.suite import data as datasets
from dlion.suite import models
from dlion.suite.config import expand_home, instantiate
from dlion.suite.data import Data, Images, Sharding, Text
from dlion.suite.data.inputs import PictureInput
from dlion.suite.data.layouts import folder_with
from dlion.suite.launch.environment import RankInfo, is_first
from dlion.suite.launch.network import check_possible
from dlion.suite.launch.resume import check_output, checkpoint_to_resume
from dlion.suite.machine import cores, memory
from dlion.suite.models.causal import check_causal
from dlion.suite.record.loggers import check_logger
from dlion.suite.settings import check as check_types
from dlion.suite.settings import naming
from dlion.suite.terminal import patience
from dlion.suite.training.agreement import VOTES
from dlion.suite.training.building import parameters_of
from dlion.suite.training.job import Job
from dlion.suite.training.weights import check_pretrained, check_weights, recorded_input
from dlion.suite.units import human_bytes, parse_rate
from dlion.values import show
from dlion.workers import Workers

_FEW = 10**7  # parameters, of a model that is made in less than a second
_FOR_CHANGING_WORKERS = {
    "participation": 1,
    "faults.drop": 0,
    "faults.byzantine": 0,
    "local_steps": 1,
    "network.rate": None,
    "backend": "gloo",
    "box": False,
    "agreement": False,
    "profile": False,
}


def check(config: DictConfig, output_dir: Path, started: RankInfo | None) -> Job:
    """Check a whole configuration and make a job of it.

    Args:
        config: the settings.
        output_dir: where the run will be recorded.
        started: this process's number, if torchrun or SLURM started it.

    Raises:
        UserError: one sentence about the first thing that is wrong.
    """
    check_settings(config)
    check_output(config, output_dir)
    if config.faults.deaths and started is not None:
        raise UserError(
            f"faults.deaths={show(config.faults.deaths)} needs train.py to start its own processes,"
            f" but {started.source} started them: leave it out"
        )
    lighthouse = _lighthouse(config, started)
    device = _device(config.device)
    processes = _processes(config, device, started)
    if config.faults.deaths and config.elastic.lighthouse is not None and processes == 1:
        more = "workers" if config.elastic.lighthouse == "here" else "processes"
        raise UserError(
            f"faults.deaths={show(config.faults.deaths)} spares the last process here that has the"
            f" state of the run, and there is one: type {more}=2 or more"
        )
    by_gloo = device == "cpu" or config.elastic.lighthouse is not None
    backend = config.backend or ("gloo" if by_gloo else "nccl")
    if backend == "nccl":
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        local_processes = started.local_processes if started else processes
        one_each = started is not None and gpus == 1  # as SLURM may bind them: meeting.py looks
        if local_processes > gpus and not one_each:
            raise UserError(
                f"backend=nccl needs a GPU for each process, but {local_processes} processes share"
                f" {gpus}: type processes={gpus} (virtual workers share a GPU) or backend=gloo"
                if gpus
                else "backend=nccl needs device=cuda: type backend=gloo"
            )
    with naming(config, "init_from", "evaluate"):
        data = _load_for_model(config)
    data.label_smoothing = config.label_smoothing
    sharding = Sharding(
        data.train_size,
        config.workers,
        config.batch_size,
        config.seed,
        config.dataset.sharding,
        labels=data.labels if config.dataset.sharding == "dirichlet" else None,
        alpha=config.dataset.get("alpha"),
    )
    if config.accumulate > sharding.smallest_batch:
        raise UserError(
            f"accumulate={config.accumulate} cuts batches of {sharding.smallest_batch} samples into"
            f" more parts: type accumulate={sharding.smallest_batch} or less"
        )
    epochs = config.epochs * sharding.steps_per_epoch
    steps = config.steps or -(-epochs // config.local_steps)
    if config.schedule.warmup_steps >= steps and is_first():
        print(
            f"note: the learning rate rises to the end, as schedule.warmup_steps="
            f"{config.schedule.warmup_steps} are not fewer than the {steps} steps of the run",
            file=sys.stderr,
        )
    local = started.local_processes if started else processes
    with naming(config, "init_from"):
        _check_method(config, data, sharding.smallest_batch // config.accumulate, device, local)
    resume = checkpoint_to_resume(config, output_dir, steps)
    samples = data.train_size, data.test_size
    if resume is not None and resume.samples != samples:
        before, now = (f"{train:,} and {test:,}" for train, test in (resume.samples, samples))
        raise UserError(
            f"{resume.directory} is of a run with {before} samples to train and to test on, the"
            f" data set has {now} now: restore it, or start again in another output_dir"
        )
    return Job(
        config=config,
        workers=Workers(processes=processes, local=_virtual(config, processes)),
        device=device,
        backend=backend,
        steps=steps,
        data=data,
        sharding=sharding,
        output_dir=output_dir,
        rate=_rate(config, backend, started),
        resume=resume,
        lighthouse=lighthouse,
    )


def _lighthouse(config: DictConfig, started: RankInfo | None) -> str | None:
    """Return the address of the lighthouse to join; None: it is to be here, or there is none."""
    address = config.elastic.lighthouse
    if address is None:
        return None
    if started is not None:
        raise UserError(
            f"elastic.lighthouse={address} needs train.py to start its own processes, but"
            f" {started.source} started them: type python train.py elastic.lighthouse=HOST:PORT on"
            " each machine"
        )
    check_torchft("elastic=true needs")
    if address == "here":
        return None
    check_lighthouse(address, f"elastic.lighthouse={address}")
    return address


def _virtual(config: DictConfig, processes: int) -> int:
    """Return how many workers a process hosts."""
    return 1 if config.elastic.lighthouse is not None else config.workers // processes


def load_data(dataset: DictConfig) -> Data:
    """Load a data set.

    Raises:
        UserError: one sentence about why it could not be loaded.
    """
    choice = f"dataset={dataset.name}"
    with _one_line(choice), patience(f"loading {choice}"):
        return datasets.load(dataset)


def _load_for_model(config: DictConfig) -> Data:
    """Load the data as the model takes it, also that of evaluate or init_from."""
    source, dataset = config.evaluate or config.init_from, config.dataset
    if source is None:
        return load_data(dataset)
    made = None
    if takes_levels := dataset.get("levels", ...) is None:
        made = recorded_input(source)
        if isinstance(made, PictureInput) and made.levels is not None:
            dataset = OmegaConf.merge(dataset, {"levels": list(made.levels)})
    data = load_data(dataset)
    if isinstance(data, Images) and not takes_levels:
        made = recorded_input(source)
    if not isinstance(data, Images) or not isinstance(made, PictureInput):
        return data
    if config.evaluate is not None and made.names and data.names:
        data = data.numbered_as(made.names)
    return data.like(made)


def check_settings(settings: DictConfig, data_is_here: bool = True) -> None:
    """Check the settings alone, without loading data or a model.

    Args:
        settings: of a run.
        data_is_here: whether this machine is the one that will load the data.

    Raises:
        UserError: one sentence about the first setting that is wrong.
    """
    _check_data_path(settings.dataset, data_is_here)
    check_types(settings)
    workers, faults = settings.workers, settings.faults
    changing = settings.elastic.lighthouse is not None
    if settings.processes is not None and workers % settings.processes and not changing:
        fitting = [p for p in range(1, workers + 1) if workers % p == 0]
        raise UserError(
            f"workers={workers} is not divisible by processes={settings.processes}:"
            f" processes may be {', '.join(map(str, fitting))}"
        )
    if faults.byzantine > workers:
        raise UserError(
            f"faults.byzantine={faults.byzantine} exceeds workers={workers}: type"
            f" faults.byzantine={workers} or less"
        )
    if faults.deaths and not changing and settings.checkpoint_every is None:
        raise UserError(
            f"faults.deaths={show(faults.deaths)} would restart all from the first step: type"
            " elastic=true, or checkpoint_every=20"
        )
    if settings.box and not settings.optimizer.get("weight_decay"):
        raise UserError(
            "box=true, but without weight decay there is no box: type optimizer.weight_decay=1"
        )
    if changing:
        _check_elastic(settings)
    check_logger(settings.logger)


def _check_elastic(settings: DictConfig) -> None:
    """Refuse what holds for a fixed number of workers alone."""
    least, workers = settings.elastic.min_workers, settings.workers
    if least > workers:
        raise UserError(
            f"elastic.min_workers={least} exceeds workers={workers}: type"
            f" elastic.min_workers={workers} or less"
        )
    for setting, allowed in _FOR_CHANGING_WORKERS.items():
        value = OmegaConf.select(settings, setting)
        if value != allowed and not (setting == "backend" and value is None):
            raise UserError(
                f"{setting}={show(value)} does not work with workers that come and go"
                f" (elastic.lighthouse={settings.elastic.lighthouse}): type"
                f" {setting}={show(allowed)}"
            )


def _check_data_path(dataset: DictConfig, data_is_here: bool) -> None:
    if OmegaConf.is_missing(dataset, "path"):
        raise UserError(
            f"dataset={dataset.name} must be on a disk: type dataset.path=DIR,"
            f" {folder_with(dataset.name)}"
        )
    path = dataset.get("path")
    if data_is_here and path:
        try:
            os.stat(expand_home("dataset.path", str(path)))  # noqa: PTH116 - of any value
        except PermissionError as error:
            raise UserError(
                f"dataset.path={path} could not be read ({error.strerror}): ask its owner, or give"
                " another"
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"dataset.path={path} is not a folder: give {folder_with(dataset.name)}"
            ) from error


def _device(setting: str | None) -> str:
    """Return the device of a run: by default a GPU if this machine has one."""
    # torch asks the driver without starting CUDA, which must not happen before a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    has_gpu = torch.cuda.is_available()
    if setting is None:
        return "cuda" if has_gpu else "cpu"
    if setting == "cuda" and not has_gpu:
        raise UserError("device=cuda, but torch finds no GPU on this machine: type device=cpu")
    return setting


def _rate(config: DictConfig, backend: str, started: RankInfo | None) -> int | None:
    """Return the bits per second of the emulated links, None for the machine's own network."""
    if config.network.rate is None:
        return None
    try:
        rate = parse_rate(config.network.rate)
    except UserError as error:
        raise UserError(f"network.rate={error}") from None
    if started is not None:
        raise UserError(
            f"network={config.network.name} needs train.py to start its own processes, but"
            f" {started.source} started them: type network=none"
        )
    if backend != "gloo":
        raise UserError(
            "an emulated network carries gloo only, as GPUs of one machine would talk past it: type"
            " backend=gloo, or network=none"
        )
    check_possible()
    return rate


def _processes(config: DictConfig, device: str, started: RankInfo | None) -> int:
    """Return the number of processes: by default as many as this machine has room for."""
    if started is None:
        if config.processes is not None:
            return config.processes
        if config.elastic.lighthouse is not None:
            return config.workers if config.elastic.lighthouse == "here" else 1
        most = torch.cuda.device_count() if device == "cuda" else cores()
        return max(p for p in range(1, most + 1) if config.workers % p == 0)
    if config.processes not in (None, started.processes):
        raise UserError(
            f"processes={config.processes}, but {started.source} started {started.processes}: leave"
            " processes out"
        )
    if config.workers % started.processes:
        raise UserError(
            f"workers={config.workers} is not divisible by the {started.processes} processes"
            f" that {started.source} started: give a multiple of {started.processes}"
        )
    return started.processes


@contextmanager
def _one_line(choice: str) -> Iterator[None]:
    """Turn any error of a component, which may be a user's own, into one line.

    Raises:
        UserError: the error, and the line of code that raised it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it names the file
        *_, frame = traceback.extract_tb(error.__traceback__)
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{choice} could not be built: {type(error).__name__}: {reason} ({frame.filename}, line"
            f" {frame.lineno})"
        ) from error


def _check_method(
    config: DictConfig, data: Data, samples: int, device: str, processes: int
) -> None:
    """Build model and optimizer without memory, so that they refuse wrong settings here.

    Args:
        config: the settings.
        data: the data set.
        samples: fewest that go through the model at once.
        device: of the run.
        processes: of the run on this machine.
    """
    choice = f"model={config.model.name}"
    with torch.device("meta"), _one_line(choice), patience(f"building {choice}"):
        model = models.build(config.model, data)
    if device == "cpu":
        _check_memory(model, choice, processes)
        if isinstance(data, Text) and sum(p.numel() for p in model.parameters()) <= _FEW:
            _check_order(config, data, choice)
    if samples == 1 and any(isinstance(part, _BatchNorm) for part in model.modules()):
        _check_single_sample(model, config, data)
    path = config.model.get("path")
    if isinstance(model, models.CausalLM) and path and Path(path).is_dir():
        check_pretrained(model, path)
    if config.init_from is not None:
        try:
            check_weights(model, config.init_from, config.init_from_except)
        except UserError as error:
            size = getattr(getattr(data, "recorded", None), "image_size", None)
            if size in (None, getattr(data, "image_size", None)):
                raise
            raise UserError(
                f"{error}; its pictures had {size} pixels: dataset.image_size={size} may be all"
                " that is missing"
            ) from error
    try:
        optimizer = instantiate(
            config.optimizer,
            parameters_of(model, config.optimizer),
            workers=Workers(local=config.workers),
            seed=config.seed,
            bucket_cap_mb=config.bucket_cap_mb,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer={config.optimizer.name}: {error}") from error
    if config.elastic.lighthouse is not None:
        try:
            check_method(optimizer)
            for bucket in optimizer.buckets:
                check_dealt(bucket, type(optimizer).__name__)
        except ValueError as error:
            raise UserError(f"optimizer={config.optimizer.name}: {error}") from error
    if isinstance(optimizer, LocalUpdate):
        _check_local(config, optimizer)
    if config.agreement and not isinstance(optimizer, VOTES):
        raise UserError(
            f"agreement=true compares votes with a mean, but optimizer={config.optimizer.name} does"
            " not vote with the sign of momenta: type agreement=false, or optimizer=dlion_mavo"
        )
    if device == "cpu":
        optimizer.prepare()  # compiled once, before the fork, not by every process


def _check_order(config: DictConfig, data: Text, choice: str) -> None:
    """Refuse a model that sees the tokens it predicts; a larger one is tried by its processes."""
    with _one_line(choice), torch.random.fork_rng(devices=[]):
        model = models.build(config.model, data)
        try:
            check_causal(model, data.vocabulary, data.context, "cpu")
        except TrainingFailed as error:
            raise UserError(f"{choice}: {error}") from error


def _check_memory(model: nn.Module, choice: str, processes: int) -> None:
    """Refuse a model whose parameters and gradients alone are more than the memory."""
    least = 2 * processes * sum(p.numel() * p.element_size() for p in model.parameters())
    if (there := memory()) is not None and least > there:
        raise UserError(
            f"{choice} has {sum(p.numel() for p in model.parameters()):,} parameters, which take"
            f" {human_bytes(least)} with their gradients in {processes} process"
            f"{'es' * (processes > 1)}, but this machine has {human_bytes(there)}: choose a smaller"
            " model"
        )


def _check_local(config: DictConfig, optimizer: LocalUpdate) -> None:
    """Refuse settings that contradict a method with local steps."""
    name = config.optimizer.name
    if config.local_steps > 1:
        raise UserError(
            f"local_steps={config.local_steps} is a path of its own within each step, but"
            f" optimizer={name} has an inner optimizer of its own: type"
            f" optimizer.local_steps={config.local_steps} instead"
        )
    if callable(optimizer.inner):
        raise UserError(
            f"optimizer.inner must be a name in a run, as checkpoints hold no state of torch's"
            f" optimizers: type optimizer.inner={' or '.join(INNER)}"
        )


def _check_single_sample(model: nn.Module, config: DictConfig, data: Data) -> None:
    """Refuse batches of one sample for a model that normalises over batches."""
    if not isinstance(data, Images):
        return
    images = torch.empty(1, data.channels, data.image_size, data.image_size, device="meta")
    try:
        model.train()(images)
    except Exception as error:  # of what cannot be tried without values, training may do well
        if "more than 1 value per channel" not in str(error):
            return
        raise UserError(
            f"model={config.model.name} normalises over the samples of a batch, but"
            f" batch_size={config.batch_size} and accumulate={config.accumulate} leave a worker"
            f" batches of one: type a larger batch_size ({error})"
        ) from error
