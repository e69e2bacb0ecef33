"""Print the board: each method's final result, its cost, and which differences exceed the noise.

TASK is a folder with task.yaml and published runs:

  runs.jsonl   the lines
  noise/       one method with many seeds, which is its line as well
  compute/     short runs on an idle machine (or the folder that task.yaml names as compute:)
  links/       real runs over emulated links, for --links
  search.csv   the trials, a table of dlion collect, for --search

results/board has the rules. --links prints milliseconds a step, and in brackets the ratio to the
board's assumption: the longer of the same step without links and the wire, or their sum after local
steps.
"""

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from omegaconf.errors import OmegaConfBaseException
from scipy.special import stdtrit

from dlion.errors import UserError
from dlion.suite.arguments import add_printed_output, make_parser, print_or_write
from dlion.suite.compare.curves import (
    Conditions,
    Curve,
    Settings,
    best_first,
    make_curves,
    select_runs,
    settings_of,
)
from dlion.suite.compare.options import add_only, conditions_of
from dlion.suite.compare.plot import FRONTS, Figure, draw
from dlion.suite.compare.reading import read_runs
from dlion.suite.compare.readme import MARK, refresh
from dlion.suite.compare.style import (
    display_name,
    end_values,
    in_axis_unit,
    mean_and_deviation,
    number_format,
    title_of,
)
from dlion.suite.compare.table import Table, to_markdown
from dlion.suite.compare.trials import to_search_table
from dlion.suite.files import write_atomically
from dlion.suite.inside import read
from dlion.suite.record.configs import read_yaml
from dlion.suite.record.runs import Run
from dlion.suite.record.studies import PACKED
from dlion.suite.units import parse_rate, show_rate

RATES = (10, 100, 1000)  # Mbit/s
LEVEL = 0.01  # two-sided: means that chance parts so far less often differ
NEVER = "never"


@dataclass(frozen=True)
class Task:
    """Task on which methods are compared.

    Attributes:
        title: for people.
        metric: ``accuracy`` or ``loss``.
        target: a value of it, a share or nats.
        curves: of the runs to their end.
        apart: how far noise lets two single runs end from each other, in the unit of tables; None
            if it was not measured. It is Student's t at LEVEL, times the standard deviation over
            seeds, times the square root of 2.
        compute: seconds of a worker and step without a network, by method and number of workers.
    """

    title: str
    metric: str
    target: float
    curves: list[Curve]
    apart: float | None
    compute: dict[tuple[str, int], float]

    @property
    def up(self) -> bool:
        """Whether more is better."""
        return self.metric == "accuracy"


@dataclass(frozen=True)
class Standing:
    """A method's line on the board.

    Attributes:
        curve: of its runs.
        behind: how far its mean is behind the best, in the unit of tables.
        level: whether noise could explain that; None if the noise is not known.
        late_gain: what its mean has gained in the last fifth of the steps, in the unit of tables.
        bits_to_target: sent per parameter until all seeds have reached the target, their mean.
        steps_to_target: the same in steps; infinite if a seed never did.
    """

    curve: Curve
    behind: float
    level: bool | None
    late_gain: float
    bits_to_target: float
    steps_to_target: float

    def seconds(self, rate: float, compute: float | None) -> float | None:
        """Return the time to the target over links of ``rate`` bits a second.

        Messages travel while a step computes, or after it where workers take local steps. The
        steps between two evaluations count with what was sent in them: a warm-up sends more.
        """
        if compute is None:
            return None
        if self.steps_to_target == math.inf:
            return math.inf
        curve = self.curve
        end, sent = curve.steps[-1], curve.bits / (curve.bits[-1] or 1)  # of all that was sent
        total = 8 * end * max(curve.sent_bytes, curve.received_bytes)
        wire = np.diff(sent, prepend=0) * total / rate
        computing = np.diff(curve.steps, prepend=0) * compute
        spent = np.maximum(computing, wire) if _overlaps(curve.settings) else computing + wire
        return float(np.interp(self.steps_to_target, curve.steps, spent.cumsum()))


