"""Draw accuracy against bandwidth, or against a setting, from any recorded runs.

Prints a table and writes a picture. Runs that differ only by their seed become one line with a
band from the worst to the best. For an interactive report: dlion report.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlion.suite.arguments import PICTURES, beside, make_parser, output_file, picture
from dlion.suite.compare.curves import Curve, best_first, is_accuracy, more_is_better, short_name
from dlion.suite.compare.options import add_curve_options, curves_of, setting
from dlion.suite.compare.style import (
    CURVES,
    MOST_LABELS,
    SIDES,
    Style,
    axis_title,
    display_name,
    end_values,
    error_bar,
    in_axis_unit,
    is_ordered,
    label_sides,
    lines_along,
    log_ticks,
    setting_values,
    styles_of,
    tick_label,
    title_of,
)
from dlion.suite.compare.table import overview
from dlion.suite.files import whole_file

REFERENCE = "g_lion"  # the method whose bits the others save
FRONTS = ("sent_bits", "received_bits")  # what was counted, by which the best methods are known
A_STEP = ("paper_bits", *FRONTS)  # axes of bits a step, which have a point for each method
COURSES = {"bits": "bits", "step": "steps", "seconds": "times"}  # axes of training, in curves
TITLE_HEIGHT, LEGEND_SHARE = 0.8, 0.45  # inches; of the width that a legend may take from panels
LABEL_DISTANCE = (9, 13)  # points between a marker and its name beside, above or below it
SHARES = ("outside_box", "agreement", "disagreement")  # whose axis is linear


@dataclass(frozen=True)
class Figure:
    """Contents of a figure.

    Attributes:
        metric: as :func:`choose_metric` gives it.
        x: bits | paper_bits | sent_bits | received_bits | step | seconds | a setting; None: a panel
            over bits, one over paper_bits.
        panels: a setting that has a panel for each of its values.
        best: over paper_bits or a setting, each run's best evaluation instead of its last.
    """

    metric: str
    x: str | None = None
    panels: str | None = None
    best: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel: its curves, the x axis, and its title."""

    curves: list[Curve]
    x: str
    title: str


