"""Who takes part in a run: workers that do not change, or workers that come and go.

With ``elastic=true`` one process is one worker. Everything that workers must agree on is a function
of the state that a worker gets when it joins: the step, which samples are seen, what was recorded.
It moves only where a step is committed, and a worker that has missed a commit takes the state of
one that has not. So a row is measured by those present as a step begins, written by the first of
them, and counts once that step is committed; if somebody has left meanwhile, it is measured again
by those who are left.
"""

import json
import os
import socket
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dlion.elastic import of
from dlion.elastic.joining import join
from dlion.elastic.worker import LeftBehind
from dlion.errors import Stopped, TrainingFailed
from dlion.optim import DistributedOptimizer
from dlion.suite.data import Dealing
from dlion.suite.files import load_tensors
from dlion.suite.record.runs import SUMMARY
from dlion.suite.training.building import make_optimizer
from dlion.suite.training.checkpoint import (
    COMMON,
    Checkpoint,
    Progress,
    copy_state,
    differences,
    in_words,
    worker_file,
)
from dlion.suite.training.faults import Participation
from dlion.suite.training.job import everyones_settings
from dlion.suite.training.meter import Meter
from dlion.suite.training.replicas import check_replicas, parameters_sha256
from dlion.workers import Workers

if TYPE_CHECKING:
    from dlion.suite.training.loop import Trainer

_WRITING = 10.0  # seconds to wait for another worker's part of a checkpoint
_DESCRIPTION = 1024  # bytes, at most, of a :class:`Member`


class Membership:
    """The workers of a run that do not change.

    Attributes:
        workers: those that are present.
        patience: seconds to wait for the others' parts of a checkpoint.
    """

    def __init__(self, trainer: "Trainer"):
        self.trainer, self.job = trainer, trainer.job
        self.workers, self.patience = self.job.workers, float(trainer.config.timeout)

    def make_optimizer(self) -> DistributedOptimizer:
        """Return the optimizer of these workers."""
        return make_optimizer(self.job, self.trainer.model, workers=self.workers)

    def close(self) -> None:
        """Let go of the run."""

    def begin(self) -> bool:
        """Begin a step; return whether all who are present do."""
        return True

    def announce(self, step: int) -> None:
        """Tell the optimizer who takes part in a step."""
        self.trainer.optimizer.set_participants(self.trainer.participation.at(step))

    def samples(self, worker: int, local_step: int) -> Tensor:
        """Return the numbers of the samples of a worker's batch, int64."""
        return self.job.sharding.indices(worker, local_step)

    def conclude(self, step: int) -> None:
        """Record, save and stop after a step, as far as that is due."""
        trainer = self.trainer
        if step == trainer.begun.step:
            trainer.output.banner()
        trainer.measure_due()
        if trainer.measured is not None:
            trainer.output.record_row(trainer.row)
            trainer.count_row()
        trainer.checkpoints.raise_failure()
        trainer.save_due(before=step)

    def finish(self) -> bool:
        """End the run; return whether all who are present do."""
        self.trainer.finish()
        return True

    def before(self, done: int) -> int:
        """Return the step since when a row may have become due."""
        return done - 1

    @property
    def epochs(self) -> float:
        """Passes over the samples so far."""
        turns = self.job.config.local_steps
        return self.trainer.done * turns / self.job.sharding.steps_per_epoch

    def traffic(self, progress: Progress) -> dict[str, Any]:
        """Return what the row at hand says of the traffic."""
        count, processes = self.workers.count, self.workers.processes
        return {
            "sent_bytes": round(progress.sent_bytes / count),
            "received_bytes": round(progress.received_bytes / count),
            "nic_bytes": round(progress.nic_bytes / processes) or None,
        }

    def checkpoint(self) -> Progress | None:
        """Return the progress that a checkpoint names; None: this process has no part in it."""
        return self.trainer.progress(self.trainer.counts())

    def common_state(self) -> dict[str, Tensor]:
        """Return the state that is equal everywhere, as views by name."""
        return self.trainer.optimizer.common_state()

    def worker_state(self, i: int) -> dict[str, Tensor]:
        """Return all that belongs to local worker i alone, as views by name."""
        trainer = self.trainer
        return {
            **trainer.optimizer.worker_state(i),
            **trainer.virtual.state(i),
            **trainer.byzantine.state(i),
            "losses": trainer.losses[i : i + 1],
        }

    def resume(self) -> Progress:
        """Restore the checkpoint to resume from, if any; return its progress."""
        trainer = self.trainer
        if self.job.resume is None:
            return Progress()
        progress = trainer.checkpoints.load(self.job.resume)
        for group in trainer.optimizer.param_groups:
            group["steps"] = progress.step
        for step in range(progress.last_row, progress.step):
            participants = trainer.participation.at(step)
            trainer.counted[0] += torch.tensor([w in participants for w in self.workers.ids])
        return progress


