"""The scripts of benchmarks/, which import each other by their file names."""

import importlib
import sys
from types import ModuleType

from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    """Import a script."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
