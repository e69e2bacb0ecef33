"""Styles and names of curves, in every kind of figure and table."""

import math
import random
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from dlion.errors import UserError
from dlion.optim import METHODS
from dlion.suite.compare.curves import Curve, is_accuracy, meant, sort_key
from dlion.values import show


class Style(NamedTuple):
    """Style of a curve, in matplotlib's words."""

    colour: str
    marker: str
    line: str
    fill: str


# of methods, in the order of METHODS: the palettes of Okabe and Ito and of Paul Tol, which the
# colour-blind can read, and markers
_PALETTE = [
    *("#555555", "#000000", "#D55E00", "#E69F00", "#CC79A7", "#9467BD", "#0072B2", "#56B4E9"),
    *("#009E73", "#8B4513", "#117733", "#332288", "#999933", "#661100", "#44AA99", "#AA4499"),
    *("#88CCEE", "#DDCC77", "#882255"),
]
_MARKERS = "sooDoD^vP*X<>sPdpHh"
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#8B4513"]
_LINES = ["solid", "dashed", "dotted", "dashdot"]
_FILLS = ["full", "none", "left", "right"]

TITLES = {
    "accuracy": "test accuracy (%)",
    "loss": "test loss (nats)",
    "outside_box": "share of parameters outside the box",
    "box_distance": "distance of the farthest parameter to the box",
    "kkt_score": "KKT score",
    "agreement": "share of entries whose vote has the sign of the mean",
    "disagreement": "share of entries whose vote has the opposite sign of the mean",
    "momentum_variance": "variance of momenta over workers / mean square",
}
AXES = {
    "bits": "bits sent per parameter and worker, so far",
    "paper_bits": "bits per parameter and step, both ways (papers' count)",
    "sent_bits": "bits that a worker sends, per parameter and step",
    "received_bits": "bits that a worker receives, per parameter and step",
    "step": "step",
    "seconds": "seconds of training",
}
# axes of settings: what they are in words; {n} is the number of workers
_SETTINGS = {
    "workers": "workers",
    "local_steps": "local steps between two exchanges",
    "batch_size": "samples of a worker and step",
    "participation": "share of the workers in a step",
    "optimizer.lr": "learning rate",
    "optimizer.bits": "bits of an entry of a worker's message (p)",
    "optimizer.momentum_sync": "steps between two averages of the momenta",
    "optimizer.sync_pattern": "parameters whose momenta are averaged",
    "dataset.alpha": "Dirichlet alpha (small: non-i.i.d. data)",
    "faults.byzantine": "Byzantine workers (who send wrong gradients) of {n}",
    "faults.drop": "share of the messages that are lost",
    "faults.deaths": "deaths of each process, a minute",
    "model.modern": "GPT2++ blocks (model.modern)",
}
_VALUES = {
    ("optimizer.momentum_sync", "0"): "never",
    ("optimizer.sync_pattern", "null"): "all",
}
CURVES = "curves.png"  # all curves of a folder of runs, beside them
MOST_LABELS = 14  # up to so many points have their names beside them, more have a legend
SIDES = {
    "right": (1, 0),
    "left": (-1, 0),
    "above": (0, 1),
    "below": (0, -1),
    "right above": (1, 1),
    "right below": (1, -1),
    "left above": (-1, 1),
    "left below": (-1, -1),
}

# of a figure's width and height: what a label beside a point takes
_LABEL_GAP = (0.03, 0.045)
_LETTER_WIDTH = 0.013
_LINE_HEIGHT = 0.034
_MARKER_WIDTH = 0.04
_PASSES = 4
_ORDERS = 64  # in which names choose their sides, until none covers another


def looks(number: int) -> tuple[str, str]:
    """Return colour and marker of a method, by its place in METHODS; rounds pair them otherwise."""
    turn, place = divmod(number, len(_PALETTE))
    return _PALETTE[place], _MARKERS[(place + 7 * turn) % len(_MARKERS)]


