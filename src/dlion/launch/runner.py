"""Check a configuration and run it, here or as one of the processes that somebody started."""

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from dlion.errors import Stopped
from dlion.launch.check import check
from dlion.launch.environment import detect, join_process_group, set_rendezvous
from dlion.launch.local import interruptible, report_failure, run_processes
from dlion.launch.network import Network
from dlion.results.record import load_run
from dlion.training import Job, train
from dlion.workers import Workers


def launch(config: DictConfig, output_dir: Path) -> float | None:
    """Train as configured. Returns the test accuracy, or the test loss where there is none.

    Raises:
        UserError: before any process starts, about a wrong value.
        RunFailed: if a process failed.
        Stopped: if it ended before its last step, as ``stop_after`` asked.
    """
    result = _launch(config, output_dir)
    if isinstance(result, dict):
        raise Stopped(result["stopped_after"])
    return result


def _launch(config: DictConfig, output_dir: Path) -> float | dict[str, int] | None:
    place = detect()
    torch.set_num_threads(config.threads if isinstance(config.threads, int) else 1)
    done = load_run(output_dir).summary if config.resume == "auto" else None
    if done is not None:
        print(f"{output_dir} is finished; nothing is left to do")
        return done["test_loss"] if done["test_accuracy"] is None else done["test_accuracy"]
    job = check(config, output_dir, place)
    if place is None:
        if job.rate is None:
            return run_processes(job.processes, work, job)
        with interruptible(), Network(job.processes, job.rate) as network:
            return run_processes(job.processes, work, job, network=network)
    set_rendezvous(place)
    return report_failure(work, job)


def work(job: Job) -> float | dict[str, int] | None:
    """One process of a run, told who it is by torchrun's variables.

    Returns what :func:`train` does, or ``{"stopped_after": step}``.
    """
    torch.set_num_threads(job.config.threads)
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    join_process_group(job.backend)
    try:
        job = replace(job, output_dir=Path(_from_first(str(job.output_dir), job.device)))
        try:
            result = train(job, Workers.current(job.local))
        except Stopped as stop:
            result = {"stopped_after": stop.step}
        dist.barrier()  # nobody hangs up while another may still be listening
        return result
    finally:
        dist.destroy_process_group()


def _from_first(text: str, device: str) -> str:
    """What process 0 gives: a directory named after the time may be another one elsewhere."""
    size = torch.tensor([len(text.encode())], device=device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, 0)
    return bytes(content.tolist()).decode()
