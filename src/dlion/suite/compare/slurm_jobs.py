"""The SLURM jobs of a sweep: their commands and status.

hydra-submitit-launcher leaves a folder for each job in .submitit, and Hydra leaves the sweep's
command in multirun.yaml. The folders' names are enough: nothing that was pickled is read.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlion.suite.compare.commands import read_hydra, sweep_overrides
from dlion.suite.record.runs import named_if_damaged

Job = tuple[int, int]  # its id, and its number in the array; 0 without one


def job_of(directory: Path) -> Job | None:
    """Return the job that a run was, the last one if it was started again; None if it was none.

    Raises:
        UserError: if what Hydra recorded is damaged.
    """
    hydra = read_hydra(directory, ".hydra/hydra.yaml")
    if hydra is None:
        return None
    with named_if_damaged(directory / ".hydra" / "hydra.yaml"):
        return parse_jobs(hydra["job"]["id"])[0] if _on_slurm(hydra) else None


def jobs_without_run(sweep: Path, begun: Iterable[Job]) -> dict[Job, tuple[Path, list[str]]]:
    """Return the jobs of a sweep in which no run began: their folders and commands.

    Args:
        sweep: its directory, with multirun.yaml.
        begun: the jobs of its runs. One that was started again has a later id and the same number.

    Raises:
        UserError: if multirun.yaml is damaged.
    """
    hydra = read_hydra(sweep, "multirun.yaml") or {}
    with named_if_damaged(sweep / "multirun.yaml"):
        if not _on_slurm(hydra):
            return {}
        # with batches there is an array for each, and its jobs are numbered from 0 again
        one_array = hydra["sweeper"]["max_batch_size"] is None
        overrides = dict(enumerate(sweep_overrides(hydra) if one_array else []))
    folders = (file.parent for file in sweep.glob(".submitit/*/*_submitted.pkl"))
    jobs = {parse_jobs(folder.name)[0]: folder for folder in folders}
    last_begun = {number: job_id for job_id, number in sorted(begun)}
    return {
        (job_id, number): (folder, overrides.get(number, []))
        for (job_id, number), folder in sorted(jobs.items())
        if job_id > last_begun.get(number, 0)
    }


def parse_jobs(text: str) -> list[Job]:
    """Return the jobs of an id as SLURM writes it: 7, 7_3, or 7_[0-2,5%4] for those that wait."""
    job_id, _, numbers = text.partition("_")
    jobs = []
    for part in numbers.strip("[]").split("%")[0].split(","):
        first, _, last = part.partition("-")
        low, high = int(first or 0), int(last or first or 0)
        jobs += [(int(job_id), number) for number in range(low, high + 1)]
    return jobs


def ask_slurm(jobs: Iterable[Job]) -> dict[Job, str]:
    """Return the states of jobs: pending, running, cancelled, timeout, node_fail and so on.

    Those that neither the accounting (sacct) nor the queue (squeue) knows are left out.
    """
    wanted = set(jobs)
    if not wanted:
        return {}
    ids = ",".join(str(job_id) for job_id in sorted({job_id for job_id, _ in wanted}))
    accounted = _states("sacct", "-XPn", "-j", ids, "-o", "JobID,State") or {}
    queued = _states("squeue", "-hr", "-j", ids, "-o", "%i|%T")
    if queued is None:
        return accounted
    # the accounting forgets a job that is cancelled while others of its array wait
    accounted_ids = {job_id for job_id, _ in accounted}
    forgotten = {job: "cancelled" for job in wanted if job[0] in accounted_ids}
    known = {job: state for job, state in accounted.items() if state != "pending"}
    return forgotten | queued | known


def _states(*command: str) -> dict[Job, str] | None:
    """Return the states of the jobs that a program lists as ID|STATE; None on failure."""
    if shutil.which(command[0]) is None:
        return None
    env = os.environ | {"SLURM_BITSTR_LEN": "0"}  # arrays are written in full
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:  # what squeue says of ended jobs
        return None
    states: dict[Job, str] = {}
    # a job that just began may also be listed among those that wait: it comes first
    for line in sorted(done.stdout.splitlines(), key=lambda line: "[" in line):
        text, state = line.split("|")
        for job in parse_jobs(text):
            states.setdefault(job, state.split()[0].lower())  # "CANCELLED by 1000"
    return states


def _on_slurm(hydra: dict[str, Any]) -> bool:
    """Whether jobs were submitted (other launchers number theirs too)."""
    return str((hydra.get("launcher") or {}).get("_target_")).endswith("SlurmLauncher")
