"""Tensors that say they are on cuda:0, and hold one of the CPU with the values.

:class:`CudaTensor` sees every operation on it below autograd; :class:`Functions`, a mode, sees the
functions of torch above it, which name devices, and those that read pinned memory of the host.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.cuda.device import CUDA, Device, Stream, current, place


class CudaTensor(torch.Tensor):
    """A tensor of the pretended GPU.

    Attributes:
        inner: the values, a tensor of the CPU of the same strides.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        with torch._C.DisableTorchFunction():
            return _run(func, args, kwargs or {})

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        with torch._C.DisableTorchFunction():
            return self.inner.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        with torch._C.DisableTorchFunction():
            current().record_stream(self.inner, stream)

    def __repr__(self, *args: object) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"


class Generator(torch.Generator):
    """As ``torch.Generator``; one for CUDA draws what one for the CPU draws from the same seed."""

    device = torch.device("cpu")

    def __new__(cls, device: Any = "cpu") -> "Generator":
        generator = super().__new__(cls, "cpu")
        generator.device = torch.device(device)
        return generator


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors inside nested tuples, lists and dictionaries."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace the tensors inside nested tuples, named or not, lists and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(function, each) for each in value])
    if type(value) in (tuple, list):
        return type(value)([mapped(function, each) for each in value])
    if type(value) is dict:
        return {name: mapped(function, each) for name, each in value.items()}
    return value


def inside(tensor: Tensor) -> Tensor:
    """Return the values of a pretended tensor; one of the host as it is."""
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor


def new(inner: Tensor) -> CudaTensor:
    """Return a tensor of the pretended GPU, newly allocated, with the values of ``inner``."""
    current().allocate(inner)
    return CudaTensor(inner)


# ---- operations, below autograd -----------------------------------------------------------------

_INDEXING = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_")
_INDEXING += ("aten::_index_put_impl_",)
_MASKS = (torch.bool, torch.uint8)
# whose sizes, or values, the host has to know
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_ALLOCATING = {"aten::empty", "aten::empty_like", "aten::empty_strided"}
_ALLOCATING |= {"aten::new_empty", "aten::new_empty_strided"}
_ONE_DEVICE = {"aten::cat", "aten::stack"}  # of numbers, too: others take them from the host


