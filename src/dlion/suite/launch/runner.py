"""Runs a configuration: in processes started here, or in one that torchrun or SLURM started."""

import json
import os
import secrets
import shutil
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dlion.elastic.joining import importing_torchft
from dlion.errors import RunFailed, Stopped, TrainingFailed
from dlion.suite.launch.check import check
from dlion.suite.launch.environment import RankInfo, detect
from dlion.suite.launch.local import (
    interruptible,
    lost_peer,
    run_one_process,
    run_processes,
    sentence_of,
)
from dlion.suite.launch.meeting import process_group
from dlion.suite.launch.network import Network
from dlion.suite.launch.process_killer import ProcessKiller
from dlion.suite.launch.resume import (
    alone_in,
    finished_run,
    latest_checkpoint,
    note_job,
    result_of,
    resuming,
)
from dlion.suite.launch.start_barrier import StartBarrier
from dlion.suite.launch.stored import settings_of_run
from dlion.suite.lighthouse import serving
from dlion.suite.record.runs import (
    CONFIG,
    FAILURE,
    SUMMARY,
    forget,
    holds_run,
    load_run,
    record_config,
    record_failure,
)
from dlion.suite.training import Job, train
from dlion.suite.training.checkpoint import (
    Checkpoint,
    differences,
    find,
    forget_parts,
    identity,
    in_words,
    worker_file,
)
from dlion.suite.training.job import everyones_settings
from dlion.suite.training.measure import measure
from dlion.workers import Workers


def launch(config: DictConfig, output_dir: Path) -> float | None:
    """Train as configured, or evaluate; return the test accuracy, or the loss where there is none.

    Raises:
        UserError: before any process starts, about a wrong value.
        RunFailed: if a process failed more often than ``max_restarts`` allows.
        Stopped: if it ended before its last step because of ``stop_after`` or a signal.
    """
    started = detect()
    first = started is None or started.rank == 0
    torch.set_num_threads(1)  # after a fork no process can use the threads of its parent
    if config.evaluate is not None:
        recorded = settings_of_run(config, HydraConfig.get().overrides.task)
        try:
            return _start(check(recorded, output_dir, started), started)
        finally:
            with suppress(OSError):
                output_dir.rmdir()  # which Hydra makes for each run of a sweep
    with alone_in(output_dir) if first else nullcontext():
        if resuming(config, output_dir) == "auto":
            run = finished_run(config, output_dir)
            if run is not None:
                return result_of(run)
        job = check(config, output_dir, started)
        if first:
            forget(output_dir, FAILURE, SUMMARY)  # of an earlier attempt, or of fewer steps
            record_config(output_dir, config)
            note_job(output_dir)
        try:
            return _start(job, started)
        finally:
            if job.lighthouse is not None and not holds_run(output_dir):
                shutil.rmtree(output_dir / Path(CONFIG).parent, ignore_errors=True)  # of another


def _start(job: Job, started: RankInfo | None) -> float | None:
    """Run all processes, or this one of those that torchrun or SLURM started."""
    if started is not None:
        started.export()
        return run_one_process(work, job)
    return _run_with_restarts(job)


def _run_with_restarts(job: Job) -> float | None:
    """Run all processes; after a failure run them again from the latest checkpoint."""
    config, restarts = job.config, 0
    killer = ProcessKiller(config.faults.deaths, config.faults.away, config.seed)
    while True:
        try:
            return _run(job, killer)
        except RunFailed as error:
            run = load_run(job.output_dir)
            if run.summary is not None and run.summary.get("steps") == job.steps:
                print(f"warning: after the last step, {error}", file=sys.stderr)
                return result_of(run)
            if error.leaving:
                raise
            if back := max(killer.away.values(), default=None):
                killer.away.clear()
                print(f"{error}; all restart when it returns", file=sys.stderr)
                time.sleep(max(0.0, back - time.monotonic()))
            elif restarts == config.max_restarts:
                raise
            else:
                restarts += 1
                print(f"{error}; restart {restarts} of {config.max_restarts}", file=sys.stderr)
            job = replace(job, resume=latest_checkpoint(config, job.output_dir) or job.resume)


def _run(job: Job, killer: ProcessKiller) -> float | None:
    """Run all processes once, over the emulated network if the job has a rate."""
    processes = job.workers.processes
    if job.config.elastic.lighthouse is not None:
        return _run_elastic(job, killer)
    if job.rate is None:
        watched = job.backend == "nccl"
        return run_processes(processes, work, job, watched=watched, killer=killer)
    with interruptible(), Network(processes, job.rate) as network:
        return run_processes(processes, work, job, network=network, killer=killer)


