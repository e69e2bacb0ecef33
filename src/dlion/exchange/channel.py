"""Messages between workers, and the one place where their bytes are counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.compat import backends
from dlion.exchange.transport import Collectives, Gloo, Tensors, Waiting
from dlion.timer import Timer
from dlion.workers import Workers

ROWS = 256  # that are added at a time; torch adds fewer than 2**15 values on one thread


@dataclass
class Traffic:
    """Bytes counted at the collectives, all virtual workers of this process together.

    A message from a virtual worker to another counts as if it had travelled, even inside one
    process: ``sent_bytes`` and ``received_bytes`` belong to the n workers, not to their spread.
    ``process_sent_bytes`` is what this process really handed to the network.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    process_sent_bytes: int = 0
    collectives: int = 0


class Channel:
    """The collectives the exchanges are made of, in terms of workers instead of processes.

    Of n workers k are hosted here; m take part in this step (:meth:`set_participants`; by default
    all), k' of those hosted here. Tensors are uint8 and contiguous, but :meth:`gather` takes any.
    Everything goes directly from process to process.

    Attributes:
        transports: what carries bytes from process to process, by type of device.
        alone: whether messages stay in this process, as there is no other. Set to False they go
            through the collectives of a group of one process: how NCCL is tried on one GPU.
    """

    def __init__(self, workers: Workers):
        self.traffic = Traffic()
        self.timer = Timer()
        there = backends(workers.group) if dist.is_initialized() else {}
        transports = {
            device: Gloo(workers) if backend == "gloo" else Collectives(workers)
            for device, backend in there.items()
        }
        self._set(workers, transports)

    def move(self, workers: Workers, waiting: Waiting | None = None) -> None:
        """Continue with other workers, on a gloo group that torch need not know.

        Args:
            waiting: for its messages, if workers may leave.
        """
        self._set(workers, dict.fromkeys(("cpu", "cuda"), Gloo(workers, waiting)))

    def _set(self, workers: Workers, transports: dict[str, Collectives]) -> None:
        self.workers, self.alone = workers, workers.processes == 1
        self.transports = transports
        self.set_participants(None)

    def set_participants(self, participants: Sequence[int] | None) -> None:
        """Say which workers take part from now on, ascending; None: all. Equal everywhere.

        Attributes set by it:
            participants: all of them.
            local_participants: the local indices of those hosted here.
        """
        w = self.workers
        self.participants = list(range(w.count) if participants is None else participants)
        self.local_participants = [
            worker - w.ids.start for worker in self.participants if worker in w.ids
        ]
        of = [worker // w.local for worker in self.participants]
        self._senders_of = [of.count(q) for q in range(w.processes)]  # senders of each process

    @property
    def owned(self) -> slice:
        """The workers hosted here, among all."""
        return slice(self.workers.ids.start, self.workers.ids.stop)

    def scatter(self, parts: Tensor, out: Tensor | None = None) -> Tensor:
        """Send ``parts[i, j]`` from the i-th local participant to worker j.

        Args:
            parts: ``[k', n, s]``.
            out: where to put the result, ``[n, k, s]``, if all take part and there are several
                processes.

        Returns:
            ``[m, k, s]``: what each participant sent to each local worker.
        """
        w, m = self.workers, len(self.participants)
        k, (senders, n, s) = w.local, parts.shape
        self.count(
            sent=senders * (n - 1) * s,
            received=(m * k - senders) * s,
            process=senders * (n - k) * s,
        )
        if self.alone:
            return parts
        outgoing = parts.view(senders, w.processes, k * s).transpose(0, 1).flatten(1)
        incoming = out if out is not None and m == n else parts.new_empty(m, k, s)
        if m == n:
            self.all_to_all(outgoing, incoming.view(outgoing.shape))
        else:
            sizes = [c * k * s for c in self._senders_of]
            self.all_to_all([*outgoing], incoming.view(-1).split(sizes))
        return incoming

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Send ``part[i]`` from local worker i to everyone: ``[k, ...]`` -> ``[n, ...]``.

        Args:
            part: of any dtype, on a device whose tensors the group carries.
            out: uint8 ``[n, s]``, where to put the result of a uint8 part (unused within one
                process).
        """
        w, (k, *shape), s = self.workers, part.shape, part[0].nbytes
        others = (w.count - 1) * k * s
        self.count(sent=others, received=others, process=k * s * (w.processes - 1))
        if self.alone:
            return part
        sent = part.contiguous().view(torch.uint8).view(1, k * s)
        everything = sent.new_empty(w.count, s) if out is None else out
        with self.timer.travel:
            self.transports[part.device.type].all_gather(sent, everything.view(w.processes, k * s))
        return everything.view(part.dtype).view(w.count, *shape)

    def scatter_ragged(
        self, parts: list[list[Tensor]], sizes: Tensor, device: torch.device | str
    ) -> list[list[Tensor]]:
        """Like :meth:`scatter` for parts of differing size.

        Args:
            parts: ``parts[i][j]``, 1-D, from the i-th local participant to worker j.
            sizes: ``[m, k]``, the bytes that local worker j will receive from each participant.
                (They are known beforehand: the exchange sends them in a header.)
            device: of the parts, which a process without participants has none of.

        Returns:
            ``[i][j]``: what the i-th participant sent to local worker j.
        """
        w = self.workers
        k, blocks = w.local, range(w.processes)
        own = w.ids
        lengths = [[part.numel() for part in row] for row in parts]
        to_self = sum(row[own[i]] for i, row in zip(self.local_participants, lengths, strict=True))
        leaves = sum(size for row in lengths for j, size in enumerate(row) if j not in own)
        self.count(
            sent=sum(map(sum, lengths)) - to_self,
            received=int(sizes.sum()) - to_self,
            process=leaves,
        )
        if self.alone:
            return parts
        ordered = [p for q in blocks for row in parts for p in row[q * k : (q + 1) * k]]
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        outgoing = torch.cat([nothing, *ordered])
        send = [sum(sum(row[q * k : (q + 1) * k]) for row in lengths) for q in blocks]
        receive = [int(rows.sum()) for rows in sizes.split(self._senders_of)]
        incoming = outgoing.new_empty(sum(receive))
        self.all_to_all(outgoing.split(send), incoming.split(receive))
        pieces = iter(incoming.split(sizes.flatten().tolist()))
        return [[next(pieces) for _ in range(k)] for _ in self.participants]

    def gather_ragged(self, part: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Like :meth:`gather` for parts of differing size; ``sizes``: bytes from each worker."""
        w = self.workers
        n, own = w.count, w.ids
        mine = sum(sizes[i] for i in own)
        self.count(
            sent=(n - 1) * mine,
            received=w.local * sum(sizes) - mine,
            process=(w.processes - 1) * mine,
        )
        if self.alone:
            return part
        outgoing = torch.cat(part)
        receive = [sum(sizes[q * w.local : (q + 1) * w.local]) for q in range(w.processes)]
        incoming = outgoing.new_empty(sum(receive))
        self.all_to_all([outgoing] * w.processes, incoming.split(receive))
        return list(incoming.split(sizes))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor``, of any dtype and layout, with that of process ``source``."""
        w = self.workers
        peers = (w.processes - 1) * tensor.nbytes if w.rank == source else 0
        received = tensor.nbytes if w.rank != source else 0
        self.count(sent=peers, received=received, process=peers)
        if w.processes > 1 and tensor.numel():
            values = tensor.contiguous()
            # as bytes, as gloo does not know every dtype
            dist.broadcast(values.view(-1).view(torch.uint8), group=w.group, group_src=source)
            if values is not tensor and w.rank != source:
                tensor.copy_(values)

    def all_to_all(self, outgoing: Tensors, incoming: Tensors) -> None:
        """Send ``outgoing[q]`` to process q and fill ``incoming[q]`` from it, uncounted.

        Tensors, ``[P, ...]``, are of one size on all processes; other sequences may be ragged.
        """
        with self.timer.travel:
            if self.alone:
                incoming[0].copy_(outgoing[0])
            else:
                self.transports[outgoing[0].device.type].all_to_all(outgoing, incoming)

    def barrier(self) -> None:
        """Wait until all processes are here, and have received all earlier messages."""
        if not self.alone:
            first = next(iter(self.transports.values()))
            self.transports.get("cpu", first).barrier()

    def count(self, sent: int, received: int, process: int) -> None:
        """Add bytes to the traffic, those of a collective."""
        self.traffic.sent_bytes += sent
        self.traffic.received_bytes += received
        self.traffic.process_sent_bytes += process
        self.traffic.collectives += 1


def is_broken(error: RuntimeError) -> bool:
    """Whether a collective failed; only the text tells gloo's errors from others."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def sum_in_order(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dimension, ``[n, ...]`` -> ``[...]``, added from worker 0 to n - 1.

    Floating-point sums depend on their order; what workers send is added in this one everywhere,
    so that no result depends on how they are spread over processes. ``out``: where to put it.
    """
    total = torch.empty_like(rows[0]) if out is None else out
    total.copy_(rows[0])
    for row in rows[1:]:
        total += row
    return total


def sums_of_rows(values: Tensor) -> Tensor:
    """The sums of ``|v|`` of rows of 64 in float64, ``[m, 64]`` -> ``[m]``, for any threads.

    On a CPU some rows at a time, as torch would first make a float64 copy of all.
    """
    blocks = (values,) if values.is_cuda else values.split(ROWS)
    return torch.cat([block.abs().sum(-1, dtype=torch.float64) for block in blocks])