class _Operation(NamedTuple):
    """What is known of an operation of torch beforehand.

    Attributes:
        name: without its overload.
        launches: whether the device has something to do.
        views: whether the result is memory of an argument.
        writes: positions and names of the arguments that it changes.
    """

    name: str
    launches: bool
    views: bool
    writes: list[tuple[int, str]]

    @classmethod
    @cache
    def of(cls, func: Any) -> "_Operation":
        name, views = func._schema.name, func.is_view or func._schema.name == "aten::_unsafe_view"
        arguments = enumerate(func._schema.arguments)
        writes = [(i, argument.name) for i, argument in arguments if argument.is_write]
        return cls(name, not views and name not in _ALLOCATING, views, writes)

    def written(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that it changes among its arguments."""
        if not self.writes:
            return []
        return tensors_in([args[i] if i < len(args) else kwargs.get(n) for i, n in self.writes])

    def waits(self, kwargs: dict[str, Any]) -> bool:
        """Whether the host has to know a result before it goes on."""
        if self.name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        if self.name == "aten::segment_reduce":
            return not kwargs.get("unsafe")
        return self.name in _WAITING


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and note what the device would do for it."""
    device, operation = current(), _Operation.of(func)
    if operation.name == "aten::copy_":
        return _copy(*args, **kwargs)
    if operation.name == "aten::_foreach_copy_" and len({*map(type, tensors_in(args))}) > 1:
        for target, source in zip(args[0], args[1], strict=True):
            _copy(target, source, *args[2:], **kwargs)
        return None
    given = tensors_in(args, kwargs)
    ours = [tensor for tensor in given if isinstance(tensor, CudaTensor)]
    if len(ours) < len(given):
        others = [tensor for tensor in given if not isinstance(tensor, CudaTensor)]
        if operation.name in _INDEXING:
            others = [tensor for tensor in others if all(tensor is not i for i in args[1])]
        if any(other.dim() or operation.name in _ONE_DEVICE for other in others):
            device.seen.mixed[f"{operation.name} at {place()}"] += 1
    if operation.name in _INDEXING:
        _note_indices(args[1])
    result = func(*mapped(inside, args), **mapped(inside, kwargs))
    known = {id(inside(tensor)): tensor for tensor in given}
    made = [tensor for tensor in tensors_in(result) if id(tensor) not in known]
    if operation.launches:
        written = [id(tensor) for tensor in operation.written(args, kwargs)]
        reads = [tensor.inner for tensor in ours if id(tensor) not in written]
        writes = [tensor.inner for tensor in ours if id(tensor) in written]
        device.launch(operation.name, reads, [*writes, *made])
        if operation.waits(kwargs):
            device.wait(operation.name)
    elif not operation.views:
        for tensor in made:
            device.allocate(tensor)

    def outside(tensor: Tensor) -> Tensor:
        return known[id(tensor)] if id(tensor) in known else CudaTensor(tensor)

    return mapped(outside, result)


def _note_indices(indices: Sequence[Tensor | None]) -> None:
    """Note that an index of the host is copied, and how long that of a mask is, is asked."""
    device = current()
    for index in indices:
        if index is not None and not isinstance(index, CudaTensor):
            device.launch("copy HtoD")
            device.wait("copy HtoD of an index")
        elif index is not None and index.dtype in _MASKS:
            device.wait("index of bool")


# ---- copies between host and device -------------------------------------------------------------


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``target.copy_(source)``; one of them, or both, are pretended."""
    to, of = inside(target), inside(source)
    if to is not target and of is not source:
        current().launch("aten::copy_", reads=[of], writes=[to])
    elif to is not target:
        _upload(to, of, non_blocking)
    else:
        _download(to, of, non_blocking)
    to.copy_(of)
    return target


def _upload(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy from the host: without waiting only from pinned memory, and the bytes as they are."""
    device = current()
    plain = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    pinned = plain and device.is_pinned(source)
    device.launch("copy HtoD", reads=[source] if pinned else [], writes=[target])
    if not (pinned and non_blocking):
        device.wait("copy HtoD" if not non_blocking else "copy HtoD of pageable memory")


def _download(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy to the host: without waiting only to pinned memory, and the bytes as they are."""
    device = current()
    pinned = target.is_contiguous() and device.is_pinned(target)
    device.launch("copy DtoH", reads=[source], writes=[target] if pinned else [])
    if not (pinned and non_blocking):
        device.wait("copy DtoH" if not non_blocking else "copy DtoH to pageable memory")


def to_device(source: Tensor, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Any:
    """``source.to("cuda")`` of a tensor of the host."""
    inner = source.detach().to(dtype or source.dtype, copy=True)
    result = new(inner)
    _upload(inner, source, non_blocking)
    return result


def to_host(source: CudaTensor, dtype: torch.dtype | None = None, non_blocking: bool = False):
    """``source.to("cpu")``; where nobody waits, torch takes pinned memory by itself."""
    result = source.inner.detach().to(dtype or source.dtype, copy=True)
    if non_blocking:
        current().allocate(result, pinned=True)
    _download(result, source.inner, non_blocking)
    return result


# ---- functions, above autograd ------------------------------------------------------------------

_SET_DATA, _GET_DATA = torch.Tensor.data.__set__, torch.Tensor.data.__get__
_READING = {"__array__", "__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}
_FROM_VALUES = {"as_tensor", "asarray", "new_tensor", "tensor"}
_SHAPED_ALIKE = ("_like", "new_empty", "new_full", "new_ones", "new_zeros")


class Functions(TorchFunctionMode):
    """Gives torch's functions a device ``cuda`` and pinned memory, in one thread."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.gpu = device

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in _METHODS and isinstance(first, Tensor):
            return _METHODS[name](*args, **kwargs)
        if isinstance(first, CudaTensor):
            if func == _SET_DATA:
                first.inner = args[1].inner
                return None
            if func == _GET_DATA:
                return CudaTensor(first.inner.detach())
            if name in ("numpy", "__array__"):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the"
                    " tensor to host memory first."
                )
            if name == "tolist":
                return to_host(first).tolist()
            if name == "__setitem__" and isinstance(args[2], int | float):
                if any(index.dtype not in _MASKS for index in tensors_in(args[1])):
                    self.gpu.launch("copy HtoD")
                    self.gpu.wait("copy HtoD of a number")  # seen on an H100
                args = (*args[:2], CudaTensor(torch.tensor(args[2], dtype=first.dtype)))
        if kwargs.get("pin_memory"):
            return self._pinned(func(*args, **{**kwargs, "pin_memory": False}))
        tensors = tensors_in(args, kwargs)
        result = self._on_device(func, name, tensors, args, kwargs)
        if self.gpu.has_pinned:
            self._touch(name, tensors, kwargs, result)
        return result

    def _pinned(self, tensor: Tensor) -> Tensor:
        self.gpu.allocate(tensor, pinned=True)
        return tensor

    def _on_device(
        self, func: Any, name: str, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that may say which device its result is to be on."""
        given = kwargs.get("device")
        ours = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        here = ours if given is None else _is_cuda(given)
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != here:
            self.gpu.seen.mixed[f"{name} with a generator for {generator.device} at {place()}"] += 1
        if name in _FROM_VALUES and here:
            kwargs.pop("device", None)
            if ours and name != "new_tensor":
                return func(*args, **kwargs)
            values = args[1:] if name == "new_tensor" else args
            if name == "new_tensor":
                kwargs.setdefault("dtype", args[0].dtype)
            return to_device(torch.tensor(*values, **kwargs))
        if given is None:
            return func(*args, **kwargs)
        if not here:
            if ours and name.endswith(_SHAPED_ALIKE):  # of the device in all but this
                args = mapped(inside, args)
            return func(*args, **kwargs)
        del kwargs["device"]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not isinstance(result, CudaTensor):
            if name.startswith("empty"):
                return new(result.detach())
            result = new(result.detach())
            self.gpu.launch(f"aten::{name}", writes=[result.inner])
        return result

    def _touch(self, name: str, tensors: list[Tensor], kwargs: dict[str, Any], result: Any) -> None:
        """Let the host read or write what is pinned among a function's arguments."""
        if any(isinstance(tensor, CudaTensor) for tensor in tensors):
            return  # a copy, which has its own rules
        for tensor in tensors:
            if self.gpu.is_pinned(tensor):
                writes = tensor is kwargs.get("out") or (tensor is tensors[0] and _changes(name))
                if writes or name in _READING or _computes(name, tensor, result):
                    self.gpu.touch(tensor, writes or name == "numpy")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _changes(name: str) -> bool:
    """Whether a method of this name changes its tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _computes(name: str, tensor: Tensor, result: Any) -> bool:
    """Whether a result is made of a tensor's values, and is no view."""
    if name.endswith(_SHAPED_ALIKE):
        return False
    memory = tensor.untyped_storage().data_ptr()
    return any(made.untyped_storage().data_ptr() != memory for made in tensors_in(result))


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``, in any of its forms."""
    device, dtype, flags = kwargs.get("device"), kwargs.get("dtype"), []
    for value in args:
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            device = value
    named = kwargs.get("non_blocking", False), kwargs.get("copy", False)
    non_blocking, copy = (*flags, *named[len(flags) :])
    ours = isinstance(tensor, CudaTensor)
    theirs = ours if device is None else _is_cuda(device)
    if ours and not theirs:
        return to_host(tensor, dtype, non_blocking)
    if theirs and not ours:
        return to_device(tensor, dtype, non_blocking)
    if ours:
        return tensor.to(dtype=dtype or tensor.dtype, copy=copy)
    result = tensor.to(*args, **kwargs)
    if result is not tensor and current().is_pinned(tensor):
        current().touch(tensor, writes=False)
    return result


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin memory of cuda:0: only dense CPU tensors can be pinned")
    if current().is_pinned(tensor):
        return tensor
    pinned = tensor.detach().clone()
    current().allocate(pinned, pinned=True)
    return pinned


_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": lambda tensor, **kwargs: _to(tensor, "cpu"),
    "cuda": lambda tensor, device=None, non_blocking=False, **kwargs: _to(
        tensor, "cuda", non_blocking=non_blocking
    ),
    "pin_memory": _pin,
    "is_pinned": lambda tensor, device=None: (
        not isinstance(tensor, CudaTensor) and current().is_pinned(tensor)
    ),
}
