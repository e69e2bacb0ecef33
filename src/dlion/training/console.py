"""What a person sees while a run goes on: one table, one live line, one result."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dlion.units import human_bytes

QUIET_INTERVAL = 10.0  # seconds between lines where there is no terminal


class RunConsole:
    """The terminal of a run; silent on all processes but the first."""

    def __init__(self, steps: int, active: bool):
        self.active, self.steps = active, steps
        self._console = Console()
        self._live = active and self._console.is_terminal
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=steps, values="")
        self._started = self._printed = time.monotonic()
        self._latest: dict[str, Any] = {}

    def table(self, facts: dict[str, str]) -> None:
        """Show what runs, and what one step puts on the network."""
        if not self.active:
            return
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(name, value, style="")
        self._console.print(table)
        sys.stdout.flush()
        if self._live:
            self._progress.start()

    def row(self, row: dict[str, Any]) -> None:
        """Show the latest metrics."""
        if not self.active:
            return
        self._latest.update(row)
        text = self.result()
        self._progress.update(self._task, completed=row["step"], values=text)
        now = time.monotonic()
        if not self._live and (now - self._printed > QUIET_INTERVAL or "test_loss" in row):
            self._printed = now
            left = (now - self._started) / row["step"] * (self.steps - row["step"])
            print(f"step {row['step']}/{self.steps}  {text}  {left:.0f} s left", flush=True)

    def close(self) -> None:
        """End the live line."""
        if self._live:
            self._progress.stop()

    def note(self, text: str) -> None:
        """One line after the run."""
        if self.active:
            print(text, file=sys.stdout, flush=True)

    def result(self) -> str:
        """The latest metrics in words."""
        shown = [f"loss {self._latest['train_loss']:.4f}"]
        if "test_accuracy" in self._latest:
            shown.append(f"accuracy {self._latest['test_accuracy']:.2%}")
        elif "test_loss" in self._latest:
            shown.append(f"test loss {self._latest['test_loss']:.4f}")
        shown.append(f"sent {human_bytes(self._latest['sent_bytes'])} a worker")
        return "  ".join(shown)
