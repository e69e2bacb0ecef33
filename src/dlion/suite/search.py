"""Points of a search, as recipes compute them: resolvers for files of ``conf/search/``."""

import functools
import string
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from dlion.errors import UserError


def sobol(dimension: int, dimensions: int, count: int, candidate: str) -> float:
    """Return a coordinate, in [0, 1), of a point of those that cover the unit cube evenly.

    The first half of the points covers it evenly too, and so does the first quarter.

    Args:
        dimension: number of the coordinate, from 0 on.
        dimensions: of the cube.
        count: number of points.
        candidate: letter of the point, from a on.
    """
    letters = string.ascii_lowercase[:count]
    if candidate not in tuple(letters):
        raise UserError(f"candidate={candidate} is unknown: choose a to {letters[-1]}")
    return _points(dimensions, count)[letters.index(candidate)][dimension]


@functools.cache
def _points(dimensions: int, count: int) -> list[list[float]]:
    import torch

    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=0)
    return engine.draw(count).tolist()


def between(low: float, high: float, share: float, digits: int = 2) -> float:
    """Return a value between two others, in equal ratios, with a few digits."""
    return _rounded(low * (high / low) ** share, digits)


def one_of(choices: Sequence[Any], share: float) -> Any:
    """Return the choice at a share of the list."""
    return choices[int(share * len(choices))]


def over(numerator: float, denominator: float) -> float:
    """Return a quotient with two digits."""
    return _rounded(numerator / denominator, 2)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


for resolver in (sobol, between, one_of, over):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
