"""An hour of training on a slow link while its processes are killed, stopped and sent away.

    sudo .venv/bin/python benchmarks/soak.py [--minutes 60] [--mean 60] [-o results/robustness]

Every minute or so (exponential waits) one of: SIGKILL to a worker, SIGKILL to the launcher, SIGTERM
to the launcher, SIGSTOP to a worker. The launcher restarts its workers by itself; the launcher is
restarted here, with the same command. At the end the parameters are compared with those of an
undisturbed run on the machine's own network. Writes soak.json (after every fault) and soak.png.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Parser, run, show_seconds
from matplotlib.figure import Figure

from dlion.errors import RunFailed
from dlion.suite.arguments import link, number, whole
from dlion.suite.files import write_atomically
from dlion.suite.machine import machine
from dlion.suite.record.provenance import commit

SETTINGS = ["optimizer=dlion_mavo", "workers=4", "logger=none", "log_every=5"]
FAULTS = ("worker killed", "launcher killed", "told to leave", "worker stopped")
OF_LAUNCHER = ("launcher killed", "told to leave")
SIGNALS = {"told to leave": signal.SIGTERM, "worker stopped": signal.SIGSTOP}
LIMIT = 120  # seconds until a fault must have been noticed, or overcome


class DisturbedRun:
    """A run whose processes are disturbed.

    Attributes:
        launcher: the process that the command has started last.
        messages: all lines that launchers wrote to stderr.
    """

    def __init__(self, command: list[str], directory: Path):
        """``directory``: the run's output directory."""
        self.command, self.directory = command, directory
        self.messages: list[str] = []
        self.start()

    def start(self) -> None:
        """Start the launcher, for the first time or again."""
        self.launcher = subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, args=(self.launcher,), daemon=True).start()

    def _listen(self, launcher: subprocess.Popen[str]) -> None:
        for line in launcher.stderr or ():
            self.messages.append(line.strip())

    def workers(self) -> list[int]:
        """Return the process ids of the workers."""
        found = subprocess.run(["pgrep", "-P", str(self.launcher.pid)], capture_output=True)
        return [int(pid) for pid in found.stdout.split()]

    def step(self) -> int:
        """Return the latest step that was recorded."""
        try:
            rows = (self.directory / "metrics.jsonl").read_text().splitlines()
            return json.loads(rows[-1])["step"] if rows else 0
        except (OSError, json.JSONDecodeError):
            return 0

    def saved(self) -> int:
        """Return the step of the latest checkpoint."""
        found = (self.directory / "checkpoint").glob("step-????????")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def megabytes(self) -> float:
        """Return the memory of all processes, what they share counted once."""
        return sum(map(_megabytes, [self.launcher.pid, *self.workers()]))

    def wait_for(self, reached: Callable[[], bool]) -> float:
        """Return the seconds that passed until ``reached()``."""
        began = time.monotonic()
        while not reached():
            if time.monotonic() - began > LIMIT:
                raise RunFailed(f"nothing happened in {LIMIT} s: {self.messages[-3:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        """End all processes; the launcher gets the time to put its network away."""
        self.launcher.terminate()
        try:
            self.launcher.wait(30)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()


def disturb(run: DisturbedRun, fault: str, rng: random.Random) -> dict[str, Any]:
    """Cause a fault, and wait until it has been noticed and the run is back at work."""
    workers, before = run.workers(), len(run.messages)
    victim = run.launcher.pid if fault in OF_LAUNCHER else rng.choice(workers)
    os.kill(victim, SIGNALS.get(fault, signal.SIGKILL))
    code = None
    if fault in OF_LAUNCHER:
        noticed = run.wait_for(lambda: not any(map(_alive, [victim, *workers])))
        code = run.launcher.wait()
    else:
        noticed = run.wait_for(lambda: any("restart" in line for line in run.messages[before:]))
    saved, step = run.saved(), run.step()
    began = time.monotonic()
    if code is not None:
        run.start()
    run.wait_for(lambda: run.step() > step or run.launcher.poll() == 0)
    messages = [line for line in run.messages[before:] if "process" in line or "step" in line]
    return {
        "fault": fault,
        "step": step,
        "resumed_from": saved,
        "exit_code": code,
        "noticed_seconds": noticed,
        "back_seconds": time.monotonic() - began,
        "message": messages[0] if messages else "",
    }


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _megabytes(pid: int) -> float:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, ROOT / "results" / "robustness")
    parser.add_argument("--minutes", type=number(0), default=60, help="no faults after them")
    parser.add_argument("--mean", type=number(0.1), default=60, help="seconds between two faults")
    parser.add_argument("--steps", type=whole(1), default=16000)
    parser.add_argument("--rate", type=link, default=10**6, help="of the links, or loopback")
    parser.add_argument("--seed", type=whole(0), default=0)
    args = parser.read(arguments, minutes=5, steps=200, rate=10**9)
    args.rates = [args.rate]
    parser.check_links(args)
    (args.rate,) = args.rates
    return args


def faults(args: argparse.Namespace, rng: random.Random) -> Iterator[tuple[float, str]]:
    """Yield the seconds to wait before a fault, and which it is; in the smoke form each once."""
    if args.smoke:
        yield from zip(itertools.repeat(0.0), FAULTS, strict=False)
        return
    while True:
        yield rng.expovariate(1 / args.mean), rng.choice(FAULTS)


def main(args: argparse.Namespace) -> None:
    file = args.output / "soak.json"
    about = {
        "machine": machine("cpu"),
        "commit": commit(),
        "command": " ".join(["benchmarks/soak.py", *sys.argv[1:]]),
        "steps": args.steps,
    }
    if file.exists() and not args.fresh:
        before = json.loads(file.read_text())
        if before.get("equal") and all(before.get(name) == about[name] for name in about):
            print(f"{file} is of this command (--fresh measures again)", file=sys.stderr)
            return
    with tempfile.TemporaryDirectory(prefix="dlion-soak-") as scratch:
        measured = soak(args, file, about, Path(scratch))
    draw(measured).savefig(args.output / "soak.png", dpi=150)
    spent = show_seconds(measured["seconds"])
    print(f"{len(measured['events'])} faults in {spent}; equal: {measured['equal']}")
    sys.exit(not measured["equal"])


def soak(
    args: argparse.Namespace, file: Path, about: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    """Disturb a run, compare it with an undisturbed one, and keep what happened in ``file``."""
    train = [sys.executable, "train.py", *SETTINGS, f"steps={args.steps}"]
    train += ["batch_size=4", f"eval_every={args.steps}"] if args.smoke else ["eval_every=500"]
    run = DisturbedRun(
        [
            *(*train, "checkpoint_every=20", "max_restarts=100000", "resume=auto"),
            f"processes={2 if args.smoke else 4}",
            f"timeout={3 if args.smoke else 15}",
            *([f"network.rate={args.rate}bit", "network.name=soak"] if args.rate else []),
            f"output_dir={scratch / 'disturbed'}",
        ],
        scratch / "disturbed",
    )
    rng, began = random.Random(args.seed), time.monotonic()
    measured = about | {"equal": None, "events": [], "memory": []}
    coming, due, fault = faults(args, rng), None, ""
    try:
        while run.launcher.poll() is None:
            now = time.monotonic() - began
            step = run.step()
            if step:
                measured["memory"].append([round(now), round(run.megabytes(), 1), step])
            if due is None and now < 60 * args.minutes:
                wait, fault = next(coming, (float("inf"), ""))
                due = now + wait
            if step and run.workers() and due is not None and now >= due:
                event = {"seconds": now} | disturb(run, fault, rng)
                measured["events"].append(event)
                measured["seconds"] = time.monotonic() - began
                write_atomically(file, json.dumps(measured, indent=1) + "\n")
                left = show_seconds(max(0, 60 * args.minutes - measured["seconds"]))
                print(f"{json.dumps(event)} (faults for {left} more)", flush=True)
                due = None
            time.sleep(0.2 if args.smoke else 2)
    finally:
        run.end()
    measured |= {"seconds": time.monotonic() - began, "exit_code": run.launcher.returncode}
    undisturbed = [*train, "processes=1", f"output_dir={scratch / 'undisturbed'}"]
    subprocess.run(undisturbed, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    hashes = {}
    for name in ("disturbed", "undisturbed"):
        summary = scratch / name / "summary.json"
        if not summary.exists():
            raise RunFailed(f"the {name} run did not finish: {run.messages[-3:]}")
        hashes[name] = json.loads(summary.read_text())["parameters_sha256"]
    measured |= {"parameters_sha256": hashes, "equal": len(set(hashes.values())) == 1}
    write_atomically(file, json.dumps(measured, indent=1) + "\n")
    return measured


def draw(measured: dict[str, Any]) -> Figure:
    """Draw steps and memory over time, with the faults."""
    figure = Figure(figsize=(8, 5))
    above, below = figure.subplots(2, 1, sharex=True)
    minutes = [seconds / 60 for seconds, _, _ in measured["memory"]]
    above.plot(minutes, [step for _, _, step in measured["memory"]], lw=1)
    above.set_ylabel("step")
    below.plot(minutes, [megabytes for _, megabytes, _ in measured["memory"]], lw=1)
    below.set(xlabel="minutes", ylabel="memory of all processes, MB", ylim=(0, None))
    for index, fault in enumerate(FAULTS):
        times = [event["seconds"] / 60 for event in measured["events"] if event["fault"] == fault]
        for axis in (above, below):
            for time_ in times:
                label = fault if time_ == times[0] and axis is above else None
                axis.axvline(time_, color=f"C{index + 1}", lw=0.7, label=label)
    above.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    run(main, parse())
