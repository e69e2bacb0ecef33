"""Send runs that were recorded offline, such as those of a whole sweep, to Weights & Biases.

Each run is sent once: wandb marks it, and it is left out from then on. The exit code is 1 if a run
could not be sent; the same command then sends what is left.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from dlion.arguments import add_runs, make_parser
from dlion.errors import RunFailed, UserError
from dlion.record.loggers import can_sync

_LOOK = 0.5  # seconds between two looks at what was sent


def offline_runs(paths: list[Path]) -> list[Path]:
    """Return the folders that wandb recorded offline at or below the given ones, oldest first.

    Raises:
        UserError: if there are none.
    """
    found: set[Path] = set()
    for path in paths:
        folders = [path, *path.rglob("offline-run-*")]
        found |= {folder.resolve() for folder in folders if any(folder.glob("*.wandb"))}
    if not found:
        where = ", ".join(map(str, paths))
        raise UserError(f"{where} holds no run that was recorded offline: give what is above one")
    return sorted(found, key=lambda folder: folder.name)  # which has the date


def is_sent(folder: Path) -> bool:
    """Whether wandb has marked all that was recorded there as sent."""
    return all(file.with_suffix(".wandb.synced").exists() for file in folder.glob("*.wandb"))


def sync(folders: list[Path]) -> None:
    """Send runs that were not sent before, with wandb's own command, and show how far it is.

    Raises:
        RunFailed: naming the reason of the first that could not be sent.
    """
    from rich.progress import MofNCompleteColumn, Progress

    command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        ) as wandb,
        Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress,
    ):
        bar = progress.add_task("runs", total=len(folders))
        try:
            while wandb.poll() is None:
                progress.update(bar, completed=sum(map(is_sent, folders)))
                try:
                    wandb.wait(_LOOK)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            wandb.terminate()
            raise
        sent = sum(map(is_sent, folders))
        progress.update(bar, completed=sent)
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    if sent < len(folders):
        reason = lines[-1] if lines else "wandb does not say why"
        raise RunFailed(f"{len(folders) - sent} of {len(folders)} runs were not sent: {reason}")


def main(arguments: list[str]) -> None:
    parser = make_parser("sync", __doc__, "outputs")
    add_runs(parser)
    options = parser.parse_args(arguments)
    folders = offline_runs(options.runs)
    waiting = [folder for folder in folders if not is_sent(folder)]
    if waiting:
        if not can_sync():
            raise RunFailed("there is no key, or no server answers: type `wandb login`")
        sync(waiting)
    before = len(folders) - len(waiting)
    print(f"sent: {len(waiting)}; before: {before}")
