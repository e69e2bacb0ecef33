"""The command line: an error is one clear sentence and an exit code."""

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

from dlion import __version__
from dlion.errors import Finished, RunFailed, Stopped, UserError
from dlion.suite.config import explain, resolve, unlisted_method
from dlion.suite.launch.arguments import Arguments, check_own_files
from dlion.suite.launch.environment import among_others, detect, is_first
from dlion.suite.launch.help import help_text, opened
from dlion.suite.record.runs import FAILURE, forget, holds_run, record_config, record_failure
from dlion.suite.settings import check_effects, check_values
from dlion.suite.terminal import end_now, in_one_line, raise_interrupts

_EXIT_CODES = {
    UserError: 2,
    HydraException: 2,
    OmegaConfBaseException: 2,
    RunFailed: 1,
    Stopped: 75,
    KeyboardInterrupt: 130,
}


def run(main: Callable[[], Any], conf: Path) -> None:
    """Run a Hydra main function; an error that is written for the user ends it with one line.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 75 stopped with a checkpoint to continue
    from, 130 interrupted.

    Args:
        main: decorated by Hydra.
        conf: the folder of its configuration.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised here instead of being printed
    try:
        arguments = Arguments(sys.argv[1:])
        if (own := arguments.options.config_dir) is not None:
            check_own_files(own, conf)
        if arguments.options.version:
            print(f"dlion {__version__}")
        elif arguments.options.help:
            print(help_text(arguments, conf))
        else:
            sys.argv[1:] = arguments.ordered()
            main()
    except (MarkedYAMLError, UnicodeDecodeError) as error:  # before the others: a duplicate key
        _leave(UserError(_unreadable_file(error)))
    except tuple(_EXIT_CODES) as error:
        _leave(_reason_behind(error, conf))
    except Exception as error:
        if type(error).__module__.startswith("submitit."):
            _leave(RunFailed(_job_failure(error)))
        from_hydra = _raised_by(error) in ("hydra", "omegaconf", "antlr4")
        if from_hydra and not isinstance(error, OSError):
            _leave(UserError(f"Hydra cannot read the command line: {_sentence(error)}"))
        raise


def _reason_behind(error: BaseException, conf: Path) -> BaseException:
    """Return what an error of composing is about.

    Hydra takes a recipe that cannot be composed for one that is no sweep, and then complains of
    several values. Of a sweep's choices it names no other that has a setting.
    """
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "." in (cause.full_key or ""):
        return _of_other_choices(cause.full_key, conf) or error
    if "Ambiguous value for argument" not in str(error):
        return error
    arguments = Arguments(sys.argv[1:])
    try:
        with opened(conf, arguments.options.config_dir) as loader:
            loader.load_configuration(
                "config", arguments.settings, RunMode.MULTIRUN, validate_sweep_overrides=False
            )
    except (HydraException, OmegaConfBaseException) as reason:
        return reason
    return error


def _of_other_choices(key: str, conf: Path) -> UserError | None:
    """Return the refusal of a setting that only some of a sweep's choices have; else None."""
    arguments, group = Arguments(sys.argv[1:]), key.partition(".")[0]
    with opened(conf, arguments.options.config_dir) as loader:
        words = OverridesParser.create(config_loader=loader).parse_overrides(arguments.settings)
        recipes = [w.input_line for w in words if w.key_or_group == "experiment"]
        load = partial(loader.load_configuration, "config", run_mode=RunMode.RUN)
        choices = [
            choice
            for word in words
            if word.key_or_group == group and word.is_discrete_sweep()
            for choice in word.sweep_string_iterator()
        ]
        if group == "optimizer" and recipes and not choices:
            choices = [*(load(recipes).get("methods") or ())]
        keys = {choice: f"{group}={choice}" for choice in choices}
        have = [c for c, word in keys.items() if key.partition(".")[2] in load([word])[group]]
    if not have:
        return None
    name, typed = key.partition(".")[2], "VALUE"
    typed = next((w.input_line.partition("=")[2] for w in words if w.key_or_group == key), typed)
    lack = [choice for choice in choices if choice not in have]
    lack = ", ".join(lack) if len(lack) < 4 else "the others"
    instead = " ".join(f"+methods.{choice}.{name}={typed}" for choice in have)
    is_table = group == "optimizer" and "," not in typed
    hint = f"type {instead} instead, or" if is_table else "leave it out, or"
    return UserError(
        f"{key} is a setting of {', '.join(have)} and not of {lack}: {hint} sweep over"
        f" {','.join(have)} alone"
    )


