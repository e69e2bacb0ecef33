"""pyproject.toml and environment.yml ask for the same packages."""

import tomllib

import yaml

from tests.conftest import ROOT


def test_conda_and_pip_pins_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    suite = project["optional-dependencies"]["suite"]
    assert pip == [*project["dependencies"], *suite, "--editable ."]
    assert f"python{project['requires-python']}" in conda
