"""Amounts as people write them."""

import re

from dlion.errors import UserError

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: object) -> int:
    """Return the bits per second of ``100mbit``, ``2.5gbit`` and so on.

    Raises:
        UserError: if it is not a rate; the message begins with the text.
    """
    match = re.fullmatch(r"([0-9.]+)(bit|kbit|mbit|gbit)", str(text).lower())
    try:
        rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        rate = 0.0
    if rate < 1000:
        raise UserError(
            f"{text} is not a rate: write a number and a unit, such as 100mbit or"
            " 2.5gbit (at least 1kbit)"
        )
    return round(rate)


def show_rate(rate: int | None) -> str:
    """Return a link's rate as it is read: ``100 Mbit/s``."""
    return "loopback" if rate is None else f"{rate / 1e6:g} Mbit/s"


def human_seconds(seconds: float) -> str:
    """Write 0.00123 as ``1.23 ms``."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def human_bytes(count: float) -> str:
    """Write 1,234,000 as ``1.23 MB`` (powers of 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which three digits round up
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