def guarded(config: DictConfig) -> Any:
    """Launch the configured run, from inside Hydra's main function, and end as it ended.

    The exception is the outcome: Stopped, RunFailed, UserError; none: the run has finished.
    """
    hydra = HydraConfig.get()
    multirun = hydra.mode == RunMode.MULTIRUN
    output_dir = Path(hydra.runtime.output_dir) if multirun else None
    sweep = Path(hydra.sweep.dir) if multirun else None
    try:
        if not multirun:
            _check_single(hydra)
        settings = resolve(config, hydra)
        check_values(settings)
        if not multirun:  # the sweeper has checked it
            check_effects(settings, hydra.overrides.task)
        _announce(settings, unlisted_method(config, hydra))
        from dlion.suite.launch.resume import (
            check_place,
            choose_output_dir,
        )  # here, as it takes seconds
        from dlion.suite.launch.runner import launch

        if not multirun:
            output_dir = choose_output_dir(config, settings)
            settings.output_dir = str(output_dir)
        else:
            check_place(output_dir, sweep)
        raise_interrupts()
        return launch(settings, output_dir)
    except (Exception, KeyboardInterrupt) as error:
        told = _told(error)
        _conclude(told, config, output_dir, sweep)
        if isinstance(told, Finished):
            return told.result
        raise told from error.__cause__ if told is error else error


def _told(error: BaseException) -> BaseException:
    """Return an error, or the sentence about a file that the operating system refuses."""
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(
            f"{error.filename} could not be read or written ({error.strerror}): name another place"
        )
    return error


def _conclude(
    error: BaseException, config: DictConfig, output_dir: Path | None, sweep: Path | None
) -> None:
    """Record why a run ended, print it and exit; return if its caller is to get the error.

    Hydra would print the error of a single run with its own traceback, so that exits here. In a
    sweep Hydra gets it, and runs the other jobs first, unless a signal asked the run to end.
    """
    asked, command = None, None  # the signal that asked the run to end, and what to type
    if isinstance(error, KeyboardInterrupt):
        asked = signal.SIGINT
        signal.signal(asked, signal.SIG_IGN)  # another one would cut the record off
    if isinstance(error, KeyboardInterrupt | Stopped):
        from dlion.suite.launch.resume import resume_command

        command = resume_command(output_dir, sweep)
    if isinstance(error, Stopped):
        asked = error.signal
        error.command, command = command, None  # its sentence says it
        # whoever started this process may have a handler: that of submitit requeues the job
        handled = asked not in (None, signal.SIGINT) and callable(signal.getsignal(asked))
        if isinstance(error, Finished) and (handled or sweep is None):
            return
        if handled:
            print(error, file=sys.stderr)
            signal.raise_signal(asked)
            sys.exit(_EXIT_CODES[Stopped])
    elif output_dir is not None:
        _record(error, config, output_dir, sweep)
    if isinstance(error, tuple(_EXIT_CODES)) and (asked is not None or sweep is None):
        _leave(error, command)


def _record(error: BaseException, config: DictConfig, output_dir: Path, sweep: Path | None) -> None:
    """Record why a run failed, unless another run, or a link, is in its directory."""
    from dlion.suite.launch.resume import check_place, holds_another, in_use

    try:
        check_place(output_dir, sweep)
    except (UserError, OSError):
        return
    if isinstance(error, UserError):
        if sweep is None or holds_another(config, output_dir):
            return
        if not holds_run(output_dir):  # the table of the sweep lists it by its settings
            record_config(output_dir, config)
        forget(output_dir, FAILURE)  # of an earlier attempt
    elif in_use(output_dir):
        return
    record_failure(output_dir, _sentence(error))


