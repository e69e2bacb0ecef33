"""What the person at the keyboard meets: checked overrides, one clear line, exit codes."""

import difflib
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlion.errors import RunFailed, Stopped, UserError
from dlion.launch.check import check_numbers, check_output, holds_another
from dlion.launch.environment import is_first
from dlion.record.runs import holds_run, record_config, record_failure


def run(main: Callable[[], Any], conf: Path) -> None:
    """Run a Hydra main function after checking the command line; never returns on a user's error.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 75 stopped with a checkpoint to go on from, 130
    interrupted.
    """
    try:
        arguments = sys.argv[1:] = _name_recipe(sys.argv[1:], conf)
        if not any(a.startswith("-") and a not in ("-m", "--multirun") for a in arguments):
            _check_command_line(arguments, conf)
        if not is_first():
            # one process keeps the records; the others must not write where it does
            sys.argv += ["hydra.run.dir=.", "hydra/job_logging=disabled"]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # what is raised comes here instead of being printed
        main()
    except UserError as error:
        _leave(error, 2)
    except RunFailed as error:
        _leave(error, 1)
    except Stopped as stop:
        _leave(stop, 75)
    except HydraException as error:
        _leave(_first_line(error), 2)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        _leave(_job_failure(error), 1)


def guarded(launch: Callable[[DictConfig, Path], Any], config: DictConfig) -> Any:
    """Call ``launch(config, output_dir)`` from inside Hydra's main function.

    Hydra would wrap what is raised into its own traceback, so a single run leaves here. In a
    multirun the error goes on to Hydra, which runs the other jobs first.
    """
    hydra = HydraConfig.get()
    output_dir = Path(hydra.runtime.output_dir)
    if not is_first() and hydra.mode == RunMode.RUN:
        output_dir = Path(config.output_dir)  # Hydra itself was told to write nothing, see run
    try:
        return launch(config, output_dir)
    except KeyboardInterrupt:
        record_failure(output_dir, "interrupted")
        _leave("interrupted", 130)
    except Stopped as stop:
        if hydra.mode == RunMode.MULTIRUN and stop.signal is None:
            raise
        if stop.signal is not None and callable(signal.getsignal(stop.signal)):
            print(stop, file=sys.stderr)
            signal.raise_signal(stop.signal)  # whoever listened before: submitit requeues the job
            sys.exit(75)
        _leave(stop, 75)
    except UserError as error:
        if hydra.mode == RunMode.MULTIRUN:
            if not holds_run(output_dir):
                record_config(output_dir, config)
            if not holds_another(config, output_dir):  # whose record stays as it is
                record_failure(output_dir, str(error))
            raise
        _leave(error, 2)
    except Exception as error:
        record_failure(output_dir, str(error) or type(error).__name__)
        if hydra.mode == RunMode.MULTIRUN or not isinstance(error, RunFailed):
            raise
        _leave(error, 1)


def _name_recipe(arguments: list[str], conf: Path) -> list[str]:
    """``experiment=NAME scale=full`` becomes ``experiment=NAME/full``, the file of a recipe."""
    scales = [a.removeprefix("scale=") for a in arguments if a.startswith("scale=")]
    rest = [a for a in arguments if not a.startswith("scale=")]
    recipes = sorted(p.parent.name for p in (conf / "experiment").glob("*/small.yaml"))
    named = [i for i, a in enumerate(rest) if a.removeprefix("experiment=") in recipes]
    scale = scales[-1] if scales else "small"
    if scale not in ("small", "full"):
        raise UserError(f"scale={scale} is unknown: choose small (a laptop) or full (the paper's)")
    several = [a for a in rest if a.startswith("experiment=") and "," in a]
    if several:
        raise UserError(f"{several[0]}: type one recipe at a time")
    if scales and not named:
        raise UserError(
            f"scale={scale} is of a recipe: type experiment= and one of {', '.join(recipes)}"
        )
    for i in named:
        rest[i] = f"{rest[i]}/{scale}"
    return rest


def _leave(reason: Any, code: int) -> None:
    if is_first() or code == 1:
        print(reason if code == 75 else f"error: {reason}", file=sys.stderr)
    sys.exit(code)


