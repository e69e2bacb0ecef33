"""Workers that die and join at random moments, and the price of a step with torchft.

    python benchmarks/elastic.py [--events 13] [--mean 2.5] [--rounds 7]

For each method, with and without overlap, so many workers are killed (SIGKILL) and as many join.
Every worker writes a digest of its parameters before every step: all must be equal, and no step may
be missing. Stalls are the longest times between two steps of the run, by what happened then. Then
milliseconds a step of 4 and 8 workers with `manager=` and without, interleaved. Writes
elastic.json.
"""

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as train.py does, before torch's import

import torch
import torch.distributed as dist
from common import ROOT, Parser, Points, fork, in_random_order, ratios, run, spread

import dlion
from dlion.errors import RunFailed
from dlion.methods import METHODS
from dlion.suite.arguments import number, whole
from dlion.suite.lighthouse import serving
from dlion.suite.training.replicas import parameters_sha256

STRESS = [
    ("dlion_mavo", True),
    ("dlion_mavo", False),
    ("lion_cub", True),
    ("lion_cub", False),
    ("g_adamw", True),
    ("dlion_avg", False),
    ("sign_muon_mavo", True),
    ("diloco", False),
]
LEAST, MOST = 2, 6  # workers
LIMIT = 300  # seconds to wait for anything
STALL = 0.5  # seconds between two steps that something must have caused
WARM = 50  # steps that are not timed


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, ROOT / "results" / "churn", beside="torchft")
    parser.add_argument("--events", type=whole(1), default=13, help="deaths, and joins, of each")
    parser.add_argument("--mean", type=number(0), default=2.5, help="seconds between two of these")
    parser.add_argument("--cases", type=whole(0), default=len(STRESS), help="the first so many")
    parser.add_argument("--workers", nargs="*", type=whole(2), default=[4, 8], help="of the price")
    parser.add_argument("--rounds", type=whole(2), default=7)
    parser.add_argument("--steps", type=whole(1), default=200, help="of a round")
    return parser.read(arguments, events=2, mean=0.5, cases=1, workers=[2], rounds=2, steps=20)


