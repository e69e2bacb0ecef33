"""The training loop: ``train`` runs it, a ``Trainer`` is one process's part of it."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlion.errors import Stopped
from dlion.exchange import Channel, sum_in_order
from dlion.extensions.nonfinite import norms
from dlion.streams import stream_seed
from dlion.suite.data import Data
from dlion.suite.record.runs import SUMMARY
from dlion.suite.training.agreement import Agreement
from dlion.suite.training.building import check_finite, make_model
from dlion.suite.training.checkpoint import Checkpoints, Progress, identity
from dlion.suite.training.evaluation import box_state, evaluate
from dlion.suite.training.faults import Byzantine, Participation
from dlion.suite.training.job import Job
from dlion.suite.training.local_steps import LocalSteps
from dlion.suite.training.membership import ElasticMembership, Membership
from dlion.suite.training.meter import Meter
from dlion.suite.training.output import Output
from dlion.suite.training.replicas import check_replicas, parameters_sha256
from dlion.suite.training.schedule import share_of_rate
from dlion.suite.training.signals import SignalNotice
from dlion.suite.training.virtual import VirtualWorkers
from dlion.suite.training.weights import save_model


def train(job: Job) -> float | None:
    """Train in this process, as one of a run; the first keeps the records.

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
            trainer.membership.close()


