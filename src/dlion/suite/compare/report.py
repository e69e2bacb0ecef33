"""Compare runs on one HTML page, which needs no network and no account.

Runs are grouped by study, data set and model; those that differ only by their seed become one curve
with a band from the worst to the best.
"""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup, escape

from dlion.suite.arguments import add_runs, beside, make_parser, of_kind, output_file
from dlion.suite.compare.curves import Curve, best_first, group_runs, make_curves, short_name
from dlion.suite.compare.plotly_figures import (
    METHOD,
    figure_along_setting,
    figure_over_course,
    figure_over_paper_bits,
    tags,
)
from dlion.suite.compare.reading import read_runs, warn_left_out
from dlion.suite.compare.style import (
    CURVES,
    MOST_LABELS,
    TITLES,
    Style,
    axis_title,
    display_name,
    end_values,
    mean_and_deviation,
    number_format,
    setting_values,
    styles_of,
)
from dlion.suite.files import write_atomically
from dlion.suite.inside import read
from dlion.suite.record.runs import METRICS, Run
from dlion.suite.record.studies import PACKED
from dlion.suite.terminal import printable
from dlion.values import show

PROVENANCE = "provenance.txt"  # beside packed runs
# how the page's filters and key show matplotlib's markers and lines
MARKS = dict(zip("soDd^v<>XP*phH", "■●◆♦▲▼◀▶✖✚★⬟⬢⬣", strict=True))
DASHES = {"solid": "", "dashed": "6 3", "dotted": "2 3", "dashdot": "6 3 2 3"}


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        text: how it is written.
        value: None where it is unknown, and for times, which are not compared.
        spread: its standard deviation over seeds; 0 for what is counted; None if it is unknown.
        high: whether more is better.
    """

    text: str
    value: float | None = None
    spread: float | None = 0.0
    high: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table: a curve, its name, and a cell for each number."""

    curve: Curve
    name: str
    cells: list[Cell]


@dataclass(frozen=True)
class Choice:
    """A button of a filter: a value, its words, its mark, and whether it is on at first."""

    value: str
    words: str
    mark: Style | None
    on: bool


@dataclass(frozen=True)
class Drawing:
    """A figure as HTML, with its title and a description."""

    title: str
    words: str
    html: Markup


class Folder(NamedTuple):
    """Folder of runs.

    Attributes:
        address: as seen from the page's folder.
        name: for people.
        picture: the address of a picture of all their curves, if there is one.
    """

    address: str
    name: str
    picture: str | None


@dataclass(frozen=True)
class Section:
    """Section of the page: the runs of one model on one data set, in one study."""

    title: str
    metric: str
    curves: list[Curve]
    unevaluated: list[str]
    provenance: list[tuple[str, str]]
    folders: list[Folder]

    def rows(self) -> list[Row]:
        """Return the rows of the table, the best at the end first."""
        percent = self.metric == "accuracy"
        form = number_format(self.metric)
        curves = best_first(self.curves, self.metric)
        columns = []
        for best in (False, True):
            ends = [end_values(curve, self.metric, best) for curve in curves]
            columns.append([_measured(values, form, percent) for values in ends])
        columns += [
            [_counted(curve.paper_bits, "{:.3g}") for curve in curves],
            [_counted(curve.sent_bytes / 1e3, "{:,.1f} kB") for curve in curves],
            [_counted(curve.saving, "{:.3g}x", high=True) for curve in curves],
            [Cell(f"{1e3 * curve.seconds:,.1f} ms") for curve in curves],
        ]
        return [
            Row(curve, display_name(curve), list(cells))
            for curve, cells in zip(curves, zip(*columns, strict=True), strict=True)
        ]

    def filters(self) -> dict[str, list[Choice]]:
        """Return the filters and their values: the method, and differing settings.

        Of very many curves those of the most workers are shown at first.
        """
        styles = styles_of(self.curves)
        methods = {curve.method: styles[curve.label] for curve in self.curves}
        filters = {METHOD: [Choice(name, name, style, True) for name, style in methods.items()]}
        many = len(self.curves) > MOST_LABELS
        for key in sorted({key for curve in self.curves for key in curve.differing}):
            values = setting_values(self.curves, key)
            off = values[:-1] if many and key == "workers" else []
            filters[key] = [
                Choice(show(value), f"{short_name(key)} {show(value)}", None, value not in off)
                for value in values
            ]
        return filters

    def key(self) -> list[tuple[str, Style]]:
        """Return the lines and fills that distinguish the settings of a method, by their words.

        A single method's settings differ by colour, which its figures' legends show.
        """
        if len({curve.method for curve in self.curves}) == 1:
            return []
        styles = styles_of(self.curves)
        variants = {c.variant(): styles[c.label] for c in self.curves if c.variant()}
        return list(variants.items()) if len(variants) > 1 else []

    def differences(self) -> tuple[list[str], list[tuple[Curve, list[str]]]]:
        """Return the settings in which the curves differ, and each curve's values of them."""
        known = sorted(set().union(*(curve.settings for curve in self.curves)))
        keys = [key for key in known if key != "optimizer.name" and self._differs(key)]
        table = [(c, [_setting(c, key) for key in keys]) for c in self.curves]
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
                heading = f"at the end, against {axis_title(key, curves)}"
                figure = figure_along_setting(curves, metric, key)
                drawings.append(Drawing(heading, bars, figure))
        return drawings


def breakable(text: str) -> Markup:
    """Return a text as HTML that may be broken behind its signs, and nowhere within a word."""
    escaped = str(escape(printable(text)))
    return Markup(re.sub(r"([_.=|,])(?!\d)", r"\1<wbr>", escaped))


