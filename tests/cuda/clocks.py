"""Order between streams and threads of the host, by vector clocks, and accesses without any.

Everything that happens belongs to a timeline, a stream or a thread of the host, and has a number
there. A timeline's clock holds the last moment of every timeline that is over before what it does
next. Two accesses to the same bytes, one of which writes, race if neither's clock knows the other.
"""

import itertools
from typing import NamedTuple


class Clock(dict[int, int]):
    """The last moment that is over, by timeline."""

    def join(self, other: "Clock") -> None:
        """Take over what another clock knows."""
        for timeline, moment in other.items():
            if moment > self.get(timeline, 0):
                self[timeline] = moment

    def knows(self, access: "Access") -> bool:
        """Whether an access is over."""
        return self.get(access.timeline.number, 0) >= access.moment


class Timeline:
    """What happens in order: the work of a stream, or of a thread of the host."""

    _numbers = itertools.count(1)

    def __init__(self, name: str) -> None:
        self.name, self.number = name, next(self._numbers)
        self.clock = Clock()

    def tick(self) -> None:
        """Begin the next moment."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1

    @property
    def now(self) -> int:
        return self.clock.get(self.number, 0)


class Access(NamedTuple):
    """A read or write of the bytes from address ``begin`` to ``end``."""

    begin: int
    end: int
    timeline: Timeline
    moment: int
    writes: bool
    place: str

    def conflicts(self, other: "Access") -> bool:
        """Whether the order of the two matters."""
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and (self.writes or other.writes)

    def covers(self, other: "Access") -> bool:
        """Whether whatever conflicts with ``other`` later conflicts with this one, too."""
        inside = self.begin <= other.begin and other.end <= self.end
        return inside and (self.writes or not other.writes)

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.timeline.name} at {self.place}"


class Memory:
    """A block of memory and its latest accesses.

    Attributes:
        home: the stream that it was allocated on, where the allocator uses it again at once when it
            is freed; None: pinned memory of the host.
        recorded: streams that the allocator waits for (``record_stream``).
    """

    def __init__(self, home: Timeline | None) -> None:
        self.home = home
        self.recorded: set[Timeline] = set()
        self._accesses: list[Access] = []

    def add(self, access: Access) -> list[Access]:
        """Note an access; return the earlier ones that it races with."""
        clock, kept, races = access.timeline.clock, [], []
        for earlier in self._accesses:
            ordered = clock.knows(earlier)
            if not ordered and access.conflicts(earlier):
                races.append(earlier)
            if not (ordered and access.covers(earlier)):
                kept.append(earlier)
        self._accesses = [*kept, access]
        return races

    def in_use(self, host: Clock) -> list[Access]:
        """Return accesses that may not be over when the memory, freed now, is used again."""
        home = self.home
        if home is None:  # torch's allocator of pinned memory waits for copies
            return []
        return [
            access
            for access in self._accesses
            if access.timeline not in (home, *self.recorded)
            and not home.clock.knows(access)
            and not host.knows(access)
        ]
