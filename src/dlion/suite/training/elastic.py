"""Training with workers that come and go: ``elastic=true``. One process is one worker.

Everything that workers must agree on is a function of the state that a worker gets when it joins:
the step, which samples are seen, what was recorded. It moves only where a step is committed, and a
worker that has missed a commit takes the state of one that has not. So a row is measured by those
present as a step begins, written by the first of them, and counts once that step is committed; if
somebody has left meanwhile, it is measured again by those who are left.
"""

import json
import math
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlion.elastic import of
from dlion.elastic.joining import join
from dlion.elastic.worker import LeftBehind
from dlion.errors import Stopped, TrainingFailed
from dlion.exchange import Channel, sum_in_order
from dlion.streams import stream_seed
from dlion.suite.data import Dealing, Sharding
from dlion.suite.files import load_tensors
from dlion.suite.record.runs import SUMMARY
from dlion.suite.training.building import check_finite, make_model, make_optimizer
from dlion.suite.training.checkpoint import (
    COMMON,
    Checkpoint,
    Checkpoints,
    Progress,
    copy_state,
    differences,
    identity,
    in_words,
    worker_file,
)
from dlion.suite.training.evaluation import evaluate_again
from dlion.suite.training.job import Job, everyones_settings
from dlion.suite.training.meter import Meter
from dlion.suite.training.output import Output
from dlion.suite.training.replicas import check_replicas, parameters_sha256
from dlion.suite.training.schedule import share_of_rate
from dlion.suite.training.signals import SignalNotice
from dlion.suite.training.virtual import VirtualWorkers
from dlion.suite.training.weights import save_model
from dlion.workers import Workers

_WRITING = 10.0  # seconds to wait for another worker's part of a checkpoint
_NAME = 1024  # bytes, at most, of what a worker says of itself


def train_elastic(job: Job) -> float | None:
    """Train in this process as a worker of the run that ``job.lighthouse`` knows.

    Returns:
        The test accuracy, or the test loss where there is none.

    Raises:
        Stopped: after ``stop_after`` steps or when a signal asked this worker to leave.
        TrainingFailed: with one sentence about why it cannot continue.
    """
    with SignalNotice() as notice:
        worker = ElasticWorker(job, notice)
        try:
            return worker.train()
        finally:
            worker.close()


@dataclass(frozen=True)
class Member:
    """A worker that is present.

    Attributes:
        name: its machine and process.
        launch: of the command that has started it; its workers share a folder.
        seat: its number among these.
    """

    name: str
    launch: str
    seat: int


@dataclass
class Totals:
    """What was recorded until the latest row, equal on all workers.

    Attributes:
        row: the step of that row.
        seconds: of training.
        sent, received: sums over rows of the mean bytes of the workers present.
        sent_by_all: bytes of all workers together, those included that have left.
        skipped: steps of workers in which a gradient was left out.
    """

    row: int = 0
    seconds: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    sent_by_all: int = 0
    skipped: int = 0


