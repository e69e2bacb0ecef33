"""Output of a run: terminal, records and the logger; only one process writes."""

import json
import shlex
import zlib
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from dlion.exchange.grid import bytes_along
from dlion.optim import DistributedOptimizer
from dlion.suite.files import as_argument, write_atomically
from dlion.suite.machine import cores
from dlion.suite.record.loggers import Recording, make_logger
from dlion.suite.record.provenance import provenance
from dlion.suite.record.runs import RunRecord, finite
from dlion.suite.training.checkpoint import Progress, identity
from dlion.suite.training.console import RunConsole
from dlion.suite.training.job import Job
from dlion.suite.training.precision import describe
from dlion.suite.units import human_bytes, show_rate
from dlion.timer import BESIDE, PHASES, Timer


class Output:
    """Sends each row of metrics, and the summary, to terminal, metrics.jsonl and the logger.

    Rows and summary have the same names everywhere: those of metrics.jsonl and summary.json.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        state_bytes: int,
        active: bool,
        step: int | None = None,
    ):
        """Open the record.

        Args:
            job: the run.
            model: what is trained.
            optimizer: the method.
            state_bytes: what a worker keeps beside parameters and gradients.
            active: whether this process writes; others compute the same.
            step: to which events are kept, where that is later than the latest row.
        """
        self.job, self.optimizer, self.state_bytes = job, optimizer, state_bytes
        self.parameters = sum(p.numel() for p in model.parameters())
        self.active = active
        self.row: dict[str, Any] = {}  # the latest one
        self._begun = begun = job.resume.progress if job.resume else Progress()
        self._step, self._seconds = begun.step, begun.seconds  # of the latest row, or as resumed
        self.console = RunConsole(job.steps, self.active, begun.step)
        if self.active:
            self.origin = provenance(job.device)
            resolved = OmegaConf.to_container(job.config, resolve=True) | self.origin
            last_row = job.resume and job.resume.progress.last_row
            self.record = RunRecord(job.output_dir, last_row, step)
            recording = Recording(
                config=resolved,
                directory=job.output_dir,
                rows=self.record.rows,
                group=_group(job),
                online=job.rate is None,
            )
            self.logger = make_logger(job.config.logger, recording)

    def banner(self) -> None:
        """Show the facts of the run; traffic was counted in the first step."""
        self.console.begin(_facts(self.job, self.parameters, self.optimizer))

    def take_over(self) -> None:
        """Show that this process records from here on."""
        self.console.begin({"recording": f"from step {self._step} on, in {self.job.output_dir}"})

    def note(self, event: dict[str, Any], text: str) -> None:
        """Show and write that a worker has joined or left."""
        self.console.say(text)
        self.record.append(event)

    def record_row(self, row: dict[str, Any]) -> None:
        """Show and write a row of metrics."""
        took = (row["seconds"] - self._seconds) / (row["step"] - self._step)
        self._step, self._seconds = row["step"], row["seconds"]
        self.row = row | {
            "seconds_per_step": took,
            "sent_bits_per_parameter": 8 * row["sent_bytes"] / self.parameters,
        }
        if self.active:
            self.console.row(self.row)
            self.record.append(self.row)
            self.logger.log(self.row)

    def sync(self) -> None:
        """Put all rows on the disk, as a checkpoint is about to count on them."""
        if self.active:
            self.record.sync()

    def profile(self, timer: Timer, seconds: float) -> None:
        """Show where this process's time went and write profile.json (milliseconds per step)."""
        phases = (*PHASES, *BESIDE)
        steps = self.job.steps - self._begun.step  # since this process began
        table = {phase: 1e3 * timer.seconds[phase] / steps for phase in phases}
        spent = 1e3 * (seconds - self._begun.seconds) / steps
        table["other"] = spent - sum(table[phase] for phase in PHASES)
        if self.active:
            write_atomically(self.job.output_dir / "profile.json", json.dumps(table, indent=2))
        notes = dict.fromkeys(BESIDE, " (beside the rest, or waited for)")
        self.console.table(
            {phase: f"{ms:.2f} ms a step{notes.get(phase, '')}" for phase, ms in table.items()}
        )

    def finish(self, parameters_sha256: str, model_sha256: str) -> None:
        """Write the summary, with the hash of the parameters and that of the model's files."""
        hashes = {"parameters_sha256": parameters_sha256, "model_sha256": model_sha256}
        summary = finite(self._summary(hashes))
        self.record.finish(summary)
        self.logger.finish(summary)
        directory = shlex.quote(as_argument(self.job.output_dir))
        self.console.finish(f"after {self.row['seconds']:.1f} s; dlion plot {directory}")

    def close(self) -> None:
        """Let go of the logger, whether the run is finished or not."""
        if self.active:
            self.logger.finish(None)

    def _summary(self, hashes: dict[str, Any]) -> dict[str, Any]:
        job, row, config = self.job, self.row, self.job.config
        bits_up, bits_down = self.optimizer.paper_bits
        return {
            "optimizer": config.optimizer.name,
            "model": config.model.name,
            "dataset": config.dataset.name,
            "workers": job.workers.count if job.lighthouse is None else config.workers,
            "processes": job.workers.processes,
            "steps": job.steps,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "device": job.device,
            "parameters": self.parameters,
            "test_accuracy": row.get("test_accuracy"),
            "test_loss": row["test_loss"],
            "train_loss": row["train_loss"],
            "paper_bits_up": bits_up,
            "paper_bits_down": bits_down,
            "state_bytes_per_parameter": self.state_bytes / self.parameters,
            "sent_bytes_per_step": row["sent_bytes"] / job.steps,
            "seconds": row["seconds"],
            "seconds_per_step": row["seconds"] / job.steps,
            "nic_bytes": row["nic_bytes"],
            **hashes,
            **self.origin,
        }


