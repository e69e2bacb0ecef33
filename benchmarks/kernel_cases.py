"""Where a compiled kernel is compared with the reference: by the tests, and on a GPU.

The cases are those of ``tests/kernels``; ``accelerator.py`` runs them on the device.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dlion.kernels import Coder, Gradients, Places, reference
from dlion.rivals.wire import Sparse
from dlion.wire import packing

NAN, INF = math.nan, math.inf
LENGTHS = [1, 63, 64, 65, 1100]
DTYPES = [torch.float32, torch.bfloat16]
ODD = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1.0, -1.0]

Call = tuple[str, tuple[Any, ...]]  # the name of a kernel and its arguments


class Message(NamedTuple):
    """A message inside longer rows: words precede and follow each."""

    rows: torch.Tensor
    planes: int
    words: int
    flat: bool = False  # without the dimension of planes

    def view(self) -> torch.Tensor:
        inside = self.rows[:, 3 : 3 + self.planes * self.words]
        return inside if self.flat else inside.unflatten(1, (self.planes, self.words))


class Compiled(NamedTuple):
    """Compiled kernels, and where their tensors live.

    Triton's interpreter takes its time (``interpreted``), and cuts bfloat16 off where a GPU rounds.
    """

    module: ModuleType
    device: str
    interpreted: bool = False


class Case(NamedTuple):
    """Calls that have to leave the bits of the reference; ``calls`` asks for what is compared."""

    name: str
    calls: Callable[[Compiled], Iterator[Call]]

    def holds(self, compiled: Compiled) -> bool:
        """Whether they do."""
        return all(both(compiled, name, *arguments) for name, arguments in self.calls(compiled))


def both(compiled: Compiled, name: str, *arguments) -> bool:
    """Whether a compiled kernel and the reference leave the same bits in all their arguments.

    What :func:`dlion.kernels.measure` returns has to be close: it adds in an order of its own.
    """
    results, measured = [], []
    for module, device in (compiled[:2], (reference, "cpu")):
        copies = [copied(argument, device) for argument in arguments]
        measured.append(run(module, name, *copies))
        results.append([tensor.cpu() for tensor in tensors(copies)])
    if measured[1] is not None:
        equal = close if name == "measure" else same
        if not equal(*(result.cpu() for result in measured)):
            return False
    exact = not compiled.interpreted
    return all(same(a, b, exact) for a, b in zip(*results, strict=True))


def run(module: ModuleType, name: str, *arguments) -> torch.Tensor | None:
    """Call a kernel; return what it returns that means something."""
    arguments = (a.view() if isinstance(a, Message) else a for a in arguments)
    result = kernel(module, name)(*arguments)
    return result[0][: result[1]] if isinstance(result, tuple) else result


def kernel(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a kernel, which may be in the module of this name that rivals have."""
    if not hasattr(module, name):
        rivals = module.__name__.replace("dlion.kernels", "dlion.rivals.kernels")
        module = importlib.import_module(rivals)
    return getattr(module, name)


def copied(argument, device: str):
    """Copy an argument of a kernel to a device."""
    if isinstance(argument, Message):
        return argument._replace(rows=copied(argument.rows, device))
    if isinstance(argument, Coder):
        return Coder(*(copied(tensor, device) for tensor in argument))
    if isinstance(argument, Gradients):
        return argument._replace(tensors=[copied(tensor, device) for tensor in argument.tensors])
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def tensors(arguments) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments and in them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, Message | Coder):
            yield from tensors(argument)
        elif isinstance(argument, Gradients):
            yield from argument.present


def same(first: torch.Tensor, second: torch.Tensor, exact: bool = True) -> bool:
    """Whether two tensors are equal to the bit; any NaN is like another."""
    if first.dtype == torch.bfloat16 and not exact:
        return torch.allclose(first.float(), second.float(), rtol=2**-7, equal_nan=True)
    if first.dtype.is_floating_point:
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
        first, second = (t.nan_to_num(nan=12345.0).view(integers) for t in (first, second))
    return torch.equal(first, second)


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results in float32 are equal but for the order of additions."""
    return torch.allclose(first, second, rtol=1.3e-6, atol=1e-5, equal_nan=True)


def coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values of many sizes, every third one replaced by an odd one."""
    generator = coins(seed)
    values = torch.randn(length, generator=generator)
    values *= 10.0 ** torch.randint(-6, 3, (length,), generator=generator)
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (length,), generator=generator)]
    values = values.where(torch.rand(length, generator=generator) > 0.3, odd).to(dtype)
    if dtype == torch.bfloat16:  # Triton's interpreter cannot read its denormals; Numba's own test
        values = values.where(values.abs() > 2e-38, 0.0)
    return values


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=coins(seed))


def message(n: int, planes: int, length: int) -> Message:
    """Random words; ``length``: words of a plane."""
    return Message(words(n, planes * length + 5), planes, length)


