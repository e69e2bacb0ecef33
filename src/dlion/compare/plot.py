"""Draw accuracy against bandwidth: ``python -m dlion.compare.plot RUN_DIR... [-o PREFIX]``.

Takes any directories with runs below them, prints a table, and writes PREFIX.png. Runs that differ
only by their seed become one line with a band from the worst to the best. For a page to look around
in: ``python -m dlion.compare.report``.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dlion.compare.curves import Curve, choose_metric, make_curves
from dlion.compare.style import (
    AXES,
    NAMED,
    SIDES,
    ends,
    lines_over,
    name_of,
    shown,
    sides_of,
    spread,
    styles_of,
    title_of,
    values_of,
    with_deviation,
)
from dlion.errors import UserError
from dlion.record.studies import find_runs


def draw(
    curves: list[Curve],
    metric: str,
    path: Path,
    x: str | None = None,
    panels: str | None = None,
    best: bool = False,
) -> None:
    """Write a PNG.

    Args:
        curves: what to draw.
        metric: as :func:`choose_metric` gives it.
        path: of the file.
        x: bits | paper_bits | step | a setting; None: a panel over bits, one over paper_bits.
        panels: a setting that has a panel for each of its values.
        best: over paper_bits or a setting, each run's best evaluation instead of its last.

    Raises:
        UserError: if no run has that setting.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if panels is None:
        parts = [(curves, axis, "") for axis in ([x] if x else ["bits", "paper_bits"])]
    else:
        parts = [
            ([c for c in curves if c.settings.get(panels) == value], x or "bits",
             f"{panels} = {value}")
            for value in values_of(curves, panels)
        ]  # fmt: skip
    columns = min(len(parts), 2)
    rows = math.ceil(len(parts) / columns)
    size = (8.5, 5) if len(parts) == 1 else (12.5, 5 * rows if rows == 1 else 4.2 * rows)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    named = x == "paper_bits" and panels is None and len(curves) <= NAMED
    legend: dict[str, Any] = {}
    for place, (axes, (part, axis, title)) in enumerate(zip(grid.flat, parts, strict=False)):
        legend = _panel(axes, part, metric, axis, panels, best, named) | legend
        lowest = place + columns >= len(parts)
        axes.set(title=title, xlabel=AXES.get(axis, axis) if lowest else "")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    kind = "best " if best and x not in ("bits", "step") else ""
    for axes in grid[:, 0]:
        axes.set_ylabel(kind + title_of(metric))
    low, high = min(c.values.min() for c in curves), max(c.values.max() for c in curves)
    falls = metric not in ("accuracy", "outside_box") and 0 < 10 * low < high
    if falls and x not in (None, "bits", "paper_bits"):
        grid[0, 0].set_yscale("log")
    if legend:
        seeds = max(c.seeds for c in curves)
        note = f"worst to best of {seeds} seeds" if seeds > 1 else None
        names = [name.replace("$", r"\$") for name in legend]
        figure.legend(legend.values(), names, loc="outside right center", title=note,
                      frameon=False)  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(
    axes: Any, curves: list[Curve], metric: str, x: str, panels: str | None, best: bool, named: bool
) -> dict[str, Any]:
    """Draw into one panel; what the legend has to name."""
    if x in ("bits", "step"):
        return _curves(axes, curves, metric, x, panels)
    if x == "paper_bits":
        return _points(axes, curves, metric, panels, best, named)
    values, styles = values_of(curves, x), styles_of(curves, x)
    handles = {}
    for name, line in lines_over(curves, x).items():
        style = styles[line[0].label]
        places = [values.index(c.settings[x]) for c in line]
        finals = [ends(c, metric, best) for c in line]
        means = [float(f.mean()) for f in finals]
        bars = np.stack([spread(f) for f in finals], 1)
        handles[name] = axes.errorbar(
            places, means, bars, color=style.colour, marker=style.marker, linestyle=style.line,
            fillstyle=style.fill, capsize=3,
        )  # fmt: skip
    axes.set_xticks(range(len(values)), labels=[str(value) for value in values])
    return handles


