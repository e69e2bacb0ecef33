"""Command-line options shared by the commands that read runs."""

import argparse

from dlion.errors import UserError
from dlion.suite.arguments import add_runs
from dlion.suite.compare.curves import Conditions, Curve, choose_metric, make_curves, select_runs
from dlion.suite.compare.reading import read_runs
from dlion.suite.compare.style import AXES, setting_values

_OTHER_NAMES = {
    **dict.fromkeys(("optimizer", "method"), "optimizer.name"),
    **{"model.name": "model", "dataset.name": "dataset", "schedule": "schedule.name"},
}


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    """Add RUNS, the options of :func:`curves_of`, and ``--best``."""
    add_runs(parser)
    parser.add_argument("--metric", help="accuracy, loss, or a key of metrics.jsonl")
    add_only(parser)
    parser.add_argument(
        "--best",
        action="store_true",
        help="each run's best evaluation, of those that all its seeds have, instead of its last, as"
        " in arXiv 2404.00438",
    )


def add_only(parser: argparse.ArgumentParser) -> None:
    """Add ``--only``, which leaves out runs."""
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="leave out runs with another value of a setting, such as workers=32; may be repeated,"
        " for another setting or for another value of it",
    )


def setting(typed: str) -> str:
    """Return the name by which the commands know a setting: optimizer=NAME sets optimizer.name."""
    return _OTHER_NAMES.get(typed, typed)


def conditions_of(options: argparse.Namespace) -> Conditions:
    """Return the settings that ``--only`` asks for, with their values.

    Raises:
        UserError: if one has no value.
    """
    conditions: Conditions = {}
    for condition in options.only:
        key, equals, value = condition.partition("=")
        if not equals:
            raise UserError(f"--only {condition} names no value: type SETTING=VALUE")
        conditions.setdefault(setting(key), []).append(value)
    return conditions


def curves_of(options: argparse.Namespace, *settings: str | None) -> tuple[list[Curve], str]:
    """Return the curves that a command line is about, and their metric.

    Args:
        options: as parsed with :func:`add_curve_options`.
        settings: those that the command line names, by which curves are distinguished first.

    Raises:
        UserError: if no run matches, or the runs are not comparable.
    """
    if "seed" in settings:
        raise UserError(
            "seed is no axis: runs that differ by it alone are one curve or point; `dlion collect`"
            " lists each run"
        )
    runs = select_runs(read_runs(options.runs), conditions_of(options))
    metric = choose_metric(runs, options.metric)
    first = [key for key in settings if key and key not in AXES]
    curves = make_curves(runs, metric, first)
    for key in first:
        setting_values(curves, key)  # it is an error if no run has it
    return curves, metric
