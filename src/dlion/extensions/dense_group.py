"""Two levels: processes of a node average their gradients densely, and nodes exchange messages."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dlion.checks import check_parameters
from dlion.core.bucket import Bucket
from dlion.core.layout import local_part
from dlion.exchange import Channel, RoundedMean, Stages, Traffic
from dlion.extensions.lockstep import check_equal, facts_about, settings_of
from dlion.extensions.protocol import Extension
from dlion.extensions.shards import ShardedBucket
from dlion.wire import BFloat16, Float32, Wire
from dlion.workers import Workers, check_gpus


class DenseGroup(Extension):
    """Processes that are one worker together, all with the same parameters and state.

    They give each other the mean of their gradients. Of each bucket one of them, in turn, then
    exchanges messages with its counterparts in the other nodes, and hands on the answer.

    Args:
        group: these processes, connected by fast links.
        wire: of gradients, bf16 or float32.
        elastic: whether voters may leave during an exchange, and the node continues.

    Attributes:
        processes: how many they are.

    Raises:
        ValueError: if voters are among these processes, or the method does not go with it.
    """

    def __init__(self, group: dist.ProcessGroup, wire: str, elastic: bool) -> None:
        self._workers = Workers.current(group=group)
        self.processes, self._elastic = self._workers.processes, elastic
        self._wire: Wire = BFloat16() if wire == "bf16" else Float32()
        self._means: dict[int, RoundedMean] = {}

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        workers = self._workers
        if len({*workers.ranks} & {*optimizer.workers.ranks}) > 1:
            raise ValueError(
                "the processes of dense_group are also to exchange messages: give the mesh (or"
                " process_group) of one process in each node"
            )
        self._headers = Channel(workers.with_cpu_group())
        own = optimizer.options.get("overlap", False)  # others talk meanwhile
        self._channel = Channel(workers.with_own_group() if own else workers)
        optimizer.borrowed.append(self._channel.workers)
        check_equal(workers, {"settings": settings_of(optimizer)})

    @property
    def traffic(self) -> Traffic:
        """Bytes inside the node."""
        one, two = self._headers.traffic, self._channel.traffic
        return Traffic(
            *(a + b for a, b in zip(vars(one).values(), vars(two).values(), strict=True))
        )

    def on_groups(self, groups: list[dict[str, Any]]) -> None:
        """Compare what the processes of the node were given; its first one's values are theirs."""
        params = [tensor for group in groups for tensor in group["params"]]
        for tensor in params[:1]:
            check_gpus(self._workers, tensor.device)
        check_parameters([p for p in params if p.requires_grad], alone=False)
        check_equal(self._workers, facts_about(groups))
        for tensor in params:
            self._channel.broadcast(local_part(tensor).detach())

    def on_bucket(self, bucket: Bucket) -> None:
        """Let one process exchange the messages of a bucket, and hand on the result."""
        if isinstance(bucket, ShardedBucket) or not bucket.exchange.supports_leader:
            what = self.optimizer.__class__.__name__
            if isinstance(bucket, ShardedBucket):
                what = "parameters that FSDP has sharded"
            raise ValueError(
                f"dense_group does not go with {what}: leave it out, or use DLion, Signum,"
                " SignMuon, LionCub (without weighted votes), GAdamW, GLion, GMuon or DiLoCo (of"
                " the float32 wire) on a plain model"
            )
        bucket.led = self.run

    def before_step(self) -> bool:
        """Let all processes know of an overflow on one, which a GradScaler has found."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is not None:
            self.optimizer.found_inf = self.any(found != 0).to(found.dtype)
        return True

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        for bucket in buckets:
            self.average(bucket, local)

    def any(self, here: Tensor) -> Tensor:
        """Return where some process has True, bool ``[...]``."""
        return self._channel.gather(here[None]).any(0)

    def average(self, bucket: Bucket, local: int) -> None:
        """Give all processes the mean gradient; one that some have counts as zero elsewhere.

        Raises:
            TrainingFailed: if processes are in different steps or have different hyperparameters.
        """
        header = self.optimizer.make_header(bucket, local, bucket.present())
        rows = self._headers.gather(header[None])
        read = self.optimizer.read_headers(bucket, rows, "process", self._workers.ranks)
        self.optimizer.flag_beside |= read.flag
        numel = bucket.exchange.numel
        if bucket.index not in self._means:
            mean = RoundedMean(self._channel, numel, self._wire, device=bucket.device)
            self._means[bucket.index] = mean
        exchange = self._means[bucket.index]
        exchange.encode(0, pad(bucket.gradients(), (0, exchange.numel - numel)))
        exchange.run(bucket.step)
        mean = exchange.decode()
        for slot, here in zip(bucket.slots, read.present, strict=True):
            if not here:
                continue
            if slot.tensor.grad is None:
                slot.tensor.grad = torch.empty_like(slot.tensor)
            slot.tensor.grad.copy_(slot.view(mean))

    def run(self, bucket: Bucket) -> Stages:
        """Run the exchange of a bucket on one process, and hand on the result.

        Raises:
            RuntimeError: if it breaks off. Where voters may leave, all processes of the node raise.
        """
        exchange, leader = bucket.exchange, bucket.index % self.processes
        broken: RuntimeError | None = None
        if leader == self._workers.rank:
            try:
                yield from exchange.stages(bucket.step)
            except RuntimeError as error:
                if not self._elastic:
                    raise
                broken = error
        else:
            exchange.prepare_receive()
        if self._elastic:
            self._raise_together(broken, leader)
        for part in (exchange.answer, exchange.headers):
            self._channel.broadcast(part, leader)
        if leader != self._workers.rank:
            exchange.on_received()

    def _raise_together(self, broken: RuntimeError | None, leader: int) -> None:
        """Raise the leader's error on all processes, which would wait for its answer."""
        failed = torch.tensor([broken is not None], dtype=torch.uint8)
        self._headers.broadcast(failed, leader)
        if failed:
            raise broken or RuntimeError("the exchange of another process of this worker broke off")
