"""The training loop, top to bottom."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf

from dlion import models
from dlion.config import make
from dlion.exchange import Channel
from dlion.exchange.nic import NicMeter
from dlion.files import write_atomically
from dlion.optim import DistributedOptimizer
from dlion.results.loggers import make_logger
from dlion.results.record import RunRecord
from dlion.streams import stream_seed
from dlion.timer import Timer
from dlion.training.box import box_state
from dlion.training.console import RunConsole
from dlion.training.evaluation import evaluate
from dlion.training.job import Job
from dlion.training.precision import in_precision
from dlion.training.replicas import check_replicas, parameters_sha256
from dlion.training.schedule import make_schedule
from dlion.training.virtual import VirtualWorkers
from dlion.units import human_bytes
from dlion.workers import Workers


def train(job: Job, workers: Workers) -> float | None:
    """Train in this process as one of ``workers.processes``; the first keeps the records.

    Returns the test accuracy, or the test loss for text.
    """
    config, data, device = job.config, job.data, job.device
    torch.manual_seed(stream_seed(config.seed, "initialisation"))
    model = in_precision(models.build(config.model, data), config.precision, device)
    optimizer: DistributedOptimizer = make(
        config.optimizer,
        model.named_parameters(),
        workers=workers,
        seed=config.seed,
        overlap=config.overlap,
        bucket_cap_mb=config.bucket_cap_mb,
    )
    schedule = make_schedule(config.schedule, optimizer, job.steps)
    virtual = VirtualWorkers(model, workers, config.seed)
    control = Channel(workers)  # losses, hashes and evaluations: not part of the method's traffic
    output = Output(job, workers, model, optimizer)

    timer = optimizer.channel.timer
    timer.enabled = config.profile
    control.barrier()  # the first parameters have arrived
    clock, nic = Clock(), NicMeter(job.rate is not None)
    batches = data.batches(_requests(job, workers), device)
    losses = torch.zeros(workers.local, dtype=torch.float64)
    since = 0
    for step in range(job.steps):
        for i, worker in enumerate(workers.ids):
            samples = len(job.sharding.indices(worker, step))
            virtual.enter(i, step)
            for part in reversed(range(config.accumulate)):
                x, y = next(batches)
                with timer("forward"):
                    loss = data.loss(model(x), y) * (len(x) / samples)
                waits = optimizer.no_sync() if part else nullcontext()
                with timer("backward"), waits:
                    loss.backward()
                losses[i] += loss.detach().double().cpu()
            optimizer.collect(i)
            virtual.leave(i)
        optimizer.step()
        schedule.step()

        done = step + 1
        if done == 1:
            output.first_step()
        if config.check_replicas_every and done % config.check_replicas_every == 0:
            check_replicas(model, control, done)
        evaluates = done % config.eval_every == 0 or done == job.steps
        if evaluates or done % config.log_every == 0:
            row = {
                "step": done,
                "epoch": done / job.sharding.steps_per_epoch,
                "seconds": clock.seconds(),
                **totals(control, losses / (done - since), optimizer, nic.bytes),
            }
            losses.zero_()
            since = done
            if evaluates:
                with clock.paused(), nic.paused():
                    virtual.load_mean_buffers(control)
                    row |= evaluate(model, data, control, device)
                    if config.box and output.first:
                        decay = config.optimizer.weight_decay
                        row |= box_state(model, data, decay, device, config.seed)
            output.row(row)
    if config.profile:
        output.profile(timer, clock.seconds())
    return output.finish(row, parameters_sha256(model))


def _requests(job: Job, workers: Workers) -> Iterator[tuple[torch.Tensor, int]]:
    """The samples of every backward pass of this process, and the seed of what is random there."""
    seed, parts = job.config.seed, job.config.accumulate
    for step in range(job.steps):
        for worker in workers.ids:
            indices = job.sharding.indices(worker, step)
            for part, chosen in enumerate(indices.tensor_split(parts)):
                yield chosen, stream_seed(seed, "augmentation", worker, step, part)


def totals(
    control: Channel, losses: torch.Tensor, optimizer: DistributedOptimizer, nic_bytes: int
) -> dict[str, float]:
    """Means over all workers: the loss, and the bytes sent and received so far.

    ``nic_bytes`` belong to processes; the mean over workers is that over processes.
    """
    traffic, local = optimizer.channel.traffic, control.workers.local
    rows = torch.stack(
        [
            losses,
            torch.full_like(losses, traffic.sent_bytes / local),
            torch.full_like(losses, traffic.received_bytes / local),
            torch.full_like(losses, nic_bytes),
        ],
        dim=1,
    )
    device = optimizer.buckets[0].params.device
    everyone = control.gather(rows.view(torch.uint8).to(device)).cpu().view(torch.float64)
    loss, sent, received, nic = (everyone.cumsum(0)[-1] / len(everyone)).tolist()
    return {
        "train_loss": loss,
        "sent_bytes": round(sent),
        "received_bytes": round(received),
        "nic_bytes": round(nic) or None,
    }


@dataclass
class Clock:
    """Seconds of training, without evaluations."""

    _started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def paused(self) -> "_Pause":
        return _Pause(self)


class _Pause:
    def __init__(self, clock: Clock):
        self._clock = clock

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._clock._started += time.perf_counter() - self._began


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
            resolved = OmegaConf.to_container(job.config, resolve=True)
            self.record = RunRecord(job.output_dir)
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
        }
        summary = {k: None if _is_nan(v) else v for k, v in summary.items()}
        self.record.finish(summary)
        self.logger.finish(summary)
        self.console.note(
            f"finished: {self.console.result()} after {row['seconds']:.1f} s;"
            f" python -m dlion.results.plot {self.job.output_dir}"
        )
        return result


def _network(job: Job) -> str:
    if job.rate is None:
        return f"{job.backend} on {job.device}"
    return f"{job.backend} on {job.device}, links of {job.rate / 1e6:g} Mbit/s (emulated)"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
