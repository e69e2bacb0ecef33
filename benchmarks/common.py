"""What the benchmarks share: arguments, rounds in random order, spreads, points that are kept."""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dlion.errors import RunFailed, Stopped, TrainingFailed, UserError
from dlion.suite import arguments
from dlion.suite.files import write_atomically
from dlion.suite.launch.environment import LOOPBACK
from dlion.suite.launch.local import interruptible
from dlion.suite.launch.network import check_possible
from dlion.suite.machine import die_with, machine
from dlion.suite.record.provenance import commit
from dlion.suite.training.signals import SIGNALS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "speed"

Row = dict[str, Any]


class Parser(arguments.Parser):
    """Arguments of a benchmark.

    Every benchmark has ``--smoke``; those that measure have ``--output`` and ``--fresh``.
    """

    def __init__(self, doc: str, output: Path | None = RESULTS, beside: str | None = None) -> None:
        """Make a parser.

        Args:
            doc: the benchmark's docstring; its first line is the description.
            output: where files go if nothing else is typed; None: nothing is measured.
            beside: a package that is measured too, and that dlion itself does not need.
        """
        super().__init__(description=doc.splitlines()[0])
        self._output, self._beside = output, beside
        self.add_argument(
            "--smoke",
            action="store_true",
            help="the smallest form, some seconds long, instead of what was typed beside it",
        )
        if output is None:
            self.set_defaults(output=None)
            return
        self.add_argument(
            "-o",
            "--output",
            type=folder,
            metavar="DIR",
            help=f"where files go; default: {output.relative_to(ROOT)}, with --smoke nowhere",
        )
        self.add_argument(
            "--fresh", action="store_true", help="measure again what was measured already"
        )

    def read(self, arguments: Sequence[str] | None, **smoke: Any) -> argparse.Namespace:
        """Parse the command line; ``smoke`` holds the arguments that ``--smoke`` puts in place."""
        args = self.parse_args(arguments)
        if self._beside is not None and importlib.util.find_spec(self._beside) is None:
            self.error(f"{self._beside} is measured here too: type pip install -e '.[test]'")
        if args.smoke:
            vars(args).update(smoke)
        elif args.output is None:
            args.output = self._output
        return args

    def check_links(self, args: argparse.Namespace) -> None:
        """Refuse emulated links that this machine cannot make; the smoke form does without."""
        missing = missing_for_links()
        if missing is None or not any(args.rates):
            return
        if not args.smoke:
            self.error(f"{missing}: do that, or type --rates loopback")
        print(f"over loopback, as {missing}", file=sys.stderr)
        args.rates = [None]


def missing_for_links() -> str | None:
    """Return why this machine cannot emulate slow links, None if it can."""
    try:
        check_possible()
    except UserError as error:
        return str(error).partition(":")[0]
    return None


def folder(text: str) -> Path:
    """Parse the name of a folder, which may be made in a folder that is there."""
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text} is not a folder, nor can it be made there")
    return path


