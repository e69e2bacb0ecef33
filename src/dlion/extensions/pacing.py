"""Slow links: messages over gloo leave one after the other once a process has found its links slow.

At once they get in each other's way there, and on fast links waiting costs more (results/speed).
"""

from dlion.core.bucket import Bucket
from dlion.core.extension import Extension
from dlion.core.header import Headers
from dlion.exchange.transport import Gloo

SLOW = 2_000_000  # bytes a second, below which a link is slow


class Pacing(Extension):
    """Tells all processes, in the next headers, whether the links of one were slow in a step."""

    header_bytes = 1

    def __init__(self) -> None:
        self._here = self._anywhere = self._sent = False

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        self._sent = True
        return b"\1" if self._here else b"\0"

    def read_headers(self, bucket: Bucket, headers: Headers, senders: list[str]) -> None:
        self._anywhere |= bool(headers.extra[:, self.place].any())

    def after_step(self, counts: bool) -> None:
        found = self.optimizer.channel.transports.values()
        if not (counts and self._sent):
            return
        slow = self._here or self._anywhere  # headers that are all the same are not read here
        self._here = self._anywhere = self._sent = False
        for gloo in [each for each in found if isinstance(each, Gloo)]:
            gloo.slow = slow
            self._here |= 0 < gloo.fastest < SLOW
            gloo.fastest = 0.0