def make_model() -> torch.nn.Module:
    """Return a model of 50,890 parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def backward(model: torch.nn.Module, step: int, worker: int) -> None:
    """Leave the gradient of a batch of noise in the parameters."""
    draws = torch.Generator().manual_seed(1000 * step + worker)
    x, y = torch.randn(8, 784, generator=draws), torch.randint(10, (8,), generator=draws)
    torch.nn.functional.cross_entropy(model(x), y).backward()


# ---- deaths and joins


def _train(address: str, name: str, method: str, overlap: bool, file: Path) -> None:
    model, entry = make_model(), METHODS[method]
    manager = dlion.join(address, min_workers=LEAST, name=name, timeout=60, patience=LIMIT)
    optimizer = entry.cls(model.parameters(), manager=manager, overlap=overlap, **entry.options)
    with file.open("w") as rows:
        while True:
            optimizer.zero_grad()
            step = optimizer.param_groups[0]["steps"]
            optimizer.host(None)  # the parameters that all share, of local updates
            count, sha256 = optimizer.workers.count, parameters_sha256(model)
            optimizer.host(0)
            rows.write(json.dumps([step, time.monotonic(), count, sha256]) + "\n")
            rows.flush()
            backward(model, step, optimizer.workers.rank)
            optimizer.step()
            time.sleep(0.01)


class Stress:
    """A run whose workers die and join at random moments.

    Attributes:
        events: time, and what happened then.
    """

    def __init__(self, method: str, overlap: bool, folder: Path, seed: int):
        self.settings, self.folder, self.rng = (method, overlap), folder, random.Random(seed)
        self.alive: dict[str, BaseProcess] = {}
        self.events: list[tuple[float, str]] = []
        self.begun = 0.0  # when all had met
        self._names = itertools.count()

    def start(self, address: str) -> None:
        name = f"{next(self._names):04}"
        self.alive[name] = fork(_train, address, name, *self.settings, self.folder / name)

    def rows(self, name: str) -> list[list[Any]]:
        """Return the lines of a worker, but for one that it was killed in."""
        file = self.folder / name
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def run(self, events: int, mean: float) -> None:
        """Let so many die and join, and wait until all who are left have met."""
        with serving() as address:
            try:
                for _ in range((LEAST + MOST) // 2):
                    self.start(address)
                self.meet()
                self.begun = time.monotonic()
                left = ["join"] * events + ["death"] * events
                end = time.monotonic() + LIMIT + 4 * events * mean
                while left:
                    if time.monotonic() > end:
                        raise RunFailed(f"{self.settings}: workers do not join")
                    time.sleep(self.rng.expovariate(1 / mean))
                    # the state is lost with the last that has it: LEAST of those who have stay
                    began = [name for name in sorted(self.alive) if self.rows(name)]
                    victims = sorted(self.alive) if len(began) > LEAST else []
                    possible = {"join": len(self.alive) < MOST, "death": victims}
                    event = self.rng.choice([what for what in left if possible[what]] or ["none"])
                    if event == "none":  # until joiners have begun
                        continue
                    left.remove(event)
                    self.events.append((time.monotonic(), event))
                    if event == "join":
                        self.start(address)
                    else:
                        process = self.alive.pop(self.rng.choice(victims))
                        process.kill()
                        process.join()
                self.meet()
            finally:
                for process in self.alive.values():
                    process.kill()
                    process.join()

    def meet(self) -> None:
        """Wait until all who are alive take steps together."""
        began, end = time.monotonic(), time.monotonic() + LIMIT
        while time.monotonic() < end:
            last = [rows[-1] for name in self.alive if (rows := self.rows(name))]
            if len(last) == len(self.alive) and all(
                count == len(self.alive) and at > began for _, at, count, _ in last
            ):
                return
            if any(process.exitcode is not None for process in self.alive.values()):
                raise RunFailed(f"{self.settings}: a worker has ended by itself")
            time.sleep(0.2)
        raise RunFailed(f"{self.settings}: after {LIMIT} s not all take steps together")

    def result(self) -> dict[str, Any]:
        """Compare all workers, and find the longest stalls."""
        digests, first, present = defaultdict(set), {}, defaultdict(set)
        for file in self.folder.iterdir():
            for step, at, _, sha256 in self.rows(file.name):
                digests[step].add(sha256)
                present[step].add(file.name)
                first[step] = min(at, first.get(step, at))
        stalls: dict[str, float] = {}
        for before, after in itertools.pairwise(sorted(first)):
            if first[before] > self.begun and first[after] - first[before] > STALL:
                left, joined = present[before] - present[after], present[after] - present[before]
                kind = "several" if len(left) + len(joined) > 1 else "other"
                if kind == "other" and (left or joined):
                    kind = "a death" if left else "a join"
                stalls[kind] = max(stalls.get(kind, 0.0), first[after] - first[before])
        return {
            "deaths": sum(what == "death" for _, what in self.events),
            "joins": sum(what == "join" for _, what in self.events),
            "steps": len(first),
            "steps_missing": max(first) + 1 - len(first),
            "steps_different": sum(len(found) > 1 for found in digests.values()),
            "longest_stalls": {kind: round(stalls[kind], 3) for kind in sorted(stalls)},
        }


# ---- the price of a step


def _time(address: str | None, folder: Path, rank: int, workers: int, steps: int) -> None:
    model, entry = make_model(), METHODS["dlion_mavo"]
    if address is None:
        store = dist.FileStore(str(folder / "store"), workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
        optimizer = entry.cls(model.parameters(), overlap=True, **entry.options)
    else:
        manager = dlion.join(address, min_workers=workers, name=f"{rank:03}", patience=LIMIT)
        optimizer = entry.cls(model.parameters(), overlap=True, manager=manager, **entry.options)
    for step in range(WARM + steps + 1):
        optimizer.zero_grad()
        if step == WARM:
            began = time.perf_counter()
        if step < WARM + steps:
            backward(model, step, rank)
            optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    (folder / str(rank)).write_text(str(seconds))


def seconds_of_a_step(workers: int, steps: int, elastic: bool) -> float:
    """Return the seconds of a step, the mean of all workers."""
    with tempfile.TemporaryDirectory(prefix="dlion-elastic-") as name:
        folder = Path(name)
        with serving() as lighthouse:  # also beside the plain run
            address = lighthouse if elastic else None
            processes = [fork(_time, address, folder, r, workers, steps) for r in range(workers)]
            for process in processes:
                process.join()
        if any(process.exitcode for process in processes):
            raise RunFailed("a worker has failed")
        return sum(float((folder / str(r)).read_text()) for r in range(workers)) / workers


def price(workers: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Time a step with a manager and without, in rounds of random order."""
    found: dict[str, list[float]] = {"plain": [], "elastic": []}
    for round_, case in in_random_order(found, rounds):
        seconds = seconds_of_a_step(workers, steps, case == "elastic")
        if round_ >= 0:
            found[case].append(1000 * seconds)
    more = [after - before for after, before in zip(found["elastic"], found["plain"], strict=True)]
    return [
        *({"case": case, "milliseconds": spread(found[case])} for case in found),
        {"case": "difference", "milliseconds": spread(more)},
        {"case": "ratio", "ratio": ratios(found["elastic"], found["plain"])},
    ]


def main(args: argparse.Namespace) -> None:
    settings = {name: vars(args)[name] for name in ("events", "mean", "rounds", "steps")}
    points = Points(args.output / "elastic.json", {}, settings, args.fresh)
    keys = [{"method": method, "overlap": overlap} for method, overlap in STRESS[: args.cases]]
    for key in points.missing([*keys, *({"workers": count} for count in args.workers)]):
        if "workers" in key:
            points.add(key, price(key["workers"], args.rounds, args.steps))
        else:
            with tempfile.TemporaryDirectory(prefix="dlion-elastic-") as folder:
                stress = Stress(key["method"], key["overlap"], Path(folder), keys.index(key))
                stress.run(args.events, args.mean)
                points.add(key, [stress.result()])
        for row in points.rows:
            if key.items() <= row.items():
                shown = {n: v for n, v in row.items() if n not in ("settings", "commit", "load")}
                print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    run(main, parse())
