"""Batches, shards and the readers of real formats."""

import ctypes
import io
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from dlion.errors import TrainingFailed, UserError
from dlion.suite.data import (
    ImageData,
    Sharding,
    TextData,
    cifar10,
    cifar100,
    digits,
    imagenet,
    mnist5k,
    stdlib_text,
)
from dlion.suite.data.image_files import ImageFiles
from dlion.suite.launch.local import run_processes
from tests.data.formats import (
    as_the_hub_converts,
    picture,
    write_cifar,
    write_imagenet_folders,
    write_imagenet_parquet,
)


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mode", ["partition", "contiguous"])
@pytest.mark.parametrize(("size", "workers", "batch"), [(100, 4, 8), (101, 8, 5), (4000, 8, 32)])
def test_every_sample_once_an_epoch(size, workers, batch, mode):
    sharding = Sharding(size, workers, batch, seed=1, mode=mode)
    orders = []
    for epoch in range(2):
        steps = range(epoch * sharding.steps_per_epoch, (epoch + 1) * sharding.steps_per_epoch)
        parts = [[sharding.indices(w, s) for s in steps] for w in range(workers)]
        assert torch.cat([p for row in parts for p in row]).sort().values.tolist() == list(
            range(size)
        )
        sizes = [len(p) for row in parts for p in row]
        assert min(sizes) > 0 and max(sizes) <= batch and max(sizes) - min(sizes) <= 1
        orders.append([set(torch.cat(row).tolist()) for row in parts])
    assert orders[0] == orders[1]  # a worker keeps its shard


@pytest.mark.parametrize("mode", ["partition", "contiguous", "dirichlet", "replicate"])
@pytest.mark.parametrize(("size", "workers"), [(101, 8), (103, 4), (5, 4), (40, 8)])
def test_batches_of_one_sample_leave_out_as_little_as_they_can(size, workers, mode):
    labels = torch.arange(size) % 2
    sharding = Sharding(size, workers, 1, seed=1, mode=mode, labels=labels, alpha=1.0)
    length = size if mode == "replicate" else size // workers
    assert (sharding.steps_per_epoch, sharding.smallest_batch) == (length, 1)
    for epoch in range(2):
        steps = range(epoch * length, (epoch + 1) * length)
        batches = [sharding.indices(w, s).tolist() for w in range(workers) for s in steps]
        assert all(len(batch) == 1 for batch in batches)
        seen = [index for (index,) in batches]
        assert len(set(seen)) == (size if mode == "replicate" else len(seen))


def test_an_odd_sample_is_another_one_in_each_epoch():
    sharding = Sharding(9, 2, 1, seed=1, mode="partition")
    epochs = [{int(sharding.indices(0, 4 * e + s)) for s in range(4)} for e in range(20)]
    assert len(set.union(*epochs)) == 5