def _check_command_line(arguments: list[str], conf: Path) -> None:
    """Compose every configuration that the overrides ask for, without running anything."""
    asked = any(a in ("-m", "--multirun") for a in arguments)
    overrides = _parse([a for a in arguments if not a.startswith("-")])
    choices = [_choices(override) for override in overrides]
    with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
        _check_names(overrides, choices, conf)
        multirun, more = _sweep_of([variants[0] for variants in choices])
        if not asked and not multirun:
            for override in overrides:
                if override.is_sweep_override():
                    raise UserError(
                        f"{override.input_line} names several values: add -m to run them all"
                    )
        keys = {override.key_or_group for override in overrides}
        choices += [_choices(override) for override in more if override.key_or_group not in keys]
        for job in itertools.product(*choices):
            try:
                config = compose("config", overrides=list(job))
                _check_data_path(config, here="hydra/launcher" not in keys)
                OmegaConf.resolve(config)
            except (HydraException, OmegaConfBaseException) as error:
                raise UserError(f"{' '.join(job)}: {_first_line(error)}") from None
            check_numbers(config)
            if not (asked or multirun):
                check_output(config, Path(config.output_dir))
    GlobalHydra.instance().clear()


def _check_data_path(config: DictConfig, here: bool) -> None:
    """Data that is not there would fail every job; ``here``: jobs run on this machine."""
    name = config.dataset.name
    if OmegaConf.is_missing(config.dataset, "path"):
        raise UserError(
            f"dataset={name} must be on a disk: type dataset.path=DIR;"
            f" conf/dataset/{name}.yaml says what DIR holds"
        )
    path = config.dataset.get("path")
    if here and path and not Path(path).expanduser().exists():
        raise UserError(f"dataset.path={path} is not a folder: give that of the data")


def _parse(texts: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(texts)
    except HydraException as error:
        raise UserError(f"cannot read {' '.join(texts)}: {_first_line(error)}") from None


def _choices(override: Override) -> list[str]:
    """The values that an override stands for, each as an override of its own."""
    if not override.is_sweep_override():
        return [override.input_line]
    return [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]


def _sweep_of(overrides: list[str]) -> tuple[bool, list[Override]]:
    """Whether the configuration itself asks for several runs, and over what (recipes do)."""
    try:
        hydra = compose("config", overrides=overrides, return_hydra_config=True).hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{' '.join(overrides)}: {_first_line(error)}") from None
    params = hydra.sweeper.get("params") or {}
    return hydra.mode == RunMode.MULTIRUN, _parse([f"{k}={v}" for k, v in params.items()])


def _check_names(overrides: list[Override], choices: list[list[str]], conf: Path) -> None:
    """Every override must name a group, and a file in it, or a key."""
    groups = {
        p.relative_to(conf).as_posix() for p in conf.rglob("*") if p.is_dir()
    }  # fmt: skip
    chosen = []
    for override, variants in zip(overrides, choices, strict=True):
        key = override.key_or_group
        if key not in groups:
            continue
        files = (p.relative_to(conf / key) for p in (conf / key).rglob("*.yaml"))
        options = sorted(p.with_suffix("").as_posix() for p in files if p.stem != "common")
        for variant in variants:
            value = variant.split("=", 1)[1]
            if value not in (*options, "null"):
                raise UserError(
                    f"{key}={value} is unknown{_nearest(value, options)}: choose one of"
                    f" {', '.join(sorted({option.split('/')[0] for option in options}))}"
                )
        chosen.append(variants[0])
    composed = compose("config", overrides=chosen)
    keys = _keys(OmegaConf.to_container(composed)) | groups
    for override in overrides:
        key = override.key_or_group
        known = key in keys or key.split(".")[0].split("/")[0] == "hydra"
        if not known and not override.is_add() and not override.is_force_add():
            raise UserError(
                f"{key} is not a setting{_nearest(key, keys)}: see `python train.py --help`"
            )


def _keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return set()
    inner = {f"{prefix}{key}": value for key, value in node.items()}
    return set(inner).union(*(_keys(value, f"{key}.") for key, value in inner.items()))


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _job_failure(error: Exception) -> str:
    """What became of a job of a sweep on SLURM, in one sentence."""
    text = str(error)
    job = re.search(r"\b\d+_\d+\b", text)
    state = re.search(r"state: ([A-Z_ ]+)", text)
    lines = [line.strip(" -") for line in text.splitlines()]
    reason = state[1].strip().lower() if state else next(x for x in reversed(lines) if x)
    return (
        f"SLURM job {job[0] if job else ''} of the sweep: {reason}; the others go on, and"
        " `python -m dlion.compare.collect SWEEP_DIR` tells what became of each"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else str(error.__cause__ or type(error).__name__)
