"""The training loop, top to bottom."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from dlion import models
from dlion.config import make
from dlion.errors import Stopped
from dlion.exchange import Channel
from dlion.exchange.nic import NicMeter
from dlion.optim import DistributedOptimizer
from dlion.streams import stream_seed
from dlion.training.box import box_state
from dlion.training.byzantine import Byzantine
from dlion.training.checkpoint import Checkpoints, Progress, identity
from dlion.training.clock import Clock
from dlion.training.evaluation import evaluate
from dlion.training.job import Job
from dlion.training.local_steps import LocalSteps
from dlion.training.output import Output
from dlion.training.participation import Participation
from dlion.training.precision import in_precision
from dlion.training.replicas import check_replicas, parameters_sha256
from dlion.training.schedule import make_schedule, set_step
from dlion.training.signals import SignalNotice
from dlion.training.virtual import VirtualWorkers
from dlion.workers import Workers


def train(job: Job, workers: Workers) -> float | None:
    """Train in this process as one of ``workers.processes``; the first keeps the records.

    Returns the test accuracy, or the test loss for text.

    Raises:
        Stopped: with a checkpoint, after ``job.stop_after`` steps or when a signal asked for it.
        TrainingFailed: with one sentence about why it cannot go on.
    """
    with SignalNotice() as notice:
        return _train(job, workers, notice)


def _train(job: Job, workers: Workers, notice: SignalNotice) -> float | None:
    config, data, device = job.config, job.data, job.device
    torch.manual_seed(stream_seed(config.seed, "initialisation"))
    model = in_precision(models.build(config.model, data), config.precision, device).train()
    faults = config.faults
    byzantine = Byzantine(
        model,
        workers,
        config.seed,
        faults.byzantine,
        faults.attack,
        faults.scale,
        faults.stale_steps,
    )
    optimizer: DistributedOptimizer = make(
        config.optimizer,
        model.named_parameters(),
        workers=workers,
        seed=config.seed,
        overlap=config.overlap,
        bucket_cap_mb=config.bucket_cap_mb,
        nonfinite=config.nonfinite,
    )
    schedule = make_schedule(config.schedule, optimizer, job.steps)
    virtual = VirtualWorkers(model, workers, config.seed)
    local = LocalSteps(model, config.local_steps, config.local_lr)
    participation = Participation(workers.count, config.participation, faults.drop, config.seed)
    control = Channel(workers)  # losses, hashes and evaluations: not part of the method's traffic
    output = Output(job, workers, model, optimizer)

    run = identity(config, workers.count)
    checkpoints = Checkpoints(
        job.output_dir,
        run,
        config.keep_checkpoints,
        optimizer,
        lambda i: virtual.state(i) | byzantine.state(i),
        control,
        config.timeout,
    )
    begun, losses = Progress(), torch.zeros(workers.local, dtype=torch.float64)
    if job.resume is not None:
        begun, losses = checkpoints.load(job.resume)
        set_step(schedule, begun.step)
    notice.tell = lambda _: setattr(optimizer, "flag", True)  # all are told with the next messages
    optimizer.flag |= notice.came is not None
    timer = optimizer.channel.timer
    timer.enabled = config.profile
    control.barrier()  # the first parameters have arrived
    clock, nic = Clock(begun.seconds), NicMeter(job.rate is not None)
    batches = data.batches(_requests(job, workers, participation, begun.step), device)
    since = begun.since
    spoken = sum(len(participation.at(step)) for step in range(since, begun.step))

    def reached(done: int, since: int) -> Progress:
        total = counted(begun, optimizer, control, nic)
        return replace(total, step=done, since=since, seconds=clock.seconds())

    for step in range(begun.step, job.steps):
        participants = participation.at(step)
        spoken += len(participants)
        optimizer.set_participants(participants)
        for i, worker in enumerate(workers.ids):
            if worker not in participants:
                continue
            virtual.enter(i, step)
            local.begin()
            for each in _passes(job, worker, step):
                if each.moves:
                    local.move()
                x, y = next(batches)
                with timer("forward"):
                    loss = data.loss(model(x), y) * each.share
                byzantine.enter(i, step, each.last)
                waits = nullcontext() if each.last else optimizer.no_sync()
                with timer("backward"), waits:
                    loss.backward()
                losses[i] += loss.detach().double().cpu()
            local.end()
            optimizer.collect(i)
            virtual.leave(i)
        optimizer.step()
        schedule.step()

        done = step + 1
        if done == begun.step + 1:
            output.first_step()
        if _every(config.check_replicas_every, done):
            check_replicas(model, control, done)
        evaluates = done % config.eval_every == 0 or done == job.steps
        if evaluates or done % config.log_every == 0:
            row = {
                "step": done,
                "epoch": done * config.local_steps / job.sharding.steps_per_epoch,
                "seconds": clock.seconds(),
                **averages(reached(done, since), losses / spoken, optimizer, control),
            }
            losses.zero_()
            since, spoken = done, 0
            if evaluates:
                with clock.paused(), nic.paused():
                    virtual.load_mean_buffers(control)
                    row |= evaluate(model, data, control, device)
                    if config.box and output.first:
                        decay = config.optimizer.weight_decay
                        row |= box_state(model, data, decay, device, config.seed)
            output.row(row)
        checkpoints.look()
        stops = done == job.stop_after or optimizer.flagged
        if done < job.steps and (stops or _every(config.checkpoint_every, done)):
            with clock.paused(), nic.paused():
                checkpoints.save(reached(done, since), losses)
        if done < job.steps and stops:
            checkpoints.wait()
            control.barrier()
            raise Stopped(done, notice.came)
    if config.profile:
        output.profile(timer, clock.seconds())
    last = reached(job.steps, since)
    result = output.finish(row, parameters_sha256(model))
    checkpoints.save(last, losses)
    checkpoints.wait()
    control.barrier()
    return result


def _every(steps: int | None, done: int) -> bool:
    return bool(steps) and done % steps == 0


class _Pass(NamedTuple):
    """One forward and backward pass of a worker.

    Attributes:
        indices: its samples.
        place: worker, step of its own, and part: names what is random in making a batch of them.
        share: of its loss in the loss of the worker's step.
        moves: a local step ended before it.
        last: it is the worker's last one in this step.
    """

    indices: torch.Tensor
    place: tuple[int, int, int]
    share: float
    moves: bool
    last: bool


def _passes(job: Job, worker: int, step: int) -> Iterator[_Pass]:
    """What a worker does between two exchanges."""
    turns, parts = job.config.local_steps, job.config.accumulate
    for turn in range(turns):
        own_step = step * turns + turn
        indices = job.sharding.indices(worker, own_step)
        for part, chosen in enumerate(indices.tensor_split(parts)):
            yield _Pass(
                chosen,
                (worker, own_step, part),
                len(chosen) / len(indices) / turns,
                turn > 0 and part == 0,
                turn == turns - 1 and part == parts - 1,
            )


def _requests(
    job: Job, workers: Workers, participation: Participation, start: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """The samples of every backward pass of this process, and the seed of what is random there."""
    for step in range(start, job.steps):
        participants = participation.at(step)
        for worker in workers.ids:
            if worker in participants:
                for each in _passes(job, worker, step):
                    yield each.indices, stream_seed(job.config.seed, "augmentation", *each.place)


def counted(
    begun: Progress, optimizer: DistributedOptimizer, control: Channel, nic: NicMeter
) -> Progress:
    """The counts of all processes, with those from before the run was resumed."""
    traffic = optimizer.channel.traffic
    own = [traffic.sent_bytes, traffic.received_bytes, nic.bytes, optimizer.skipped]
    rows = torch.zeros(control.workers.local, len(own), dtype=torch.int64)
    rows[0] = torch.tensor(own)  # the process's first worker speaks for it
    sent, received, on_wire, skipped = _everyone(rows, optimizer, control).sum(0).tolist()
    return replace(
        begun,
        sent_bytes=begun.sent_bytes + sent,
        received_bytes=begun.received_bytes + received,
        nic_bytes=begun.nic_bytes + on_wire,
        skipped=begun.skipped + skipped,
    )


def averages(
    progress: Progress, losses: torch.Tensor, optimizer: DistributedOptimizer, control: Channel
) -> dict[str, float | None]:
    """The sum of the local losses; bytes of a worker, and of a process's interface, on average."""
    w = control.workers
    loss = _everyone(losses.view(-1, 1), optimizer, control).cumsum(0)[-1].item()
    skipped = {"skipped": progress.skipped} if optimizer.nonfinite == "skip" else {}
    return {
        "train_loss": loss,
        "sent_bytes": round(progress.sent_bytes / w.count),
        "received_bytes": round(progress.received_bytes / w.count),
        "nic_bytes": round(progress.nic_bytes / w.processes) or None,
        **skipped,
    }


def _everyone(
    rows: torch.Tensor, optimizer: DistributedOptimizer, control: Channel
) -> torch.Tensor:
    """``[k, m]`` of the local workers -> ``[n, m]``."""
    packed = rows.contiguous().view(torch.uint8).to(optimizer.buckets[0].device)
    return control.gather(packed).cpu().view(rows.dtype)
