"""Compare runs on one HTML page, which needs no network and no account.

Runs are grouped by study, data set and model; those that differ only by their seed become one curve
with a band from the worst to the best.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from dlion.arguments import add_runs, beside, make_parser, output_file
from dlion.compare.curves import Curve, group_runs, make_curves, short_name
from dlion.compare.plotly_figures import (
    METHOD,
    figure_along_setting,
    figure_over_course,
    figure_over_paper_bits,
    tags,
)
from dlion.compare.reading import read_runs
from dlion.compare.style import (
    MOST_LABELS,
    TITLES,
    display_name,
    end_values,
    mean_and_deviation,
    number_format,
    setting_values,
    styles_of,
)
from dlion.files import write_atomically
from dlion.record.runs import Run


@dataclass(frozen=True)
class Cell:
    """A number of the table as text, and whether it is the best of its column."""

    text: str
    best: bool


@dataclass(frozen=True)
class Row:
    """A row of the table: a curve, its name, and a cell for each number."""

    curve: Curve
    name: str
    cells: list[Cell]


@dataclass(frozen=True)
class Choice:
    """A button of a filter: a value, its words, its colour, and whether it is on at first."""

    value: str
    words: str
    colour: str
    on: bool


@dataclass(frozen=True)
class Drawing:
    """A figure as HTML, with its title and what it shows in words."""

    title: str
    words: str
    html: Markup


@dataclass(frozen=True)
class Section:
    """What the page shows of the runs of one model on one data set, in one study."""

    title: str
    metric: str
    curves: list[Curve]
    unevaluated: list[str]

    def rows(self) -> list[Row]:
        """Return the rows of the table, the best at the end first."""
        percent = self.metric == "accuracy"
        form, choose = number_format(self.metric), max if percent else min
        curves = sorted(self.curves, key=lambda curve: curve.final.mean(), reverse=percent)
        columns = []
        for best in (False, True):
            values = [end_values(curve, self.metric, best) for curve in curves]
            texts = [mean_and_deviation(value, form) for value in values]
            columns.append(_column(choose, [float(value.mean()) for value in values], texts))
        columns += [
            _number_column(min, [curve.paper_bits for curve in curves], "{:.3g}"),
            _number_column(min, [curve.sent_bytes / 1e3 for curve in curves], "{:,.1f} kB"),
            _number_column(max, [curve.saving for curve in curves], "{:.3g}x"),
            _number_column(min, [1e3 * curve.seconds for curve in curves], "{:,.1f} ms"),
        ]
        return [
            Row(curve, display_name(curve), list(cells))
            for curve, cells in zip(curves, zip(*columns, strict=True), strict=True)
        ]

    def filters(self) -> dict[str, list[Choice]]:
        """Return what curves are chosen by, and its values: the method, and differing settings.

        Of very many curves those of the most workers are shown at first.
        """
        styles = styles_of(self.curves)
        methods = {curve.method: styles[curve.label].colour for curve in self.curves}
        filters = {METHOD: [Choice(name, name, colour, True) for name, colour in methods.items()]}
        many = len(self.curves) > MOST_LABELS
        for key in sorted({key for curve in self.curves for key in curve.differing}):
            values = setting_values(self.curves, key)
            off = values[:-1] if many and key == "workers" else []
            filters[key] = [
                Choice(str(value), f"{short_name(key)} {value}", "", value not in off)
                for value in values
            ]
        return filters

    def differences(self) -> tuple[list[str], list[tuple[Curve, list[str]]]]:
        """Return the settings in which the curves differ, and each curve's values of them."""
        known = sorted(set().union(*(curve.settings for curve in self.curves)))
        keys = [key for key in known if key != "optimizer.name" and self._differs(key)]
        table = [(c, [str(c.settings.get(key, "")) for key in keys]) for c in self.curves]
        return [key.removeprefix("optimizer.") for key in keys], table

    def _differs(self, key: str) -> bool:
        """Whether curves differ in a setting.

        A setting that only some methods have is a difference. Another setting that a run lacks is
        not: the run is older than the setting.
        """
        values = [repr(curve.settings[key]) for curve in self.curves if key in curve.settings]
        of_some_methods = key.startswith("optimizer.") and len(values) < len(self.curves)
        return of_some_methods or len(set(values)) > 1

    def figures(self) -> list[Drawing]:
        title = TITLES[self.metric]
        bands = f"{title}; bands from the worst to the best seed"
        bars = f"{title} of the last evaluation; bars from the worst to the best seed"
        curves, metric = self.curves, self.metric
        drawings = [
            Drawing(
                "at the end, against bits per step", bars, figure_over_paper_bits(curves, metric)
            ),
            Drawing("against traffic", bands, figure_over_course(curves, metric, "bits")),
            Drawing("against steps", bands, figure_over_course(curves, metric, "steps")),
        ]
        for key in self.filters():
            if key != METHOD:
                heading = f"at the end, against {short_name(key)}"
                figure = figure_along_setting(curves, metric, key)
                drawings.append(Drawing(heading, bars, figure))
        return drawings


def _number_column(
    choose: Callable[[list[float]], float], values: list[float | None], form: str
) -> list[Cell]:
    """Return a column of values that may be unknown."""
    texts = ["" if value is None else form.format(value) for value in values]
    return _column(choose, values, texts)


def _column(
    choose: Callable[[list[float]], float], values: list[float | None], texts: list[str]
) -> list[Cell]:
    """Return a column of the table.

    Args:
        choose: min or max: which of the values is best.
        values: None where it is unknown.
        texts: how the values are written.
    """
    known = [value for value in values if value is not None]
    best = choose(known) if len(known) > 1 else None
    return [
        Cell(text, best is not None and value is not None and math.isclose(value, best))
        for value, text in zip(values, texts, strict=True)
    ]


def make_sections(runs: list[Run]) -> list[Section]:
    """Return a section for each study, data set and model, by accuracy where its runs have one."""
    sections = []
    for title, group in sorted(group_runs(runs).items()):
        evaluated = [run for run in group if any("test_loss" in row for row in run.metrics)]
        with_accuracy = [
            run for run in evaluated if any("test_accuracy" in row for row in run.metrics)
        ]
        metric = "accuracy" if with_accuracy else "loss"
        shown = with_accuracy or evaluated
        missing = [str(run.directory) for run in group if run not in shown]
        sections.append(Section(title, metric, make_curves(shown, metric), missing))
    return sections


def render(runs: list[Run], title: str) -> str:
    """Return the page."""
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dlion.compare", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.jinja").render(
        title=title,
        sections=make_sections(runs),
        tags=tags,
        most_labels=MOST_LABELS,
        count=len(runs),
        unfinished=sum(not run.finished for run in runs),
        plotly=Markup(get_plotlyjs()),
    )


def main(arguments: list[str]) -> None:
    parser = make_parser("report", __doc__, "results")
    add_runs(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in the first of RUNS",
    )
    parser.add_argument("--title", default="Accuracy against bandwidth")
    options = parser.parse_args(arguments)
    page = render(read_runs(options.runs), options.title)
    file = output_file(options.output, beside(options.runs, "report.html"))
    write_atomically(file, page)
    print(file)