def read_task(folder: Path, conditions: Conditions) -> Task:
    """Read a task and its runs.

    Args:
        folder: of the task.
        conditions: on its lines; noise and computing are taken from all runs of as many workers.

    Raises:
        UserError: if the folder holds none, or no run that meets the conditions.
    """
    try:
        facts = read_yaml(folder, "task.yaml")
        title, metric, target = str(facts["title"]), facts["metric"], float(facts["target"])
        measured = folder / facts.get("compute", "compute")
        if metric not in ("accuracy", "loss"):
            raise ValueError
    except (
        OSError,
        yaml.YAMLError,
        OmegaConfBaseException,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            f"{folder} holds no task: task.yaml has a title, a metric (accuracy or loss) and a"
            " target"
        ) from error

    def runs(place: Path) -> list[Run]:
        return read_runs([place / PACKED]) if (place / PACKED).exists() else []

    seeds = runs(folder / "noise")
    everything = seeds + runs(folder)
    lines = make_curves(select_runs(everything, conditions) if everything else [], metric)
    for line in lines:
        if line.settings.get("local_steps", 1) > 1:
            raise UserError(
                f"{folder} has {line.label}, whose steps are of {line.settings['local_steps']}"
                " gradients each: a step on the board is of one, so leave it out"
            )
    counts = {line.settings["workers"] for line in lines}
    compute: dict[tuple[str, int], float] = {}
    for curve in make_curves(runs(measured), metric):
        key = curve.method, curve.settings["workers"]
        if key in compute:
            raise UserError(f"{measured} has several runs of {curve.label}: publish one")
        compute[key] = curve.seconds / curve.settings["workers"]
    apart = [
        math.sqrt(2) * float(stdtrit(len(curve.seeds) - 1, 1 - LEVEL / 2)) * ends.std(ddof=1)
        for curve in make_curves(seeds, metric)
        if len(ends := end_values(curve, metric)) > 1 and curve.settings["workers"] in counts
    ]
    return Task(
        title=title,
        metric=metric,
        target=target,
        curves=lines,
        apart=max(apart, default=None),
        compute=compute,
    )


def standings(task: Task) -> list[Standing]:
    """Return a line for every method, the best first."""
    sign = 1 if task.up else -1
    order = best_first(task.curves, task.metric)
    lines = []
    for curve in order:
        best = end_values(order[0], task.metric)
        ends = end_values(curve, task.metric)
        behind = sign * float(best.mean() - ends.mean()) + 0.0  # not -0.0
        level = None
        if task.apart is not None:
            level = behind <= task.apart * math.sqrt((1 / len(best) + 1 / len(ends)) / 2)
        course = in_axis_unit(curve.values.mean(0), task.metric)
        before = float(np.interp(0.8 * curve.steps[-1], curve.steps, course))
        steps = np.array([_first_at(task, curve, values) for values in curve.values])
        step = float(steps.mean())
        lines.append(
            Standing(
                curve=curve,
                behind=behind,
                level=level,
                late_gain=sign * (float(course[-1]) - before),
                bits_to_target=float(np.interp(step, curve.steps, curve.bits, right=math.inf)),
                steps_to_target=step,
            )
        )
    return lines


def _first_at(task: Task, curve: Curve, values: np.ndarray) -> float:
    """Return the first evaluated step at which a run has reached the target, or infinity."""
    reached = values >= task.target if task.up else values <= task.target
    return float(curve.steps[reached.argmax()]) if reached.any() else math.inf


def to_table(task: Task, lines: list[Standing]) -> Table:
    """Return the board as a table."""
    form = number_format(task.metric)
    times = [f"{rate:,} Mbit/s" for rate in RATES]
    ends = ["at the end", "seeds", "behind", "last fifth"]
    costs = ["sent", "received", "sent to target", *times, "state"]
    table = [[title_of(task.metric), *ends, *costs]]
    for line in lines:
        curve, values = line.curve, end_values(line.curve, task.metric)
        verdict = "" if line.level is None else " (noise)" if line.level else " (behind)"
        compute = task.compute.get((curve.method, curve.settings["workers"]))
        seconds = [line.seconds(rate * 1e6, compute) for rate in RATES]
        table.append(
            [
                display_name(curve),
                mean_and_deviation(values, form),
                str(len(curve.seeds)),
                "" if math.isnan(line.behind) else f"{line.behind:{form}}{verdict}",
                "" if math.isnan(line.late_gain) else f"{line.late_gain:+{form}}",
                *(f"{bits:.3g}" for bits in (curve.sent_bits, curve.received_bits)),
                NEVER if line.bits_to_target == math.inf else f"{line.bits_to_target:,.0f}",
                *("" if s is None else NEVER if s == math.inf else f"{s:.3g} s" for s in seconds),
                "" if curve.state_bytes is None else f"{curve.state_bytes:.3g}",
            ]
        )
    return table