class Trainer:
    """One process of a run, from its first step to its last.

    Attributes:
        membership: answers where runs differ whose workers come and go.
        control: carries losses, hashes and evaluations, which are not the method's traffic. Its
            workers are those that are present.
        begun: where this process began; not zero in a run that is resumed.
        totals: of all processes, at the latest row of metrics that counts.
        reported: what this process had counted at that row, see :meth:`counts`.
        losses: ``[k]``, the sum of each local worker's losses since that row.
        norms: ``[k]``, of their gradients, in the latest step that a row is made of.
        counted: ``[2, k]``, how many losses and norms these are.
        measured: what the latest row was made of; None once it counts.
    """

    def __init__(self, job: Job, notice: SignalNotice):
        config = job.config
        self.elastic = elastic = config.elastic.lighthouse is not None
        self.job, self.config, self.data, self.notice = job, config, job.data, notice
        self.model = model = make_model(job)
        self.membership = members = (ElasticMembership if elastic else Membership)(self)
        workers = members.workers
        self.participation = Participation(
            workers.count, config.participation, config.faults.drop, config.seed
        )
        self.byzantine = Byzantine(model, workers, config.seed, config.faults)
        self.optimizer = members.make_optimizer()
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.share_of_rate = share_of_rate(config.schedule, job.steps)
        self.virtual = VirtualWorkers(model, workers, config.seed)
        self.local_steps = LocalSteps(model, config.local_steps, config.local_lr)
        self.control = Channel(workers)
        self.agreement = Agreement(self.optimizer, workers) if config.agreement else None
        self.output = self.make_output(job, not elastic and workers.rank == 0)
        # read when a row is made, so that no pass waits for a GPU
        self.losses = torch.zeros(workers.local, dtype=torch.float64, device=job.device)
        self.norms = torch.zeros_like(self.losses)
        self.counted = torch.zeros(2, workers.local, dtype=torch.float64)
        self.reported = torch.zeros(4, dtype=torch.int64)
        self.row: dict[str, Any] = {}  # the latest one
        self.measured: Measurement | None = None
        self.tested: list[Tensor] = []  # which step and buffers were evaluated
        self.scores: dict[int, Tensor] = {}  # of test batches, with these
        self.checkpoints = Checkpoints(
            job.output_dir,
            identity(config),
            job.steps,
            (job.data.train_size, job.data.test_size),
            control=self.control,
            common_state=members.common_state,
            worker_state=members.worker_state,
            keep=config.keep_checkpoints,
            timeout=members.patience,
            needs_all=not elastic,
        )
        self.begun = self.totals = members.resume()
        steps = iter(lambda: self.done, None) if elastic else range(self.begun.step, job.steps)
        make_batches = partial(Data.batches, job.data) if elastic else job.data.batches
        self.batches = make_batches(self._requests(steps), job.device)  # made ahead where they can
        self.timer = self.optimizer.channel.timer
        if config.profile:
            self.timer.enable()
        self.control.barrier()  # the first parameters have arrived
        self.meter = Meter(self.begun.seconds, count_bytes=job.rate is not None)

    @property
    def done(self) -> int:
        """Steps that were taken."""
        return self.optimizer.param_groups[0]["steps"]

    def train(self) -> float | None:
        """Take all steps that are left; return the test accuracy or, without one, the test loss."""
        while True:
            if not self.membership.begin():
                continue
            if self.done < self.job.steps:
                self.take_step(self.done)
            elif self.membership.finish():
                return self.row.get("test_accuracy", self.row["test_loss"])

    def take_step(self, step: int) -> None:
        """Let every local worker that takes part compute its gradient; exchange and update.

        The gradients' norms are looked at only in steps that a row is made of.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.share_of_rate(step)
        if step + 1 == self.job.steps:
            self.optimizer.end_round()
        if self.agreement and self._evaluates(step + 1):
            self.agreement.begin()
        self.membership.announce(step)
        participants, measures = self.participation.at(step), self._records(step + 1)
        if measures:
            self.norms.zero_()
            self.counted[1] = 0
        for i, worker in enumerate(self.control.workers.ids):
            if worker in participants:
                self.forward_backward(i, step)
                if measures:
                    found = torch.cat([norms(bucket) for bucket in self.optimizer.buckets])
                    self.norms[i], self.counted[1, i] = found.double().norm(), 1
                if self.agreement:
                    self.agreement.look(i)
                self.optimizer.collect(i)
        self.optimizer.step()
        self.optimizer.host(None)
        self.membership.conclude(step)

    def forward_backward(self, i: int, step: int) -> None:
        """Leave the gradient of local worker i in the parameters, and add its loss to the sums."""
        worker = self.control.workers.ids[i]
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
        self.counted[0, i] += 1

    def measure_due(self) -> None:
        """Compare replicas and measure a row, where that is due; all must do so together."""
        done, self.measured = self.done, None
        if passed(self.config.check_replicas_every, done - 1, done):
            check_replicas(self.model, self.control, done)
        if not self._records(done):
            return
        sums = torch.cat([torch.stack([self.losses, self.norms]).cpu(), self.counted])
        counts = self.counts()
        progress = replace(self.progress(counts), last_row=done)
        losses, norms, *n = self.control.gather(sums.T.contiguous()).T
        means = torch.stack([losses / n[0].sum(), norms / n[1].sum()], dim=1)  # of who took part
        loss, norm = sum_in_order(means).tolist()
        self.row = {
            "step": done,
            "epoch": self.membership.epochs,
            "seconds": progress.seconds,
            "train_loss": loss,
            "gradient_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **self.membership.traffic(progress),
        }
        if self.optimizer.options["nonfinite"] == "skip":
            self.row["skipped"] = progress.skipped
        if self._evaluates(done):
            with self.meter.paused():
                self.row |= self._evaluate()
        self.measured = Measurement(progress, counts, losses=sums[0], counted=sums[2])

    def count_row(self) -> None:
        """Let the row that was measured, if one was, be the latest that counts."""
        if (measured := self.measured) is None:
            return
        self.totals, self.reported, self.measured = measured.progress, measured.counts, None
        self.losses.sub_(measured.losses.to(self.losses.device)).nan_to_num_()
        self.counted[0] -= measured.counted

    def counts(self) -> Tensor:
        """Return this process's bytes sent and received, at its interface, and skipped steps."""
        traffic, skipped = self.optimizer.channel.traffic, self.optimizer.skipped
        sent, received = traffic.sent_bytes, traffic.received_bytes
        return torch.tensor([sent, received, self.meter.sent_bytes, skipped])

    def progress(self, counts: Tensor) -> Progress:
        """Return the totals of all processes from their counts; all must ask together."""
        totals = self.totals
        rows = torch.zeros(self.control.workers.local, len(counts), dtype=torch.int64)
        rows[0] = counts - self.reported  # of the process, so they go with its first worker only
        sent, received, nic, skipped = sum_in_order(self.control.gather(rows)).tolist()
        return Progress(
            step=self.done,
            last_row=totals.last_row,
            seconds=max(self.meter.seconds, totals.seconds),
            sent_bytes=totals.sent_bytes + sent,
            received_bytes=totals.received_bytes + received,
            nic_bytes=totals.nic_bytes + nic,
            skipped=totals.skipped + skipped,
        )

    def make_output(self, job: Job, active: bool, step: int | None = None) -> Output:
        """Return an output of this run; an ``active`` one writes its record."""
        state_bytes = self.optimizer.state_bytes + self.local_steps.state_bytes
        return Output(job, self.model, self.optimizer, state_bytes, active, step)

    def save_due(self, before: int) -> None:
        """Save, and stop, if that is due by one of the steps after ``before``.

        Raises:
            Stopped: if it stops.
        """
        done, config = self.done, self.config
        if done == self.job.steps:
            return
        stops, flagged = before < (config.stop_after or 0) <= done, self.optimizer.flagged
        if stops or flagged or passed(config.checkpoint_every, before, done):
            with self.meter.paused():
                self.output.sync()
                self.save()
        if not (stops or flagged):
            return
        self.checkpoints.wait()
        if not self.elastic:
            self.control.barrier()
        if stops or not self.elastic or self.notice.first is not None:
            raise Stopped(done, self.notice.first)

    def save(self) -> None:
        """Begin to write a checkpoint, if this process has a part in it."""
        if (progress := self.membership.checkpoint()) is not None:
            self.checkpoints.save(progress)

    def finish(self) -> None:
        """Write the model, the summary and the last checkpoint."""
        if self.config.profile:
            self.output.profile(self.timer, self.meter.seconds)
        check_finite(self.job, self.model, self.row["test_loss"])
        if self.output.active and not (self.job.output_dir / SUMMARY).exists():
            model_sha256 = save_model(self.model, self.data, self.job.output_dir)  # mean buffers
            self.output.finish(parameters_sha256(self.model), model_sha256)
        self.save()
        self.checkpoints.wait()
        self.control.barrier()

    def _records(self, done: int) -> bool:
        """Whether a row is made after so many steps."""
        since = self.membership.before(done)
        return self._evaluates(done) or passed(self.config.log_every, since, done)

    def _evaluates(self, done: int) -> bool:
        since = self.membership.before(done)
        due = done == self.job.steps or passed(self.config.eval_every, since, done)
        return due or (self.config.box and done == 1)  # nearly where it begins

    def _evaluate(self) -> dict[str, float]:
        config, device = self.config, self.job.device
        self.virtual.load_mean_buffers(self.control)
        watch, limit = self.output.console.watch, config.eval_limit
        tested = [torch.tensor(self.done), *self.model.buffers()]
        if [*map(torch.equal, tested, self.tested)] != [True] * len(tested):
            self.tested, self.scores = [each.clone() for each in tested], {}
        results = evaluate(self.model, self.data, self.control, device, limit, watch, self.scores)
        if self.agreement:
            results |= self.agreement.measure()
        if config.box and self.control.workers.rank == 0:
            decay = config.optimizer.weight_decay
            results |= box_state(self.model, self.data, decay, device, config.seed)
        return results

    def _sending(self, i: int, step: int, sends: bool) -> AbstractContextManager[None]:
        """Let messages leave during the backward pass in here, or only sum its gradients."""
        return self.byzantine.attacking(i, step) if sends else self.optimizer.no_sync()

    def _passes(self, worker: int, step: int) -> Iterator["_Pass"]:
        """Yield the passes of a worker between two exchanges."""
        turns = self.config.local_steps
        for turn in range(turns):
            local_step = step * turns + turn
            indices = self.membership.samples(worker, local_step)
            parts = min(self.config.accumulate, len(indices))
            for part, samples in enumerate(indices.tensor_split(parts)):
                ends, last = part == parts - 1, turn == turns - 1
                yield _Pass(
                    samples=samples,
                    stream=(worker, local_step, part),
                    share=len(samples) / len(indices) / turns,
                    moves=ends and not last,
                    sends=ends and last,
                )

    def _requests(self, steps: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield the samples and the seed of every pass of this process."""
        for step in steps:
            participants = self.participation.at(step)
            for worker in self.control.workers.ids:
                if worker in participants:
                    for each in self._passes(worker, step):
                        seed = stream_seed(self.config.seed, "augmentation", *each.stream)
                        yield each.samples, seed


class Measurement(NamedTuple):
    """What a row was made of: the totals of all, this process's counts, its workers' losses."""

    progress: Progress
    counts: Tensor
    losses: Tensor
    counted: Tensor


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


def passed(every: int | None, before: int, done: int) -> bool:
    """Whether a multiple of ``every`` is among the steps after ``before`` up to ``done``."""
    return bool(every) and done // every > before // every
