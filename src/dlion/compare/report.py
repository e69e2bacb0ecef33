"""Compare runs on one page: ``python -m dlion.compare.report RUN_DIR... [-o report.html]``.

The page needs nothing else, no network and no account. Runs are grouped by data set and model;
those that differ only by their seed become one curve with a band from the worst to the best.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from dlion.compare.curves import Curve, group_runs, make_curves, short
from dlion.compare.plotly_figures import METHOD, bands, lines, points, tags
from dlion.compare.style import NAMED, TITLES, ends, name_of, styles_of, values_of, with_deviation
from dlion.errors import UserError
from dlion.files import write_atomically
from dlion.record.runs import Run
from dlion.record.studies import find_runs


@dataclass(frozen=True)
class Cell:
    """A number of the table as it is shown; ``best``: of its column."""

    text: str
    best: bool


@dataclass(frozen=True)
class Choice:
    """A button of a filter: a value, its words, its colour, and whether it is on at first."""

    value: str
    words: str
    colour: str
    on: bool


@dataclass(frozen=True)
class Section:
    """What the page shows of the runs of one model on one data set."""

    title: str
    metric: str
    curves: list[Curve]
    unevaluated: list[str]

    def rows(self) -> list[tuple[Curve, str, str, list[Cell]]]:
        """(curve, name, colour, cells of the table), the best at the end first."""
        percent = self.metric == "accuracy"
        form, pick = (".2f", max) if percent else (".4f", min)
        curves = sorted(self.curves, key=lambda c: c.final.mean(), reverse=percent)
        styles = styles_of(self.curves)
        finals, tops = ([ends(c, self.metric, best) for c in curves] for best in (False, True))
        columns = [
            *(
                _column(
                    pick, [float(v.mean()) for v in group], [with_deviation(v, form) for v in group]
                )
                for group in (finals, tops)
            ),
            _column(min, [c.paper_bits for c in curves], "{:.3g}"),
            _column(min, [c.sent_bytes / 1e3 for c in curves], "{:,.1f} kB"),
            _column(max, [c.saving for c in curves], "{:.3g}x"),
            _column(min, [1e3 * c.seconds for c in curves], "{:,.1f} ms"),
        ]
        return [
            (curve, name_of(curve), styles[curve.label].colour, list(cells))
            for curve, cells in zip(curves, zip(*columns, strict=True), strict=True)
        ]

    def filters(self) -> dict[str, list[Choice]]:
        """What to choose curves by, and the values: the method, and the settings that differ.

        Of very many curves those of the most workers are shown at first.
        """
        styles = styles_of(self.curves)
        methods = {c.method: styles[c.label].colour for c in self.curves}
        found = {METHOD: [Choice(m, m, colour, True) for m, colour in methods.items()]}
        many = len(self.curves) > NAMED
        for key in sorted({key for c in self.curves for key in c.told}):
            values = values_of(self.curves, key)
            off = values[:-1] if many and key == "workers" else []
            found[key] = [Choice(str(v), f"{short(key)} {v}", "", v not in off) for v in values]
        return found

    def differences(self) -> tuple[list[str], list[tuple[Curve, list[str]]]]:
        """The settings in which the curves differ, and each curve's values of them."""
        keys = sorted(set().union(*(c.settings for c in self.curves)) - {"optimizer.name"})
        shown = [key for key in keys if self._differs(key)]
        table = [(c, [str(c.settings.get(k, "")) for k in shown]) for c in self.curves]
        return [key.removeprefix("optimizer.") for key in shown], table

    def _differs(self, key: str) -> bool:
        """Methods have settings of their own; what else a run lacks is younger than it."""
        known = [repr(c.settings[key]) for c in self.curves if key in c.settings]
        own = key.startswith("optimizer.") and len(known) < len(self.curves)
        return own or len(set(known)) > 1

    def figures(self) -> list[tuple[str, str, Markup]]:
        """(title, what it shows in words, HTML) of each figure."""
        word = TITLES[self.metric]
        shaded = f"{word}; bands from the worst to the best seed"
        found = [
            (
                "at the end, against bits per step",
                f"{word} of the last evaluation; bars from the worst to the best seed",
                points(self.curves, self.metric),
            ),
            ("against traffic", shaded, bands(self.curves, self.metric, "bits")),
            ("against steps", shaded, bands(self.curves, self.metric, "steps")),
        ]
        for key in self.filters():
            if key != METHOD:
                words = f"{word} of the last evaluation; bars from the worst to the best seed"
                heading = f"at the end, against {short(key)}"
                found.append((heading, words, lines(self.curves, self.metric, key)))
        return found


def _column(
    choose: Callable[[list[float]], float], values: list[float | None], texts: list[str] | str
) -> list[Cell]:
    """A column of the table: values, how they are written, and which of them are best."""
    known = [value for value in values if value is not None]
    best = choose(known) if len(known) > 1 else None
    if isinstance(texts, str):
        texts = ["" if value is None else texts.format(value) for value in values]
    return [
        Cell(text, None not in (value, best) and math.isclose(value, best))
        for value, text in zip(values, texts, strict=True)
    ]


def make_sections(runs: list[Run]) -> list[Section]:
    """A section for each model and data set, by accuracy where its runs have one."""
    sections = []
    for (dataset, model), group in sorted(group_runs(runs).items()):
        evaluated = [r for r in group if any("test_loss" in row for row in r.metrics)]
        accuracies = [r for r in evaluated if any("test_accuracy" in row for row in r.metrics)]
        metric = "accuracy" if accuracies else "loss"
        shown = accuracies or evaluated
        missing = [str(run.directory) for run in group if run not in shown]
        sections.append(
            Section(f"{model} on {dataset}", metric, make_curves(shown, metric), missing)
        )
    return sections


def render(runs: list[Run], title: str) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dlion.compare", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page = environment.get_template("report.html.jinja")
    return page.render(
        title=title,
        sections=make_sections(runs),
        tags=tags,
        named=NAMED,
        count=len(runs),
        unfinished=sum(not run.finished for run in runs),
        plotly=Markup(get_plotlyjs()),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.compare.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument("--title", default="Accuracy against bandwidth")
    options = parser.parse_args(arguments)
    try:
        text = render(find_runs(options.runs), options.title)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, text)
    print(options.output)


if __name__ == "__main__":
    main()
