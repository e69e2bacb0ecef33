"""The half of an optimizer that holds: parameters in buckets, their state, and what is saved."""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dlion.engine.bucket import Bucket, StateNames, by_kind, plain_values
from dlion.engine.checks import (
    check_alike,
    check_bare,
    check_hyperparameters,
    check_parameters,
    check_state,
    checked,
)
from dlion.engine.saving import put_back, spread_state
from dlion.engine.shards import EXCHANGE, check_sharding, local_part
from dlion.exchange import Channel, Exchange, Traffic


class BucketedOptimizer(torch.optim.Optimizer, ABC):
    """A ``torch.optim.Optimizer`` whose trained parameters and state live in buckets.

    Creating it checks that all processes were given the same, and copies the parameters of process
    0 to all. A frozen parameter is in no bucket.

    Args:
        params: parameters, named parameters, or parameter groups.
        defaults: hyperparameters.
        channel: to the other workers.
        bucket_cap_mb: cut the parameters, last ones first, into buckets of at most so many MB of
            float32 (as DistributedDataParallel's), smaller ones first and towards the end. None:
            one bucket a group.

    Attributes:
        buckets: of all groups, in the order in which their messages leave.
    """

    own_state: list[str] = []
    shared_state: list[str] = []
    counters: list[str] = []  # shared state, one number a parameter
    own_counters: list[str] = []  # a worker's state, one number a parameter
    whole_matrices: bool = False  # whether a part of a matrix will not do

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # pyrefly: ignore[bad-assignment]

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        channel: Channel,
        bucket_cap_mb: float | None,
    ):
        self.channel, self.workers = channel, channel.workers
        self.bucket_cap_mb = bucket_cap_mb
        self.buckets: list[Bucket] = []
        self._frozen: list[Tensor] = []
        self._constructed = False
        self._hyperparameters = {**defaults, "steps": 0}  # torch adds to its own
        super().__init__(params, {**self._hyperparameters})
        self._constructed = True
        self._hand_out(self.param_groups, self.buckets)
        self.channel.traffic = Traffic()  # handing out the parameters is not part of any step

    @abstractmethod
    def make_exchange(self, bucket: Bucket) -> Exchange:
        """Make the exchange for a bucket of ``bucket.numel`` parameters."""

    def state_names(self, bucket: Bucket) -> StateNames:
        """Return what the state of a bucket's parameters is called."""
        return self

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups, frozen ones too."""
        return [param for group in self.param_groups for param in group["params"]]

    def _watch(self, bucket: Bucket) -> None:
        """Do what a new bucket needs besides."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, first = self.param_groups[-1], len(self.buckets)
        try:
            check_hyperparameters(type(self), group)
            check_sharding(self.params, self.workers, type(self).__name__, self.whole_matrices)
            self._add_buckets(group, [tensor for tensor in group["params"] if tensor.requires_grad])
        except Exception:
            self.param_groups.pop()
            for tensor in group["params"]:
                self.state.pop(tensor, None)
            del self.buckets[first:]
            raise
        self._frozen += [tensor for tensor in group["params"] if not tensor.requires_grad]
        self._note_groups()
        if self._constructed:
            self._hand_out([group], self.buckets[first:])

    def _hand_out(self, groups: list[dict[str, Any]], buckets: list[Bucket]) -> None:
        """Check that all processes were given the same parameters, and give them process 0's."""
        params = [tensor for group in groups for tensor in group["params"]]
        facts = {
            "hyperparameters": [plain_values(group) for group in groups],
            "parameter groups": [len(group["params"]) for group in groups],
            "parameter names": [group.get("param_names") for group in groups],
            "parameter shapes": [list(local_part(tensor).shape) for tensor in params],
            "parameter dtypes": [str(tensor.dtype) for tensor in params],
            "frozen parameters": [tensor.requires_grad for tensor in params],
        }
        self._check_alike(facts)
        check_bare(params)
        for bucket in buckets:
            self._give(bucket.params)
            bucket.write_back()
        for tensor in params if self.workers.processes > 1 else ():
            if not tensor.requires_grad:
                here = local_part(tensor)
                values = here.contiguous()
                self._give(values.flatten().view(torch.uint8))  # gloo does not know every dtype
                here.copy_(values)

    def _check_alike(self, facts: dict[str, Any]) -> None:
        """Compare what all processes were given."""
        check_alike(self.workers, facts)

    def _check_groups(self) -> None:
        """Refuse parameter groups that were edited by hand: buckets know nothing of it."""
        given = [len(group["params"]) for group in self.param_groups]
        same = given == self._given[0] and all(map(operator.is_, self.params, self._given[1]))
        if not same:
            raise RuntimeError(
                "param_groups were edited, which moves no parameter in or out: add a group with"
                " add_param_group(), freeze with requires_grad_(False), or make another optimizer"
            )

    def _note_groups(self) -> None:
        self._given = [len(group["params"]) for group in self.param_groups], self.params

    def _abandon_step(self) -> None:
        """Forget a step that has begun."""

    def _give(self, values: Tensor) -> None:
        """Give all processes the values of process 0."""
        self.channel.broadcast(values)

    def _add_buckets(self, group: dict[str, Any], tensors: list[torch.nn.Parameter]) -> None:
        """Put parameters of a group into buckets of one dtype and device each."""
        check_parameters(tensors)
        named = dict(zip(group["params"], group.get("param_names") or [], strict=False))
        for kind in by_kind(tensors):
            for part in self._cut(kind):
                bucket = Bucket(
                    len(self.buckets), part, [named.get(tensor, "") for tensor in part], group
                )
                bucket.allocate(self.make_exchange(bucket), self.state_names(bucket))
                self.buckets.append(bucket)
                self._publish_state(bucket)
                self._watch(bucket)

    def _cut(self, tensors: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Parameters by bucket, in the order in which a backward pass is done with them.

        The first bucket is a quarter as large, so that messages start early, and each at most half
        of what is left, so that little is left to send when the backward pass is over.
        """
        if self.bucket_cap_mb is None:
            return [tensors]
        cap, parts, rest = self.bucket_cap_mb * 1e6, [], tensors[::-1]
        while rest:
            sizes = [4 * local_part(tensor).numel() for tensor in rest]
            room = min(cap, max(cap / 8, sum(sizes) / 2)) if parts else cap / 4
            count = max(1, sum(total <= room for total in itertools.accumulate(sizes)))
            parts.append(rest[:count])
            rest = rest[count:]
        return parts

    def _include_unfrozen(self) -> None:
        """Make buckets for parameters that were unfrozen since the last step."""
        unfrozen = {id(tensor) for tensor in self._frozen if tensor.requires_grad}
        if not unfrozen:
            return
        for group in self.param_groups:
            self._add_buckets(group, [t for t in group["params"] if id(t) in unfrozen])
        self._frozen = [tensor for tensor in self._frozen if not tensor.requires_grad]

    def _count_trained(self) -> int:
        """Count the parameters that are in buckets, or will be before this step is over."""
        unfrozen = sum(tensor.requires_grad for tensor in self._frozen)
        return sum(len(bucket.slots) for bucket in self.buckets) + unfrozen

    def _publish_state(self, bucket: Bucket) -> None:
        """Show the flat state as ``self.state[param][name]``, as views.

        ``worker`` says whose the per-worker state is: id and number of workers, int64 ``[k, 2]``.
        What an exchange keeps for its bucket is with the first parameter, ``exchange.NAME``.
        """
        worker = self._worker()
        for index, slot in enumerate(bucket.slots):
            state = self.state[slot.tensor]
            if bucket.own:
                state["worker"] = worker
            for name, flat in (bucket.own | bucket.shared).items():
                state[name] = slot.view(flat)
            for name, counts in bucket.counters.items():
                state[name] = counts[index]
            for name, counts in bucket.own_counters.items():
                state[name] = counts[:, index]
        if not bucket.sharded:
            first = self.state[bucket.slots[0].tensor]
            first |= {EXCHANGE + name: rows for name, rows in bucket.exchange.state.items()}

    def _worker(self) -> Tensor:
        rows = [[worker, self.workers.count] for worker in self.workers.ids]
        return torch.tensor(rows, device="cpu")

    def worker_state(self, local: int) -> dict[str, Tensor]:
        """What belongs to one local worker alone, as views by name: the same for every spread."""
        views = {}
        for bucket in self.buckets:
            for name, rows in (bucket.own | bucket.own_counters).items():
                views[f"{bucket.index}.{name}"] = rows[local]
            for name, rows in bucket.exchange.state.items():
                views[f"{bucket.index}.exchange.{name}"] = rows[local]
        return views

    def common_state(self) -> dict[str, Tensor]:
        """Parameters and state that are equal on all workers, as views by name."""
        views = {}
        for bucket in self.buckets:
            views[f"{bucket.index}.parameters"] = bucket.params
            for name, values in (bucket.shared | bucket.counters).items():
                views[f"{bucket.index}.{name}"] = values
        return views

    @property
    def state_bytes(self) -> int:
        """Bytes of state that a worker keeps beside parameters and gradients, padding included."""
        common = {k: v for k, v in self.common_state().items() if not k.endswith(".parameters")}
        return sum(tensor.nbytes for tensor in (*self.worker_state(0).values(), *common.values()))

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with a leading dimension, the workers, for per-worker state.

        With several processes, what differs from one to another is a DTensor: so
        torch.distributed.checkpoint (``get_state_dict`` and ``set_state_dict``) saves it for every
        worker and gives it back to that worker, in another number of processes too. To another
        number of workers it raises CheckpointException before this optimizer hears of it: "Size
        mismatch between saved torch.Size([4, 2]) and current: torch.Size([2, 2]) for ...worker",
        where 4 workers have saved and 2 load; let processes host several, until there are as many.
        With ``torch.save``, which writes the local part, save on every rank, and import
        ``dlion.optim`` before ``torch.load``. Where FSDP has sharded the parameters, all processes
        must call this together.
        """
        state, (found, _) = super().state_dict(), spread_state(self)
        params = enumerate(self.params)
        state["state"] = {index: found[param] for index, param in params if param in found}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state in; it must be of the same workers.

        Raises:
            ValueError: if it is of other workers, or of other parameters or settings.
        """
        self._include_unfrozen()
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != self._given[0]:
            raise ValueError(
                f"the saved state is of groups of {sizes} parameters, this optimizer has"
                f" {self._given[0]}: load it into the same model with the same groups"
            )
        param_of = dict(zip(names, self.params, strict=True))
        saved = {param_of[name]: tensors for name, tensors in state_dict["state"].items()}
        here, flats = spread_state(self)
        for group in state_dict["param_groups"]:
            missing = sorted(self._hyperparameters.keys() - group.keys())
            if missing:
                raise ValueError(
                    f"the saved state has no {', '.join(missing)}: it is of another method"
                )
        for name, param in param_of.items():
            check_state(name, saved.get(param, {}), here.get(param, {}), self._worker())
        self._abandon_step()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for bucket in self.buckets:
            first = bucket.slots[0].tensor
            bucket.group = next(
                group for group in self.param_groups if any(p is first for p in group["params"])
            )
            self._publish_state(bucket)
        put_back(self, here, flats, saved)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it talks to other processes:"
            " make another, and load this one's state_dict()"
        )
