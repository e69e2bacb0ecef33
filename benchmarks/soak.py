"""An hour of training on a slow link while its processes are killed, stopped and sent away.

    sudo .venv/bin/python benchmarks/soak.py [--minutes 60] [--mean 60] [-o results/robustness]

Every minute or so (exponential waits) one of: SIGKILL to a worker, SIGKILL to the launcher, SIGTERM
to the launcher, SIGSTOP to a worker. The launcher restarts its workers by itself; the launcher is
restarted here, with the same command. At the end the parameters are compared with those of an
undisturbed run on the machine's own network. Writes soak.json and soak.png.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import ROOT, machine

from dlion.files import write_atomically

SETTINGS = ["optimizer=dlion_mavo", "workers=4", "logger=none", "log_every=5", "eval_every=500"]
FAULTS = ("worker killed", "launcher killed", "told to leave", "worker stopped")


class Patient:
    """A run that is disturbed: its launcher, and what became of it."""

    def __init__(self, command: list[str], directory: Path):
        self.command, self.directory = command, directory
        self.messages: list[tuple[float, str]] = []
        self.memory: list[tuple[float, float]] = []
        self.start()

    def start(self) -> None:
        self.launcher = subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, args=(self.launcher,), daemon=True).start()

    def _listen(self, launcher: subprocess.Popen[str]) -> None:
        for line in launcher.stderr or ():
            self.messages.append((time.monotonic(), line.strip()))

    def workers(self) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(self.launcher.pid)], capture_output=True)
        return [int(pid) for pid in found.stdout.split()]

    def step(self) -> int:
        """The latest one recorded."""
        try:
            rows = (self.directory / "metrics.jsonl").read_text().splitlines()
            return json.loads(rows[-1])["step"] if rows else 0
        except (OSError, json.JSONDecodeError):
            return 0

    def saved(self) -> int:
        """The step of the latest checkpoint."""
        found = (self.directory / "checkpoint").glob("step-????????")
        return max((int(p.name.removeprefix("step-")) for p in found), default=0)

    def megabytes(self) -> float:
        """Memory of all processes, what they share counted once."""
        return sum(map(_megabytes, [self.launcher.pid, *self.workers()]))

    def wait_for(self, reached: Any, limit: float = 120) -> float:
        """Seconds until ``reached()``."""
        began = time.monotonic()
        while not reached():
            if time.monotonic() - began > limit:
                raise SystemExit(f"nothing happened in {limit} s: {self.messages[-3:]}")
            time.sleep(0.05)
        return time.monotonic() - began


def disturb(run: Patient, fault: str, rng: random.Random) -> dict[str, Any]:
    """Do it, see it noticed and the run back at work."""
    workers = run.workers()
    heard = len(run.messages)
    victim = run.launcher.pid if fault in FAULTS[1:3] else rng.choice(workers)
    how = {"told to leave": signal.SIGTERM, "worker stopped": signal.SIGSTOP}
    os.kill(victim, how.get(fault, signal.SIGKILL))
    if fault in FAULTS[1:3]:
        noticed = run.wait_for(lambda: not any(map(_alive, [victim, *workers])))
        code = run.launcher.wait()
    else:
        noticed = run.wait_for(lambda: any("restart" in m for _, m in run.messages[heard:]))
        code = None
    saved, step = run.saved(), run.step()
    began = time.monotonic()
    if code is not None:
        run.start()
    run.wait_for(lambda: run.step() > step or run.launcher.poll() == 0)
    return {
        "fault": fault,
        "step": step,
        "resumed_from": saved,
        "exit_code": code,
        "noticed_seconds": noticed,
        "back_seconds": time.monotonic() - began,
        "message": next((m for _, m in run.messages[heard:] if "process" in m or "step" in m), ""),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--mean", type=float, default=60, help="seconds between two faults")
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--rate", default="1mbit", help="of the emulated links")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "results" / "robustness")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="dlion-soak-"))
    train = [sys.executable, "train.py", *SETTINGS, f"steps={args.steps}"]
    run = Patient(
        [*train, "processes=4", f"network.rate={args.rate}", "network.name=soak", "timeout=15",
         "checkpoint_every=20", "max_restarts=100000", "resume=auto",
         f"output_dir={folder / 'disturbed'}"],
        folder / "disturbed",
    )  # fmt: skip
    began, events, memory = time.monotonic(), [], []
    due = rng.expovariate(1 / args.mean)
    while run.launcher.poll() is None:
        now = time.monotonic() - began
        if run.step():
            memory.append((now, run.megabytes(), run.step()))
        if now > due and now < 60 * args.minutes and run.step():
            events.append({"seconds": now} | disturb(run, rng.choice(FAULTS), rng))
            due = time.monotonic() - began + rng.expovariate(1 / args.mean)
            print(json.dumps(events[-1]), flush=True)
        time.sleep(2)
    seconds = time.monotonic() - began
    whole = [*train, "processes=1", f"output_dir={folder / 'whole'}"]
    subprocess.run(whole, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = {
        name: (folder / name / "summary.json").read_text() for name in ("disturbed", "whole")
    }
    hashes = {name: json.loads(text)["parameters_sha256"] for name, text in results.items()}
    measured = {
        "machine": machine(),
        "command": " ".join(["benchmarks/soak.py", *sys.argv[1:]]),
        "seconds": seconds,
        "steps": args.steps,
        "parameters_sha256": hashes,
        "equal": hashes["disturbed"] == hashes["whole"],
        "exit_code": run.launcher.returncode,
        "events": events,
        "memory": [[round(t), round(m, 1), s] for t, m, s in memory],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output / "soak.json", json.dumps(measured, indent=1) + "\n")
    draw(measured, args.output / "soak.png")
    shutil.rmtree(folder)
    print(f"{len(events)} faults in {seconds / 60:.0f} minutes; equal: {measured['equal']}")
    sys.exit(not measured["equal"])


def draw(measured: dict[str, Any], file: Path) -> None:
    """Steps and memory over time, with the faults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    minutes = [t / 60 for t, _, _ in measured["memory"]]
    above.plot(minutes, [s for _, _, s in measured["memory"]], lw=1)
    above.set_ylabel("step")
    below.plot(minutes, [m for _, m, _ in measured["memory"]], lw=1)
    below.set(xlabel="minutes", ylabel="memory of all processes, MB", ylim=(0, None))
    for place, fault in enumerate(FAULTS):
        times = [e["seconds"] / 60 for e in measured["events"] if e["fault"] == fault]
        for axes in (above, below):
            for i, at in enumerate(times):
                label = fault if not i and axes is above else None
                axes.axvline(at, color=f"C{place + 1}", lw=0.7, label=label)
    above.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