@pytest.mark.parametrize("mode", ["partition", "contiguous", "replicate"])
def test_every_epoch_has_an_order_of_its_own(mode):
    sharding = Sharding(200, 2, 20, seed=1, mode=mode)
    length = sharding.steps_per_epoch
    orders = [
        torch.cat([sharding.indices(0, epoch * length + step) for step in range(length)])
        for epoch in range(3)
    ]
    assert not any(torch.equal(orders[a], orders[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_replicate_shows_every_worker_everything():
    sharding = Sharding(50, 3, 8, seed=1, mode="replicate")
    for worker in range(3):
        seen = torch.cat([sharding.indices(worker, s) for s in range(sharding.steps_per_epoch)])
        assert seen.sort().values.tolist() == list(range(50))
    assert not torch.equal(sharding.indices(0, 0), sharding.indices(1, 0))


def test_indices_depend_on_worker_and_step_alone():
    one, two = (Sharding(100, 4, 8, seed=1, mode="partition") for _ in range(2))
    forward = [one.indices(2, s) for s in range(10)]
    backward = [two.indices(2, s) for s in reversed(range(10))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = Sharding(100, 4, 8, seed=2, mode="partition").indices(2, 0)
    assert not torch.equal(forward[0], other)


def test_dirichlet_shards_are_a_partition_of_unlike_parts():
    labels = torch.arange(1000) % 10
    spread = {}
    for alpha in (1000, 0.1):
        sharding = Sharding(1000, 8, 25, 1, "dirichlet", labels, alpha)
        steps = range(sharding.steps_per_epoch)
        parts = [torch.cat([sharding.indices(w, s) for s in steps]) for w in range(8)]
        assert sorted(torch.cat(parts).tolist()) == list(range(1000))
        assert {len(part) for part in parts} == {125}
        counts = torch.stack([labels[part].bincount(minlength=10) for part in parts])
        spread[alpha] = counts[0].max().item()  # the largest class of the first worker
    assert spread[1000] < 25 < 50 < spread[0.1]


def test_contiguous_shards_are_stretches_in_the_sets_own_order():
    for seed in (1, 2):
        sharding = Sharding(103, 4, 5, seed, "contiguous")
        steps = range(sharding.steps_per_epoch)
        parts = [torch.cat([sharding.indices(w, s) for s in steps]) for w in range(4)]
        assert [sorted(part.tolist()) for part in parts] == [
            list(range(start, stop)) for start, stop in ((0, 25), (25, 51), (51, 77), (77, 103))
        ]
        assert all(part.tolist() != sorted(part.tolist()) for part in parts)


def test_contiguous_shards_of_a_text_are_other_modules():
    data = stdlib_text(context=32, max_bytes=400_000)
    sharding = Sharding(data.train_size, 4, 8, 0, "contiguous")
    seen = []
    for worker in range(4):
        indices = torch.cat([sharding.indices(worker, s) for s in range(sharding.steps_per_epoch)])
        starts = indices.sort().values * data.context
        stretch = data.train_tokens[int(starts[0]) : int(starts[-1]) + data.context]
        assert len(stretch) == len(indices) * data.context
        seen.append(bytes(stretch.tolist()))
    assert b"".join(seen) == bytes(data.train_tokens[: data.train_size * data.context].tolist())


def test_an_unknown_way_to_divide_is_refused():
    with pytest.raises(UserError, match="choose partition, contiguous, replicate, dirichlet"):
        Sharding(100, 4, 8, 0, "by_file")
    with pytest.raises(UserError, match=r"needs an alpha: type \+dataset.alpha=0.5"):
        Sharding(10, 2, 1, 0, "dirichlet", torch.zeros(10))


def test_a_batch_larger_than_a_shard_is_refused():
    with pytest.raises(UserError, match="type batch_size=12 or less, or fewer workers"):
        Sharding(100, 8, 20, 0, "partition")


@pytest.mark.parametrize(
    ("make", "sizes", "side"), [(mnist5k, (4000, 1000), 28), (digits, (1397, 400), 8)]
)
def test_digits(make, sizes, side):
    data = make()
    assert (data.train_size, data.test_size) == sizes
    assert data.test_y.bincount().tolist() == 10 * [sizes[1] // 10]
    x, y = data.batch(torch.arange(500), coins())
    assert x.shape == (500, 1, side, side) and y.dtype == torch.int64
    assert abs(x.mean()) < 0.2 and 0.7 < x.std() < 1.3


def test_augmentation_draws_from_the_generator_only():
    images = torch.arange(16 * 16 * 3, dtype=torch.int64).remainder(256).to(torch.uint8)
    data = ImageData(*2 * (images.view(3, 1, 16, 16), torch.zeros(3).long()), 10, True, True)
    indices = torch.tensor(200 * [0])
    one, two = (data.batch(indices, coins(s))[0] for s in (1, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, data.batch(indices, coins(2))[0])
    plain = data.test_batch(0, 1)[0][0]
    matches = [torch.equal(image, plain) for image in one]
    mirrored = [torch.equal(image, plain.flip(-1)) for image in one]
    assert any(matches) and any(mirrored)  # no shift is one in 25


def test_text_windows_are_consecutive():
    tokens = torch.arange(200, dtype=torch.uint8)
    data = TextData(tokens, tokens, 256, context=8)
    x, y = data.batch(torch.tensor([0, 3, 23]), coins())
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (3, 8)
    x, y = data.test_batch(0, 100)
    assert torch.equal(x.flatten(), torch.arange(192)) and torch.equal(x + 1, y)


def test_standard_library_text():
    data = stdlib_text(context=32, max_bytes=300_000)
    assert len(data.train_tokens) == 300_000 and data.vocabulary == 256
    words = bytes(data.test_tokens.tolist())
    assert b"import" in words and b"def " in words
    with pytest.raises(UserError, match="context=0"):
        stdlib_text(context=0)


def test_hold_out_takes_training_data_only():
    data = mnist5k()
    held = data.hold_out()
    assert (held.train_size, held.test_size) == (3600, 400)
    text = stdlib_text(max_bytes=100_000)
    assert torch.equal(text.hold_out().test_tokens, text.train_tokens[90_000:])


def test_cifar_in_the_hubs_layout(tmp_path):
    write_cifar(tmp_path)
    data = cifar10(str(tmp_path))
    assert data.train_x.shape == (24, 3, 32, 32) and data.test_y.tolist() == [*range(10), 0, 1]
    first = np.asarray(Image.open(io.BytesIO(picture(32, 0))))
    assert torch.equal(data.train_x[0], torch.from_numpy(first.copy()).permute(2, 0, 1))
    assert cifar10(str(tmp_path), train_limit=5).train_size == 5


def test_the_hubs_own_copies_are_read(tmp_path):
    write_cifar(tmp_path / "cifar")
    write_imagenet_parquet(tmp_path / "imagenet")
    before = cifar10(str(tmp_path / "cifar"))
    as_the_hub_converts(tmp_path)
    after = cifar10(str(tmp_path / "cifar"))
    assert torch.equal(before.train_x, after.train_x) and torch.equal(before.test_y, after.test_y)
    assert torch.equal(cifar10(str(tmp_path / "cifar" / "plain_text")).test_x, after.test_x)
    data = imagenet(str(tmp_path / "imagenet"), loaders=0)
    assert (data.train_size, data.test_size) == (24, 6)
    assert imagenet(str(tmp_path / "imagenet" / "data"), loaders=0).train_size == 24


def test_configurations_are_not_mixed(tmp_path):
    write_cifar(tmp_path)
    shutil.copytree(tmp_path / "plain_text", tmp_path / "other")
    with pytest.raises(UserError, match=r"of train in other and in plain_text: leave one"):
        cifar10(str(tmp_path))


def test_cifar100_has_its_own_column(tmp_path):
    write_cifar(tmp_path, classes=100, columns=("img", "fine_label"), count=200)
    data = cifar100(str(tmp_path))
    assert data.classes == 100 and data.train_y.max() == 99


def test_cifar10_says_what_is_wrong_with_a_folder(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        cifar10(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"holds no train-\*.parquet"):
        cifar10(str(tmp_path))
    write_cifar(tmp_path, columns=("image", "label"))
    with pytest.raises(UserError, match="has the columns image, label: img and label are needed"):
        cifar10(str(tmp_path))


@pytest.mark.parametrize("write", [write_imagenet_folders, write_imagenet_parquet])
def test_imagenet_in_both_layouts(tmp_path, write):
    write(tmp_path)
    data = imagenet(str(tmp_path), image_size=24, loaders=0)
    assert (data.train_size, data.test_size, data.classes) == (24, 6, 3)
    x, y = data.test_batch(0, 6)
    assert x.shape == (6, 3, 24, 24) and sorted(y.tolist()) == [0, 0, 1, 1, 2, 2]
    means = [x[y == label].mean() for label in range(3)]
    assert means[0] < means[1] < means[2]  # each image came with its own label
    held = data.hold_out(0.25)
    assert (held.train_size, held.test_size) == (18, 6)


@pytest.mark.parametrize("write", [write_imagenet_folders, write_imagenet_parquet])
def test_grey_and_cmyk_images_become_coloured(tmp_path, write):
    write(tmp_path)
    data = imagenet(str(tmp_path), loaders=0)
    grey = 0
    for image, label in (data.train[i] for i in range(data.train_size)):
        pixels = np.asarray(image)
        assert image.mode == "RGB" and 40 * label < pixels.mean() < 40 * label + 40
        grey += (pixels == pixels[..., :1]).all()
    assert grey == data.train_size // 4


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_image_files_do_not_depend_on_who_decodes_them(tmp_path, mixup):
    write_imagenet_folders(tmp_path)
    requests = [(torch.tensor([3, 1, 20, 9]), seed) for seed in range(5)]
    options = {"image_size": 24, "auto_augment": True, "mixup": mixup}
    torch.manual_seed(0)
    one = list(imagenet(str(tmp_path), loaders=0, **options).batches(requests))
    torch.manual_seed(1)
    two = list(imagenet(str(tmp_path), loaders=2, **options).batches(requests))
    for (x, y), (other_x, other_y) in zip(one, two, strict=True):
        assert torch.equal(x, other_x) and torch.equal(y, other_y)
    assert not torch.equal(one[0][0], one[1][0])
    labels = one[0][1]
    if mixup:
        assert labels.shape == (4, 3) and torch.allclose(labels.sum(1), torch.ones(4))
    else:
        assert labels.tolist() == [0, 0, 2, 1]


def _with_little_shared_memory(path: str) -> bool:
    """Whether helper processes give the same batches where these do not fit into /dev/shm."""
    if ctypes.CDLL(None).unshare(0x00020000):  # a mount namespace of its own
        raise OSError("unshare")
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=128k", "none", "/dev/shm"]):
        subprocess.run(["mount", *mount], check=True)
    requests = [(torch.tensor([3, 1, 20, 9]), seed) for seed in range(5)]  # of 196 kB
    here, there = (list(imagenet(path, 64, loaders=n).batches(requests)) for n in (0, 1))
    return all(torch.equal(*x) and torch.equal(*y) for x, y in map(zip, here, there))


@pytest.mark.netns
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root")
def test_batches_need_not_fit_into_shared_memory(tmp_path):
    write_imagenet_folders(tmp_path)
    assert run_processes(1, _with_little_shared_memory, str(tmp_path))


@pytest.mark.parametrize("picture", [lambda: time.sleep(1), lambda: os.kill(os.getpid(), 9)])
def test_helper_processes_that_hang_or_die_are_named(picture):
    class Samples(list):
        targets = [0]

        def __getitem__(self, _: int) -> None:
            picture()

    data = ImageFiles(Samples([0]), Samples([0]), classes=1, image_size=24, loaders=1)
    data.patience = 0.2
    with pytest.raises(TrainingFailed, match=r"^the 1 helper processes of dataset.loaders give no"):
        next(data.batches([(torch.tensor([0]), 0)]))


def test_imagenet_says_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match=r"give a folder with train/CLASS/\*.JPEG .*, or train-"):
        imagenet(str(tmp_path))
    write_imagenet_folders(tmp_path)
    (tmp_path / "val" / "n00000002").rename(tmp_path / "val" / "n00000003")
    with pytest.raises(UserError, match="differ in their class folders, n00000002, n00000003"):
        imagenet(str(tmp_path))