def styles_of(curves: list[Curve], hidden: str | None = None) -> dict[str, Style]:
    """Return the style of each curve, by its label.

    Methods differ by colour, the settings of a method by line and fill. Curves of a single method
    differ by colour.

    Args:
        curves: all that share a figure.
        hidden: a setting that the figure shows otherwise, on an axis or as panels.
    """
    methods = list(dict.fromkeys(curve.method for curve in curves))
    variants = list(dict.fromkeys(filter(None, (curve.variant(hidden) for curve in curves))))
    known = {name: looks(number) for number, name in enumerate(METHODS)}
    other_colours = dict(zip(methods, _COLOURS * len(methods), strict=False))
    styles = {}
    for curve in curves:
        variant = curve.variant(hidden)
        number = variants[::-1].index(variant) if variant else 0  # the last is solid
        colour, marker = known.get(curve.method, (other_colours[curve.method], "o"))
        if len(methods) == 1 and len(variants) > 1:
            colour = _COLOURS[number % len(_COLOURS)]
            styles[curve.label] = Style(colour, marker, "solid", "full")
        else:
            styles[curve.label] = Style(colour, marker, _LINES[number % 4], _FILLS[number % 4])
    return styles


def in_axis_unit(values: np.ndarray, metric: str) -> np.ndarray:
    """Return values of a metric in the unit of its axis: accuracies in per cent."""
    return values * (100 if is_accuracy(metric) else 1)


def end_values(curve: Curve, metric: str, best: bool = False) -> np.ndarray:
    """Return the last, or the best, evaluation of each run, ``[runs]``, in the axis' unit."""
    return in_axis_unit(curve.best(metric) if best else curve.final, metric)


def error_bar(values: np.ndarray) -> np.ndarray:
    """Return how far the lowest and the highest value are from the mean, ``[2]``."""
    return np.array([values.mean() - values.min(), values.max() - values.mean()])


def number_format(metric: str) -> str:
    """Return the format of a metric's values in tables, in the unit of its axis."""
    return ".2f" if is_accuracy(metric) else ".4f"


def mean_and_deviation(values: np.ndarray, form: str, sign: str = "") -> str:
    """Return the mean and, of several values, the standard deviation; or that one is not finite.

    Args:
        values: of the runs.
        form: of a number, such as ``.2f``.
        sign: ``+`` to show the mean's sign even if it is positive.
    """
    if np.isnan(values).any():
        return "diverged"
    deviation = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
    return f"{values.mean():{sign}{form}}{deviation}"


def title_of(metric: str) -> str:
    """Return the label of a metric on an axis, with the unit of :func:`in_axis_unit`."""
    return TITLES.get(metric, f"{metric} (%)" if is_accuracy(metric) else metric)


def axis_title(x: str, curves: list[Curve]) -> str:
    """Return the title of an axis of bits, of steps or of a setting, in words where it has some."""
    if x in AXES:
        return AXES[x]
    counts = {curve.settings.get("workers") for curve in curves}
    return _SETTINGS[x].format(n=counts.pop() if len(counts) == 1 else "n") if x in _SETTINGS else x


def tick_label(setting: str, value: Any) -> str:
    """Return a setting's value in words, for an axis of it."""
    text = show(value)
    return _VALUES.get((setting, text), text)


def is_ordered(values: list[Any]) -> bool:
    """Whether a line may join these values of a setting: numbers, no names."""
    return all(isinstance(value, int | float) for value in values)


def display_name(curve: Curve, hidden: str | None = None) -> str:
    """Return a curve's name for legends and tables, without a setting that is shown otherwise."""
    name = " ".join(filter(None, [curve.method, curve.variant(hidden)]))
    return name + ("" if curve.finished else f" (not finished, to step {curve.steps[-1]:,})")