def _run_elastic(job: Job, killer: ProcessKiller) -> float | None:
    """Run the workers here of an elastic run, and its lighthouse if it is to be here."""
    here = job.lighthouse is None
    # of no other command: containers may have one name and the same process ids
    os.environ["DLION_LAUNCHED"] = f"{int(not here)}-{time.time_ns()}-{secrets.token_hex(4)}"
    processes = job.workers.processes
    if job.resume is not None:
        _say_whose_state_is_lost(job.resume, processes)
    forget_parts(job.output_dir)
    with importing_torchft("elastic=true needs"):
        import torchft.coordination  # noqa: F401 - once, not in every process
    rounds = job.config.optimizer.get("local_steps", 1) > 1
    served = serving(job.config.elastic.timeout) if rounds else serving()
    with interruptible(), served if here else nullcontext(job.lighthouse) as lighthouse:
        killer.begun = begun = RawArray("b", processes)
        barrier = StartBarrier(processes)
        job = replace(job, lighthouse=lighthouse, start_barrier=barrier, begun=begun)
        return run_processes(
            processes,
            work_elastic,
            job,
            apart=True,
            interface=None,  # join() chooses it
            restarts=job.config.max_restarts,
            again=(replace(job, start_barrier=None, resume=None),),
            killer=killer,
        )


def work_elastic(job: Job) -> float | None:
    """Train in one process of an elastic run."""
    _prepare(job)
    return train(job)


def work(job: Job) -> float | None:
    """Train or evaluate in one process of a run, numbered by torchrun's variables."""
    _prepare(job)
    with process_group(job.backend, job.config.timeout):
        job = _resume_as_first(job)
        _check_same(job)
        # a directory that is named after the time may have another name in each process
        output_dir = Path(_from_first(str(job.output_dir)))
        workers = Workers.current(job.workers.local, timeout=job.config.timeout)
        job = replace(job, output_dir=output_dir, workers=workers)
        return measure(job) if job.config.evaluate is not None else _train(job)


def _prepare(job: Job) -> None:
    """Prepare this process for its threads and its GPU."""
    torch.set_num_threads(job.config.threads)
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    job.data.patience = job.config.timeout


def _say_whose_state_is_lost(checkpoint: Checkpoint, processes: int) -> None:
    """Say how many workers begin without the momentum that the checkpoint's workers had."""
    found = [(checkpoint.directory / worker_file(slot)).exists() for slot in range(processes)]
    if not all(found):
        print(
            f"note: {checkpoint.directory} has the own state of {sum(found)} of these {processes}"
            " workers: the others begin with momenta and residuals of zero",
            file=sys.stderr,
        )


def _train(job: Job) -> float | None:
    """Train, and record the cause of a failure: it may be known to this process alone."""
    try:
        return train(job)
    except Exception as error:
        if not (isinstance(error, Stopped) or lost_peer(error)):
            reason = f"process {job.workers.rank} failed: {sentence_of(error)}"
            record_failure(job.output_dir, reason)
        raise


def _resume_as_first(job: Job) -> Job:
    """Resume from the checkpoint that process 0 has chosen, as it alone has read all of it."""
    found = job.resume
    name = json.loads(_from_first(json.dumps(found and found.directory.name)))
    if found is None or name in (None, found.directory.name):
        return job  # _check_same refuses what no restart can repair
    chosen, _ = find(found.directory.with_name(name), identity(job.config), hashed=False)
    return replace(job, resume=chosen)


def _check_same(job: Job) -> None:
    """Refuse to train with settings that differ between processes: their messages would not fit.

    Raises:
        TrainingFailed: naming the settings that differ from those of process 0.
    """
    begins = {"checkpoint": job.resume.progress.step if job.resume else None}
    settings = {**everyones_settings(job), **begins}
    first = json.loads(_from_first(json.dumps(settings)))
    if different := differences(json.loads(json.dumps(settings)), first):
        raise TrainingFailed(
            f"process {dist.get_rank()} was started with other settings than process 0"
            f" ({in_words(different, 'there')}): give all the same command"
        )


def _from_first(text: str) -> str:
    """Broadcast the text of process 0."""
    encoded = os.fsencode(text)  # in a path there may be what is not UTF-8
    size = torch.tensor([len(encoded)])
    dist.broadcast(size, 0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return os.fsdecode(bytes(content.tolist()))