def draw(curves: list[Curve], figure: Figure, path: Path) -> None:
    """Write a picture: PNG, SVG or PDF, by the suffix of its path.

    Raises:
        UserError: if no run has a setting that the figure asks for.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(curves, figure)
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    canvas, grid = pyplot.subplots(
        rows,
        columns,
        figsize=_size(len(panels), rows, _tallness(panels[0])),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    legend: dict[str, Any] = {}
    for number, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        legend = _draw_panel(axes, panel, figure) | legend
        is_lowest = number + columns >= len(panels)
        axes.set_title(_verbatim(panel.title), fontsize=10)
        axes.set_xlabel(_verbatim(axis_title(panel.x, panel.curves)) if is_lowest else "")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    best = "best " if figure.best and figure.x not in COURSES else ""
    for axes in grid[:, 0]:
        axes.set_ylabel(_verbatim(best + title_of(figure.metric)))
    if _falls_by_decades(curves, figure):
        grid[0, 0].set_yscale("log")
    if legend:
        names = [_verbatim(name) for name in legend]
        turns = any(_turns(panel, figure) for panel in panels)
        note = "lines on each other\ntake turns" if turns else None
        _add_legend(canvas, [*legend.values()], names, note)
    canvas.suptitle(_title(curves, figure), fontsize=11)
    kind = path.suffix.removeprefix(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # equal runs, equal files
    constant = {"svg.hashsalt": "dlion", "svg.fonttype": "none"}
    with whole_file(path) as part, pyplot.rc_context(constant):
        canvas.savefig(part, format=kind, dpi=130, metadata=dates.get(kind))
    pyplot.close(canvas)


def _add_legend(canvas: Any, handles: list[Any], names: list[str], title: str | None) -> None:
    """Add a legend beside the panels or, where it has no room there, below them in columns."""
    make = partial(canvas.legend, handles, names, title=title, frameon=False)
    width, height = canvas.get_size_inches()
    legend = make(loc="outside right center")
    column, tall = legend.get_window_extent().size / canvas.dpi
    if tall < height - TITLE_HEIGHT and column < LEGEND_SHARE * width:
        return
    for columns in range(6, 0, -1):
        legend.remove()
        legend = make(loc="outside lower center", ncols=columns)
        wide, tall = legend.get_window_extent().size / canvas.dpi
        if wide < width:
            break
    canvas.set_size_inches(max(width, wide), height + tall)


def _panels(curves: list[Curve], figure: Figure) -> list[Panel]:
    if figure.panels is None:
        axes = [figure.x] if figure.x else ["bits", "paper_bits"]
        return [Panel(curves, x, "") for x in axes]
    panels = []
    for value in setting_values(curves, figure.panels):
        part = [curve for curve in curves if curve.settings.get(figure.panels) == value]
        title = f"{short_name(figure.panels)} = {tick_label(figure.panels, value)}"
        panels.append(Panel(part, figure.x or "bits", title))
    return panels


def _size(panels: int, rows: int, tallness: float) -> tuple[float, float]:
    """Return width and height of a figure in inches."""
    if panels == 1:
        return 8.5, 5 * tallness
    return 12.5, 5 if rows == 1 else 4.2 * rows


def _tallness(panel: Panel) -> float:
    """Return how many times taller than others a panel is, so that many names have room."""
    return 1.6 if panel.x in FRONTS and len(panel.curves) > MOST_LABELS else 1.0


def _falls_by_decades(curves: list[Curve], figure: Figure) -> bool:
    """Whether a metric that gets small during training needs a logarithmic axis."""
    shares = figure.metric in SHARES or is_accuracy(figure.metric)
    if shares or figure.x in (None, "bits", "paper_bits"):
        return False
    low = min(np.nanmin(curve.values) for curve in curves)
    high = max(np.nanmax(curve.values) for curve in curves)
    return bool(0 < 10 * low < high)


def _title(curves: list[Curve], figure: Figure) -> str:
    """Return the settings that all curves share, and the meaning of bars and bands."""
    tasks = ([*dict.fromkeys(c.settings[key] for c in curves)] for key in ("model", "dataset"))
    words = [" on ".join(" and ".join(names) for names in tasks)]
    workers = {curve.settings.get("workers") for curve in curves}
    steps = {int(curve.steps[-1]) for curve in curves}
    if len(workers) == 1 and "workers" not in (figure.x, figure.panels):
        words.append(f"{workers.pop()} workers")
    if len(steps) == 1:
        words.append(f"{steps.pop():,} steps")
    if several := {len(curve.seeds) for curve in curves} - {1}:
        least, most = min(several), max(several)
        seeds = f"{most}" if least == most else f"{least} to {most}"
        x = figure.x or (figure.panels and "bits")  # as _panels has it
        shapes = "bands and bars" if x is None else "bands" if x in COURSES else "bars"
        words.append(f"{shapes}: worst to best of {seeds} seeds")
    return _verbatim(", ".join(words))


def _verbatim(text: str) -> str:
    """Return a text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def _draw_panel(axes: Any, panel: Panel, figure: Figure) -> dict[str, Any]:
    """Draw into one panel and return the legend's entries by name."""
    if panel.x in COURSES:
        return _draw_courses(axes, panel, figure)
    if panel.x in A_STEP:
        return _draw_points(axes, panel, figure)
    return _draw_along_setting(axes, panel, figure)


def _draw_courses(axes: Any, panel: Panel, figure: Figure) -> dict[str, Any]:
    """Draw the metric in the course of training, with bands over seeds."""
    styles, handles = styles_of(panel.curves, figure.panels), {}
    over_bits = panel.x == "bits"
    turns = _turns(panel, figure)
    for curve in panel.curves:
        style = styles[curve.label]
        values = in_axis_unit(curve.values, figure.metric)
        xs = getattr(curve, COURSES[panel.x])
        look = _look(style) if over_bits else _look(style) | {"marker": ""}
        (line,) = axes.plot([], [], **look, linestyle=style.line, ms=4)
        handles[display_name(curve, figure.panels)] = line
        dashes = turns.get(curve.label, style.line)
        axes.plot(xs, values.mean(0), **look, linestyle=dashes, ms=4)
        axes.fill_between(xs, values.min(0), values.max(0), color=style.colour, alpha=0.15, lw=0)
    if over_bits and any(curve.bits[-1] == 0 for curve in panel.curves):
        axes.set_xscale("symlog", linthresh=1)  # one worker sends nothing
    elif over_bits:
        _scale_bits(axes, [bits for curve in panel.curves for bits in curve.bits if bits])
    return handles


