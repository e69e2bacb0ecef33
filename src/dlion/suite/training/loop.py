"""The training loop: ``train`` runs it, a ``Trainer`` is one process's part of it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dlion.errors import Stopped
from dlion.exchange import Channel, sum_in_order
from dlion.streams import stream_seed
from dlion.suite.training.agreement import Agreement
from dlion.suite.training.building import check_finite, make_model, make_optimizer
from dlion.suite.training.checkpoint import Checkpoints, Progress, identity
from dlion.suite.training.evaluation import box_state, evaluate
from dlion.suite.training.faults import Byzantine, Participation
from dlion.suite.training.job import Job
from dlion.suite.training.local_steps import LocalSteps
from dlion.suite.training.meter import Meter
from dlion.suite.training.output import Output
from dlion.suite.training.replicas import check_replicas, parameters_sha256
from dlion.suite.training.schedule import make_schedule
from dlion.suite.training.signals import SignalNotice
from dlion.suite.training.virtual import VirtualWorkers
from dlion.suite.training.weights import save_model


def train(job: Job) -> float | None:
    """Train in this process as one of ``job.workers.processes``; the first keeps the records.

    Returns:
        The test accuracy, or the test loss where there is none.

    Raises:
        Stopped: with a checkpoint, after ``stop_after`` steps or when a signal asked for it.
        TrainingFailed: with one sentence about why it cannot continue.
    """
    with SignalNotice() as notice:
        trainer = Trainer(job, notice)
        try:
            return trainer.train()
        finally:
            trainer.output.close()


class Trainer:
    """One process of a run, from its first step to its last.

    Attributes:
        begun: totals of all processes when this one began; not zero in a run that is resumed.
        losses: ``[k]``, the sum of each local worker's losses since the latest row of metrics.
        gradient_norms: ``[k]``, of each local worker, in steps that a row is made of.
        last_row: the step of that row.
        control: carries losses, hashes and evaluations, which are not the method's traffic.
    """

    def __init__(self, job: Job, notice: SignalNotice):
        config, workers = job.config, job.workers
        self.job, self.config, self.data, self.notice = job, config, job.data, notice
        self.model = model = make_model(job)
        self.byzantine = Byzantine(model, workers, config.seed, config.faults)
        self.optimizer = make_optimizer(job, model, workers=workers)
        self.virtual = VirtualWorkers(model, workers, config.seed)
        self.local_steps = LocalSteps(model, config.local_steps, config.local_lr)
        self.participation = Participation(
            workers.count, config.participation, config.faults.drop, config.seed
        )
        self.control = Channel(workers)
        self.agreement = Agreement(self.optimizer, workers) if config.agreement else None
        state_bytes = self.optimizer.state_bytes + self.local_steps.state_bytes
        self.output = Output(job, model, self.optimizer, state_bytes)
        # read when a row is made, so that no pass waits for a GPU
        self.losses = torch.zeros(workers.local, dtype=torch.float64, device=job.device)
        self.gradient_norms = torch.zeros_like(self.losses)
        self.checkpoints = Checkpoints(
            job.output_dir,
            identity(config),
            job.steps,
            (job.data.train_size, job.data.test_size),
            control=self.control,
            common_state=self.optimizer.common_state,
            worker_state=self._worker_state,
            keep=config.keep_checkpoints,
            timeout=config.timeout,
        )
        self.begun = self._resume()
        self.last_row = self.begun.last_row
        steps = range(self.begun.step, job.steps)
        self.schedule = make_schedule(config.schedule, self.optimizer, job.steps, steps.start)
        self.batches = job.data.batches(self._requests(steps), job.device)
        self.timer = self.optimizer.channel.timer
        if config.profile:
            self.timer.enable()
        self.control.barrier()  # the first parameters have arrived
        self.meter = Meter(self.begun.seconds, count_bytes=job.rate is not None)

    def train(self) -> float | None:
        """Take all steps that are left; return the test accuracy or, without one, the test loss."""
        job, config = self.job, self.config
        for step in range(self.begun.step, job.steps):
            done = step + 1
            evaluates = _every(config.eval_every, done) or done == job.steps
            evaluates |= config.box and done == 1  # nearly where it begins
            records = evaluates or _every(config.log_every, done)
            learning_rate = self.optimizer.param_groups[0]["lr"]
            if done == job.steps:
                self.optimizer.end_round()
            if evaluates and self.agreement:
                self.agreement.begin()
            self.train_step(step, records)
            if step == self.begun.step:
                self.output.banner()
            if _every(config.check_replicas_every, done):
                check_replicas(self.model, self.control, done)
            if records:
                self.record_row(done, evaluates, learning_rate)
            self.checkpoints.raise_failure()
            if done < job.steps:
                stops = done == config.stop_after or self.optimizer.flagged
                if stops or _every(config.checkpoint_every, done):
                    progress = self.progress(done)
                    with self.meter.paused():
                        self.output.sync()
                        self.checkpoints.save(progress)
                if stops:
                    self.checkpoints.wait()
                    self.control.barrier()
                    raise Stopped(done, self.notice.first)
        return self._finish()

    def train_step(self, step: int, measures: bool) -> None:
        """Let every local worker that takes part compute its gradient; exchange and update.

        The gradients' norms are looked at only in steps that ``measures`` them.
        """
        participants = self.participation.at(step)
        self.optimizer.set_participants(participants)
        for i, worker in enumerate(self.job.workers.ids):
            if worker in participants:
                self.forward_backward(i, step)
                if measures:
                    norms = torch.cat([bucket.norms() for bucket in self.optimizer.buckets])
                    self.gradient_norms[i] = norms.double().norm()
                if self.agreement:
                    self.agreement.look(i)
                self.optimizer.collect(i)
        self.optimizer.step()
        self.optimizer.host(None)
        self.schedule.step()

    def forward_backward(self, i: int, step: int) -> None:
        """Leave the gradient of local worker i in the parameters, and add its loss to the sums."""
        worker = self.job.workers.ids[i]
        with self.virtual.hosting(i, step), self.local_steps.path():
            for each in self._passes(worker, step):
                x, y = next(self.batches)
                with self.timer.forward:
                    loss = self.data.loss(self.model(x), y) * each.share
                self.optimizer.flag = self.notice.first is not None  # goes with the messages
                with self.timer.backward, self._sending(i, step, each.sends):
                    loss.backward()
                self.losses[i] += loss.detach().double()
                if each.moves:
                    with self.timer.apply:
                        self.local_steps.move()

    def record_row(self, done: int, evaluates: bool, learning_rate: float) -> None:
        """Record the mean loss since the latest row, totals and, if asked for, an evaluation."""
        sums = torch.stack([self.losses, self.gradient_norms]).cpu()  # waits for a GPU
        seconds = self.meter.seconds
        progress, workers = self.progress(done), self.job.workers
        epoch = done * self.config.local_steps / self.job.sharding.steps_per_epoch
        row = {
            "step": done,
            "epoch": epoch,
            "seconds": seconds,
            **self._means(done, *sums),
            "learning_rate": learning_rate,
            "sent_bytes": round(progress.sent_bytes / workers.count),
            "received_bytes": round(progress.received_bytes / workers.count),
            "nic_bytes": round(progress.nic_bytes / workers.processes) or None,
        }
        if self.optimizer.options["nonfinite"] == "skip":
            row["skipped"] = progress.skipped
        if evaluates:
            with self.meter.paused():
                row |= self._evaluate()
        self.output.record_row(row)
        self.losses.zero_()
        self.gradient_norms.zero_()
        self.last_row = done

    def progress(self, done: int) -> Progress:
        """Return the totals of all processes after so many steps; all must ask together."""
        begun, traffic = self.begun, self.optimizer.channel.traffic
        counts = [
            traffic.sent_bytes,
            traffic.received_bytes,
            self.meter.sent_bytes,
            self.optimizer.skipped,
        ]
        rows = torch.zeros(self.job.workers.local, len(counts), dtype=torch.int64)
        rows[0] = torch.tensor(counts)  # of the process, so they go with its first worker only
        sent, received, nic, skipped = sum_in_order(self.control.gather(rows)).tolist()
        return Progress(
            step=done,
            last_row=self.last_row,
            seconds=self.meter.seconds,
            sent_bytes=begun.sent_bytes + sent,
            received_bytes=begun.received_bytes + received,
            nic_bytes=begun.nic_bytes + nic,
            skipped=begun.skipped + skipped,
        )

    def _resume(self) -> Progress:
        """Restore the checkpoint to resume from, if any; return its progress."""
        if self.job.resume is None:
            return Progress()
        progress = self.checkpoints.load(self.job.resume)
        for group in self.optimizer.param_groups:
            group["steps"] = progress.step
        return progress

    def _worker_state(self, i: int) -> dict[str, torch.Tensor]:
        """Return all that belongs to local worker i alone, as views by name."""
        return {
            **self.optimizer.worker_state(i),
            **self.virtual.state(i),
            **self.byzantine.state(i),
            "losses": self.losses[i : i + 1],
        }

    def _means(self, done: int, losses: torch.Tensor, norms: torch.Tensor) -> dict[str, float]:
        """Return means over workers that took part: loss since the latest row, latest gradient."""
        steps = range(self.last_row, done)
        gradients = sum(len(self.participation.at(step)) for step in steps)
        latest = len(self.participation.at(done - 1))
        rows = torch.stack([losses / gradients, norms / latest], dim=1)
        loss, norm = sum_in_order(self.control.gather(rows)).tolist()
        return {"train_loss": loss, "gradient_norm": norm}

    def _evaluate(self) -> dict[str, float]:
        config, device = self.config, self.job.device
        self.virtual.load_mean_buffers(self.control)
        watch, limit = self.output.console.watch, config.eval_limit
        results = evaluate(self.model, self.data, self.control, device, limit, watch)
        if self.agreement:
            results |= self.agreement.measure()
        if config.box and self.job.workers.rank == 0:
            decay = config.optimizer.weight_decay
            results |= box_state(self.model, self.data, decay, device, config.seed)
        return results

    def _finish(self) -> float | None:
        if self.config.profile:
            self.output.profile(self.timer, self.meter.seconds)
        progress = self.progress(self.job.steps)
        check_finite(self.job, self.model, self.output.row["test_loss"])
        model_sha256 = None
        if self.job.workers.rank == 0:  # with the mean buffers still
            model_sha256 = save_model(self.model, self.data, self.job.output_dir)
        result = self.output.finish(parameters_sha256(self.model), model_sha256)
        self.checkpoints.save(progress)
        self.checkpoints.wait()
        self.control.barrier()
        return result

    def _sending(self, i: int, step: int, sends: bool) -> AbstractContextManager[None]:
        """Let messages leave during the backward pass in here, or only sum its gradients."""
        return self.byzantine.attacking(i, step) if sends else self.optimizer.no_sync()

    def _passes(self, worker: int, step: int) -> Iterator["_Pass"]:
        """Yield the passes of a worker between two exchanges."""
        turns, parts = self.config.local_steps, self.config.accumulate
        for turn in range(turns):
            local_step = step * turns + turn
            indices = self.job.sharding.indices(worker, local_step)
            for part, samples in enumerate(indices.tensor_split(parts)):
                ends, last = part == parts - 1, turn == turns - 1
                yield _Pass(
                    samples=samples,
                    stream=(worker, local_step, part),
                    share=len(samples) / len(indices) / turns,
                    moves=ends and not last,
                    sends=ends and last,
                )

    def _requests(self, steps: range) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the samples and the seed of every pass of this process."""
        for step in steps:
            participants = self.participation.at(step)
            for worker in self.job.workers.ids:
                if worker in participants:
                    for each in self._passes(worker, step):
                        seed = stream_seed(self.config.seed, "augmentation", *each.stream)
                        yield each.samples, seed


@dataclass(frozen=True)
class _Pass:
    """One forward and backward pass of a worker.

    Attributes:
        samples: their indices.
        stream: worker, local step and part; they name what is random in making a batch of them.
        share: of its loss in the loss of the worker's step.
        moves: whether the worker moves after it.
        sends: whether messages leave during it.
    """

    samples: torch.Tensor
    stream: tuple[int, int, int]
    share: float
    moves: bool
    sends: bool


def _every(steps: int | None, done: int) -> bool:
    return bool(steps) and done % steps == 0
