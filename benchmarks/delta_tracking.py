"""How closely adaptive delta modulation follows what the workers of a training would say.

    python benchmarks/delta_tracking.py

Trains with dlion_adm on digits, whose classes are shared out evenly and unevenly, and on text, all
workers in one process, for several settings. What the owners' estimates miss is divided into slope
overload, where the step did not reach the truth, and granular noise, where it went beyond it.
Writes delta_tracking.json and its figure.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from common import ROOT, Parser, Points, Row, run
from matplotlib.figure import Figure
from torch import Tensor

from dlion.core.bucket import Bucket
from dlion.exchange import Channel
from dlion.kernels import step_size
from dlion.kernels.reference import lion_direction
from dlion.optim import DistributedOptimizer, DLion, DLionADM, GLion
from dlion.streams import stream, stream_seed
from dlion.suite.arguments import whole
from dlion.suite.data import Data, Sharding, mnist5k, stdlib_text
from dlion.suite.models import gpt, vit
from dlion.suite.training.evaluation import evaluate
from dlion.suite.training.schedule import share_of_rate
from dlion.wire.packing import unpack_bits
from dlion.workers import Workers

SEED = 0
MOMENTA = [(0.9, 0.99), (0.8, 0.9), (0.7, 0.8), (0.9, 0.95)]
LION, SHORTER, SHORT, _ = MOMENTA
COLOURS = ("#D55E00", "#0072B2", "#009E73")  # of the tasks
MARKERS = {0.0: "v", 0.5: "s", 1.0: "o", 2.0: "^"}  # of the lookaheads


class Setting(NamedTuple):
    """How a training is done, without knobs for methods that have none."""

    betas: tuple[float, float]
    rise: int | None = 3
    lookahead: float | None = 1.0
    method: str = "dlion_adm"


class Task(NamedTuple):
    """What is trained.

    Attributes:
        alpha: of the Dirichlet distribution of the classes; None: samples are dealt out at random.
        settings: the standard one comes first.
    """

    data: Callable[[], Data]
    model: Callable[[Any], torch.nn.Module]
    workers: int
    batch_size: int
    alpha: float | None
    steps: int
    warmup: int
    lr: float
    settings: list[Setting]


class Schedule(NamedTuple):
    """The settings of a schedule, as in conf/schedule."""

    warmup_steps: int
    final: float = 0.0


def digits() -> Data:
    """Load the digits, to be seen as they are."""
    return mnist5k(augment=False)


def others(momenta: Sequence[tuple[float, float]]) -> list[Setting]:
    """Return settings of the methods that are compared with."""
    return [
        Setting(betas, None, None, name) for name in ("g_lion", "dlion_mavo") for betas in momenta
    ]


ALIKE = [Setting(LION)] + [Setting(LION, r, c) for c in (1.0, 0.0) for r in (2, 3, 4)]
UNLIKE = ALIKE + [Setting(LION, rise, 2.0) for rise in (2, 3, 4)]
UNLIKE += [Setting(betas, rise) for rise in (3, 2) for betas in MOMENTA[1:]]
UNLIKE += [Setting(SHORTER, 3, 0.0), Setting(SHORTER, 4), Setting(LION, 3, 0.5)]
TEXT = [(3, 1.0), (2, 1.0), (4, 1.0), (3, 0.0), (3, 0.5), (3, 2.0)]
TASKS = {
    "unlike digits": Task(digits, vit, 8, 16, 0.1, 320, 0, 1.5e-3, UNLIKE + others(MOMENTA)),
    "text": Task(
        stdlib_text,
        gpt,
        4,
        8,
        None,
        1200,
        50,
        4e-3,
        [*(Setting(SHORT, *knobs) for knobs in TEXT), Setting(LION), *others([SHORT])],
    ),
    "alike digits": Task(
        digits, vit, 8, 16, 100.0, 320, 0, 1.5e-3, [*ALIKE, Setting(LION, 2, 2.0)]
    ),
}


class Recorder(DLionADM):
    """dlion_adm that measures, at steps that are asked for, how its estimates meet the truth.

    Attributes:
        recording: whether the step that is being encoded is to be measured.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recording = False
        self._seen: list[tuple[Tensor, ...]] = []

    def encode(self, bucket: Bucket, local: int) -> None:
        if not self.recording:
            super().encode(bucket, local)
            return
        coder, (beta1, beta2) = bucket.exchange.coder(local), bucket.groups[0]["betas"]
        before = coder.estimate.clone()
        truth = torch.zeros_like(before)
        for start, momentum, gradient in bucket.grads().parts(bucket.own["momentum"][local]):
            direction = lion_direction(momentum.clone(), gradient, beta1, beta2)
            truth[start : start + len(direction)] = direction
        super().encode(bucket, local)
        momentum = bucket.own["momentum"][local]
        step = step_size(coder.level)
        bit = torch.where(truth >= before, 1.0, -1.0)
        equal = unpack_bits(coder.history[1].view(torch.uint8), len(bit))
        kept = bucket.mask.nonzero().flatten()
        values = (truth, coder.estimate, step, bit, coder.level, equal, momentum)
        self._seen.append(tuple(value[kept] for value in values))

    def measure(self) -> dict[str, float]:
        """Return what the last step, which was recorded, amounts to."""
        (bucket,) = self.buckets
        answer = bucket.exchange.decode()[bucket.mask.nonzero().flatten()]
        rows = [torch.stack(values) for values in zip(*self._seen, strict=True)]
        self._seen.clear()
        self.recording = False
        return compare(*rows, answer, self.lookahead)