def lines_along(curves: list[Curve], setting: str) -> dict[str, list[Curve]]:
    """Return the curves that differ by one setting alone: by name, in the order of the setting."""
    lines: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        if setting in curve.settings:
            lines[display_name(curve, setting)].append(curve)
    return {
        name: sorted(line, key=lambda curve: sort_key(curve.settings[setting]))
        for name, line in lines.items()
    }


def setting_values(curves: list[Curve], setting: str) -> list[Any]:
    """Return the values that a setting has in these curves, in order.

    Raises:
        UserError: if they lack the setting.
    """
    values = [curve.settings[setting] for curve in curves if setting in curve.settings]
    if not values:
        known = sorted(set().union(*(curve.settings for curve in curves)))
        raise UserError(
            f"{setting} is no setting of these runs{meant(setting, known)}: choose"
            f" {', '.join(known)}"
        )
    distinct = {sort_key(value): value for value in values}
    return [distinct[key] for key in sorted(distinct)]


def log_ticks(values: list[float]) -> list[float]:
    """Return ticks of a logarithmic axis: decades, and 2 and 5 between them where there are few."""
    low, high = min(values, default=1), max(values, default=1)
    digits = (1,) if high / low > 100 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in digits]


class _Label(NamedTuple):
    """A text or a marker in a figure of width 1: its middle, and half its width."""

    x: float
    y: float
    half_width: float

    def overlap(self, other: "_Label") -> float:
        """The area that both cover."""
        width = self.half_width + other.half_width - abs(self.x - other.x)
        return max(width, 0) * max(_LINE_HEIGHT - abs(self.y - other.y), 0)


def label_sides(points: dict[str, tuple[float, float]], tallness: float = 1.0) -> dict[str, str]:
    """Return for each point the side where its name has room, one of SIDES.

    Args:
        points: by name, on a logarithmic x and a linear y axis.
        tallness: of the figure, over that of others.
    """
    if not points:
        return {}
    markers = _markers(points, tallness)
    order = sorted(points, key=lambda name: -points[name][1])  # the highest first
    draws = random.Random(0)
    tried = [_sides_in_turn(markers, order)]
    while tried[-1][1] > 0 and len(tried) < _ORDERS:
        tried.append(_sides_in_turn(markers, draws.sample(order, len(order))))
    return min(tried, key=lambda found: found[1])[0]


def _sides_in_turn(markers: dict[str, _Label], order: list[str]) -> tuple[dict[str, str], float]:
    """Choose the sides of names in turn; return also the area that they cover of others."""
    labels: dict[str, _Label] = {}
    sides: dict[str, str] = {}
    covered: dict[str, float] = {}
    for name in _PASSES * order:  # again, as the first knew nothing of the last
        choices = {side: _label_beside(markers[name], name, side) for side in SIDES}
        others = [label for other, label in labels.items() if other != name]
        overlaps = {
            side: sum(label.overlap(other) for other in (*markers.values(), *others))
            for side, label in choices.items()
        }
        sides[name] = min(overlaps, key=overlaps.__getitem__)
        labels[name], covered[name] = choices[sides[name]], overlaps[sides[name]]
    return sides, sum(covered.values())


def _markers(points: dict[str, tuple[float, float]], tallness: float) -> dict[str, _Label]:
    """Return where the points' markers are in the figure."""
    xs = {name: math.log(x) for name, (x, _) in points.items()}
    ys = {name: y for name, (_, y) in points.items()}
    width = max(max(xs.values()) - min(xs.values()), 1e-9)
    height = max(max(ys.values()) - min(ys.values()), 1e-9)
    half = _MARKER_WIDTH / 2
    return {name: _Label(xs[name] / width, tallness * ys[name] / height, half) for name in points}


def _label_beside(marker: _Label, name: str, side: str) -> _Label:
    right, above = SIDES[side]
    half_width = _LETTER_WIDTH / 2 * len(name)
    return _Label(
        marker.x + right * (half_width + _LABEL_GAP[0]),
        marker.y + above * _LABEL_GAP[1],
        half_width,
    )