class Member(NamedTuple):
    """A worker that is present.

    Attributes:
        launch: of the command that has started it; its workers share a folder.
        name: its machine and process.
        slot: its number among these.
    """

    launch: str
    name: str
    slot: int


class ElasticMembership(Membership):
    """The workers that a lighthouse knows; this process is one of them.

    Attributes:
        members: the workers present, in the order of their numbers.
        known: those at the latest commit.
        boundary: the step of that commit.
        means: bytes sent and received until the latest row that counts, of the mean worker.
    """

    def __init__(self, trainer: "Trainer"):
        super().__init__(trainer)
        job, config = self.job, trainer.config
        host, slot = socket.gethostname(), int(os.environ["RANK"])
        self.workers, self.patience = Workers(), _WRITING
        self.me = Member(os.environ["DLION_LAUNCHED"], f"{host}-{os.getpid()}", slot)
        self.members, self.known, self.boundary = list[Member](), list[Member](), 0
        self.means = self._new_means = torch.zeros(2, dtype=torch.float64)
        size, batch_size = job.data.train_size, config.batch_size
        self.dealing = Dealing(job.sharding.among, size, batch_size, config.seed)
        self._saving: set[Member] = set()  # whose parts the latest checkpoint has
        self._unreported = torch.zeros(6, dtype=torch.float64)  # in it, since the latest row
        self._settings = everyones_settings(job)
        self.manager = join(
            job.lighthouse or "",
            config.elastic.min_workers,
            name=f"{self.me.launch}-{host}-{slot:05}",
            timeout=config.elastic.timeout,
            patience=config.timeout,
        )
        if job.start_barrier is not None:
            job.start_barrier.wait(slot)
        self.manager.register_state_dict_fn("run", self._load, self._state)

    def make_optimizer(self) -> DistributedOptimizer:
        optimizer = make_optimizer(self.job, self.trainer.model, manager=self.manager)
        elastic = of(optimizer)
        assert elastic is not None
        self.elastic = elastic
        self.elastic.interrupted = lambda: self.trainer.notice.first is not None
        return optimizer

    def close(self) -> None:
        self.manager.shutdown(wait=False)

    def begin(self) -> bool:
        """Ask who is there, and let them record what is due as a new step begins."""
        trainer, asks = self.trainer, not self.elastic.open
        try:
            trainer.optimizer.zero_grad()  # who is there?
        except LeftBehind:  # what they have saved is newer
            raise
        except (TrainingFailed, Stopped) as error:  # the lighthouse is lost, or we leave
            if self.boundary:
                trainer.save()
                trainer.checkpoints.wait()
            if isinstance(error, Stopped):
                raise Stopped(self.boundary or None, trainer.notice.first) from None
            raise
        if asks and not self.elastic.attempt(self._meet):
            return False
        if asks:
            self._record()
        return True

    def _meet(self) -> None:
        """Learn who is there, and measure with them what is due."""
        trainer, control = self.trainer, self.trainer.control
        if control.workers is not trainer.optimizer.workers:
            self.elastic.meet(control)
            self.workers = trainer.virtual.workers = control.workers
            trainer.participation = Participation(self.workers.count, 1, 0, trainer.config.seed)
            said = json.dumps(self.me).encode().ljust(_DESCRIPTION)
            rows = control.gather(torch.frombuffer(bytearray(said), dtype=torch.uint8)[None])
            self.members = [Member(*json.loads(bytes(row.tolist()))) for row in rows]
            gone = self._saving - {*self.members}
            trainer.checkpoints.gone = [member.slot for member in gone]
        trainer.measure_due()

    def announce(self, step: int) -> None:
        trainer = self.trainer
        self._meets = trainer.optimizer.exchanges
        self._before = [sums.clone() for sums in (trainer.losses, trainer.norms, trainer.counted)]
        trainer.optimizer.host(0)

    def samples(self, worker: int, local_step: int) -> Tensor:
        return self.dealing.indices(worker, self.workers.count)

    def conclude(self, step: int) -> None:
        """Count the step if all have taken it; else only the samples and losses are lost."""
        trainer, done = self.trainer, self.trainer.done
        if done > step:
            self.dealing.taken(self.workers.count)
        if done == step or not trainer.losses.isfinite():  # or all later means would not be
            trainer.losses, trainer.norms, trainer.counted = self._before
        if not (self._meets and trainer.optimizer.committed):
            return
        before, self.boundary = self.boundary, done
        self.job.begun[self.me.slot] = 1
        if trainer.measured is not None:
            self.means = self._new_means
            trainer.count_row()
        if self.workers.rank == 0:
            self._take_record()
            self._note_changes()
        self.known = self.members
        transport, traffic = self.manager._checkpoint_transport, trainer.optimizer.channel.traffic
        traffic.sent_bytes += transport.sent_bytes  # state, to those who have joined
        transport.sent_bytes = 0
        trainer.save_due(before)

    def finish(self) -> bool:
        self.manager._min_replica_size = 1  # others may have seen it, and left
        trainer, first = self.trainer, self.members[0]

        def work() -> None:
            check_replicas(trainer.model, trainer.control, trainer.done)
            trainer.finish()

        if not self.elastic.attempt(work):
            return False
        here = [member.slot for member in self.members if member.launch == self.me.launch]
        if first.launch != self.me.launch and self.me.slot == min(here):
            said = f"step {trainer.done}, parameters {parameters_sha256(trainer.model)}"
            print(f"finished: {said}; {first.name} has the record")
        return True

    def before(self, done: int) -> int:
        measured = self.trainer.measured
        return (self.trainer.totals if measured is None else measured.progress).last_row

    @property
    def epochs(self) -> float:
        return self.dealing.epochs

    def traffic(self, progress: Progress) -> dict[str, Any]:
        totals = self.trainer.totals
        sent = progress.sent_bytes - totals.sent_bytes
        received = progress.received_bytes - totals.received_bytes
        new = torch.tensor([sent, received], dtype=torch.float64)
        self._new_means = self.means + new / self.workers.count
        sent, received = self._new_means.round().long().tolist()
        return {
            "sent_bytes": sent,
            "received_bytes": received,
            "nic_bytes": None,
            "sent_bytes_of_all": progress.sent_bytes,
            "workers": self.workers.count,
        }

    def _record(self) -> None:
        """Write the row that was measured as the first worker, unless it is there already."""
        trainer = self.trainer
        if self.workers.rank != 0:
            if trainer.output.active:  # another has the record now
                trainer.output.close()
                trainer.output = trainer.make_output(self.job, active=False)
            return
        ended = trainer.done == self.job.steps and (self.job.output_dir / SUMMARY).exists()
        known = ended or trainer.output.row.get("step") == trainer.done
        if trainer.measured is not None and not known:
            self._take_record()
            trainer.output.record_row(trainer.row)

    def _take_record(self) -> None:
        """Write the record of the run from here on."""
        trainer, output = self.trainer, self.trainer.output
        if output.active and not output.record.replaced:
            return
        output.close()
        row = trainer.totals.last_row
        progress = Progress(row, row, trainer.totals.seconds)
        at = Checkpoint(self.job.output_dir, progress, self.job.steps, (0, 0))
        job = replace(self.job, workers=Workers(processes=len(self.members)), resume=at)
        trainer.output = trainer.make_output(job, active=True, step=trainer.done)
        if trainer.done == trainer.begun.step + 1:
            trainer.output.banner()
        else:
            trainer.output.take_over()

    def _note_changes(self) -> None:
        """Record who has joined and left since the commit before."""
        output, done, count = self.trainer.output, self.trainer.done, len(self.members)
        left = [("left", member) for member in self.known if member not in self.members]
        joined = [("joined", member) for member in self.members if member not in self.known]
        for event, member in left + joined if self.known else []:
            row = {"step": done, "event": event, "worker": member.name, "workers": count}
            text = f"step {done}: {member.name} has {event}, {count} workers"
            output.note(row | {"seconds": self.trainer.meter.seconds}, text)

    def checkpoint(self) -> Progress | None:
        """Return the progress without totals, which a worker that joins needs as common state.

        A worker has a part in a checkpoint if it shares a folder with the first one.
        """
        if not self.members or self.me.launch != self.members[0].launch:
            return None
        trainer, checkpoints = self.trainer, self.trainer.checkpoints
        checkpoints.wait()
        self._saving = {member for member in self.members if member.launch == self.me.launch}
        checkpoints.hosted = [self.me.slot]
        checkpoints.everyone = sorted(member.slot for member in self._saving)
        checkpoints.gone, checkpoints.first = (), self.me == self.members[0]
        counts = trainer.counts() - trainer.reported
        self._unreported.copy_(torch.cat([trainer.losses.cpu(), trainer.counted[0], counts]))
        return Progress(trainer.done, trainer.totals.last_row, trainer.meter.seconds)

    def common_state(self) -> dict[str, Tensor]:
        return {"joined": self.elastic.snapshot()}

    def worker_state(self, i: int) -> dict[str, Tensor]:
        views = {"counts": self._unreported, **self.trainer.virtual.state(0)}
        for bucket in self.trainer.optimizer.buckets:
            for name, rows in bucket.own.items():  # their padding depends on the workers
                views[f"{bucket.index}.{name}"] = rows[0, : bucket.numel]
            for name, rows in bucket.own_counters.items():
                views[f"{bucket.index}.{name}"] = rows[0]
        return views

    def resume(self) -> Progress:
        """Start from a checkpoint; without a file of this worker's, its own state is zero."""
        trainer, resume = self.trainer, self.job.resume
        if resume is None:
            return Progress()
        settings, self._settings = self._settings, {}  # another log_every, say, is allowed
        self.elastic.restore(load_tensors(resume.directory / COMMON)["joined"])
        self._settings, self.known = settings, []
        file = resume.directory / worker_file(self.me.slot)
        if file.exists():
            copy_state(load_tensors(file), self.worker_state(0))
            trainer.losses[0], trainer.counted[0, 0], *counts = self._unreported
            trainer.reported -= torch.stack(counts).long()
        return replace(trainer.totals, step=trainer.done, seconds=trainer.meter.seconds)

    def _state(self) -> dict[str, Any]:
        """Return what a worker that joins gets of the run, besides the optimizer's state."""
        trainer = self.trainer
        return {
            "settings": json.dumps(self._settings),
            "step": trainer.done,
            "totals": asdict(trainer.totals),
            "means": self.means,
            "samples": self.dealing.state,
            "known": [[*member] for member in self.known],
            "seconds": trainer.meter.seconds,
            "buffers": list(trainer.virtual.state(0).values()),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Start from the state of a worker that is there, or of a checkpoint."""
        trainer = self.trainer
        different = differences(self._settings, json.loads(state["settings"]))
        if different and self._settings:
            raise TrainingFailed(
                f"this worker was started with other settings than the run that it joins"
                f" ({in_words(different)}): give all the same settings"
            )
        self.boundary, self.means, self.dealing.state = (
            state[name] for name in ("step", "means", "samples")
        )
        self.known = [Member(*member) for member in state["known"]]
        trainer.totals, trainer.scores = Progress(**state["totals"]), {}
        trainer.meter = Meter(state["seconds"], count_bytes=False)
        views = trainer.virtual.state(0).values()
        for buffer, theirs in zip(views, state["buffers"], strict=True):
            buffer.copy_(theirs)
