"""The kernels for CUDA, pretended: those of Numba, on the values."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.cuda.device import current, place
from tests.cuda.tensors import CudaTensor, inside, mapped, tensors_in


def kernels(package: str) -> ModuleType:
    """Return a module with the names of a package's ``triton_cuda``.

    What that defines runs in Numba, as one launch; what it leaves to the reference runs there.
    """
    kinds = "numba_cpu", "reference"
    numba_cpu, reference = (importlib.import_module(f"{package}.{kind}") for kind in kinds)
    source = Path(reference.__file__).with_name("triton_cuda.py").read_text()
    own = re.findall(r"^def ([a-z]\w*)\(", source, re.MULTILINE)
    module = ModuleType("pretended_kernels")
    for name, function in vars(reference).items():
        if callable(function):
            setattr(module, name, function)
    for name in own:
        if hasattr(numba_cpu, name):
            setattr(module, name, _launched(name, getattr(numba_cpu, name)))
    return module


def _launched(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes pretended tensors, anywhere in its arguments.

    What it writes is what differs afterwards.
    """

    def launch(*args: Any) -> Any:
        device = current()
        tensors = tensors_in(args)
        with torch._C.DisableTorchFunction():
            if not all(isinstance(tensor, CudaTensor) for tensor in tensors):
                device.seen.mixed[f"kernel {name} at {place()}"] += 1
            values = [inside(tensor) for tensor in tensors]
            before = [value.clone() for value in values]
            result = kernel(*mapped(inside, args))
            same = [_equal(*pair) for pair in zip(values, before, strict=True)]
            reads = [value for value, equal in zip(values, same, strict=True) if equal]
            writes = [value for value, equal in zip(values, same, strict=True) if not equal]
            device.launch(f"kernel::{name}", reads, [*writes, *tensors_in(result)])
            return mapped(CudaTensor, result)

    return launch


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)
