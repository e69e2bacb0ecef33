"""Console output of a run: one table, one live line, one result."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dlion.suite.terminal import printable
from dlion.suite.units import human_bytes

QUIET_INTERVAL = 10.0  # seconds between lines where there is no terminal


class RunConsole:
    """The terminal of a run; shows nothing unless ``active``."""

    def __init__(self, steps: int, active: bool, begun: int = 0):
        """Prepare for the steps from ``begun`` on, where the run has gone on."""
        self.active, self.steps, self._begun = active, steps, begun
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
        self._latest: dict[str, Any] = {}  # of each metric; not all are in every row

    def begin(self, facts: dict[str, str]) -> None:
        """Show the facts of the run, and start the live line below them."""
        self.table(facts)
        if self._live:
            self._progress.start()

    def table(self, facts: dict[str, str]) -> None:
        """Show names and values in two columns."""
        if not self.active:
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            self._print(f"{name:<{width}}  {value}")

    def row(self, row: dict[str, Any]) -> None:
        """Show the latest metrics."""
        if not self.active:
            return
        self._latest.update(row)
        text = self._metrics()
        self._progress.update(self._task, completed=row["step"], values=text)
        if self._live and "test_loss" in row:
            self._print(f"step {row['step']}/{self.steps}  {text}")
        now = time.monotonic()
        if not self._live and (now - self._printed > QUIET_INTERVAL or "test_loss" in row):
            self._printed = now
            a_step = (now - self._started) / (row["step"] - self._begun)
            left = a_step * (self.steps - row["step"])
            print(f"step {row['step']}/{self.steps}  {text}  {left:.0f} s left", flush=True)

    def watch(self, batches: Iterable[Any], count: int) -> Iterator[Any]:
        """Yield the batches of an evaluation, and show how far it is once that takes long."""
        shown = time.monotonic()
        for done, batch in enumerate(batches):
            if self.active and time.monotonic() - shown > QUIET_INTERVAL:
                text = f"evaluating: {done / count:.0%} of the test set"
                if self._progress.live.is_started:
                    self._progress.update(self._task, values=text)
                else:
                    shown = time.monotonic()
                    print(text, flush=True)
            yield batch

    def finish(self, text: str) -> None:
        """End the live line and show the result, followed by ``text``."""
        if self._live:
            self._progress.stop()
        if self.active:
            print(f"finished: {self._metrics()} {text}", flush=True)

    def say(self, line: str) -> None:
        """Show a line above the live one."""
        if self.active:
            self._print(line)

    def _print(self, line: str) -> None:
        """Print a line as it is, above the live one if there is one; paths in it stay whole."""
        self._console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()

    def _metrics(self) -> str:
        """Return the latest metrics in words."""
        row = self._latest
        shown = [f"train loss {row['train_loss']:.4f}"]
        if "test_accuracy" in row:
            shown.append(f"test accuracy {row['test_accuracy']:.2%}")
        elif "test_loss" in row:
            shown.append(f"test loss {row['test_loss']:.4f}")
        if "workers" in row:
            shown.append(f"{row['workers']} workers")
        shown.append(f"sent {human_bytes(row['sent_bytes'])} a worker")
        return "  ".join(shown)
