"""Where a run goes: terminal, records and the logger; silent on all processes but the first."""

import json
from typing import Any

import torch
from omegaconf import OmegaConf

from dlion.files import write_atomically
from dlion.optim import DistributedOptimizer
from dlion.record.loggers import make_logger
from dlion.record.provenance import provenance
from dlion.record.runs import RunRecord, finite
from dlion.timer import Timer
from dlion.training.console import RunConsole
from dlion.training.job import Job
from dlion.units import human_bytes
from dlion.workers import Workers


class Output:
    """Where a run goes: terminal, metrics.jsonl, summary.json and the logger."""

    def __init__(
        self,
        job: Job,
        workers: Workers,
        model: torch.nn.Module,
        optimizer: DistributedOptimizer,
    ):
        self.job, self.workers, self.optimizer = job, workers, optimizer
        self.parameters = sum(p.numel() for p in model.parameters())
        self.first = workers.rank == 0
        self.console = RunConsole(job.steps, self.first)
        if self.first:
            self.origin = provenance(job.device)
            resolved = OmegaConf.to_container(job.config, resolve=True) | self.origin
            self.record = RunRecord(job.output_dir, job.resume and job.resume.progress.since)
            online = job.rate is None  # an emulated network leads nowhere else
            self.logger = make_logger(job.config.logger, resolved, job.output_dir, online)

    def first_step(self) -> None:
        """Show the table; what travels was counted in the first step."""
        n, traffic = self.workers.count, self.optimizer.channel.traffic
        sent = traffic.sent_bytes / self.workers.local
        ring = 2 * (n - 1) / n * 4 * self.parameters
        virtual = f" of {self.workers.local} virtual workers" if self.workers.local > 1 else ""
        config = self.job.config
        self.console.table(
            {
                "method": config.optimizer.name,
                "task": f"{config.model.name} on {config.dataset.name}, {self.job.steps} steps of"
                f" {n} x {config.batch_size} samples",
                "workers": f"{n}: {self.workers.processes} processes{virtual}",
                "network": _network(self.job),
                "parameters": f"{self.parameters:,}",
                "a worker sends": f"{human_bytes(sent)} a step"
                + (f", 1/{ring / sent:.1f} of a float32 ring all-reduce" if sent else ""),
                "collectives": f"{traffic.collectives} a step",
                "output": str(self.job.output_dir),
            }
        )

    def row(self, row: dict[str, Any]) -> None:
        row["sent_bits_per_parameter"] = 8 * row["sent_bytes"] / self.parameters
        self.console.row(row)
        if self.first:
            self.record.append(row)
            self.logger.log(row)

    def profile(self, timer: Timer, seconds: float) -> None:
        """Show where this process's time went and write profile.json (milliseconds per step)."""
        phases = ("forward", "backward", "encode", "wait", "apply")
        beside = ("travel", "vote")  # during the backward pass, or while step() waits
        table = {phase: 1e3 * timer.seconds[phase] / self.job.steps for phase in phases + beside}
        table["other"] = 1e3 * seconds / self.job.steps - sum(table[phase] for phase in phases)
        if self.first:
            write_atomically(self.job.output_dir / "profile.json", json.dumps(table, indent=2))
        self.console.close()
        notes = dict.fromkeys(beside, " (beside the rest, or waited for)")
        self.console.table(
            {phase: f"{ms:.2f} ms a step{notes.get(phase, '')}" for phase, ms in table.items()}
        )

    def finish(self, row: dict[str, Any], sha256: str) -> float | None:
        """Write the summary. Returns what a sweep compares."""
        self.console.close()
        config, up_down = self.job.config, self.optimizer.paper_bits
        result = row.get("test_accuracy", row["test_loss"])
        if not self.first:
            return result
        summary = {
            "optimizer": config.optimizer.name,
            "model": config.model.name,
            "dataset": config.dataset.name,
            "workers": self.workers.count,
            "processes": self.workers.processes,
            "steps": self.job.steps,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "device": self.job.device,
            "parameters": self.parameters,
            "test_accuracy": row.get("test_accuracy"),
            "test_loss": row["test_loss"],
            "train_loss": row["train_loss"],
            "paper_bits_up": up_down[0],
            "paper_bits_down": up_down[1],
            "sent_bytes_per_step": row["sent_bytes"] / self.job.steps,
            "seconds": row["seconds"],
            "seconds_per_step": row["seconds"] / self.job.steps,
            "nic_bytes": row["nic_bytes"],
            "parameters_sha256": sha256,
            **self.origin,
        }
        summary = finite(summary)
        self.record.finish(summary)
        self.logger.finish(summary)
        self.console.note(
            f"finished: {self.console.result()} after {row['seconds']:.1f} s;"
            f" python -m dlion.compare.plot {self.job.output_dir}"
        )
        return result


def _network(job: Job) -> str:
    if job.rate is None:
        return f"{job.backend} on {job.device}"
    return f"{job.backend} on {job.device}, links of {job.rate / 1e6:g} Mbit/s (emulated)"
