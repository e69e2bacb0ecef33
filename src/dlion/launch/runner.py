"""Check a configuration and run it, here or as one of the processes that somebody started."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from dlion.errors import RunFailed, TrainingFailed
from dlion.launch.check import check, latest_checkpoint, resuming
from dlion.launch.environment import detect, join_process_group, set_rendezvous
from dlion.launch.local import interruptible, report_failure, run_processes
from dlion.launch.network import Network
from dlion.record.runs import load_run, record_config
from dlion.training import Job, train
from dlion.training.checkpoint import identity
from dlion.workers import Workers


def launch(config: DictConfig, output_dir: Path) -> float | None:
    """Train as configured. Returns the test accuracy, or the test loss where there is none.

    Raises:
        UserError: before any process starts, about a wrong value.
        RunFailed: if a process failed.
        Stopped: if it ended before its last step, as ``stop_after`` or a signal asked.
    """
    place = detect()
    torch.set_num_threads(config.threads if isinstance(config.threads, int) else 1)
    if resuming(config, output_dir) == "auto" and (done := _result(output_dir)) is not None:
        print(f"{output_dir} is finished; nothing is left to do")
        return done
    job = check(config, output_dir, place)
    if place is None or place.rank == 0:
        record_config(output_dir, config)
    if place is not None:
        set_rendezvous(place)
        return report_failure(work, job)
    for attempt in range(config.max_restarts + 1):
        try:
            return _run(job)
        except RunFailed as error:
            if (done := _result(output_dir)) is not None:  # all that failed was to hang up
                return done
            if attempt == config.max_restarts or error.leaving:
                raise
            print(f"{error}; restart {attempt + 1} of {config.max_restarts}", file=sys.stderr)
            job = replace(job, resume=latest_checkpoint(config, output_dir) or job.resume)
    raise AssertionError


def _result(output_dir: Path) -> float | None:
    """Of a run that is finished."""
    done = load_run(output_dir).summary
    if done is None:
        return None
    return done["test_loss"] if done["test_accuracy"] is None else done["test_accuracy"]


def _run(job: Job) -> float | None:
    if job.rate is None:
        return run_processes(job.processes, work, job)
    with interruptible(), Network(job.processes, job.rate) as network:
        return run_processes(job.processes, work, job, network=network)


def work(job: Job) -> float | None:
    """One process of a run, told who it is by torchrun's variables; returns what train does."""
    torch.set_num_threads(job.config.threads)
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    join_process_group(job.backend, job.config.timeout)
    try:
        _check_same(job)
        # a directory named after the time may be another one elsewhere
        job = replace(job, output_dir=Path(_from_first(str(job.output_dir), job.device)))
        return train(job, Workers.current(job.local, timeout=job.config.timeout))
    finally:
        dist.destroy_process_group()


def _check_same(job: Job) -> None:
    """Whether all processes were told to do the same; messages would not fit otherwise."""
    facts = {**identity(job.config, job.config.workers), "steps": job.steps}
    first = json.loads(_from_first(json.dumps(facts), job.device))
    odd = [key for key, value in facts.items() if first.get(key) != value]
    if odd:
        raise TrainingFailed(
            f"process {dist.get_rank()} was started with another {', '.join(odd)} than process 0:"
            " give all the same command"
        )


def _from_first(text: str, device: str) -> str:
    """What process 0 gives."""
    size = torch.tensor([len(text.encode())], device=device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, 0)
    return bytes(content.tolist()).decode()
