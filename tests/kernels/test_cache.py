"""Compiled kernels come from the disk, and are compiled anew when that is damaged or full."""

import importlib.util
import resource
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dlion.kernels import numba_cpu, reference


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the kernels, and the cache of one of them beside it."""
    shutil.copy(numba_cpu.__file__, tmp_path)
    use(tmp_path)
    assert sorted(path.suffix for path in files(tmp_path)) == [".nbc", ".nbi"]
    return tmp_path


def files(package: Path) -> list[Path]:
    return [path for path in package.rglob("__pycache__/*.nb*") if path.stat().st_size]


def use(package: Path) -> ModuleType:
    """Import the copy as a new process would, and check what a kernel gives."""
    spec = importlib.util.spec_from_file_location("copied_kernels", package / "numba_cpu.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    greater, equal = torch.tensor([0b0101]), torch.tensor([0b1010])
    packed, expected = (torch.zeros(13, dtype=torch.uint8) for _ in range(2))
    copy.pack_votes(greater, equal, packed)
    reference.pack_votes(greater, equal, expected)
    assert torch.equal(packed, expected)
    return copy


def compiled(copy: ModuleType) -> bool:
    """Whether the kernel was compiled, and not read."""
    return bool(copy._pack_votes.stats.cache_misses)


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
def test_a_damaged_file_is_replaced(package, suffix):
    assert not compiled(use(package))
    for share in (0, 0.5):
        (damaged,) = (path for path in files(package) if path.suffix == suffix)
        content = damaged.read_bytes()
        damaged.write_bytes(content[: int(share * len(content))])
        assert compiled(use(package))
        assert not compiled(use(package))


def test_a_full_disk_is_done_without(package):
    shutil.rmtree(package / "__pycache__")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # of bytes in a file
    try:
        assert compiled(use(package))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not files(package)