def _turns(panel: Panel, figure: Figure) -> dict[str, tuple[float, tuple[float, float]]]:
    """Return the dashes of curves that lie on each other, so that each shows in its turn.

    They are given by label, as matplotlib takes them: where they start, and what is on and off.
    """
    if panel.x not in COURSES:
        return {}
    x = COURSES[panel.x]
    height = np.log if _falls_by_decades(panel.curves, figure) else np.asarray
    means = {curve.label: height(curve.values.mean(0)) for curve in panel.curves}
    together: list[list[Curve]] = []
    heights = np.concatenate([*means.values()])
    finite = heights[np.isfinite(heights)]  # what diverged is near nothing
    near = 0.005 * np.ptp(finite) if finite.size else 0.0
    for curve in panel.curves:
        for group in together:
            first = group[0]
            if (
                len(first.steps) == len(curve.steps)
                and np.allclose(getattr(first, x), getattr(curve, x), rtol=0.01)
                and np.allclose(means[first.label], means[curve.label], rtol=0, atol=near)
            ):
                group.append(curve)
                break
        else:
            together.append([curve])
    dash = 5.0
    return {
        curve.label: (dash * turn, (dash, dash * (len(group) - 1)))
        for group in together
        if len(group) > 1
        for turn, curve in enumerate(group)
    }


def _scale_bits(axes: Any, bits: list[float]) -> None:
    """Make the x axis logarithmic, with the ticks that lie between these numbers of bits."""
    axes.set_xscale("log")
    ticks = [
        tick for tick in log_ticks(bits) if min(bits, default=1) <= tick <= max(bits, default=0)
    ]
    if ticks:
        axes.set_xticks(ticks, labels=[f"{tick:,.10g}" for tick in ticks])
        axes.minorticks_off()


def _draw_points(axes: Any, panel: Panel, figure: Figure) -> dict[str, Any]:
    """Draw a point for each curve over its bits a step, named beside it where there is room."""
    styles, handles, points = styles_of(panel.curves, figure.panels), {}, {}
    for curve in panel.curves:
        bits, ends = getattr(curve, panel.x), end_values(curve, figure.metric, figure.best)
        if not bits or np.isnan([bits, *ends]).any():  # sends nothing, not counted, or diverged
            continue
        points[curve.label] = (bits, ends.mean())
        handles[display_name(curve, figure.panels)] = axes.errorbar(
            bits,
            ends.mean(),
            error_bar(ends)[:, None],
            **_look(styles[curve.label]),
            linestyle="",
            ms=9,
            capsize=3,
        )
    alone = figure.x in A_STEP and figure.panels is None
    if alone and (len(panel.curves) <= MOST_LABELS or panel.x in FRONTS):
        _label_points(axes, points, styles, _tallness(panel))
        handles = {}
        _draw_reference(axes, panel.curves, figure)
    if panel.x in FRONTS:
        _draw_front(axes, list(points.values()), figure.metric)
        _scale_bits(axes, [x for x, _ in points.values()])
    else:
        axes.set_xscale("log")
        axes.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
        axes.minorticks_off()
    axes.margins(x=0.15)  # for names
    if len({x for x, _ in points.values()}) == 1:  # an axis of one point would have no ticks
        (x, _), *_ = points.values()
        axes.set_xlim(x / 2, x * 2)
    return handles


def _draw_front(axes: Any, points: list[tuple[float, float]], metric: str) -> None:
    """Draw a line along the points that none beats with as few bits."""
    sign = 1 if more_is_better(metric) else -1
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not front or sign * y > sign * front[-1][1]:
            front.append((x, y))
    xs, ys = [x for x, _ in front], [y for _, y in front]
    axes.plot(xs, ys, color="#999999", lw=1, zorder=0, drawstyle="steps-post")