def coder(*shape: int, seed: int = 0) -> Coder:
    """A coder of ``[..., d]`` elements in the middle of its life, many at the ends of the scale."""
    *rows, length = shape
    estimate = vector(math.prod(shape), torch.float32, seed).view(shape)
    level = torch.randint(-200, 456, shape, generator=coins(seed)).clamp(0, 255).to(torch.uint8)
    return Coder(estimate, level, words(*rows, 2, length // 64, seed=seed))


def at(start: int, *gradients: torch.Tensor | None, gap: int = 70) -> Gradients:
    """Gradients of parameters that begin at ``start``; those that are missing have ``gap`` values.

    Each begins at the first multiple of 64 after the one before.
    """
    spans = []
    for grad in gradients:
        stop = start + (gap if grad is None else len(grad))
        spans.append((start, stop))
        start = -(-stop // 64) * 64
    return Gradients(gradients, Places(spans))


def bucket(length: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, Gradients]:
    """Momentum of a bucket, and its gradients: one of ``length``, none, and one of 129 values."""
    gradients = at(64, vector(length, dtype, seed + 1), None, vector(129, dtype, seed + 2))
    return vector(elements(gradients), torch.float32, seed), gradients


def elements(gradients: Gradients) -> int:
    """The elements of a bucket, with a word behind the last parameter."""
    return -(-gradients.places.spans[-1][1] // 64) * 64 + 64


def cases() -> list[Case]:
    """Return all cases, each with a name of its own."""
    made: list[tuple[Callable[..., Iterator[Call]], list[Any]]] = [
        *((encode_signs, [*rest]) for rest in product(LENGTHS, DTYPES, [True, False])),
        *((encode_levels, [*rest]) for rest in product(LENGTHS, DTYPES, [1, 7, 127])),
        *((measure, [*rest]) for rest in product(LENGTHS, ["l1", "max", "geometric"])),
        *((sums_and_votes, [n, largest]) for n, largest in SUMS),
        *((pack_votes, [length]) for length in (1, 5, 300)),
        *((apply, [*rest]) for rest in product([64, 65, 1216], DTYPES)),
        *((lion, [*rest]) for rest in product(LENGTHS, DTYPES)),
        *((momentum, [*rest]) for rest in product(LENGTHS, DTYPES)),
        *((rounded, [length]) for length in LENGTHS),
        *((ternarise, [length]) for length in LENGTHS),
        *((entries, [*rest]) for rest in product(LENGTHS, DTYPES, [0.0, 0.1])),
        *((largest, [*rest]) for rest in product([1, 65, 1100, 50_000], [1e-9, 0.04, 0.3, 1.0])),
        *((encode_deltas, [*rest]) for rest in product(LENGTHS, DTYPES, [2, 4])),
        *((decode_deltas, [*rest]) for rest in product(LENGTHS, [False, True])),
    ]
    return [
        Case("-".join(map(_word, [calls.__name__, *rest])), partial(calls, *rest))
        for calls, rest in made
    ]


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


def encode_signs(length: int, dtype: torch.dtype, positive: bool, _: Compiled) -> Iterator[Call]:
    momentum, gradients = bucket(length, dtype)
    rows = message(5, 1, len(momentum) // 320 + 1)
    yield "encode_signs", (rows, momentum, gradients, 0.9, 0.99, positive)


def encode_levels(length: int, dtype: torch.dtype, largest: int, _: Compiled) -> Iterator[Call]:
    momentum, gradients = bucket(length, dtype)
    rows = message(5, (2 * largest).bit_length(), len(momentum) // 320 + 1)
    for first, last in ((largest / 1e-3, NAN), (1e30, largest / 1e-2), (0.0, 1e30)):
        factors = (0.9, 0.99, torch.tensor([first, 1.0, last]), largest)
        yield "encode_levels", (rows, momentum, gradients, *factors)


def measure(length: int, scale: str, _: Compiled) -> Iterator[Call]:
    momentum = torch.randn(length, generator=coins(1))
    grad = torch.randn(length, generator=coins(2)).bfloat16()
    grad[length // 2] = momentum[length // 2] = 0
    broken, zeros = grad.clone(), torch.zeros_like(grad)
    broken[length // 2] = NAN
    gradients = at(0, grad, None, broken, zeros)
    flat = torch.randn(elements(gradients), generator=coins(3))
    for (start, stop), part in zip(gradients.places.spans, (1, 1, 1, 0), strict=True):
        flat[start:stop] = momentum[: stop - start] if part and stop - start == length else 0.0
    yield "measure", (flat, gradients, 0.9, scale)


SUMS = [(1, 1), (2, 1), (3, 1), (8, 1), (33, 1), (1, 14), (3, 2), (8, 14), (5, 254)]


def levels(n: int, largest: int, length: int) -> tuple[torch.Tensor, Message]:
    """Return random integers up to ``largest``, ``[n, 64 * length]``, and messages of them."""
    values = torch.randint(largest + 1, (n, 64 * length), generator=coins())
    rows = message(n, largest.bit_length(), length)
    rows.view().copy_(packing.pack_planes(values, rows.planes).view(torch.int64))
    return values, rows


def sums_and_votes(n: int, largest: int, compiled: Compiled) -> Iterator[Call]:
    length = 20 if compiled.interpreted else 700
    _, rows = levels(n, largest, length)
    total = torch.zeros((n * largest).bit_length(), length, dtype=torch.int64)
    yield "sum_planes", (rows, largest, total)
    for constant in (0, n * largest // 2, n * largest):
        yield "compare_sum", (rows, largest, constant, *words(2, length))


def pack_votes(length: int, _: Compiled) -> Iterator[Call]:
    greater = words(length)
    equal = words(length, seed=1) & ~greater
    out = torch.zeros(-(-64 * length // 5), dtype=torch.uint8)
    yield "pack_votes", (greater, equal, out)


def apply(length: int, dtype: torch.dtype, _: Compiled) -> Iterator[Call]:
    n, params = 3, vector(length, dtype, 1)
    size = -(-length // (64 * n))
    answers = message(n, 1, size)
    yield "apply_signs", (params, answers._replace(flat=True), 0.1, 0.2)
    for largest in (1, 3, 8, 112):
        answers = message(n, largest.bit_length(), size)
        yield "apply_levels", (params, answers, largest, 0.1, 0.2)
    trits = packing.pack_trits(torch.randint(-1, 2, (n, 64 * size), generator=coins()))
    yield "apply_trits", (params, trits, 64 * size, 0.1, 0.2)


def lion(length: int, dtype: torch.dtype, _: Compiled) -> Iterator[Call]:
    params, momentum = vector(length, dtype, 1), vector(length, torch.float32, 2)
    for grad in (vector(length, torch.float32, 3), vector(length, torch.bfloat16, 3)):
        yield "lion", (params, momentum, grad, 0.9, 0.99, 0.1, 0.2)


def momentum(length: int, dtype: torch.dtype, _: Compiled) -> Iterator[Call]:
    moved, changed = vector(length, torch.float32, 1), vector(length, torch.float32, 2)
    params, answer = vector(length, dtype, 3), vector(length, torch.float32, 4)
    yield "accumulate", (moved, changed, vector(length, dtype, 5), 0.9)
    yield "momentum_descent", (params, moved, answer, 0.9, 0.1, 0.2)


def rounded(length: int, _: Compiled) -> Iterator[Call]:
    values, key = vector(length, torch.float32, 1), (0x89ABCDEF, 0x01234567)
    yield "round_at_random", (torch.zeros(length, dtype=torch.bfloat16), values, key)


def entries(length: int, dtype: torch.dtype, decay: float, _: Compiled) -> Iterator[Call]:
    """Of a tenth of the places, and of none and of all."""
    params, total = vector(length, dtype, 1), vector(length, torch.float32, 2)
    order, values = torch.randperm(length, generator=coins()), vector(length, torch.float32, 3)
    for count in {-(-length // 10), 0, length}:
        indices = order[:count].sort().values
        few = Sparse().encode((indices, values[:count])).view(torch.int32).view(-1, 2)
        yield "add_entries", (total, few)
        yield "descend_at", (params, few, 0.1, decay)
        sums = torch.zeros(length).index_add_(0, indices, values[:count].nan_to_num())
        for senders in (1, 4):
            yield "take_mean", (sums, senders)


def ternarise(length: int, _: Compiled) -> Iterator[Call]:
    values, scales = vector(length, torch.float32, 1), vector(length, torch.float32, 2).abs()
    yield "ternarise", (values, scales, torch.rand(length, generator=coins()))


def largest(length: int, density: float, _: Compiled) -> Iterator[Call]:
    """Of sizes that differ, with infinities and NaN among them, and of few different sizes."""
    values = vector(length, torch.float32, 1)
    for given in (values, values.nan_to_num().clamp(-2, 2).round()):
        yield "largest", (given, math.ceil(density * length))


def encode_deltas(length: int, dtype: torch.dtype, rise: int, _: Compiled) -> Iterator[Call]:
    momentum, _ = bucket(length, dtype)
    rows = message(5, 1, len(momentum) // 320 + 1)
    state = coder(5 * 64 * rows.words)
    for step in range(3):
        _, gradients = bucket(length, dtype, 2 + step)
        call = "encode_deltas", (rows, momentum, gradients, state, 0.9, 0.99, rise)
        yield call
        run(reference, call[0], *call[1])


def decode_deltas(length: int, weighted: bool, _: Compiled) -> Iterator[Call]:
    size = -(-length // 64)
    state, masks = coder(4, 64 * size), words(2, size)
    if not weighted:
        state = state._replace(estimate=state.estimate[:1])
    weights = torch.tensor([0.3, 1.0, 2.7, 0.0]) if weighted else None
    for step, senders in enumerate(([2, 0, 3, 1], [-1, 1, -1, 0], [0, -1, -1, -1])):
        messages = Message(words(4, size + 5, seed=step), 1, size)
        received = (messages, torch.tensor(senders))
        arguments = (*received, state, weights, 2 + step, 1 - 0.7 * step, *masks)
        yield "decode_deltas", arguments
        run(reference, "decode_deltas", *arguments)
