"""The commands that runs came from, as Hydra keeps them beside a run and beside a sweep."""

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from dlion.suite.record.configs import read_yaml
from dlion.suite.record.runs import Run, named_if_damaged


def read_hydra(folder: Path, name: str) -> dict[str, Any] | None:
    """Return Hydra's own settings of hydra.yaml or multirun.yaml, without interpolation.

    Returns:
        None where the file does not exist.

    Raises:
        UserError: if it is damaged.
    """
    with named_if_damaged(folder / name):
        recorded = read_yaml(folder, name)
        return None if recorded is None else recorded["hydra"]


def sweep_overrides(hydra: Mapping[str, Any]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in the order of the runs.

    Args:
        hydra: what Hydra recorded in the sweep's multirun.yaml.
    """
    typed = [f"{key}={value}" for key, value in (hydra["sweeper"]["params"] or {}).items()]
    choices = {}
    for override in OverridesParser.create().parse_overrides([*typed, *hydra["overrides"]["task"]]):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
    return [list(job) for job in itertools.product(*choices.values())]


def command(run: Run) -> str:
    """Return the command that a run came from, without the directories that it wrote to."""
    typed, options = run.overrides, []
    sweep = run.directory.parent
    if hydra := read_hydra(sweep, "multirun.yaml"):
        with named_if_damaged(sweep / "multirun.yaml"):
            # of several sweeps into one directory, the file describes the last
            if typed in sweep_overrides(hydra):
                typed, options = hydra["overrides"]["task"], ["-m"]
    kept = [override for override in typed if not override.startswith("output_dir=")]
    return shlex.join(["python", "train.py", *options, *kept])