def _curves(
    axes: Any, curves: list[Curve], metric: str, x: str, panels: str | None
) -> dict[str, Any]:
    styles, handles = styles_of(curves, panels), {}
    for curve in curves:
        style, values = styles[curve.label], shown(curve.values, metric)
        places = curve.bits if x == "bits" else curve.steps
        (handles[name_of(curve, panels)],) = axes.plot(
            places, values.mean(0), color=style.colour, linestyle=style.line,
            marker=style.marker if x == "bits" else "", fillstyle=style.fill, ms=4,
        )  # fmt: skip
        low, high = values.min(0), values.max(0)
        axes.fill_between(places, low, high, color=style.colour, alpha=0.15, lw=0)
    if x == "bits":
        if any(c.bits[-1] == 0 for c in curves):  # one worker sends nothing
            axes.set_xscale("symlog", linthresh=1)
        else:
            axes.set_xscale("log")
    return handles


def _points(
    axes: Any, curves: list[Curve], metric: str, panels: str | None, best: bool, named: bool
) -> dict[str, Any]:
    styles, handles, places = styles_of(curves, panels), {}, {}
    for curve in curves:
        if curve.paper_bits is None:
            continue
        style, last = styles[curve.label], ends(curve, metric, best)
        name, places[curve.label] = name_of(curve, panels), (curve.paper_bits, last.mean())
        handles[name] = axes.errorbar(
            curve.paper_bits, last.mean(), spread(last)[:, None], color=style.colour,
            marker=style.marker, fillstyle=style.fill, linestyle="", ms=9, capsize=3,
        )  # fmt: skip
    if named:
        for label, side in sides_of(places).items():
            right, above = SIDES[side]
            axes.annotate(
                label, places[label], (9 * right, 9 * above), textcoords="offset points",
                ha={1: "left", 0: "center", -1: "right"}[right], va="center", fontsize=9,
                color=styles[label].colour,
            )  # fmt: skip
        handles = {}
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
    axes.margins(x=0.1)
    return handles


def print_table(curves: list[Curve], metric: str) -> None:
    """The table on the terminal; the best value is bold."""
    from rich.console import Console
    from rich.table import Table

    percent = "accuracy" in metric
    table = Table(title=f"{title_of(metric)} and traffic")
    columns = (
        "method",
        "seeds",
        "at the end",
        "best",
        "paper bits",
        "sent a step",
        "saving",
        "time a step",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    pick = max if percent else min
    leader = pick(curves, key=lambda c: c.final.mean()).label
    for curve in curves:
        final, best = (ends(curve, metric, best) for best in (False, True))
        form = ".2f" if percent else ".4f"
        table.add_row(
            name_of(curve),
            str(curve.seeds),
            with_deviation(final, form),
            f"{best.mean():{form}}",
            "" if curve.paper_bits is None else f"{curve.paper_bits:.3g}",
            f"{curve.sent_bytes / 1e3:.4g} kB",
            "" if curve.saving is None else f"{curve.saving:.3g}x",
            f"{1e3 * curve.seconds:,.1f} ms",
            style="bold" if curve.label == leader else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 500)
    console.print(table)
    console.print(
        "± is the deviation over seeds; saving: against a float32 ring all-reduce.",
        style="dim",
        soft_wrap=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dlion.compare.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves"), metavar="PREFIX")
    parser.add_argument("--metric", help="accuracy, loss, or a key of metrics.jsonl")
    parser.add_argument(
        "--x",
        help="bits (sent so far), paper_bits (a step), step, or a setting such as workers; without:"
        " a panel over bits and one over paper_bits",
    )
    parser.add_argument(
        "--panels", metavar="SETTING", help="a panel for each value of a setting, workers say"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="each run's best evaluation instead of its last, as in arXiv 2404.00438",
    )
    options = parser.parse_args(arguments)
    try:
        runs = find_runs(options.runs)
        metric = choose_metric(runs, options.metric)
        asked = [key for key in (options.panels, options.x) if key and key not in AXES]
        curves = make_curves(runs, metric, asked)
        for key in asked:
            values_of(curves, key)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print_table(curves, metric)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    path = options.output.with_name(options.output.name.removesuffix(".png") + ".png")
    draw(curves, metric, path, options.x, options.panels, options.best)
    print(path)


if __name__ == "__main__":
    main()
