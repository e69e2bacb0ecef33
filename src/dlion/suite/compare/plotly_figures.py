"""The figures of the page that compares runs, in plotly."""

from html import escape
from typing import Any

import numpy as np
from markupsafe import Markup
from plotly.graph_objects import Figure

from dlion.suite.compare.curves import Curve
from dlion.suite.compare.style import (
    AXES,
    MOST_LABELS,
    TITLES,
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
    number_format,
    setting_values,
    styles_of,
    tick_label,
)
from dlion.values import show

CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "sendChartToCloud", "sendDataToCloud"],
}
LAYOUT = {
    "template": "plotly_white",
    "paper_bgcolor": "rgba(0, 0, 0, 0)",
    "plot_bgcolor": "rgba(0, 0, 0, 0)",
    "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": "#8a929c", "activecolor": "#2a3f5f"},
    "height": 420,
    "hovermode": "closest",
}
# plotly's words for matplotlib's
MARKERS = {
    "s": "square",
    "o": "circle",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
    "X": "x",
    "P": "cross",
    "*": "star",
    "d": "diamond-tall",
    "p": "pentagon",
    "h": "hexagon",
    "H": "hexagon2",
}
LINES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
FILLS = {"full": "", "none": "-open", "left": "-dot", "right": "-open-dot"}
SIDES = {
    "right": "middle right",
    "left": "middle left",
    "above": "top center",
    "below": "bottom center",
    "right above": "top right",
    "right below": "bottom right",
    "left above": "top left",
    "left below": "bottom left",
}
METHOD = "method"  # what a curve is chosen by on the page, beside its settings


def tags(curve: Curve, hidden: str | None = None) -> dict[str, str]:
    """Return the filters of a curve on the page, without a setting that an axis shows."""
    settings = {key: show(value) for key, value in curve.differing.items() if key != hidden}
    return {METHOD: curve.method, **settings}


def figure_over_paper_bits(curves: list[Curve], metric: str) -> Markup:
    """Draw the last values over the bits of a step, a named point for each curve."""
    figure, styles = Figure(), styles_of(curves)
    several_methods = len({curve.method for curve in curves}) > 1
    groups = _shown_together(curves, several_methods)
    for group in groups:
        finals = [end_values(curve, metric) for curve in group]
        names = [_verbatim(curve.method if several_methods else curve.variant()) for curve in group]
        longest = [curve.label for curve in group] if len(groups) == 1 else names
        points = [
            (c.paper_bits, float(final.mean())) for c, final in zip(group, finals, strict=True)
        ]
        sides = label_sides(dict(zip(longest, points, strict=True)))
        for i, (curve, final, (x, y)) in enumerate(zip(group, finals, points, strict=True)):
            figure.add_scatter(
                x=[x],
                y=[y],
                error_y=_error_bars([final]),
                name=_verbatim(display_name(curve)),
                meta=tags(curve),
                mode="markers+text",
                text=[names[i]],
                # the page shows one or the other
                customdata=[[names[i], _verbatim(display_name(curve))]],
                **_hover([x], [final], display_name(curve), metric),
                textposition=SIDES[sides[longest[i]]],
                cliponaxis=False,
                **_look(styles[curve.label], 13),
            )
    ticks = [2**exponent for exponent in range(8)]
    title = AXES["paper_bits"].replace(", ", ",<br>")
    figure.update_xaxes(title_text=title, type="log", tickvals=ticks, ticktext=ticks)
    return _to_html(figure, metric, right_margin=96)  # room for the last names


def _shown_together(curves: list[Curve], several_methods: bool) -> list[list[Curve]]:
    """Return the curves in groups that are likely to be chosen together on the page.

    Those of a group make room for each other's names.
    """
    known = [curve for curve in curves if curve.paper_bits is not None]
    if not several_methods or len(known) <= MOST_LABELS:
        return [known]
    variants = dict.fromkeys(curve.variant() for curve in known)
    return [[curve for curve in known if curve.variant() == variant] for variant in variants]


