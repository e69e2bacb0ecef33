"""The methods as tests run them: all of METHODS and some variants, on a few hundred parameters."""

from typing import Any, NamedTuple

import pytest

from dlion.optim import METHODS, DistributedOptimizer
from tests.support.scripts import script

SMALL = script("same_bits").SMALL


class Tested(NamedTuple):
    """A method with settings for small tests.

    Attributes:
        method: its ``optimizer=`` name.
        cls: its class.
        options: keyword arguments of the class.
    """

    __test__ = False  # pytest need not look for tests in it

    method: str
    cls: type[DistributedOptimizer]
    options: dict[str, Any]


def tested(method: str, **options: Any) -> Tested:
    """Return a method with its settings for small tests, and with further ones."""
    entry = METHODS[method]
    return Tested(method, entry.cls, entry.options | SMALL.get(method, {}) | options)


VARIANTS = [
    tested("dlion_mavo", ties="zero"),
    tested("dgc", clip_norm=5.0),
    tested("dlion_adm", limit=2.0, weighted=True),
    tested("lion_cub", bits=2),
    tested("lion_cub", momentum_sync=2),
    tested("sparseloco", local_steps=2),
    tested("diloco", local_steps=2),
    tested("diloco", local_steps=2, inner="lion", wire="sign"),
]
ALL = [*map(tested, METHODS), *VARIANTS]
# the answer depends on how slices are cut, and so on the number of workers
OF_PIECES = {"ef_signsgd", "ef21_sign", "onebit_adam"}
IDS = ["-".join([each.method, *map(str, each.options.values())]) for each in ALL]
of_all = pytest.mark.parametrize(("method", "cls", "options"), ALL, ids=IDS)
