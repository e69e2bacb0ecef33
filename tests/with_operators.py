"""Run a script where torchvision's compiled operators may not fit torch: FILE."""

import runpy
import sys
from pathlib import Path

from dlion.suite.data.torchvision_ops import declare_missing_operators

declare_missing_operators()
sys.path.insert(0, str(Path(sys.argv[1]).parent))
runpy.run_path(sys.argv[1], run_name="__main__")