def to_link_table(runs: list[Run]) -> Table:
    """Return the time of a step over each link, and over the longer of computing and wire."""
    steps: dict[str, dict[float, Run]] = defaultdict(dict)
    for run in runs:
        settings = settings_of(run)
        name, rate = settings["optimizer.name"], settings.get("network.rate")
        speed = parse_rate(rate) if rate else math.inf
        if speed in steps[name]:
            raise UserError(f"links/ has two runs of {name} at {_link_name(speed)}: publish one")
        steps[name][speed] = run
    rates = sorted({rate for by_rate in steps.values() for rate in by_rate})
    table = [["ms a step", *map(_link_name, rates)]]
    for name, by_rate in steps.items():
        if by_rate.keys() != set(rates) or math.inf not in rates:
            raise UserError(f"links/ lacks a rate or network=none of {name}: publish all of them")
        cells = []
        for rate in rates:
            seconds, wire = _step(by_rate[rate], rate)
            alone, _ = _step(by_rate[math.inf], rate)
            expected = max(alone, wire) if _overlaps(settings_of(by_rate[rate])) else alone + wire
            over = "" if rate == math.inf else f" ({seconds / expected:.2f})"
            cells.append(f"{1e3 * seconds:,.0f}{over}")
        table.append([name, *cells])
    return table


def _overlaps(settings: Settings) -> bool:
    """Whether messages travel while a step computes, and not after it."""
    return "optimizer.local_steps" not in settings


def _link_name(rate: float) -> str:
    """Return the name of a link of so many bits a second; infinite: no link."""
    return "no link" if rate == math.inf else show_rate(rate)


def _step(run: Run, rate: float) -> tuple[float, float]:
    """Return the seconds of a step of a run, and those of its bytes over a link."""
    last = run.metrics[-1] if run.metrics else {}
    measured = [last.get(key) for key in ("seconds", "sent_bytes", "received_bytes")]
    if None in measured:
        raise UserError(f"{run.directory} has no measurements: publish a run with some")
    seconds, *sizes = measured
    return seconds / last["step"], 8 * max(sizes) / rate / last["step"]


def make_table(arguments: list[str]) -> str:
    """Return the Markdown that the command prints with these arguments.

    Raises:
        UserError: if the board does not exist.
    """
    return _board(_parse(arguments))


def make_page(folder: Path, conditions: Conditions) -> None:
    """Write README.md's tables and the figures of a task into its folder.

    Raises:
        UserError: if the folder holds no task, or its page no text to put them in.
    """
    task, page = read_task(folder, conditions), folder / "README.md"
    content = read(folder, page.name)
    if content is None:
        raise UserError(f"{page} is missing: write one with <!-- table: dlion board {folder} -->")
    text = content.decode()
    if not MARK.search(text):
        raise UserError(
            f"{page} has no place for a table: write a line <!-- table: dlion board {folder} -->"
        )
    if not task.curves:
        raise UserError(f"{folder} has no run yet: dlion publish RUNS -o {folder} adds some")
    for bits in FRONTS:
        draw(task.curves, Figure(task.metric, bits), folder / f"{bits}.png")
    write_atomically(page, refresh(text))


def _board(options: argparse.Namespace) -> str:
    if options.links:
        runs = read_runs([options.task / "links" / PACKED])
        return to_markdown(to_link_table(select_runs(runs, conditions_of(options))))
    task = read_task(options.task, conditions_of(options))
    if options.search:
        return to_markdown(to_search_table(options.task / "search.csv", task.metric))
    return to_markdown(to_table(task, standings(task)))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("board", __doc__, "results/board/cifar10 --only workers=8")
    parser.add_argument("task", type=Path, metavar="TASK", help="a folder with task.yaml and runs")
    parser.add_argument(
        "--page", action="store_true", help="also update the tables and figures of TASK/README.md"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--links", action="store_true", help="real steps over emulated links")
    instead.add_argument("--search", action="store_true", help="the best trial of each method")
    add_only(parser)
    add_printed_output(parser, ".md")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = _parse(arguments)
    print_or_write(_board(options), options.output, "board.md")
    if options.page:
        make_page(options.task, conditions_of(options))
