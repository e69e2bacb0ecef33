"""What the person at the keyboard meets: one clear line for an error, and exit codes."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dlion.config import explain, leaves_out, settle
from dlion.errors import RunFailed, Stopped, UserError
from dlion.launch.check import holds_another
from dlion.launch.environment import is_first
from dlion.record.runs import holds_run, record_config, record_failure

_EXIT_CODES = {
    UserError: 2,
    HydraException: 2,
    OmegaConfBaseException: 2,
    RunFailed: 1,
    Stopped: 75,
    KeyboardInterrupt: 130,
}


def run(main: Callable[[], Any]) -> None:
    """Run a Hydra main function; what a user is meant to read ends it with one line.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 75 stopped with a checkpoint to go on from, 130
    interrupted.
    """
    # argparse would not read what stands on both sides of an option
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what is raised comes here instead of being printed
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

    Hydra would wrap what is raised into its own traceback, so a single run leaves here. In a
    multirun the error goes on to Hydra, which runs the other jobs first.
    """
    hydra = HydraConfig.get()
    multirun = hydra.mode == RunMode.MULTIRUN
    output_dir = Path(hydra.runtime.output_dir if multirun else config.output_dir)
    try:
        if not multirun and hydra.run.dir != ".":
            raise UserError(f"hydra.run.dir is not used: type output_dir={hydra.run.dir}")
        settings = settle(config, hydra)
        _note_own_settings(leaves_out(config, hydra))
        return launch(settings, output_dir)
    except Stopped as stop:
        if stop.signal is not None and callable(signal.getsignal(stop.signal)):
            print(stop, file=sys.stderr)
            signal.raise_signal(stop.signal)  # whoever listened before: submitit requeues the job
            sys.exit(75)
        if multirun and stop.signal is None:
            raise
        _leave(stop)
    except UserError as error:
        if not multirun:
            _leave(error)
        if not holds_run(output_dir):
            record_config(output_dir, config)
        if not holds_another(config, output_dir):  # whose record stays as it is
            record_failure(output_dir, str(error))
        raise
    except (Exception, KeyboardInterrupt) as error:
        record_failure(output_dir, _sentence(error))
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, RunFailed) and not multirun):
            _leave(error)
        raise


def _note_own_settings(method: str | None) -> None:
    if method is not None and is_first():
        print(
            f"note: the recipe has no settings for optimizer={method} here, which keeps those of"
            f" conf/optimizer/{method}.yaml",
            file=sys.stderr,
        )


def _leave(error: BaseException) -> None:
    code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
    if is_first() or code == 1:
        print("" if code == 75 else "error: ", _sentence(error), sep="", file=sys.stderr)
    sys.exit(code)


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return explain(error)
    return str(error) or type(error).__name__


def _job_failure(error: Exception) -> str:
    """Say in one sentence what became of a job of a sweep on SLURM."""
    text = str(error)
    job = re.search(r"\b\d+_\d+\b", text)
    state = re.search(r"state: ([A-Z_ ]+)", text)
    lines = [line.strip(" -") for line in text.splitlines()]
    reason = state[1].strip().lower() if state else next(x for x in reversed(lines) if x)
    return (
        f"SLURM job {job[0] if job else ''} of the sweep: {reason}; the others go on, and"
        " `python -m dlion.compare.collect SWEEP_DIR` tells what became of each"
    )
