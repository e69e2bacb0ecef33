"""Print a table of runs as Markdown, for a README.

Runs that differ only by their seed make one row, with the mean and the standard deviation over
seeds. With --columns there is a column for each value of a setting; with --against, differences to
a method, seed for seed, instead of or beside the values.
"""

import argparse
import re
from collections.abc import Callable, Container

import numpy as np

from dlion.errors import UserError
from dlion.suite.arguments import add_printed_output, make_parser, print_or_write
from dlion.suite.compare.curves import Curve, short_name
from dlion.suite.compare.options import add_curve_options, curves_of
from dlion.suite.compare.style import (
    display_name,
    end_values,
    lines_along,
    mean_and_deviation,
    number_format,
    setting_values,
    title_of,
)
from dlion.suite.terminal import printable
from dlion.values import show

Table = list[list[str]]  # rows of equal length, the headings first
_SIGNS = re.compile(r"[\\|`*<~]|\](?=[(\[:])")


def final_cell(curve: Curve, metric: str) -> str:
    return mean_and_deviation(end_values(curve, metric), number_format(metric))


def best_cell(curve: Curve, metric: str) -> str:
    return f"{end_values(curve, metric, best=True).mean():{number_format(metric)}}"


def paper_bits_cell(curve: Curve, _: str) -> str:
    return "" if curve.paper_bits is None else f"{curve.paper_bits:.3g}"


def saving_cell(curve: Curve, _: str) -> str:
    return "" if curve.saving is None else f"{curve.saving:.3g}x"


def sent_cell(curve: Curve, _: str) -> str:
    sent = curve.sent_bytes
    return f"{sent / 1e3:.4g} kB" if sent >= 1e3 else f"{sent:.4g} B"


# heading and cell of each column, by the name that --show knows
COLUMNS: dict[str, tuple[str, Callable[[Curve, str], str]]] = {
    "seeds": ("seeds", lambda curve, _: str(len(curve.seeds))),
    "end": ("at the end", final_cell),
    "best": ("best", best_cell),
    "paper_bits": ("paper bits", paper_bits_cell),
    "sent": ("sent a step", sent_cell),
    "saving": ("saving", saving_cell),
    "total": ("sent in all", lambda c, _: f"{c.sent_bytes * c.steps[-1] / 1e6:.3g} MB"),
    "time": ("time a step", lambda curve, _: f"{1e3 * curve.seconds:,.1f} ms"),
}


def overview(curves: list[Curve], metric: str, show: list[str]) -> Table:
    """Return a row for each curve, with the columns that are named."""
    rows = [[COLUMNS[name][1](curve, metric) for name in show] for curve in curves]
    headings = ["method", *(COLUMNS[name][0] for name in show)]
    return [headings, *([display_name(c), *row] for c, row in zip(curves, rows, strict=True))]


def by_setting(curves: list[Curve], setting: str, cell: Callable[[Curve], str]) -> Table:
    """Return a column for each value of a setting, and a row for all else that differs."""
    values = setting_values(curves, setting)
    table = [["method", *(f"{short_name(setting)} = {show(value)}" for value in values)]]
    for name, line in lines_along(curves, setting).items():
        cells = {repr(curve.settings[setting]): cell(curve) for curve in line}
        table.append([name, *(cells.get(repr(value), "") for value in values)])
    return table


def differences(curve: Curve, reference: Curve, metric: str, best: bool = False) -> np.ndarray:
    """Return how far a curve's runs end above the reference's runs of the same seeds.

    Raises:
        UserError: if they have no seed in common.
    """
    reference_ends = dict(zip(reference.seeds, end_values(reference, metric, best), strict=True))
    pairs = [
        (end, reference_ends[seed])
        for seed, end in zip(curve.seeds, end_values(curve, metric, best), strict=True)
        if seed in reference_ends
    ]
    if not pairs:
        raise UserError(f"{curve.label} and {reference.label} have no seed in common")
    return np.array([end - reference_end for end, reference_end in pairs])


def reference_of(curve: Curve, curves: list[Curve], method: str) -> Curve:
    """Return the curve of a method that has a curve's settings, as far as the method's differ.

    Raises:
        UserError: if there is not exactly one.
    """
    found = [
        other
        for other in curves
        if other.method == method
        and all(curve.settings.get(key) == value for key, value in other.differing.items())
    ]
    if len(found) != 1:
        raise UserError(f"there are {len(found)} curves of {method} to compare {curve.label} with")
    return found[0]


def difference_cell(curve: Curve, curves: list[Curve], method: str, metric: str, best: bool) -> str:
    """Return how far a curve ends above a method's, seed for seed; nothing for that method."""
    if curve.method == method:
        return ""
    values = differences(curve, reference_of(curve, curves, method), metric, best)
    return mean_and_deviation(values, number_format(metric), sign="+")


def to_markdown(table: Table, words: Container[int] = (0,), signs: re.Pattern = _SIGNS) -> str:
    """Return the text of a table: the columns of ``words`` to the left, those of numbers right.

    ``signs`` stand for themselves. By default no cell can end its row, or hold HTML, code,
    emphasis, a link or a picture.
    """
    headings, *rows = ([signs.sub(r"\\\g<0>", printable(cell)) for cell in row] for row in table)
    rule = ["---" if column in words else "---:" for column in range(len(headings))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (headings, rule, *rows))


def table_of(options: argparse.Namespace) -> Table:
    """Return the table that a parsed command line is about.

    Raises:
        UserError: if the table does not exist.
    """
    curves, metric = curves_of(options, options.columns)
    form, best, method = number_format(metric), options.best, options.against

    def difference(curve: Curve) -> str:
        return difference_cell(curve, curves, method, metric, best)

    def value(curve: Curve) -> str:
        return mean_and_deviation(end_values(curve, metric, best), form)

    if options.columns:
        table = by_setting(curves, options.columns, difference if method else value)
    else:
        table = overview(curves, metric, options.show)
        if method:
            cells = [f"minus {method}", *map(difference, curves)]
            table = [[*row, cell] for row, cell in zip(table, cells, strict=True)]
    table[0][0] = title_of(metric)
    if options.columns and method:
        table[0][0] += f" minus {method}"
    return table


def column_names(text: str) -> list[str]:
    """Return the names in ``COLUMN,...``."""
    names = text.split(",")
    if unknown := [name for name in names if name not in COLUMNS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]} is no column: choose of {', '.join(COLUMNS)}"
        )
    return names


def make_table(arguments: list[str]) -> str:
    """Return the Markdown that the command prints with these arguments.

    Raises:
        UserError: if the table does not exist.
    """
    return to_markdown(table_of(_parse(arguments)))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("table", __doc__, "results/dlion_cifar10 --columns workers")
    add_curve_options(parser)
    parser.add_argument(
        "--show",
        type=column_names,
        default="seeds,end,best,paper_bits,sent,saving",
        metavar="COLUMN,...",
        help=f"of {', '.join(COLUMNS)}; default: %(default)s",
    )
    parser.add_argument("--columns", metavar="SETTING", help="a column for each of its values")
    parser.add_argument("--against", metavar="METHOD", help="show differences to this method")
    add_printed_output(parser, ".md")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = _parse(arguments)
    print_or_write(to_markdown(table_of(options)), options.output, "table.md")
