"""Two levels: processes of a node average their gradients densely, and nodes exchange messages."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dlion.core.bucket import Bucket
from dlion.exchange import Channel, RoundedMean, Stages, Traffic
from dlion.extensions.lockstep import check_equal
from dlion.wire import BFloat16, Float32, Wire
from dlion.workers import Workers

DenseWire = Literal["bf16", "float32"]


class Node:
    """Processes that are one worker together, all with the same parameters and state.

    They give each other the mean of their gradients. Of each bucket one of them, in turn, then
    exchanges messages with its counterparts in the other nodes, and hands on the answer.

    Args:
        group: these processes, connected by fast links.
        wire: of gradients.
        voters: those that this process exchanges messages with, one in each node.
        overlap: whether others talk meanwhile, so that these need a group of their own.
        elastic: whether voters may leave during an exchange, and the node continues.

    Raises:
        ValueError: if voters are among these processes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: DenseWire,
        voters: Workers,
        overlap: bool,
        elastic: bool,
    ) -> None:
        workers = Workers.current(group=group)
        if len({*workers.ranks} & {*voters.ranks}) > 1:
            raise ValueError(
                "the processes of dense_group are also to exchange messages: give the mesh (or"
                " process_group) of one process in each node"
            )
        self._rank, self._processes, self._ranks = workers.rank, workers.processes, workers.ranks
        self._elastic = elastic
        self._wire: Wire = BFloat16() if wire == "bf16" else Float32()
        self._headers = Channel(workers.with_cpu_group())
        self._channel = Channel(workers.with_own_group() if overlap else workers)
        self._means: dict[int, RoundedMean] = {}

    @property
    def traffic(self) -> Traffic:
        """Bytes inside the node."""
        one, two = self._headers.traffic, self._channel.traffic
        return Traffic(
            *(a + b for a, b in zip(vars(one).values(), vars(two).values(), strict=True))
        )

    def close(self) -> None:
        """Give back the group of its own."""
        self._channel.workers.give_back()

    def lead(self, bucket: Bucket, method: str) -> None:
        """Let one process exchange the messages of a bucket, and hand on the result."""
        if bucket.sharded or not bucket.exchange.can_follow:
            what = "parameters that FSDP has sharded" if bucket.sharded else method
            raise ValueError(
                f"dense_group does not go with {what}: leave it out, or use DLion, Signum,"
                " SignMuon, LionCub (without weighted votes), GAdamW, GLion, GMuon or DiLoCo (of"
                " the float32 wire) on a plain model"
            )
        bucket.run_led = self.run

    def hand_out(self, values: Tensor) -> None:
        """Overwrite ``values`` with those of the first process of the node."""
        self._channel.broadcast(values)

    def check_equal(self, facts: dict[str, Any]) -> None:
        """Compare the arguments of the processes, as ``check_equal`` of ``lockstep.py``."""
        check_equal(self._channel.workers, facts)

    def any(self, here: Tensor) -> Tensor:
        """Return where some process has True, bool ``[...]``."""
        return self._channel.gather(here[None]).any(0)

    def average(self, bucket: Bucket, header: Tensor) -> bool:
        """Give all processes the mean gradient; one that some have counts as zero elsewhere.

        Args:
            bucket: whose gradients.
            header: of the message that this process would send by itself.

        Returns:
            whether some process has its flag set.

        Raises:
            TrainingFailed: if processes are in different steps or have different hyperparameters.
        """
        headers = bucket.header.decode(self._headers.gather(header[None]))
        if not headers.agree:
            bucket.check_in_step(headers, self._ranks, "process")
        numel = bucket.exchange.numel
        known = self._means.get(bucket.index)
        if known is None or known.device != bucket.device:
            mean = RoundedMean(self._channel, numel, self._wire, device=bucket.device)
            self._means[bucket.index] = mean
        exchange = self._means[bucket.index]
        exchange.encode(0, pad(bucket.gradients(), (0, exchange.numel - numel)))
        exchange.run(bucket.step)
        mean = exchange.decode()
        for slot, here in zip(bucket.slots, headers.present, strict=True):
            if not here:
                continue
            if slot.tensor.grad is None:
                slot.tensor.grad = torch.empty_like(slot.tensor)
            slot.tensor.grad.copy_(slot.view(mean))
        return headers.flag

    def run(self, bucket: Bucket) -> Stages:
        """Run the exchange of a bucket on one process, and hand on the result.

        Raises:
            RuntimeError: if it breaks off. Where voters may leave, all processes of the node raise.
        """
        exchange, leader = bucket.exchange, bucket.index % self._processes
        broken: RuntimeError | None = None
        if leader == self._rank:
            try:
                yield from exchange.stages(bucket.step)
            except RuntimeError as error:
                if not self._elastic:
                    raise
                broken = error
        else:
            exchange.expect()
        if self._elastic:
            self._raise_together(broken, leader)
        for part in (exchange.answer, exchange.headers):
            whole = part.contiguous()
            self._channel.broadcast(whole, leader)
            if leader != self._rank:
                part.copy_(whole)
        if leader != self._rank:
            exchange.accept()

    def _raise_together(self, broken: RuntimeError | None, leader: int) -> None:
        """Raise the leader's error on all processes, which would wait for its answer."""
        failed = torch.tensor([broken is not None], dtype=torch.uint8)
        self._headers.broadcast(failed, leader)
        if failed:
            raise broken or RuntimeError("the exchange of another process of this worker broke off")
