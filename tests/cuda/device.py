"""The pretended GPU: its streams and memory, what its host waits for, and what is wrong."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import dlion
from tests.cuda.clocks import Access, Clock, Memory, Timeline

CUDA = torch.device("cuda", 0)
_SOURCE = f"{Path(dlion.__file__).parent}/"


class Sync(NamedTuple):
    """A wait of the host for the device.

    Attributes:
        kind: what for, such as ``copy HtoD``.
        place: file and function in src/dlion.
        thread: ``hook`` (inside a backward pass), ``main``, or the name of another thread.
    """

    kind: str
    place: str
    thread: str


@dataclass
class Seen:
    """What has been seen, each with how often.

    Attributes:
        syncs: waits of the host.
        launches: kernels, copies and collectives, by operation.
        mixed: operations on tensors of several devices.
        races: accesses to the same memory without an order.
        freed: memory that was freed while another stream might still use it.
    """

    syncs: Counter[Sync] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    races: Counter[str] = field(default_factory=Counter)
    freed: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> list[str]:
        """What must not happen at all, a line each."""
        kinds = {"mixed devices": self.mixed, "race": self.races, "freed too early": self.freed}
        return [
            f"{kind}: {what} ({count} times)"
            for kind, found in kinds.items()
            for what, count in found.items()
        ]

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def waits(self, thread: str) -> int:
        """Return how often a thread has waited."""
        return sum(n for sync, n in self.syncs.items() if sync.thread == thread)


class Stream(Timeline):
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        super().__init__("the default stream" if device is None else "another stream")
        self.device = CUDA

    def wait_stream(self, stream: "Stream") -> None:
        self.clock.join(stream.clock)

    def wait_event(self, event: "Event") -> None:
        self.clock.join(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Say that all is done, which then is known."""
        current().host.clock.join(self.clock)
        return True

    def synchronize(self) -> None:
        current().wait("Stream.synchronize", self.clock)


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        device = current()
        stream = stream or device.stream
        device.order_behind_host(stream)
        self.clock = Clock(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current().stream).wait_event(self)

    def query(self) -> bool:
        """Say that it has happened, which then is known."""
        current().host.clock.join(self.clock)
        return True

    def synchronize(self) -> None:
        current().wait("Event.synchronize", self.clock)


class _Thread(threading.local):
    """A thread of the host, and the stream that is current there."""

    def __init__(self, default: Stream) -> None:
        self.timeline, self.stream = Timeline("the host"), default


class Device:
    """A pretended GPU and its host.

    Attributes:
        seen: what has happened.
        lock: held while any of this changes.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        self.lock = threading.RLock()
        self.default_stream = Stream()
        self._thread = _Thread(self.default_stream)
        self._main = threading.get_ident()
        self._memories: dict[int, Memory] = {}  # by the address of a storage
        self._streams = weakref.WeakSet([self.default_stream])
        self._pinned = 0
        self._closed = False

    def close(self) -> None:
        """See no more, of what is freed later for instance."""
        self._closed = True

    # ---- threads and streams

    @property
    def host(self) -> Timeline:
        """The calling thread."""
        return self._thread.timeline

    @property
    def stream(self) -> Stream:
        """The calling thread's current stream."""
        return self._thread.stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the calling thread's current one; None changes nothing."""
        before = self._thread.stream
        self._thread.stream = stream or before
        try:
            yield
        finally:
            self._thread.stream = before

    def new_stream(self, device: object = CUDA, priority: int = 0) -> Stream:
        stream = Stream(device, priority)
        self._streams.add(stream)
        return stream

    def order_behind_host(self, stream: Timeline) -> None:
        """Let what a stream does next come after what the calling thread knows."""
        with self.lock:
            stream.clock.join(self.host.clock)

    def wait(self, kind: str, clock: Clock | None = None) -> None:
        """Let the calling thread wait, for its current stream if for nothing else."""
        with self.lock:
            self.host.clock.join(self.stream.clock if clock is None else clock)
            self.seen.syncs[Sync(kind, place(), self._thread_name())] += 1

    def synchronize(self, device: object = None) -> None:
        clock = Clock()
        with self.lock:
            for stream in self._streams:
                clock.join(stream.clock)
        self.wait("cuda.synchronize", clock)

    def _thread_name(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "hook"
        if threading.get_ident() == self._main:
            return "main"
        return threading.current_thread().name.partition("_")[0]

    # ---- memory and launches; tensors are those of the CPU that hold the values

    def launch(
        self,
        operation: str,
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
        stream: Stream | None = None,
    ) -> None:
        """Queue an operation on a stream: by default the current one."""
        stream = stream or self.stream
        with self.lock:
            self.order_behind_host(stream)
            stream.tick()
            self.seen.launches[operation] += 1
            where = place()
            for tensor in reads:
                self._access(tensor, stream, False, where)
            for tensor in writes:
                self._access(tensor, stream, True, where)

    def touch(self, tensor: Tensor, writes: bool) -> None:
        """Let the calling thread itself read or write pinned memory."""
        with self.lock:
            self.host.tick()
            self._access(tensor, self.host, writes, place())

    def allocate(self, tensor: Tensor, pinned: bool = False) -> Memory:
        """Watch the memory of a tensor, if it is a new one, until it is freed."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        with self.lock:
            memory = self._memories.get(address)
            if memory is None:
                memory = Memory(None if pinned else self.stream)
                if address:  # there is something to free
                    self._memories[address] = memory
                    self._pinned += pinned
                    weakref.finalize(storage, self._free, address).atexit = False
            return memory

    @property
    def has_pinned(self) -> bool:
        """Whether any memory of the host is pinned."""
        return self._pinned > 0

    def is_pinned(self, tensor: Tensor) -> bool:
        memory = self._memories.get(tensor.untyped_storage().data_ptr())
        return memory is not None and memory.home is None

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Let the allocator wait for a stream before it uses a tensor's memory again."""
        with self.lock:
            self.allocate(tensor).recorded.add(stream)

    def _access(self, tensor: Tensor, timeline: Timeline, writes: bool, where: str) -> None:
        if not tensor.numel():
            return
        memory = self.allocate(tensor)
        begin = tensor.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (extent + 1) * tensor.element_size()
        access = Access(begin, end, timeline, timeline.now, writes, where)
        for earlier in memory.add(access):
            self.seen.races[f"{access}, {earlier}"] += 1

    def _free(self, address: int) -> None:
        with self.lock:
            memory = self._memories.pop(address)
            self._pinned -= memory.home is None
            if not self._closed:
                for access in memory.in_use(self.host.clock):
                    self.seen.freed[f"memory of {memory.home.name} after {access}"] += 1


def place() -> str:
    """Return the file and the function in src/dlion that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_SOURCE):
            return f"{code.co_filename.removeprefix(_SOURCE)}:{code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


_current: list[Device] = []


def current() -> Device:
    """Return the pretended GPU; there is one inside :func:`tests.cuda.pretend.pretended_cuda`."""
    return _current[-1]


@contextmanager
def made_current(device: Device) -> Iterator[None]:
    _current.append(device)
    try:
        yield
    finally:
        device.close()
        _current.remove(device)
