"""How curves look and what they are called, in every kind of figure."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from dlion.compare.curves import Curve, place_of
from dlion.errors import UserError


class Style(NamedTuple):
    """How a curve is drawn; the words are matplotlib's."""

    colour: str
    marker: str
    line: str
    fill: str


# colour (Okabe and Ito's, told apart by the colour-blind) and marker of each method
_METHODS = {
    "g_adamw": ("#555555", "s"),
    "g_lion": ("#000000", "o"),
    "dlion_mavo": ("#D55E00", "o"),
    "dlion_avg": ("#E69F00", "D"),
    "signum_mavo": ("#CC79A7", "o"),
    "signum_avg": ("#9467BD", "D"),
    "terngrad": ("#0072B2", "^"),
    "graddrop": ("#56B4E9", "v"),
    "dgc": ("#009E73", "P"),
    "lion_cub": ("#8B4513", "*"),
}
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#8B4513"]
_LINES = ["solid", "dashed", "dotted", "dashdot"]
_FILLS = ["full", "none", "left", "right"]

TITLES = {
    "accuracy": "test accuracy (%)",
    "loss": "test loss (nats)",
    "outside_box": "share of parameters outside the box",
    "box_distance": "distance of the farthest parameter to the box",
    "kkt_score": "KKT score",
}
AXES = {
    "bits": "bits sent per parameter and worker, so far",
    "paper_bits": "bits per parameter and step, both ways (papers' count)",
    "step": "step",
}
SIDES = {"right": (1, 0), "left": (-1, 0), "above": (0, 1), "below": (0, -1)}
NAMED = 14  # so many points have their names beside them instead of a legend


def styles_of(curves: list[Curve], without: str | None = None) -> dict[str, Style]:
    """By the curve's label: a colour for each method, a line for each setting.

    Curves of one method have a colour for each setting. ``without`` one that is told otherwise.
    """
    methods = list(dict.fromkeys(c.method for c in curves))
    variants = list(dict.fromkeys(v for c in curves if (v := c.variant(without))))
    colours = dict(zip(methods, _COLOURS * len(methods), strict=False))
    styles = {}
    for c in curves:
        colour, marker = _METHODS.get(c.method, (colours[c.method], "o"))
        number = variants[::-1].index(v) if (v := c.variant(without)) else 0  # the last is solid
        if len(methods) == 1 and len(variants) > 1:
            styles[c.label] = Style(_COLOURS[number % len(_COLOURS)], marker, "solid", "full")
        else:
            styles[c.label] = Style(colour, marker, _LINES[number % 4], _FILLS[number % 4])
    return styles


def shown(values: np.ndarray, metric: str) -> np.ndarray:
    """In the unit of the axis."""
    return values * (100 if "accuracy" in metric else 1)


def ends(curve: Curve, metric: str, best: bool) -> np.ndarray:
    """The last or the best evaluation of each run, ``[runs]``, in the unit of the axis."""
    return shown(curve.best(metric) if best else curve.final, metric)


def spread(values: np.ndarray) -> np.ndarray:
    """From the mean down to the lowest and up to the highest, ``[2]``."""
    return np.array([values.mean() - values.min(), values.max() - values.mean()])


def with_deviation(values: np.ndarray, form: str) -> str:
    """The mean, and the standard deviation of more than one, in digits like ``.2f``."""
    deviation = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{deviation}"


def title_of(metric: str) -> str:
    return TITLES.get(metric, metric)


def name_of(curve: Curve, without: str | None = None) -> str:
    name = " ".join(filter(None, [curve.method, curve.variant(without)]))
    return name + ("" if curve.finished else " (not finished)")


def lines_over(curves: list[Curve], x: str) -> dict[str, list[Curve]]:
    """The curves that differ by the setting x alone, by name, in the order of x."""
    lines: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        if x in curve.settings:
            lines[name_of(curve, x)].append(curve)
    return {
        name: sorted(line, key=lambda curve: place_of(curve.settings[x]))
        for name, line in lines.items()
    }


def values_of(curves: list[Curve], key: str) -> list[Any]:
    """What a setting is in these curves, in order.

    Raises:
        UserError: if they have no such setting.
    """
    if not any(key in c.settings for c in curves):
        known = sorted(set().union(*(c.settings for c in curves)))
        raise UserError(f"{key} is no setting of these runs: choose {', '.join(known)}")
    found = {place_of(c.settings[key]): c.settings[key] for c in curves if key in c.settings}
    return [found[place] for place in sorted(found)]


def sides_of(points: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Where a point's name has room beside it: right, left, above or below.

    ``points``: on a logarithmic and a linear axis.
    """
    if not points:
        return {}
    xs = {name: math.log(x) for name, (x, _) in points.items()}
    ys = {name: y for name, (_, y) in points.items()}
    width = max(*xs.values(), min(xs.values()) + 1e-9) - min(xs.values())
    height = max(*ys.values(), min(ys.values()) + 1e-9) - min(ys.values())
    taken = [(xs[name] / width, ys[name] / height, 0.02) for name in points]
    sides = {}
    for name in sorted(points, key=lambda name: -ys[name]):
        half = 0.007 * len(name)  # of the name's length, as a part of the width
        free = {}
        for side, (right, above) in SIDES.items():
            x = xs[name] / width + right * (half + 0.03)
            y = ys[name] / height + above * 0.05
            free[side] = (
                (x, y, half),
                sum(abs(x - u) < half + other and abs(y - v) < 0.04 for u, v, other in taken),
            )
        sides[name] = min(free, key=lambda side: free[side][1])
        taken.append(free[sides[name]][0])
    return sides