def _group(job: Job) -> str:
    """Return a name for the runs that differ from this one by seed alone."""
    settings = identity(job.config) | {"steps": job.steps}
    del settings["seed"]
    digest = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    return f"{job.config.optimizer.name}-n{job.workers.count}-{digest:08x}"


def _facts(job: Job, parameters: int, optimizer: DistributedOptimizer) -> dict[str, str]:
    """Return the table at the beginning of a run."""
    config, workers, traffic = job.config, job.workers, optimizer.channel.traffic
    n = workers.count
    network = f"{job.backend} on {job.device}"
    if job.rate is not None:
        network += f", links of {show_rate(job.rate)} (emulated)"
    sent = traffic.sent_bytes / workers.local
    turns, warm_up = (config.optimizer.get(key) or 0 for key in ("local_steps", "warmup_steps"))
    in_warm_up = optimizer.param_groups[0]["steps"] <= warm_up
    sends = f"{human_bytes(sent)} a step{' of its warm-up' if in_warm_up else ''}"
    if turns > 1:
        sends = f"{human_bytes(sent)} in one of {turns} steps"
        if not sent:
            sends = f"nothing in {turns - 1} of {turns} steps"
    if sent:
        share = sent / max(turns, 1) / (2 * (n - 1) / n * 4 * parameters)
        sends += f", {_share(share)} a float32 ring all-reduce"
    levels = [
        f"{human_bytes(size / workers.local)} to workers {stride} apart"
        for stride, size in sorted(bytes_along(b.exchange for b in optimizer.buckets).items())
    ]
    return {
        "method": config.optimizer.name,
        "task": f"{config.model.name} on {config.dataset.name}, {job.steps} steps of {n} x"
        f" {config.batch_size} samples",
        "data": job.data.describe(),
        "workers": _spread(job),
        "network": network,
        **(
            {}
            if config.precision == "float32"
            else {"precision": describe(config.precision, job.device)}
        ),
        **({} if job.lighthouse is None else {"lighthouse": _invitation(job.lighthouse)}),
        "parameters": f"{parameters:,}",
        "a worker sends": sends,
        **({"... on the grid": ", ".join(levels)} if levels else {}),
        **({} if turns > 1 else {"collectives": f"{traffic.collectives} a step"}),
        "output": str(job.output_dir),
    }


def _spread(job: Job) -> str:
    """Say how the workers are spread over processes, and whether that leaves cores idle."""
    workers, there = job.workers, cores()
    words = f"{workers.count}: {workers.processes} process{'es' * (workers.processes > 1)}"
    if workers.local > 1:
        words += f" of {workers.local} virtual workers"
    chosen = job.config.processes is None and job.device == "cpu"
    if chosen and workers.processes < min(there, workers.count) and workers.count % there:
        words += f", on {workers.processes} of {there} cores: a multiple of {there} would use all"
    return words


def _invitation(lighthouse: str) -> str:
    return f"{lighthouse}; others join with elastic.lighthouse={lighthouse}"


def _share(ratio: float) -> str:
    """Write a ratio as it stands before a noun: ``1/32.0 of``, ``80% of``, ``as much as``."""
    if 0.95 < ratio < 1.05:
        return "as much as"
    if ratio > 1:
        return f"{ratio:.1f} times"
    return f"{ratio:.0%} of" if ratio > 0.6 else f"1/{1 / ratio:.1f} of"
