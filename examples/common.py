"""What the examples for frameworks train, and what DistributedDataParallel would send for it."""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

SENT_AND_RETRANSMITTED = struct.Struct("200x QQ")  # their place in Linux's struct tcp_info


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 4))


def make_data(size: int = 4096) -> TensorDataset:
    """The class of a point is the largest of its first four coordinates."""
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def backward(model: torch.nn.Module) -> None:
    x, y = (part[:32] for part in make_data().tensors)
    torch.nn.functional.cross_entropy(model(x), y).backward()


class BytesSent:
    """What this process sends from ``start`` to ``stop``: Linux counts, for each TCP connection."""

    count = 0  # of a run that had ended before

    def start(self) -> None:
        self._before = _tcp_bytes()

    def stop(self) -> None:
        dist.barrier()
        self.count = sum(n - self._before.get(ends, 0) for ends, n in _tcp_bytes().items())


def bytes_sent(work: Callable[[], object]) -> int:
    sent = BytesSent()
    sent.start()
    work()
    sent.stop()
    return sent.count


def _tcp_bytes() -> dict[tuple[object, object], int]:
    """Bytes sent so far, each once, by the ends of each connection."""
    counts = {}
    for descriptor in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                size = SENT_AND_RETRANSMITTED.size
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                ends = connection.getsockname(), connection.getpeername()
        except OSError:  # it is no TCP connection
            continue
        sent, again = SENT_AND_RETRANSMITTED.unpack(info)
        counts[ends] = sent - again
    return counts


def report(model: torch.nn.Module, sent: int) -> None:
    """Print the accuracy and what process 0 sends in a step: ``sent`` here, and what DDP sends."""
    x, y = make_data().tensors
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    ddp = DistributedDataParallel(make_model())
    backward(ddp)  # sends more, to agree on buckets
    dense = bytes_sent(lambda: backward(ddp))
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {sent:,} bytes sent a step; DDP: {dense:,}")
