"""Draw accuracy against bandwidth: ``python -m dlion.results.plot RUN_DIR... [-o PREFIX]``.

Takes any directories with runs below them, prints a table, and writes PREFIX.png. Runs that differ
only by their seed become one line with a band from the worst to the best. For a page to look around
in: ``python -m dlion.results.report``.
"""

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from dlion.errors import UserError
from dlion.results.curves import Curve, choose_metric, make_curves
from dlion.results.record import find_runs

# colour (Okabe and Ito's, told apart by the colour-blind) and marker of each method
STYLES = {
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
_OTHERS = ["#7F7F7F", "#BCBD22", "#17BECF", "#1F77B4", "#2CA02C", "#D62728"]
PLOTLY_MARKERS = {
    "s": "square", "o": "circle", "D": "diamond", "^": "triangle-up", "v": "triangle-down",
    "P": "cross", "*": "star",
}  # fmt: skip

TITLES = {
    "accuracy": "test accuracy (%)",
    "loss": "test loss (nats)",
    "outside_box": "share of parameters outside the box",
    "box_distance": "distance of the farthest parameter to the box",
    "kkt_score": "KKT score",
}
BITS = "bits sent per parameter and worker, so far"
PAPER_BITS = "bits per parameter and step, both ways (papers' count)"


def styles_of(curves: list[Curve]) -> dict[str, tuple[str, str]]:
    """Colour and marker by label: a method's own, where it has one curve only."""
    counts = {c.method: sum(other.method == c.method for other in curves) for c in curves}
    spare = iter(_OTHERS * len(curves))
    return {
        c.label: STYLES[c.method]
        if c.method in STYLES and counts[c.method] == 1
        else (next(spare), STYLES.get(c.method, ("", "o"))[1])
        for c in curves
    }


def _shown(curve: Curve, metric: str) -> Any:
    return curve.values * (100 if "accuracy" in metric else 1)


def _title(metric: str) -> str:
    return TITLES.get(metric, metric)


def name_of(curve: Curve) -> str:
    return curve.label + ("" if curve.finished else " (not finished)")


def write_png(curves: list[Curve], metric: str, path: Path) -> None:
    """Two panels: the metric against bits sent, and at the end against the papers' bits a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = styles_of(curves)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12.5, 5), layout="constrained", sharey=True
    )
    for curve in curves:
        colour, marker = styles[curve.label]
        values = _shown(curve, metric)
        left.plot(
            curve.bits, values.mean(0), color=colour, marker=marker, ms=4, label=name_of(curve)
        )
        left.fill_between(curve.bits, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
        if curve.paper_bits is not None:
            final = values[:, -1]
            spread = [[final.mean() - final.min()], [final.max() - final.mean()]]
            right.errorbar(
                curve.paper_bits, final.mean(), spread, color=colour, marker=marker, ms=9, capsize=3
            )
    left.set(xscale="log", xlabel=BITS, ylabel=_title(metric), title=f"{metric} against traffic")
    right.set(xscale="log", xlabel=PAPER_BITS, title="at the end, against bits per step")
    right.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    right.minorticks_off()
    if any(c.bits[-1] == 0 for c in curves):  # one worker sends nothing
        left.set_xscale("symlog", linthresh=1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    seeds = max(c.seeds for c in curves)
    title = f"band: worst to best of {seeds} seeds" if seeds > 1 else None
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", title=title,
                  frameon=False)  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_over(curves: list[Curve], metric: str, x: str, path: Path) -> None:
    """One panel: the metric over steps, or its last value over a setting (``workers``, say).

    Raises:
        UserError: if no run has that setting.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 5), layout="constrained")
    if x == "step":
        styles = styles_of(curves)
        for curve in curves:
            colour, _ = styles[curve.label]
            values = _shown(curve, metric)
            axes.plot(curve.steps, values.mean(0), color=colour, label=name_of(curve))
            axes.fill_between(
                curve.steps, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0
            )
    else:
        lines: dict[str, list[Curve]] = defaultdict(list)
        for curve in curves:
            if x not in curve.settings:
                known = sorted(set().union(*(c.settings for c in curves)))
                raise UserError(f"--x={x}: choose step, {', '.join(known)}")
            words = curve.label.split()
            key = f"{x.rpartition('.')[2]}="
            lines[" ".join(word for word in words if not word.startswith(key))].append(curve)
        spare = iter(_OTHERS * len(lines))
        values = sorted({_place(curve.settings[x]) for curve in curves})
        for label, line in sorted(lines.items()):
            colour, marker = STYLES.get(label, (next(spare), "o"))
            line.sort(key=lambda curve: _place(curve.settings[x]))
            finals = [_shown(curve, metric)[:, -1] for curve in line]
            means = [final.mean() for final in finals]
            spread = [
                [final.mean() - final.min() for final in finals],
                [final.max() - final.mean() for final in finals],
            ]
            places = [values.index(_place(curve.settings[x])) for curve in line]
            axes.errorbar(
                places, means, spread, color=colour, marker=marker, capsize=3, label=label
            )
        axes.set_xticks(range(len(values)), labels=[text for _, text in values])
    axes.set(xlabel=x, ylabel=_title(metric))
    if metric not in ("accuracy", "outside_box") and all((c.values > 0).all() for c in curves):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _place(value: Any) -> tuple[float, str]:
    """Where a setting's value stands on an axis: numbers by size, then the rest by name."""
    is_number = isinstance(value, int | float)
    return (float(value) if is_number else math.inf, str(value))


def print_table(curves: list[Curve], metric: str) -> None:
    """The table on the terminal; the best value is bold."""
    from rich.console import Console
    from rich.table import Table

    percent = "accuracy" in metric
    table = Table(title=f"{_title(metric)} and traffic")
    columns = (
        "method",
        "seeds",
        "at the end",
        "best",
        "paper bits",
        "sent a step",
        "saving",
        "time",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    pick = max if percent else min
    leader = pick(curves, key=lambda c: c.final.mean()).label
    for curve in curves:
        values = _shown(curve, metric)
        final, best = values[:, -1], (values.max(1) if percent else values.min(1))
        form = ".2f" if percent else ".4f"
        spread = f" ± {final.std(ddof=1):{form}}" if curve.seeds > 1 else ""
        table.add_row(
            name_of(curve),
            str(curve.seeds),
            f"{final.mean():{form}}{spread}",
            f"{best.mean():{form}}",
            "" if curve.paper_bits is None else f"{curve.paper_bits:.3g}",
            f"{curve.sent_bytes / 1e3:.4g} kB",
            "" if curve.saving is None else f"{curve.saving:.3g}x",
            f"{1e3 * curve.seconds:.3g}",
            style="bold" if curve.label == leader else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        "± is the deviation over seeds; saving: against a float32 ring all-reduce; ms: per step.",
        style="dim",
        soft_wrap=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dlion.results.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves"), metavar="PREFIX")
    parser.add_argument("--metric", help="accuracy, loss, or a key of metrics.jsonl")
    parser.add_argument(
        "--x", help="step, or a setting such as workers; without: bits sent, and bits per step"
    )
    options = parser.parse_args()
    try:
        runs = find_runs(options.runs)
        metric = choose_metric(runs, options.metric)
        curves = make_curves(runs, metric)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print_table(curves, metric)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    path = options.output.with_name(options.output.name + ".png")
    try:
        if options.x is None:
            write_png(curves, metric, path)
        else:
            write_over(curves, metric, options.x, path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(path)


if __name__ == "__main__":
    main()