def run(main: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Call ``main(args)`` with a folder to write to, and exit as train.py does.

    Exit codes: 0 measured, 1 failed, 2 wrong arguments, 130 interrupted.
    """
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="dlion-benchmark-") as temporary:
            if args.output is None:
                args.output = Path(temporary)
            args.output.mkdir(exist_ok=True)
            main(args)
    except UserError as error:
        _leave(f"error: {error}", 2)
    except RunFailed as error:
        _leave(f"error: {error}", 1)
    except (KeyboardInterrupt, Stopped):
        _leave("interrupted; what was measured is kept", 130)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


def fork(work: Callable[..., None], *args: Any) -> BaseProcess:
    """Run a function in a worker that meets others on loopback, and ends with this process."""
    process = multiprocessing.get_context("fork").Process(
        target=_enter, args=(os.getpid(), work, *args)
    )
    process.start()
    return process


def _enter(parent: int, work: Callable[..., None], *args: Any) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    die_with(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    code = 1
    try:
        work(*args)
        code = 0
    except TrainingFailed as error:
        print(f"error: {error}", flush=True)
    finally:
        os._exit(code)


def in_random_order(
    names: Iterable[str], rounds: int, warmups: int = 1, seed: int = 0
) -> Iterator[tuple[int, str]]:
    """Yield (round, name) of every name in every round; each round has an order of its own.

    What else happens on the machine then hits all names alike. Rounds below 0 are warm-ups.
    """
    order, rng = list(names), random.Random(seed)
    for round_ in range(-warmups, rounds):
        rng.shuffle(order)
        for name in order:
            yield round_, name


def wall_clock(case: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def interleaved(
    cases: dict[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[Callable[[], Any]], float] = wall_clock,
) -> dict[str, list[float]]:
    """Return the seconds of every case in every round; one warm-up round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_, name in in_random_order(cases, rounds):
        taken = clock(cases[name])
        if round_ >= 0:
            seconds[name].append(taken)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of at least two values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "rounds": len(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of values that were measured in the same rounds."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


class Points:
    """What a benchmark has measured, in one JSON file that is written after every point.

    A point has a key, such as ``{"rate": 10**8, "workers": 4}``, and rows, one for each case that
    was measured beside the others. It is not measured again by the same command: on the same
    machine, with equal settings and equal code. Points of another machine, or of another torch, are
    dropped; those of earlier code stay until they are measured again, each with its commit.

    Attributes:
        rows: all rows, each with its key.
    """

    def __init__(
        self, file: Path, facts: dict[str, Any], settings: dict[str, Any], fresh: bool = False
    ) -> None:
        """Read what there is.

        Args:
            facts: kept once, what holds for all points; other facts make another file.
            settings: kept with each row, how it was measured: rounds and the like.
            fresh: measure everything again.
        """
        self.file = file
        self.facts = {"machine": machine("cpu"), "torch": str(torch.__version__), **facts}
        self.facts = json.loads(json.dumps(self.facts))  # as they will be read
        self.settings = json.loads(json.dumps(settings)) | {"code": _code()}
        self.fresh = fresh
        self.rows: list[Row] = []
        before = json.loads(file.read_text()) if file.exists() else {}
        if all(before.get(name) == value for name, value in self.facts.items()):
            self.rows = before["points"]
        elif before:
            print(f"{file} is of another machine or setting, and is replaced", file=sys.stderr)

    def missing(self, keys: Sequence[Row], cost: Callable[[Row], float] = lambda _: 1) -> Iterator:
        """Yield the keys that are still to be measured, and say how long the rest will take.

        Args:
            cost: how long a point takes, in any unit, for the estimate.
        """
        todo = [key for key in keys if self.fresh or not self._measured(key)]
        if len(todo) < len(keys):
            print(
                f"{len(keys) - len(todo)} of {len(keys)} points are in {self.file} (--fresh"
                " measures them again)",
                file=sys.stderr,
            )
        total, spent, start = sum(map(cost, todo)), 0.0, time.monotonic()
        for index, key in enumerate(todo):
            left = (time.monotonic() - start) / spent * (total - spent) if spent else None
            shown = ", ".join(f"{name} {value}" for name, value in key.items())
            ahead = "" if left is None else f"; about {show_seconds(left)} left"
            print(f"point {index + 1} of {len(todo)}: {shown}{ahead}", file=sys.stderr, flush=True)
            yield key
            spent += cost(key)

    def add(self, key: Row, rows: Iterable[Row]) -> None:
        """Keep the rows of a point, in place of earlier ones."""
        origin = {"commit": commit(), "load": os.getloadavg()[0], "settings": self.settings}
        self.rows = [row for row in self.rows if not _of(row, key)]
        self.rows += [{**key, **row, **origin} for row in rows]
        data = {**self.facts, "points": self.rows}
        write_atomically(self.file, json.dumps(data, indent=1) + "\n")

    def _measured(self, key: Row) -> bool:
        return any(_of(row, key) and row.get("settings") == self.settings for row in self.rows)


def _of(row: Row, key: Row) -> bool:
    return all(name in row and row[name] == value for name, value in key.items())


def _code() -> str:
    """Return a hash of all code that is measured, or measures."""
    files = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def show_seconds(seconds: float) -> str:
    """Return a duration as it is read: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
