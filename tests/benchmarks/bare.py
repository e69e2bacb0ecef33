"""Run a script as on a machine that has torch, its dependencies and little else: PACKAGES FILE...

PACKAGES, separated by commas, are installed there too. All others are not found.
"""

import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

TORCH = {  # and what it requires
    *("torch", "torchgen", "functorch", "numpy", "nvidia", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions", "setuptools"),
}


class Bare(PathFinder):
    """Finds what a bare machine has."""

    installed: set[str]

    @classmethod
    def find_spec(cls, fullname, path=None, target=None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is None or path is not None or fullname in cls.installed:
            return spec
        places = [spec.origin, *(spec.submodule_search_locations or ())]
        packaged = any("site-packages" in Path(place or "").parts for place in places)
        return None if packaged else spec


if __name__ == "__main__":
    packages, script, *arguments = sys.argv[1:]
    Bare.installed = TORCH | {*packages.split(",")}
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
