"""Send runs that were recorded offline, such as those of a whole sweep, to Weights & Biases.

Each run is sent once: wandb marks it, and it is left out from then on. The exit code is 1 if a run
could not be sent; the same command then sends what is left.
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlion.errors import RunFailed, UserError
from dlion.suite.arguments import add_runs, make_parser
from dlion.suite.inside import Refused, check_inside
from dlion.suite.record.loggers import why_not_sync
from dlion.suite.record.runs import OF_WANDB
from dlion.suite.terminal import in_one_line

AT_ONCE = 4  # runs


def offline_runs(paths: list[Path]) -> list[Path]:
    """Return the folders that wandb recorded offline at or below the given ones, oldest first.

    One that leads elsewhere is left out: what wandb finds in it is sent.

    Raises:
        UserError: if there are none.
    """
    found: set[Path] = set()
    for path in paths:
        inside = filter(_is_plain, path.rglob("offline-run-*"))
        folders = [*filter(_is_plain, [path.resolve()]), *inside]
        found |= {folder.resolve() for folder in folders if any(folder.glob("*.wandb"))}
    if not found:
        where = ", ".join(map(str, paths))
        raise UserError(f"{where} holds no run recorded offline: give a directory above one")
    return sorted(found, key=lambda folder: folder.name)  # which has the date


def _is_plain(folder: Path) -> bool:
    """Whether a folder is no link, and holds none; if not, and wandb recorded there, say so."""
    try:
        if any(folder.glob("*.wandb")):
            check_inside(folder.parent, folder.name, links=OF_WANDB)
    except Refused as error:
        print(in_one_line(f"warning: left out: {error}"), file=sys.stderr)
        return False
    return True


def is_sent(folder: Path) -> bool:
    """Whether wandb has marked all that was recorded there as sent."""
    return all(file.with_suffix(".wandb.synced").exists() for file in folder.glob("*.wandb"))


def sync(folders: list[Path]) -> None:
    """Send runs with wandb's own program, some at a time, and show how many are sent.

    A run that was resumed has several folders, which wandb sends one after the other.

    Raises:
        RunFailed: if some were not sent, with the reason of the first.
    """
    from rich.progress import MofNCompleteColumn, Progress

    runs: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        runs[folder.name.rpartition("-")[2]].append(folder)
    reasons = []
    with (
        ThreadPoolExecutor(AT_ONCE) as pool,
        Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress,
    ):
        try:
            sent = pool.map(_send, runs.values())
            for reason in progress.track(sent, total=len(runs), description="runs"):
                if reason is not None:
                    reasons.append(reason)
        except BaseException:  # Ctrl-C
            pool.shutdown(cancel_futures=True)
            raise
    if reasons:
        raise RunFailed(f"{len(reasons)} of {len(runs)} runs were not sent: {reasons[0]}")


def _send(folders: list[Path]) -> str | None:
    """Send the folders of one run; return why they were not sent, None if they were."""
    folders = [folder.resolve() for folder in folders]
    with tempfile.TemporaryDirectory() as elsewhere:
        Path(elsewhere, "wandb").mkdir()  # for its own log
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *map(str, folders)],
            cwd=elsewhere,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    if all(map(is_sent, folders)):  # the exit code does not tell
        return None
    said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return said[-1].removeprefix("wandb: ") if said else f"wandb left with code {done.returncode}"


def main(arguments: list[str]) -> None:
    parser = make_parser("sync", __doc__, "outputs")
    add_runs(parser)
    options = parser.parse_args(arguments)
    folders = offline_runs(options.runs)
    waiting = [folder for folder in folders if not is_sent(folder)]
    if waiting:
        if (reason := why_not_sync()) is not None:
            raise RunFailed(f"nothing was sent to Weights & Biases: {reason}")
        sync(waiting)
    before = len(folders) - len(waiting)
    print(f"sent now: {len(waiting)}; before: {before}")
