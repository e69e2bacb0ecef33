"""Compare runs on one page: ``python -m dlion.results.report RUN_DIR... [-o report.html]``.

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
import numpy as np
from markupsafe import Markup

from dlion.errors import UserError
from dlion.files import write_atomically
from dlion.results.curves import Curve, group_runs, make_curves
from dlion.results.plot import BITS, PAPER_BITS, PLOTLY_MARKERS, TITLES, name_of, styles_of
from dlion.results.record import Run, find_runs

CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
LAYOUT = {
    "template": "plotly_white",
    "height": 420,
    "margin": {"l": 60, "r": 16, "t": 16, "b": 56},
    "showlegend": False,
    "hovermode": "closest",
}


@dataclass(frozen=True)
class Cell:
    """A number of the table as it is shown; ``best``: of its column."""

    text: str
    best: bool


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
        scale, form = (100, ".2f") if percent else (1, ".4f")
        pick = max if percent else min
        curves = sorted(self.curves, key=lambda c: c.final.mean(), reverse=percent)
        styles = styles_of(self.curves)
        finals = [scale * c.final for c in curves]
        tops = [scale * (c.values.max(1) if percent else c.values.min(1)) for c in curves]
        columns = [
            *(
                _column(pick, [float(v.mean()) for v in group], [_spread(v, form) for v in group])
                for group in (finals, tops)
            ),
            _column(min, [c.paper_bits for c in curves], "{:.3g}"),
            _column(min, [c.sent_bytes / 1e3 for c in curves], "{:,.1f} kB"),
            _column(max, [c.saving for c in curves], "{:.3g}x"),
            _column(min, [1e3 * c.seconds for c in curves], "{:.3g} ms"),
        ]
        return [
            (curve, name_of(curve), styles[curve.label][0], list(cells))
            for curve, cells in zip(curves, zip(*columns, strict=True), strict=True)
        ]

    def differences(self) -> tuple[list[str], dict[str, list[str]]]:
        """The settings in which the curves differ, and their values by the curve's label."""
        keys = sorted(set().union(*(c.settings for c in self.curves)) - {"optimizer._target_"})
        shown = [k for k in keys if len({repr(c.settings.get(k)) for c in self.curves}) > 1]
        table = {
            c.label: [str(c.settings[k]) if k in c.settings else "" for k in shown]
            for c in self.curves
        }
        return [key.removeprefix("optimizer.") for key in shown], table

    def figures(self) -> list[tuple[str, str, Markup]]:
        """(title, what it shows in words, HTML) of each figure."""
        word = TITLES[self.metric]
        return [
            (
                "at the end, against bits per step",
                f"{word} of the last evaluation; bars from the worst to the best seed",
                _draw(self.curves, self.metric, None, PAPER_BITS, log=True),
            ),
            (
                "against traffic",
                f"{word}; bands from the worst to the best seed",
                _draw(self.curves, self.metric, "bits", BITS, log=True),
            ),
            (
                "against steps",
                f"{word}; bands from the worst to the best seed",
                _draw(self.curves, self.metric, "steps", "steps", log=False),
            ),
        ]


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


def _spread(values: np.ndarray, form: str) -> str:
    spread = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{spread}"


def _draw(curves: list[Curve], metric: str, against: str | None, title: str, log: bool) -> Markup:
    """A figure as HTML: curves against one of their attributes, or the last values as points."""
    from plotly import graph_objects

    styles, figure = styles_of(curves), graph_objects.Figure()
    for curve in curves:
        colour, marker = styles[curve.label]
        values = curve.values * (100 if metric == "accuracy" else 1)
        look = {"name": name_of(curve), "legendgroup": curve.label}
        points = {"symbol": PLOTLY_MARKERS[marker], "color": colour, "size": 6}
        if against is None:
            if curve.paper_bits is None:
                continue
            last = values[:, -1]
            bars = {
                "type": "data",
                "symmetric": False,
                "array": [last.max() - last.mean()],
                "arrayminus": [last.mean() - last.min()],
            }
            points["size"] = 13
            figure.add_scatter(
                x=[curve.paper_bits], y=[last.mean()], error_y=bars, mode="markers+text",
                marker=points, text=[curve.label], textposition="middle right",
                cliponaxis=False, **look,
            )  # fmt: skip
            continue
        x = getattr(curve, against).tolist()
        if curve.seeds > 1:
            edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", **look}
            shade = f"rgba({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))}, 0.15)"
            figure.add_scatter(x=x, y=values.min(0).tolist(), **edge)
            figure.add_scatter(
                x=x, y=values.max(0).tolist(), fill="tonexty", fillcolor=shade, **edge
            )
        figure.add_scatter(
            x=x, y=values.mean(0).tolist(), mode="lines+markers", line={"color": colour},
            marker=points, **look,
        )  # fmt: skip
    figure.update_layout(**LAYOUT)
    figure.update_xaxes(title_text=title, type="log" if log else "linear")
    if against is None:
        ticks = [2**i for i in range(8)]
        figure.update_xaxes(tickvals=ticks, ticktext=[str(t) for t in ticks])
        figure.update_layout(margin_r=96)  # room for the last names
    figure.update_yaxes(title_text=TITLES[metric])
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))


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
        loader=jinja2.PackageLoader("dlion.results", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page = environment.get_template("report.html.jinja")
    return page.render(
        title=title,
        sections=make_sections(runs),
        count=len(runs),
        unfinished=sum(not run.finished for run in runs),
        plotly=Markup(get_plotlyjs()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.results.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument("--title", default="Accuracy against bandwidth")
    options = parser.parse_args()
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
