"""What was typed, as Hydra keeps it beside a run and beside a sweep."""

import itertools
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf


def run_overrides(directory: Path) -> list[str]:
    """The overrides of a run; of a run in a sweep, one value each."""
    file = directory / ".hydra" / "overrides.yaml"
    return list(OmegaConf.load(file)) if file.exists() else []


def sweep_overrides(multirun: DictConfig) -> list[list[str]]:
    """The overrides of each run of a sweep, in their order; ``multirun``: of multirun.yaml."""
    hydra = multirun.hydra
    typed = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    choices = {}
    for override in OverridesParser.create().parse_overrides([*typed, *hydra.overrides.task]):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
    return [list(job) for job in itertools.product(*choices.values())]


def command(directory: Path) -> str:
    """The command that a run came from, without the places where it wrote."""
    typed, options = run_overrides(directory), []
    file = directory.parent / "multirun.yaml"
    if file.exists():
        multirun = OmegaConf.load(file)
        if typed in sweep_overrides(multirun):  # it is of the last of several sweeps into one place
            typed, options = list(multirun.hydra.overrides.task), ["-m"]
    kept = [override for override in typed if not override.startswith("output_dir=")]
    return shlex.join(["python", "train.py", *options, *kept])