def _check_single(hydra: DictConfig) -> None:
    """Refuse settings that only sweeps use.

    Raises:
        UserError: what to type instead.
    """
    launcher = hydra.runtime.choices["hydra/launcher"]
    if launcher != "basic":
        raise UserError(f"hydra/launcher={launcher} is for sweeps, and would run here: add -m")


def _announce(settings: DictConfig, method: str | None) -> None:
    """Print a line about the run, before anything that takes time.

    Args:
        settings: of the run.
        method: chosen, if the recipe's table does not list it.
    """
    if not is_first():
        return
    names = [settings[group].get("name", "?") for group in ("optimizer", "model", "dataset")]
    what = "{} trains {} on {}".format(*names)
    if settings.evaluate is not None:
        what = f"measures the model of {settings.evaluate}"
    print(what, flush=True)
    if method is not None:
        print(
            f"note: the recipe has no settings for optimizer={method} here, which keeps those of"
            f" conf/optimizer/{method}.yaml",
            file=sys.stderr,
        )


def _leave(error: BaseException, command: str | None = None) -> NoReturn:
    """Print the error's sentence, once where several processes have it, and exit with its code.

    Args:
        error: why this process ends.
        command: what to type to resume, if that is known and the sentence does not say it.
    """
    code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
    stopped = isinstance(error, Stopped)
    if stopped and error.signal == signal.SIGINT:
        code = _EXIT_CODES[KeyboardInterrupt]
    start, sentence = "" if stopped else "error: ", _sentence(error)
    hint = f"; to resume: {command}" if command else ""
    tell = partial(print, start, sentence, hint, sep="", file=sys.stderr, flush=True)
    if code in (1, 2) and among_others():
        _tell_once(tell, error, sentence)
        end_now(code)
    if is_first():
        tell()
    sys.exit(code)


def _tell_once(tell: Callable[[], None], error: BaseException, sentence: str) -> None:
    """Call ``tell`` in one of the processes that torchrun or SLURM started and that fail alike."""
    from dlion.suite.launch.local import lost_peer  # here, as it takes seconds
    from dlion.suite.launch.meeting import OthersFailed, tell_once

    try:
        detect().export()
    except UserError:  # nothing says where the others are
        tell()
        return
    cause = error.__cause__ or error
    lost = isinstance(error, OthersFailed) or (isinstance(cause, Exception) and lost_peer(cause))
    tell_once(tell, sentence, lost)


def _sentence(error: BaseException) -> str:
    """Return the sentence that an error is recorded and printed with."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return in_one_line(explain(error))
    text = str(error) or type(error).__name__
    return in_one_line(text) if isinstance(error, UserError) else text


def _unreadable_file(error: MarkedYAMLError | UnicodeDecodeError) -> str:
    """Say where in a file of settings its mistake is."""
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"{mark.name}, line {mark.line + 1}" if mark else "a file of settings"
        return f"{place} is not YAML ({error.problem or error.context}): write KEY: VALUE"
    traceback, place = error.__traceback__, "a file of settings"
    while traceback is not None:  # the decoder does not know the file, but who opened it does
        opened = traceback.tb_frame.f_locals.get("full_path")
        place = opened if isinstance(opened, str) else place
        traceback = traceback.tb_next
    return f"{place} is not text in UTF-8 (byte {error.start + 1}): save it as UTF-8"


def _raised_by(error: Exception) -> str:
    """Return the name of the package whose code raised an error."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return name.partition(".")[0]


def _job_failure(error: Exception) -> str:
    """Return one sentence about a failed job of a sweep on SLURM."""
    text = str(error)
    job = re.search(r"\b\d+_\d+\b", text)
    state = re.search(r"state: ([A-Z_ ]+)", text)
    lines = [line.strip(" -") for line in text.splitlines()]
    reason = state[1].strip().lower() if state else next(x for x in reversed(lines) if x)
    if job is None:
        return f"SLURM took no job of the sweep: {reason}"
    return (
        f"SLURM job {job[0]} of the sweep: {reason}; the others continue;"
        " `dlion collect SWEEP_DIR` shows the status of each"
    )
