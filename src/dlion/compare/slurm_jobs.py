"""The SLURM jobs of a sweep: which there are, what each is to run, and what became of it.

hydra-submitit-launcher leaves a folder for each job in .submitit, and Hydra the sweep's command in
multirun.yaml. Names suffice: nothing that was pickled is read.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dlion.compare.commands import sweep_overrides

Job = tuple[int, int]  # its id, and its number in the array; 0 without one


def job_of(directory: Path) -> Job | None:
    """The job that a run's directory is of, or was of last."""
    file = directory / ".hydra" / "hydra.yaml"
    hydra = OmegaConf.load(file) if file.exists() else None
    return parse_jobs(hydra.hydra.job.id)[0] if hydra and _on_slurm(hydra) else None


def jobs_without_run(sweep: Path, begun: Iterable[Job]) -> dict[Job, tuple[Path, list[str]]]:
    """The jobs of a sweep that no run began in: their folders, and what they are to run.

    Args:
        sweep: its directory, with multirun.yaml.
        begun: the jobs of its runs. One that was started again has a later job of the same number.
    """
    hydra = OmegaConf.load(sweep / "multirun.yaml")
    if not _on_slurm(hydra):
        return {}
    # with batches there is an array for each, counted anew
    counted = hydra.hydra.sweeper.max_batch_size is None
    overrides = dict(enumerate(sweep_overrides(hydra) if counted else []))
    folders = (file.parent for file in sweep.glob(".submitit/*/*_submitted.pkl"))
    jobs = {parse_jobs(folder.name)[0]: folder for folder in folders}
    last = {number: job for job, number in sorted(begun)}
    return {
        (job, number): (folder, overrides.get(number, []))
        for (job, number), folder in sorted(jobs.items())
        if job > last.get(number, 0)
    }


def parse_jobs(text: str) -> list[Job]:
    """Of an id as SLURM writes it: 7, 7_3, or 7_[0-2,5%4] for those that wait."""
    job, _, numbers = text.partition("_")
    parts = [part.split("-") for part in numbers.strip("[]").split("%")[0].split(",")]
    ranges = [(int(part[0] or 0), int(part[-1] or 0)) for part in parts]
    return [(int(job), number) for low, high in ranges for number in range(low, high + 1)]


def ask_slurm(jobs: Iterable[Job]) -> dict[Job, str]:
    """The states of jobs: pending, running, cancelled, timeout, node_fail and so on.

    Those that neither the accounting (sacct) nor the queue knows are left out.
    """
    asked = set(jobs)
    if not asked:
        return {}
    ids = ",".join(str(job) for job in sorted({job for job, _ in asked}))
    told = _ask("sacct", "-XPn", "-j", ids, "-o", "JobID,State") or {}
    queue = _ask("squeue", "-hr", "-j", ids, "-o", "%i|%T")
    if queue is None:
        return told
    # the accounting forgets a job that is cancelled while others of its array wait
    arrays = {job for job, _ in told}
    gone = {job: "cancelled" for job in asked if job[0] in arrays}
    return gone | queue | {job: state for job, state in told.items() if state != "pending"}


def _ask(*command: str) -> dict[Job, str] | None:
    """The states of the jobs that a program lists as ID|STATE; None if it cannot tell."""
    if shutil.which(command[0]) is None:
        return None
    env = os.environ | {"SLURM_BITSTR_LEN": "0"}  # arrays are written in full
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:  # so says an empty queue
        return None
    states: dict[Job, str] = {}
    # a job that just began may still be among those that wait
    for line in sorted(done.stdout.splitlines(), key=lambda line: "[" in line):
        name, state = line.split("|")
        for job in parse_jobs(name):
            states.setdefault(job, state.split()[0].lower())  # "CANCELLED by 1000"
    return states


def _on_slurm(hydra: DictConfig) -> bool:
    """Whether jobs were submitted (other launchers number theirs too)."""
    return str(OmegaConf.select(hydra, "hydra.launcher._target_")).endswith("SlurmLauncher")
