"""The figures of the page that compares runs, in plotly."""

import math
from typing import Any

import numpy as np
from markupsafe import Markup
from plotly.graph_objects import Figure

from dlion.compare.curves import Curve, short
from dlion.compare.style import (
    AXES,
    TITLES,
    Style,
    ends,
    lines_over,
    name_of,
    shown,
    sides_of,
    spread,
    styles_of,
    values_of,
)

CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
LAYOUT = {
    "template": "plotly_white",
    "height": 420,
    "hovermode": "closest",
}
# plotly's words for matplotlib's
MARKERS = {
    "s": "square", "o": "circle", "D": "diamond", "^": "triangle-up", "v": "triangle-down",
    "P": "cross", "*": "star",
}  # fmt: skip
LINES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
FILLS = {"full": "", "none": "-open", "left": "-dot", "right": "-open-dot"}
SIDES = {"right": "middle right", "left": "middle left", "above": "top center",
         "below": "bottom center"}  # fmt: skip
METHOD = "method"  # what a curve is chosen by on the page, beside its settings


def tags(curve: Curve, without: str | None = None) -> dict[str, str]:
    """By what a curve can be chosen on the page."""
    told = {key: str(value) for key, value in curve.told.items() if key != without}
    return {METHOD: curve.method, **told}


def _look(style: Style, size: int = 6) -> dict[str, Any]:
    """A style in plotly's words."""
    symbol = MARKERS[style.marker] + FILLS[style.fill]
    return {
        "line": {"color": style.colour, "dash": LINES[style.line]},
        "marker": {"symbol": symbol, "color": style.colour, "size": size},
    }


def _bars(finals: list[np.ndarray]) -> dict[str, Any]:
    """From the lowest to the highest of each."""
    down, up = np.stack([spread(final) for final in finals], 1).tolist()
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def points(curves: list[Curve], metric: str) -> Markup:
    """The last values against the bits of a step."""
    figure, styles = Figure(), styles_of(curves)
    several = len({c.method for c in curves}) > 1
    known = [c for c in curves if c.paper_bits is not None]
    # those that are likely to be shown together make room for each other's names
    for variant in dict.fromkeys(c.variant() if several else "" for c in known):
        group = [c for c in known if c.variant() == variant or not several]
        finals = [ends(c, metric, False) for c in group]
        names = [c.method if several else c.variant() for c in group]
        places = [(c.paper_bits, float(f.mean())) for c, f in zip(group, finals, strict=True)]
        sides = sides_of(dict(zip(names, places, strict=True)))
        for c, final, name, (x, y) in zip(group, finals, names, places, strict=True):
            figure.add_scatter(
                x=[x], y=[y], error_y=_bars([final]), name=name_of(c), meta=tags(c),
                mode="markers+text", text=[name], textposition=SIDES[sides[name]],
                cliponaxis=False, **_look(styles[c.label], 13),
            )  # fmt: skip
    ticks = [2**i for i in range(8)]
    words = AXES["paper_bits"].replace(", ", ",<br>")
    figure.update_xaxes(title_text=words, type="log", tickvals=ticks, ticktext=ticks)
    return _html(figure, metric, right=96)  # room for the last names


def bands(curves: list[Curve], metric: str, against: str) -> Markup:
    """The values against an attribute of the curves."""
    figure, styles = Figure(), styles_of(curves)
    for curve in curves:
        x, values = getattr(curve, against).tolist(), shown(curve.values, metric)
        style, same = styles[curve.label], {"name": name_of(curve), "meta": tags(curve)}
        if curve.seeds > 1:
            edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", **same}
            edge["showlegend"] = False
            rgb = ", ".join(str(int(style.colour[i : i + 2], 16)) for i in (1, 3, 5))
            figure.add_scatter(x=x, y=values.min(0).tolist(), **edge)
            figure.add_scatter(
                x=x, y=values.max(0).tolist(), fill="tonexty", fillcolor=f"rgba({rgb}, 0.15)",
                **edge,
            )  # fmt: skip
        look = _look(style)
        figure.add_scatter(x=x, y=values.mean(0).tolist(), mode="lines+markers", **look, **same)
    if against == "bits":
        words = AXES["bits"].replace(" and", "<br>and")
        ticks = _log_ticks([bits for c in curves for bits in c.bits if bits])
        figure.update_xaxes(title_text=words, type="log", **ticks)
    else:
        figure.update_xaxes(title_text=against)
    return _html(figure, metric)


def _log_ticks(values: list[float]) -> dict[str, Any]:
    """Decades, and 2 and 5 between them where there are few."""
    low, high = min(values, default=1), max(values, default=1)
    digits = (1,) if high / low > 100 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def lines(curves: list[Curve], metric: str, key: str) -> Markup:
    """The last values against a setting."""
    figure, styles = Figure(), styles_of(curves, key)
    order = [str(value) for value in values_of(curves, key)]
    for name, line in lines_over(curves, key).items():
        finals = [ends(c, metric, False) for c in line]
        figure.add_scatter(
            x=[str(c.settings[key]) for c in line], y=[float(f.mean()) for f in finals], name=name,
            error_y=_bars(finals), mode="lines+markers", meta=tags(line[0], key),
            **_look(styles[line[0].label]),
        )  # fmt: skip
    figure.update_xaxes(
        title_text=short(key), type="category", categoryorder="array", categoryarray=order
    )
    return _html(figure, metric)


def _html(figure: Figure, metric: str, right: int = 16) -> Markup:
    methods = {trace.meta[METHOD] for trace in figure.data}  # the filter tells their colours
    legend = {"orientation": "h", "y": -0.25, "yanchor": "top"}
    figure.update_layout(**LAYOUT, showlegend=len(methods) == 1, legend=legend)
    figure.update_layout(margin={"l": 60, "r": right, "t": 24, "b": 64})
    figure.update_yaxes(title_text=TITLES[metric])
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))
