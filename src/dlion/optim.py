"""The optimizers, under the name that users of torch look for: those of :mod:`dlion.methods`."""

from dlion.methods import *  # noqa: F403
from dlion.methods import __all__ as __all__