class ElasticWorker:
    """One worker of a run, from the moment it joins.

    Attributes:
        losses: the sum of its losses, and their number.
        crew: the workers present, in the order of their numbers.
        known: launch and name of those at the latest commit.
        boundary: the step of the latest commit.
        output: of the run, where this worker records it.
    """

    def __init__(self, job: Job, notice: SignalNotice):
        config = job.config
        self.job, self.config, self.data, self.notice = job, config, job.data, notice
        self.model = model = make_model(job)
        host, seat = socket.gethostname(), int(os.environ["RANK"])
        self.me = Member(f"{host}-{os.getpid()}", os.environ["DLION_LAUNCHED"], seat)
        self.crew: list[Member] = []
        self._saving: set[Member] = set()  # whose parts the latest checkpoint has
        self.known: list[list[str]] = []
        self.boundary = 0
        self.totals, self._pending = Totals(), None
        self.samples = Dealing(self._sharding, job.data.train_size, config.batch_size, config.seed)
        self.virtual = VirtualWorkers(model, Workers(), config.seed)
        self.settings = everyones_settings(job)
        manager = join(
            job.lighthouse or "",
            config.elastic.min_workers,
            name=f"{self.me.launch}-{host}-{seat:05}",
            timeout=config.elastic.timeout,
            patience=config.timeout,
        )
        if job.meeting is not None:
            job.meeting.wait(seat)
        manager.register_state_dict_fn("run", self._load, self._state)
        self.optimizer = make_optimizer(job, model, manager=manager)
        elastic = of(self.optimizer)
        assert elastic is not None
        self.elastic, self.manager = elastic, manager
        self.elastic.interrupted = lambda: notice.first is not None
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.share_of_rate = share_of_rate(config.schedule, job.steps)
        self.control = Channel(Workers())
        self.output: Output | None = None
        self.results: dict[str, float] = {}
        self._tested: list[Tensor] = []  # which parameters and buffers are evaluated
        self._scores: dict[int, Tensor] = {}  # of test batches, of these
        self.losses = torch.zeros(2, dtype=torch.float64)
        self.norm = 0.0
        self._reported = torch.zeros_like(self._counts())  # in rows already
        self._unreported = torch.zeros_like(self._reported)  # in a checkpoint: the rest
        self.checkpoints = Checkpoints(
            job.output_dir,
            identity(config),
            job.steps,
            (job.data.train_size, job.data.test_size),
            control=self.control,
            common_state=lambda: {"joined": self.elastic.snapshot()},
            worker_state=lambda _: self._own(),
            keep=config.keep_checkpoints,
            timeout=_WRITING,
            needs_all=False,
        )
        self.meter = Meter(0.0, count_bytes=False)
        self._restoring = False  # from a checkpoint, whose run may have had another log_every, say
        self.begun = job.resume.progress.step if job.resume is not None else 0
        if job.resume is not None:
            self._resume(job.resume)

    @property
    def done(self) -> int:
        """Steps that were taken."""
        return self.optimizer.param_groups[0]["steps"]

    def train(self) -> float | None:
        """Take steps until the last; return the test accuracy or, without one, the test loss."""
        while True:
            asks = not self.elastic.open
            try:
                self.optimizer.zero_grad()  # who is there?
            except LeftBehind:  # what they have saved is newer
                raise
            except (TrainingFailed, Stopped) as error:  # the lighthouse is lost, or we leave
                if self.boundary:
                    self._save()
                    self._wait_for_checkpoint()
                if isinstance(error, Stopped):
                    raise Stopped(self.boundary or None, self.notice.first) from None
                raise
            if asks and not self._begin():
                continue
            if self.done == self.job.steps:
                if self._finish():
                    return self.results.get("test_accuracy", self.results["test_loss"])
                continue
            self._step()

    def close(self) -> None:
        """Let go of the record and of the run."""
        if self.output is not None:
            self.output.close()
        self.manager.shutdown(wait=False)

    # ------------------------------------------------------------------ those who are present

    def _begin(self) -> bool:
        """Meet who is there and record what is due; return whether all of them did."""
        row: dict[str, Any] | None = None

        def work() -> None:
            nonlocal row
            if self.control.workers is not self.optimizer.workers:
                self._meet()
            every = self.config.check_replicas_every
            if every and self.done and self.done % every == 0:
                self.optimizer.host(None)
                check_replicas(self.model, self.control, self.done)
                self.optimizer.host(0)
            if self._is_due(self.done):
                row = self._measure()

        if not self.elastic.attempt(work):
            return False
        if self.control.workers.rank == 0:
            if row is not None and not self._is_recorded(row["step"]):
                self._open().record_row(row)
        elif self.output is not None:  # another has the record now
            self.output.close()
            self.output = None
        return True

    def _meet(self) -> None:
        """Learn who is there."""
        self.elastic.meet(self.control)
        said = json.dumps(asdict(self.me)).encode().ljust(_NAME)
        everyone = self.control.gather(torch.frombuffer(bytearray(said), dtype=torch.uint8)[None])
        self.crew = [Member(**json.loads(bytes(row.tolist()))) for row in everyone]
        self.checkpoints.gone = [member.seat for member in self._saving - {*self.crew}]
        self.virtual.workers = self.control.workers

    def _note_changes(self) -> None:
        """Record who has joined and left since the commit before."""
        names = [[member.launch, member.name] for member in self.crew]
        if self.control.workers.rank == 0 and self.known:
            changes = {"left": [name for name in self.known if name not in names]}
            changes["joined"] = [name for name in names if name not in self.known]
            for event, workers in changes.items():
                for _, worker in workers:
                    row = {"step": self.done, "event": event, "worker": worker}
                    row |= {"workers": len(names), "seconds": self.meter.seconds}
                    text = f"step {self.done}: {worker} has {event}, {len(names)} workers"
                    self._open().note(row, text)
        self.known = names

    # ------------------------------------------------------------------ a step

    def _step(self) -> None:
        """Take a step, if all who are present do; else only the samples and losses are lost."""
        optimizer, done, count = self.optimizer, self.done, self.control.workers.count
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.share_of_rate(done)
        if done + 1 == self.job.steps:
            optimizer.end_round()
        meets = optimizer.exchanges
        with self.virtual.hosting(0, done):
            loss = self._forward_backward(done)
        if self._is_due(done + 1):
            norms = torch.cat([bucket.norms() for bucket in optimizer.buckets])
            self.norm = float(norms.double().norm())
        optimizer.step()
        if self.done > done:
            self.samples.taken(count)
            if math.isfinite(loss):  # or all later means would have it, too
                self.losses += torch.tensor([loss, 1], dtype=torch.float64)
        if meets and optimizer.committed:
            self._commit()

    def _forward_backward(self, step: int) -> float:
        """Leave the gradient of this worker in the parameters; return its loss."""
        optimizer, seed, total = self.optimizer, self.config.seed, 0.0
        worker, count = self.control.workers.rank, self.control.workers.count
        indices = self.samples.indices(worker, count)
        parts = indices.tensor_split(min(self.config.accumulate, len(indices)))
        optimizer.flag = self.notice.first is not None  # goes with the messages
        for part, samples in enumerate(parts):
            draws = stream_seed(seed, "augmentation", worker, step, part)
            generator = torch.Generator().manual_seed(draws)
            x, y = self.data.batch(samples, generator, self.job.device)
            loss = self.data.loss(self.model(x), y) * (len(samples) / len(indices))
            if part < len(parts) - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
        return total

    def _commit(self) -> None:
        """Let what was measured as this step began count; save and leave, if that is due."""
        before, done, config = self.boundary, self.done, self.config
        self.job.begun[self.me.seat] = 1
        if self._pending is not None:
            self.totals, self._reported = self._pending
            self._pending = None
        self._note_changes()
        self.boundary = done
        if self.control.workers.rank == 0 and self.output is None:
            self._open()
        if done == self.job.steps:
            return
        stops = _passed(config.stop_after, before, done) and before < (config.stop_after or 0)
        if stops or self.optimizer.flagged or _passed(config.checkpoint_every, before, done):
            self._save()
        if stops or self.optimizer.flagged:
            self._wait_for_checkpoint()
            if stops or self.notice.first is not None:
                raise Stopped(done, self.notice.first)

    # ------------------------------------------------------------------ the record

    def _is_due(self, step: int) -> bool:
        """Whether a row is made after so many steps."""
        every = (self.config.log_every, self.config.eval_every)
        last = step == self.job.steps
        return step > 0 and (last or any(_passed(n, self.totals.row, step) for n in every))

    def _measure(self) -> dict[str, Any]:
        """Return the row of the step that begins, of all who are present."""
        done, totals, workers = self.done, self.totals, self.control.workers
        counts = self._counts()
        norm_of_mine = torch.tensor([self.norm, self.norm > 0], dtype=torch.float64)
        mine = torch.cat([counts - self._reported, norm_of_mine])
        everyone = sum_in_order(self.control.gather(mine[None])).tolist()
        loss, losses, sent, received, skipped, norm, norms = everyone
        totals = Totals(
            row=done,
            seconds=max(self.meter.seconds, totals.seconds),
            sent=totals.sent + sent / workers.count,
            received=totals.received + received / workers.count,
            sent_by_all=totals.sent_by_all + int(sent),
            skipped=totals.skipped + int(skipped),
        )
        self._pending = totals, counts
        row: dict[str, Any] = {
            "step": done,
            "epoch": self.samples.epochs,
            "workers": workers.count,
            "seconds": totals.seconds,
            "train_loss": loss / losses if losses else math.nan,
            "gradient_norm": norm / norms if norms else math.nan,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "sent_bytes": round(totals.sent),
            "received_bytes": round(totals.received),
            "nic_bytes": None,
            "sent_bytes_of_all": totals.sent_by_all,
        }
        if self.config.nonfinite == "skip":
            row["skipped"] = totals.skipped
        if done == self.job.steps or _passed(self.config.eval_every, self.totals.row, done):
            with self.meter.paused():
                row |= self._evaluate()
        return row

    def _counts(self) -> Tensor:
        """Return this worker's losses, bytes sent and received, and skipped gradients so far."""
        traffic = self.optimizer.channel.traffic
        sent = traffic.sent_bytes + self.manager._checkpoint_transport.sent_bytes
        numbers = [*self.losses.tolist(), sent, traffic.received_bytes, self.optimizer.skipped]
        return torch.tensor(numbers, dtype=torch.float64)

    def _evaluate(self) -> dict[str, float]:
        """Measure the shared parameters; all present take a share of the test set."""
        self.optimizer.host(None)
        self.virtual.load_mean_buffers(self.control)
        tested = [torch.tensor([self.done, self.elastic.healed]), *self.model.buffers()]
        if [*map(torch.equal, tested, self._tested)] != [True] * len(tested):
            self._tested, self._scores = [each.clone() for each in tested], {}
        limit, device = self.config.eval_limit, self.job.device
        self.results = evaluate_again(
            self.model, self.data, self.control, device, limit, self._scores
        )
        self.optimizer.host(0)
        return self.results

    def _open(self) -> Output:
        """Return the record of the run, which this worker writes from here on."""
        if self.output is not None and not self.output.record.replaced:
            return self.output
        if self.output is not None:
            self.output.close()
        at = Progress(self.totals.row, self.totals.row, self.totals.seconds)
        begun = Checkpoint(self.job.output_dir, at, self.job.steps, (0, 0))
        first = replace(self.job, workers=Workers(processes=len(self.crew)), resume=begun)
        state_bytes = self.optimizer.state_bytes
        self.output = Output(first, self.model, self.optimizer, state_bytes, self.done)
        if self.done == self.begun + 1:
            self.output.banner()
        else:
            self.output.take_over()
        return self.output

    def _is_recorded(self, step: int) -> bool:
        """Whether a row is there already, which others did not hear of."""
        if step == self.job.steps and (self.job.output_dir / SUMMARY).exists():
            return True
        return self.output is not None and self.output.row.get("step") == step

    def _finish(self) -> bool:
        """End the run together with those present; return whether all have seen the end."""
        self.manager._min_replica_size = 1  # others may have seen it, and left
        done, first = self.done, self.crew[0]

        def work() -> None:
            self.optimizer.host(None)
            check_replicas(self.model, self.control, done)
            check_finite(self.job, self.model, self.results["test_loss"])
            self._save()
            self._wait_for_checkpoint()
            ends = self.control.workers.rank == 0 and self.output is not None
            if ends and not (self.job.output_dir / SUMMARY).exists():
                model_sha256 = save_model(self.model, self.data, self.job.output_dir)
                self.output.finish(parameters_sha256(self.model), model_sha256)
            self.control.barrier()

        if not self.elastic.attempt(work):
            return False
        mine = [m for m in self.crew if m.launch == self.me.launch]
        if first.launch != self.me.launch and self.me == min(mine, key=lambda m: m.seat):
            sha256 = parameters_sha256(self.model)
            print(f"finished: step {done}, parameters {sha256}; {first.name} has the record")
        return True

    # ------------------------------------------------------------------ state

    def _own(self) -> dict[str, Tensor]:
        """Return all that belongs to this worker alone, as views by name."""
        views = {"counts": self._unreported, **self.virtual.state(0)}
        for bucket in self.optimizer.buckets:
            for name, rows in bucket.own.items():  # their padding depends on the workers
                views[f"{bucket.index}.{name}"] = rows[0, : bucket.numel]
            for name, rows in bucket.own_counters.items():
                views[f"{bucket.index}.{name}"] = rows[0]
        return views

    def _state(self) -> dict[str, Any]:
        """Return what a worker that joins gets of the run, besides the optimizer's state."""
        return {
            "settings": json.dumps(self.settings),
            "step": self.done,
            "totals": asdict(self.totals),
            "samples": [self.samples.epoch, self.samples.parts],
            "known": self.known,
            "seconds": self.meter.seconds,
            "buffers": list(self.virtual.state(0).values()),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Start from the state of a worker that is there."""
        different = differences(self.settings, json.loads(state["settings"]))
        if different and not self._restoring:
            raise TrainingFailed(
                f"this worker was started with other settings than the run that it joins"
                f" ({in_words(different)}): give all the same settings"
            )
        self.boundary, self.known = state["step"], state["known"]
        self.totals, self._pending = Totals(**state["totals"]), None
        self.samples.epoch, self.samples.parts = state["samples"]
        self.meter = Meter(state["seconds"], count_bytes=False)
        for buffer, theirs in zip(self.virtual.state(0).values(), state["buffers"], strict=True):
            buffer.copy_(theirs)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Start from a checkpoint; without a file of this worker's, its own state is zero."""
        self._restoring = True
        self.elastic.restore(load_tensors(checkpoint.directory / COMMON)["joined"])
        self._restoring = False
        self.known = []
        file = checkpoint.directory / worker_file(self.me.seat)
        if file.exists():
            copy_state(load_tensors(file), self._own())
            self._reported = self._counts() - self._unreported

    def _save(self) -> None:
        """Begin to write a checkpoint, if this worker shares a folder with the first."""
        if not self.crew or self.me.launch != self.crew[0].launch:
            return
        self._wait_for_checkpoint()
        self._saving = {member for member in self.crew if member.launch == self.me.launch}
        here = sorted(member.seat for member in self._saving)
        self.checkpoints.hosted, self.checkpoints.everyone = [self.me.seat], here
        self.checkpoints.gone = ()
        self.checkpoints.first = self.me == self.crew[0]
        if self.output is not None:
            self.output.sync()
        self._unreported.copy_(self._counts() - self._reported)
        self.checkpoints.save(Progress(self.done, self.totals.row, self.meter.seconds))

    def _wait_for_checkpoint(self) -> None:
        """Wait until this worker's part is written; what fails is said, and the run goes on."""
        try:
            self.checkpoints.wait()
        except TrainingFailed as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)

    def _sharding(self, count: int) -> Sharding:
        """Return the division of the samples among so many workers."""
        config, size = self.config, self.data.train_size
        mode = config.dataset.sharding
        most = size if mode == "replicate" else size // count
        return Sharding(
            size,
            count,
            max(1, min(config.batch_size, most)),
            config.seed,
            mode,
            labels=self.data.labels if mode == "dirichlet" else None,
            alpha=config.dataset.get("alpha"),
        )


def _passed(every: int | None, before: int, done: int) -> bool:
    """Whether a multiple of ``every`` is among the steps after ``before`` up to ``done``."""
    return bool(every) and done // every > before // every
