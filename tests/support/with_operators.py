"""Run a script where torchvision's compiled operators may not fit torch: FILE ARGUMENTS."""

import runpy
import sys
from pathlib import Path

from dlion.suite.data.torchvision_ops import declare_missing_operators

declare_missing_operators()
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
