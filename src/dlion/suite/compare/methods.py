"""Print a Markdown table of the methods: description, traffic and memory.

Bits are per parameter and step, up and down, as the papers count them. State is bytes per parameter
on a worker, beside the parameter and its gradient. Both are of a 512 x 512 matrix and 8 workers
with default settings.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from dlion.suite.arguments import add_printed_output, make_parser, print_or_write
from dlion.suite.terminal import patience

if TYPE_CHECKING:
    from dlion.optim import MethodEntry

SIDE, WORKERS = 512, 8


def make_table(arguments: list[str]) -> str:
    """Return the Markdown that the command prints."""
    _parse(arguments)
    with patience("loading Python's modules", 5, sys.stderr):
        from dlion.optim import METHODS
        from dlion.suite.compare.table import to_markdown
    heading = ["`optimizer=`", "bits up", "bits down", "state, bytes", "method"]
    rows = [_row(name, method) for name, method in METHODS.items()]
    return to_markdown([heading, *rows], words=(0, 4), signs=re.compile(r"\|"))


def _row(name: str, method: MethodEntry) -> list[str]:
    import torch

    from dlion.workers import Workers

    params = [torch.nn.Parameter(torch.zeros(SIDE, SIDE))]
    optimizer = method.cls(params, workers=Workers(local=WORKERS), **method.options)
    numbers = [*optimizer.paper_bits, optimizer.state_bytes / SIDE**2]
    return [f"`{name}`", *(f"{number:.3g}" for number in numbers), method.summary]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("methods", __doc__, "-o methods.md")
    add_printed_output(parser, ".md")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    print_or_write(make_table(arguments), _parse(arguments).output, "methods.md")