def _setting(curve: Curve, key: str) -> str:
    return show(curve.settings[key]) if key in curve.settings else ""


def _measured(values: np.ndarray, form: str, high: bool) -> Cell:
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    mean = None if np.isnan(values).any() else float(values.mean())
    return Cell(mean_and_deviation(values, form), mean, spread, high)


def _counted(value: float | None, form: str, high: bool = False) -> Cell:
    return Cell("" if value is None else form.format(value), value, high=high)


def _provenance(runs: list[Run]) -> list[tuple[str, str]]:
    """Return the provenance of a section's runs: label and text."""
    summaries = [run.summary or {} for run in runs]
    configs = [run.config or {} for run in runs]
    commits = [str(summary.get("commit") or "")[:12] for summary in summaries]
    steps = [str(run.metrics[-1]["step"]) for run in runs if run.metrics]
    machines = [str(summary.get("machine") or "") for summary in summaries]
    facts = {
        "commit": _distinct(commits) or _noted(runs, "commit"),
        "date": _dates(runs),
        "machine": _distinct(machines) or _noted(runs, "machine"),
        "steps": _distinct(steps),
        "samples of a worker and step": _distinct([str(c.get("batch_size", "")) for c in configs]),
        "seeds": _distinct([str(config.get("seed", "")) for config in configs]),
    }
    return [(name, words) for name, words in facts.items() if words]


def _noted(runs: list[Run], fact: str) -> str:
    """Return a fact of provenance.txt, which the packed runs lack."""
    folders = sorted({run.directory.parent.parent for run in runs if run.study})
    texts = [_noted_in(folder) for folder in folders]
    lines = [line for text in texts for line in text.splitlines()]
    found = [line.removeprefix(fact).strip() for line in lines if line.startswith(fact)]
    return "; ".join(dict.fromkeys(found)) or "not recorded"


def _noted_in(folder: Path) -> str:
    try:
        return (read(folder, PROVENANCE) or b"").decode(errors="replace")
    except OSError as error:
        warn_left_out(folder, str(error))
        return ""


def _distinct(values: list[str]) -> str:
    """Return the values that there are, each once, in the order of numbers."""
    found = sorted({value for value in values if value}, key=lambda value: (len(value), value))
    shown = found if len(found) <= 6 else [*found[:3], "...", found[-1]]
    return ", ".join(shown)


def _dates(runs: list[Run]) -> str:
    """Return the dates between which the runs ended, where they are recorded."""
    dates = {str(run.summary["date"]) for run in runs if run.summary and "date" in run.summary}
    files = [run.directory / METRICS for run in runs if not run.summary or not dates]
    times = [file.stat().st_mtime for file in files if file.exists()]
    dates |= {datetime.fromtimestamp(time, UTC).date().isoformat() for time in times}
    if not dates:
        return "not recorded"
    return min(dates) if len(dates) == 1 else f"{min(dates)} to {max(dates)}"


def _folders(runs: list[Run], folder: Path) -> list[Folder]:
    """Return where the runs are, for a page in ``folder``."""
    files = {run.directory.parent for run in runs}
    folders = []
    for place in sorted({file.parent if file.name == PACKED else file for file in files}):
        address = quote(Path(os.path.relpath(place, folder)).as_posix()) + "/"
        shown = (place / CURVES).is_file() and not (place / CURVES).is_symlink()
        picture = address + CURVES if shown else None
        folders.append(Folder(address, place.name or str(place), picture))
    return folders


def make_sections(runs: list[Run], folder: Path) -> list[Section]:
    """Return a section for each study, data set and model, by accuracy where its runs have one.

    Args:
        runs: all that the page shows.
        folder: of the page, from which it links to the runs.
    """
    groups = group_runs(runs)
    depths = {title: min(len(r.directory.parts) for r in group) for title, group in groups.items()}
    order = sorted(groups, key=lambda title: (depths[title], title))  # a study before those in it
    return [_make_section(title, groups[title], folder) for title in order]


def _make_section(title: str, runs: list[Run], folder: Path) -> Section:
    evaluated = [run for run in runs if any("test_loss" in row for row in run.metrics)]
    with_accuracy = [run for run in evaluated if any("test_accuracy" in row for row in run.metrics)]
    metric = "accuracy" if with_accuracy else "loss"
    shown = with_accuracy or evaluated
    missing = [str(run.directory) for run in runs if run not in shown]
    curves = make_curves(shown, metric, left_out=lambda place, _: missing.append(str(place)))
    return Section(title, metric, curves, missing, _provenance(runs), _folders(runs, folder))


def render(runs: list[Run], title: str, folder: Path = Path()) -> str:
    """Return the page.

    Args:
        runs: those to compare.
        title: of the page, as plain text.
        folder: where the page will be, from which it links to the runs.
    """
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dlion.suite.compare", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template("report.html.jinja").render(
        title=title,
        sections=make_sections(runs, folder),
        dashes=DASHES,
        marks=MARKS,
        tags=tags,
        breakable=breakable,
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
        type=of_kind(".html", ".htm"),
        metavar="FILE",
        help="default: report.html in the first of RUNS",
    )
    parser.add_argument("--title", default="Accuracy against bandwidth")
    options = parser.parse_args(arguments)
    default = beside(options.runs, "report.html")
    page = render(read_runs(options.runs), options.title, (options.output or default).parent)
    with output_file(options.output, default) as file:
        write_atomically(file, page)
