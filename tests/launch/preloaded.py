"""What train.py imports, imported once for many starts of it (see tests/launch/forked.py)."""

# ruff: noqa: E402, F401
from dlion.data.torchvision_ops import declare_missing_operators

declare_missing_operators()
import timm
import transformers
from hydra.core.plugins import Plugins

import dlion.launch

Plugins.instance()  # looks through all of Hydra's plugins