def _draw_reference(axes: Any, curves: list[Curve], figure: Figure) -> None:
    """Draw the level of Lion on the mean gradient: compression lost the rest."""
    references = [curve for curve in curves if curve.method == REFERENCE]
    if len(references) == 1 and len(curves) > 1:
        level = end_values(references[0], figure.metric, figure.best).mean()
        axes.axhline(level, color="#555555", linestyle=":", lw=1, zorder=0)


def _label_points(
    axes: Any, points: dict[str, tuple[float, float]], styles: dict[str, Style], tallness: float
) -> None:
    for label, side in label_sides(points, tallness).items():
        right, above = SIDES[side]
        axes.annotate(
            _verbatim(label),
            points[label],
            (LABEL_DISTANCE[0] * right, LABEL_DISTANCE[1] * above),
            textcoords="offset points",
            ha={1: "left", 0: "center", -1: "right"}[right],
            va="center",
            fontsize=9,
            color=styles[label].colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=1,  # over lines, under markers
        )


def _draw_along_setting(axes: Any, panel: Panel, figure: Figure) -> dict[str, Any]:
    """Draw the metric at the end over the values of a setting, equally far from each other."""
    values, styles = setting_values(panel.curves, panel.x), styles_of(panel.curves, panel.x)
    handles = {}
    lines = lines_along(panel.curves, panel.x)
    apart = min(0.04, 0.3 / len(lines))  # so that no bar hides another
    for number, (name, line) in enumerate(lines.items()):
        style = styles[line[0].label]
        shift = apart * (number - (len(lines) - 1) / 2)
        ends = [end_values(curve, figure.metric, figure.best) for curve in line]
        handles[name] = axes.errorbar(
            [values.index(curve.settings[panel.x]) + shift for curve in line],
            [float(end.mean()) for end in ends],
            np.stack([error_bar(end) for end in ends], 1),
            **_look(style),
            linestyle=style.line if is_ordered(values) else "",
            capsize=3,
        )
    labels = [_verbatim(tick_label(panel.x, value)).replace("|", "|\n") for value in values]
    axes.set_xticks(range(len(values)), labels=labels)
    axes.margins(x=0.08)
    return handles


def _look(style: Style) -> dict[str, str]:
    """Return a style's colour and markers as arguments of matplotlib."""
    return {"color": style.colour, "marker": style.marker, "fillstyle": style.fill}


def print_table(curves: list[Curve], metric: str) -> None:
    """Print the table on the terminal; the method with the best value at the end is bold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    show = ["seeds", "end", "best", "paper_bits", "sent", "saving", "time"]
    headings, *rows = overview(curves, metric, show)
    table = Table(title=f"{title_of(metric)} and traffic")
    for heading in headings:
        justify = "left" if heading == "method" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    leader = best_first(curves, metric)[0]
    for curve, row in zip(curves, rows, strict=True):
        table.add_row(*map(Text, row), style="bold" if curve is leader else "")
    console = Console(width=None if sys.stdout.isatty() else 500)
    console.print(table)
    console.print(
        "± is the deviation over seeds; saving: against a float32 ring all-reduce.",
        style="dim",
        soft_wrap=True,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read and check the command line."""
    parser = make_parser("plot", __doc__, "outputs --x workers -o workers.pdf")
    add_curve_options(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=picture,
        metavar="FILE",
        help=f"a picture, {', '.join(PICTURES)}; default: {CURVES} in the first of RUNS",
    )
    parser.add_argument(
        "--x",
        type=setting,
        help="bits (sent so far), paper_bits, sent_bits or received_bits (a step), step, seconds,"
        " or a setting such as workers; without: a panel over bits and one over paper_bits",
    )
    parser.add_argument(
        "--panels",
        type=setting,
        metavar="SETTING",
        help="a panel for each value of a setting, workers say",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    curves, metric = curves_of(options, options.panels, options.x)
    print_table(curves, metric)
    figure = Figure(metric, options.x, options.panels, options.best)
    with output_file(options.output, beside(options.runs, CURVES)) as path:
        draw(curves, figure, path)