def figure_over_course(curves: list[Curve], metric: str, x: str) -> Markup:
    """Draw the values in the course of training over ``x``, bits or steps, with bands."""
    figure, styles = Figure(), styles_of(curves)
    for curve in curves:
        xs, values = getattr(curve, x).tolist(), in_axis_unit(curve.values, metric)
        style = styles[curve.label]
        common = {"x": xs, "name": _verbatim(display_name(curve)), "meta": tags(curve)}
        if len(curve.seeds) > 1:
            edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", **common}
            edge["showlegend"] = False
            fill = {"fill": "tonexty", "fillcolor": _translucent(style.colour)}
            figure.add_scatter(y=values.min(0).tolist(), **edge)
            figure.add_scatter(y=values.max(0).tolist(), **fill, **edge)
        figure.add_scatter(
            y=values.mean(0).tolist(),
            mode="lines+markers",
            **_look(style),
            **_hover(xs, list(values.T), display_name(curve), metric),
            **common,
        )
    if x == "bits":
        title = AXES["bits"].replace(" and", "<br>and")
        ticks = log_ticks([bits for curve in curves for bits in curve.bits if bits])
        labels = [f"{tick:,.10g}" for tick in ticks]
        figure.update_xaxes(title_text=title, type="log", tickvals=ticks, ticktext=labels)
    else:
        figure.update_xaxes(title_text=x)
    return _to_html(figure, metric)


def figure_along_setting(curves: list[Curve], metric: str, setting: str) -> Markup:
    """Draw the last values over the values of a setting."""
    figure, styles = Figure(), styles_of(curves, setting)
    values = setting_values(curves, setting)
    mode = "lines+markers" if is_ordered(values) else "markers"
    for name, line in lines_along(curves, setting).items():
        finals = [end_values(curve, metric) for curve in line]
        xs = [_verbatim(tick_label(setting, curve.settings[setting])) for curve in line]
        figure.add_scatter(
            x=xs,
            y=[float(final.mean()) for final in finals],
            name=_verbatim(name),
            error_y=_error_bars(finals),
            mode=mode,
            meta=tags(line[0], setting),
            **_look(styles[line[0].label]),
            **_hover(xs, finals, name, metric),
        )
    figure.update_xaxes(
        title_text=_verbatim(axis_title(setting, curves)),
        type="category",
        categoryorder="array",
        categoryarray=[_verbatim(tick_label(setting, value)) for value in values],
    )
    return _to_html(figure, metric)


def _hover(xs: list[Any], finals: list[np.ndarray], name: str, metric: str) -> dict[str, Any]:
    """Return the text of a point: position, mean, range of the seeds, name."""
    form = number_format(metric)
    words = []
    for x, final in zip(xs, finals, strict=True):
        down, up = error_bar(final)
        spread = f" (+{up:{form}} / -{down:{form}})" if len(final) > 1 else ""
        place = x if isinstance(x, str) else f"{x:,.4g}" if isinstance(x, float) else f"{x:,}"
        words.append(f"{place}, {final.mean():{form}}{spread} {_verbatim(name)}")
    return {"hovertext": words, "hoverinfo": "text"}


def _verbatim(text: str) -> str:
    """Return a text in which plotly finds no tags."""
    return escape(text, quote=False)


def _look(style: Style, size: int = 6) -> dict[str, Any]:
    """Return a style in plotly's words."""
    symbol = MARKERS[style.marker] + FILLS[style.fill]
    return {
        "line": {"color": style.colour, "dash": LINES[style.line]},
        "marker": {"symbol": symbol, "color": style.colour, "size": size},
    }


def _translucent(colour: str) -> str:
    """Return a colour like #D55E00 as that of a band."""
    rgb = ", ".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    return f"rgba({rgb}, 0.15)"


def _error_bars(finals: list[np.ndarray]) -> dict[str, Any]:
    """Return bars from the lowest to the highest value of each point."""
    down, up = np.stack([error_bar(final) for final in finals], 1).tolist()
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def _to_html(figure: Figure, metric: str, right_margin: int = 16) -> Markup:
    methods = {trace.meta[METHOD] for trace in figure.data}
    legend = {"orientation": "h", "y": -0.25, "yanchor": "top"}
    # the page's filters show the colours of several methods, and its key their lines
    figure.update_layout(**LAYOUT, showlegend=len(methods) == 1, legend=legend)
    figure.update_layout(margin={"l": 60, "r": right_margin, "t": 24, "b": 64})
    figure.update_yaxes(title_text=TITLES[metric])
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))
