"""The lighthouse of an elastic run, as its workers see it: its address and its page.

It is a process of torchft's that keeps who is there. Its page, for people, tells what torchft 0.2
tells in no other way: the steps of the workers, and how long nothing was heard of them.
"""

import re
import socket
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple, Self

from dlion.errors import UserError

START = "start one with `dlion lighthouse`, or correct the address"
_CONNECTING = 5.0  # seconds
_ANSWERING = 15.0  # seconds that a lighthouse on a busy machine may take
_ASKING = 0.5  # seconds in which it must accept a connection
_PAGE = 1 << 20  # bytes, at most, of its page


def split_address(address: str, typed: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``; an error names ``typed``."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise UserError(f"{typed} is not an address: give HOST:PORT")
    return host, int(port)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def check_lighthouse(address: str, typed: str) -> str:
    """Refuse an address where no lighthouse answers; ``typed`` is what an error names.

    Whoever else listens there, torchft would ask thirty times a second, and wait.

    Returns:
        This machine's address, as the lighthouse sees it.
    """
    try:
        page, own = read_page(split_address(address, typed), _ANSWERING)
    except (OSError, UnicodeError, HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{typed}: no lighthouse there ({reason}): {START}") from error
    if "quorum" not in page:
        raise UserError(f"{typed}: another service listens there: {START}")
    return own


def page_of(manager: Any) -> str | None:
    """Return the page of the lighthouse; None: it does not answer, or is not known."""
    address = getattr(manager, "lighthouse", None)
    if address is None:  # it was not made here
        return None
    try:
        return read_page(address, _CONNECTING)[0]
    except (OSError, HTTPException):
        return None


class Known(NamedTuple):
    """What a page tells.

    Attributes:
        quorum: number of the latest quorum; -1: there was none.
        steps: of each of its workers.
        silence: seconds since each worker was heard of.
    """

    quorum: int
    steps: dict[str, int]
    silence: dict[str, float]

    @classmethod
    def read(cls, page: str) -> Self:
        """Read a page; of an empty one nothing is known."""
        quorum = re.search(r"Previous quorum id: (\d+)", page)
        steps = re.findall(r"<b>(\S+)</b>\s*<br/>\s*Step: (\d+)", page)
        seen = re.findall(r"(\S+): seen ([\d.e-]+)s ago", page)
        return cls(
            int(quorum[1]) if quorum else -1,
            {name: int(step) for name, step in steps},
            {name: float(ago) for name, ago in seen},
        )


def read_page(address: tuple[str, int], limit: float) -> tuple[str, str]:
    """Return the page of a lighthouse, and this machine's address, as the lighthouse sees it."""
    connection = HTTPConnection(*address, timeout=limit)
    try:
        connection.connect()
        own = connection.sock.getsockname()[0]
        connection.request("GET", "/status")
        return connection.getresponse().read(_PAGE).decode(errors="replace"), own
    finally:
        connection.close()


def is_refused(manager: Any) -> bool:
    """Whether nobody listens at the lighthouse's address. A link that is down shows nothing."""
    address = getattr(manager, "lighthouse", None)
    if address is None:  # it was not made here
        return False
    try:
        socket.create_connection(address, _ASKING).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
