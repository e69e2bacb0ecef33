"""A method is said once: what is said of it elsewhere agrees with METHODS."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from dlion.optim import METHODS
from dlion.suite.compare.style import looks
from tests.conftest import ROOT


def test_every_method_has_a_file_of_settings_and_every_file_a_method():
    assert {file.stem for file in (ROOT / "conf" / "optimizer").glob("*.yaml")} == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_the_file_of_settings_is_of_its_class(name):
    settings = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{name}.yaml")
    method = METHODS[name]
    assert (settings.name, settings._target_) == (name, f"dlion.optim.{method.cls.__name__}")
    assert {key: settings[key] for key in method.options} == method.options


def test_methods_are_drawn_differently_also_when_there_are_many():
    assert len({looks(number) for number in range(38)}) == 38


def test_the_registry_needs_no_torch():
    code = (
        "import sys, dlion; dlion.__all__, dlion.optim.METHODS; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
