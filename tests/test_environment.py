"""pyproject.toml and environment.yml ask for the same packages, and the library waits for none."""

import importlib.metadata
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUITE = PROJECT["optional-dependencies"]["suite"]


def test_conda_and_pip_pins_agree():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    assert pip == [*PROJECT["dependencies"], *SUITE, "--editable ."]
    assert f"python{PROJECT['requires-python']}" in conda


@pytest.mark.slow
def test_importing_the_library_imports_nothing_of_the_suite_and_compiles_nothing():
    code = "import sys, dlion; dlion.DLion; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {module.partition(".")[0] for module in run.stdout.split()}
    assert "dlion" in imported and "numba" not in imported
    homes = importlib.metadata.packages_distributions()
    packages = {name.lower() for module in imported for name in homes.get(module, [])}
    assert "torch" in packages and not packages & {Requirement(line).name for line in SUITE}