METHODS: dict[str, Callable[..., DistributedOptimizer]] = {
    "dlion_adm": Recorder,
    "g_lion": GLion,
    "dlion_mavo": DLion,
}


def compare(
    truth: Tensor,
    estimate: Tensor,
    step: Tensor,
    bit: Tensor,
    level: Tensor,
    equal: Tensor,
    momentum: Tensor,
    answer: Tensor,
    lookahead: float,
) -> dict[str, float]:
    """Measure a step: all ``[n, d]`` but the answer, ``[d]``.

    Returns:
        ``error``, ``overload``, ``granular``: norms of the mean over workers of what the estimates
        miss, of its part with the sign of the bit, and of the rest, over the norm of the mean of
        the truth. ``ahead``: the error with the steps ahead. ``own``: of a worker alone.
        ``equal``: share of bits that are the last ones. ``low``, ``middle``, ``high``: 10, 50 and
        90 % of the step over the truth. ``floor``, ``top``: share of steps at either end.
        ``agrees``, ``vote_agrees``: how often the answer, or a vote on the truth, has the sign of
        the mean of the truth; ``..._slow``: of the mean momentum; for a tie of the vote, a half.
    """
    mean, missed = truth.mean(0), truth - estimate
    size, beyond = mean.norm(), missed * bit < 0
    ahead = (estimate + lookahead * step * bit).mean(0)
    some = truth != 0
    ratio = (step[some] / truth[some].abs())[:: max(1, int(some.sum()) // 200_000)]
    low, middle, high = ratio.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    vote, slow = torch.where(truth >= 0, 1.0, -1.0).sum(0).sign(), momentum.mean(0)
    return {
        "error": (missed.mean(0).norm() / size).item(),
        "overload": (missed.where(~beyond, 0).mean(0).norm() / size).item(),
        "granular": (missed.where(beyond, 0).mean(0).norm() / size).item(),
        "ahead": ((mean - ahead).norm() / size).item(),
        "own": (missed.norm(dim=1) / truth.norm(dim=1)).mean().item(),
        "equal": equal.float().mean().item(),
        "low": low,
        "middle": middle,
        "high": high,
        "floor": (level == 0).float().mean().item(),
        "top": (level == 255).float().mean().item(),
        "agrees": agreement(answer, mean),
        "vote_agrees": agreement(vote, mean),
        "agrees_slow": agreement(answer, slow),
        "vote_agrees_slow": agreement(vote, slow),
        "mean_agrees_slow": agreement(mean.sign(), slow),
    }


def agreement(signs: Tensor, values: Tensor) -> float:
    """Return how often signs are those of values that are not zero; a sign of 0 is half right."""
    some = values != 0
    return ((1 + signs[some] * values[some].sign()) / 2).mean().item()


def train(
    task: Task, setting: Setting, steps: int, every: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the test results, and what dlion_adm measured every few steps."""
    data, workers = task.data(), Workers(local=task.workers)
    torch.manual_seed(stream_seed(SEED, "initialisation"))
    model = task.model(data)
    make = METHODS[setting.method]
    knobs = {"rise": setting.rise, "lookahead": setting.lookahead} if make is Recorder else {}
    options = {"lr": task.lr, "betas": setting.betas, "weight_decay": 5e-3, "seed": SEED}
    optimizer = make(
        model.named_parameters(),
        workers=workers,
        overlap=False,
        bucket_cap_mb=None,
        **options,
        **knobs,
    )
    share = share_of_rate(Schedule(min(task.warmup, steps - 1)), steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    shards = (data.labels, task.alpha) if task.alpha else (None, 1.0)
    mode = "dirichlet" if task.alpha else "partition"
    sharding = Sharding(data.train_size, task.workers, task.batch_size, SEED, mode, *shards)
    records = []
    for step in range(steps):
        recording = isinstance(optimizer, Recorder) and step % every == every - 1
        if recording:
            optimizer.recording = True
        for worker in range(task.workers):
            coins = stream(SEED, "coins", worker, step)
            x, y = data.batch(sharding.indices(worker, step), coins)
            data.loss(model(x), y).backward()
            optimizer.collect(worker)
        optimizer.step()
        if recording:
            records.append({"step": step + 1, **optimizer.measure()})
        schedule.step()
    return evaluate(model, data, Channel(workers), "cpu"), records


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, output=ROOT / "results" / "delta_modulation")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="some only"
    )
    parser.add_argument(
        "--steps", type=whole(2), help="of every training; default: 320 for digits, 1200 for text"
    )
    parser.add_argument("--records", type=whole(2), default=40, help="measurements in a training")
    parser.add_argument("--standard", action="store_true", help="no other settings than these")
    small = ["unlike digits", "text"]
    return parser.read(arguments, tasks=small, steps=4, records=2, standard=True)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    settings = {"steps": args.steps, "records": args.records}
    points = Points(args.output / "delta_tracking.json", {"seed": SEED}, settings, args.fresh)
    count = 1 if args.standard else None
    first = [key(name, TASKS[name].settings[0]) for name in args.tasks]
    keys = first + [key(name, each) for name in args.tasks for each in TASKS[name].settings[:count]]
    keys = list({str(each): each for each in keys}.values())
    for each in points.missing(keys, cost=lambda each: 5 if each["task"] == "text" else 3):
        task = TASKS[each["task"]]
        values = (each[name] for name in Setting._fields)
        steps = args.steps or task.steps
        results, records = train(task, Setting(*values), steps, max(1, steps // args.records))
        row = {"results": rounded(results), "means": rounded(means(records)) if records else None}
        row["curve"] = list(map(rounded, records)) if each in first else None
        points.add(each, [row])
    for name in args.tasks:
        show(name, [row for row in points.rows if row["task"] == name])
    measured = [row for row in points.rows if row["means"]]
    draw(measured).savefig(args.output / "delta_tracking.png", dpi=90)


def key(name: str, setting: Setting) -> Row:
    """Return a point's key."""
    return {"task": name, **setting._asdict(), "betas": list(setting.betas)}


def means(records: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of what was measured after the first tenth of a training."""
    counted = records[len(records) // 10 :]
    names = (name for name in records[0] if name != "step")
    return {name: sum(record[name] for record in counted) / len(counted) for name in names}


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Return numbers with four digits."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def show(name: str, rows: list[Row]) -> None:
    """Print a table."""
    columns = ["error", "overload", "granular", "ahead", "own", "equal", "low", "middle", "high"]
    columns += ["agrees", "vote_agrees", "agrees_slow", "mean_agrees_slow"]
    heads = ["method", "betas", "rise", "lookahead", "result", *columns]
    print(f"\n{name}\n\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in sorted(rows, key=order):
        cells = [f"{row['means'][column]:.3g}" if row["means"] else "" for column in columns]
        betas = ", ".join(map(str, row["betas"]))
        knobs = ["" if value is None else f"{value:g}" for value in (row["rise"], row["lookahead"])]
        print(f"| {' | '.join([row['method'], betas, *knobs, result(row), *cells])} |", flush=True)


def order(row: Row) -> tuple[Any, ...]:
    """Return what rows are sorted by."""
    return row["method"], row["betas"], row["lookahead"], row["rise"]


def result(row: Row) -> str:
    """Return the accuracy, or where there is none the loss, as it is read."""
    found = row["results"]
    if "test_accuracy" in found:
        return f"{100 * found['test_accuracy']:.1f} %"
    return f"{found['test_loss']:.3f}"


def draw(rows: list[Row]) -> Figure:
    """Draw errors over time at the standard setting, and error and agreement by setting."""
    figure = Figure(figsize=(11.5, 6.5), layout="constrained")
    above, below = figure.subplots(2, len(TASKS))
    for axis, name in zip(above, TASKS, strict=True):
        draw_curve(axis, next((r["curve"] for r in rows if r["task"] == name and r["curve"]), []))
        axis.set_title(f"{name}, the standard setting", fontsize=9)
    above[0].legend(fontsize=7, loc="upper right", ncols=3)
    titles = {
        "error": "tracking error",
        "agrees": "answers with the sign of the mean",
        "agrees_slow": "... of the mean momentum",
    }
    for axis, (what, title) in zip(below, titles.items(), strict=True):
        draw_settings(axis, rows, what)
        axis.set_title(title, fontsize=9)
    for name, colour in zip(TASKS, COLOURS, strict=True):
        below[0].plot([], [], "o", ms=5, color=colour, label=name)
    for lookahead, marker in MARKERS.items():
        below[0].plot([], [], marker, ms=5, color="grey", label=f"lookahead {lookahead:g}")
    below[0].legend(fontsize=6, loc="lower left")
    return figure


def draw_curve(axis: Any, curve: list[dict[str, float]]) -> None:
    """Draw a training's errors, and how often the answer has the sign of the mean."""
    lines = {"error": "-", "overload": "--", "granular": ":", "agrees": "-", "vote_agrees": "-."}
    for name, line in lines.items():
        steps = [record["step"] for record in curve]
        axis.plot(steps, [record[name] for record in curve], line, label=name.replace("_", " "))
    axis.set(xlabel="step", ylim=(0, 1.3))


def draw_settings(axis: Any, rows: list[Row], what: str) -> None:
    """Draw a point for every setting, by momenta and rise."""
    for row in rows:
        position = 4 * MOMENTA.index(tuple(row["betas"])) + row["rise"] - 2
        colour = COLOURS[list(TASKS).index(row["task"])]
        axis.plot(position, row["means"][what], MARKERS[row["lookahead"]], ms=5, color=colour)
    starts = range(0, 4 * len(MOMENTA), 4)
    axis.set_xticks(
        [start + i for start in starts for i in range(3)], labels=[2, 3, 4] * len(starts)
    )
    axis.set_xlabel("rise", fontsize=8)
    for start, (beta1, beta2) in zip(starts, MOMENTA, strict=True):
        axis.axvline(start - 1, color="lightgrey", lw=0.8)
        middle = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "top"}
        axis.text(start + 1, 0.99, f"{beta1:g}, {beta2:g}", fontsize=7, **middle)
    axis.set_xlim(-1, 4 * len(MOMENTA) - 1)
    axis.margins(y=0.12)


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
