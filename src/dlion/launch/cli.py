"""The command line: an error is one clear sentence and an exit code."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dlion.config import explain, settle, unlisted_method
from dlion.errors import RunFailed, Stopped, UserError
from dlion.launch.environment import is_first
from dlion.launch.resume import choose_output_dir, command_to_go_on, holds_another
from dlion.launch.stored import in_any_group
from dlion.record.runs import holds_run, record_config, record_failure
from dlion.terminal import raise_interrupts

_EXIT_CODES = {
    UserError: 2,
    HydraException: 2,
    OmegaConfBaseException: 2,
    RunFailed: 1,
    Stopped: 75,
    KeyboardInterrupt: 130,
}


def run(main: Callable[[], Any]) -> None:
    """Run a Hydra main function; an error that is written for the user ends it with one line.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 75 stopped with a checkpoint to continue
    from, 130 interrupted.
    """
    # argparse cannot read overrides on both sides of an option
    words = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    sys.argv[1:] = in_any_group(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised here instead of being printed
    try:
        main()
    except tuple(_EXIT_CODES) as error:
        _leave(error)
    except Exception as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        _leave(RunFailed(_job_failure(error)))


def guarded(launch: Callable[[DictConfig, Path], Any], config: DictConfig) -> Any:
    """Call ``launch(settings, output_dir)`` from inside Hydra's main function.

    Hydra would print errors with its own traceback, so a single run exits here. In a multirun Hydra
    gets the error, and runs the other jobs first.
    """
    hydra = HydraConfig.get()
    multirun = hydra.mode == RunMode.MULTIRUN
    output_dir = Path(hydra.runtime.output_dir if multirun else config.output_dir)
    sweep = Path(hydra.sweep.dir) if multirun else None
    try:
        if not multirun and hydra.run.dir != ".":
            raise UserError(f"hydra.run.dir is not used: type output_dir={hydra.run.dir}")
        settings = settle(config, hydra)
        _note_own_settings(unlisted_method(config, hydra))
        raise_interrupts()
        if not multirun:
            output_dir = choose_output_dir(config, settings)
            settings.output_dir = str(output_dir)
        return launch(settings, output_dir)
    except Stopped as stop:
        stop.command = command_to_go_on(output_dir, sweep)
        if stop.signal not in (None, signal.SIGINT) and callable(signal.getsignal(stop.signal)):
            print(stop, file=sys.stderr)
            signal.raise_signal(stop.signal)  # to an earlier handler: submitit's requeues the job
            sys.exit(75)
        if multirun and stop.signal is None:
            raise
        _leave(stop)
    except UserError as error:
        if not multirun:
            _leave(error)
        if not holds_another(config, output_dir):  # the record of another run stays as it is
            if not holds_run(output_dir):
                record_config(output_dir, config)
            record_failure(output_dir, str(error))
        raise
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is about to end
        record_failure(output_dir, _sentence(error))
        _leave(error, command_to_go_on(output_dir, sweep))
    except Exception as error:
        record_failure(output_dir, _sentence(error))
        if isinstance(error, RunFailed) and not multirun:
            _leave(error)
        raise


def _note_own_settings(method: str | None) -> None:
    """Print that the recipe's table does not list the method, if there is one to name."""
    if method is not None and is_first():
        print(
            f"note: the recipe has no settings for optimizer={method} here, which keeps those of"
            f" conf/optimizer/{method}.yaml",
            file=sys.stderr,
        )


def _leave(error: BaseException, command: str | None = None) -> NoReturn:
    """Print the error's sentence and exit with its code; of several processes the first prints.

    Args:
        error: why this process ends.
        command: what to type to go on, if that is known and the sentence does not say it.
    """
    code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
    stopped = isinstance(error, Stopped)
    if stopped and error.signal == signal.SIGINT:
        code = _EXIT_CODES[KeyboardInterrupt]
    if is_first() or code == 1:
        hint = f"; to go on: {command}" if command else ""
        print("" if stopped else "error: ", _sentence(error), hint, sep="", file=sys.stderr)
    sys.exit(code)


def _sentence(error: BaseException) -> str:
    """Return the sentence that an error is recorded and printed with."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return explain(error)
    return str(error) or type(error).__name__


def _job_failure(error: Exception) -> str:
    """Return one sentence about a failed job of a sweep on SLURM."""
    text = str(error)
    job = re.search(r"\b\d+_\d+\b", text)
    state = re.search(r"state: ([A-Z_ ]+)", text)
    lines = [line.strip(" -") for line in text.splitlines()]
    reason = state[1].strip().lower() if state else next(x for x in reversed(lines) if x)
    return (
        f"SLURM job {job[0] if job else ''} of the sweep: {reason}; the others go on, and"
        " `dlion collect SWEEP_DIR` tells what became of each"
    )
