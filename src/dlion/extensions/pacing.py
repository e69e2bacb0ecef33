"""Slow links: messages over gloo leave one after the other once a process has found its links slow.

At once they get in each other's way there, and on fast links waiting costs more (results/speed).
"""

from dlion.core.bucket import Bucket
from dlion.exchange.transport import Gloo
from dlion.extensions.protocol import Extension

SLOW = 2_000_000  # bytes a second, below which a link is slow


class Pacing(Extension):
    """Tells all processes, in the next headers, whether the links of one were slow in a step."""

    header_bytes = 1

    def __init__(self) -> None:
        self._slow = False

    def write_header(self, bucket: Bucket, local: int) -> bytes:
        return b"\1" if self._slow else b"\0"

    def after_step(self, counts: bool) -> None:
        optimizer = self.optimizer
        read = [bucket.headers for bucket in optimizer.buckets if bucket.headers is not None]
        if not counts or not any(any(headers.present) for headers in read):
            return
        slow = any(headers.extra[:, self.place].any() for headers in read)
        self._slow = False
        for gloo in optimizer.channel.transports.values():
            if isinstance(gloo, Gloo):
                gloo.slow, self._slow = slow, self._slow or 0 < gloo.fastest < SLOW
                gloo.fastest = 0.0
