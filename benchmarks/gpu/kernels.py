"""Part ``kernels``: every Triton kernel against the reference, and against a copy of its bytes."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from common import Row, ratios, spread
from kernel_cases import Compiled, cases, kernel
from torch import Tensor

from dlion.kernels import Coder, Gradients, reference
from gpu.timing import timed

SHARE = 0.8  # of the bandwidth of a copy: the aim
LARGE = 150_000_000  # bytes moved, below which caches count and there is no aim
CALLS = 5  # in a row, timed together
VOTERS = 8
LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.99)
FAR = 2**31 + 2**20 + 128  # elements, more than 32 bits can count


# ---- bits ---------------------------------------------------------------------------------------


def check_kernels(key: Row, args: Namespace) -> list[Row]:
    """Compare all kernels with the reference, each process a share of the cases."""
    compiled, processes = compiled_kernels(args), dist.get_world_size()
    chosen = cases()[:: 16 if args.small else 1]
    mine = []
    for case in chosen[dist.get_rank() :: processes]:
        try:
            if not case.holds(compiled):
                mine.append(f"{case.name}: other bits")
        except Exception as error:  # the rest of the cases still run
            mine.append(f"{case.name}: {type(error).__name__}: {error}".splitlines()[0])
    everyone: list[list[str]] = [[]] * processes
    dist.all_gather_object(everyone, mine)
    wrong = list(chain.from_iterable(everyone))
    return [{"case": f"{len(chosen)} cases", "wrong": wrong, "met": not wrong}]


def check_far(key: Row, args: Namespace) -> list[Row]:
    """Compare the ends of vectors that are too long for offsets of 32 bits."""
    device, kernels = args.device, compiled_kernels(args).module
    d = 2048 + 128 if args.small else FAR
    tail, size = d - 1088, d // 64
    grad = torch.randn(d, device=device, dtype=torch.bfloat16)
    momentum = torch.randn(d, device=device)
    sent, row = bits(1, 1, size, device=device), torch.zeros(1, 1, 17, dtype=torch.int64)
    moved = momentum[tail:].to("cpu", copy=True)
    kernels.encode_signs(*signs(sent, momentum, grad))
    reference.encode_signs(*signs(row, moved, grad[tail:].cpu()))
    right = {"encode_signs": torch.equal(sent[..., tail // 64 :].cpu(), row)}
    right["encode_signs"] &= torch.equal(momentum[tail:].cpu(), moved)
    params = grad  # there is no memory for another vector of this length
    for name, answers, some, *rest in (
        ("apply_signs", sent[0], sent[0, :, tail // 64 :]),
        ("apply_levels", sent, sent[..., tail // 64 :], 1),
    ):
        expected = params[tail:].to("cpu", copy=True)
        getattr(kernels, name)(params, answers, *rest, LR, DECAY)
        getattr(reference, name)(expected, some.cpu(), *rest, LR, DECAY)
        right[name] = agree(params[tail:].cpu(), expected, args)
    trits = torch.randint(243, (1, -(-d // 5)), dtype=torch.uint8, device=device)
    start = tail - tail % 5  # the first value of a byte
    behind = params[start:].to("cpu", copy=True)
    kernels.apply_trits(params, trits, d, LR, DECAY)
    reference.apply_trits(behind, trits[:, start // 5 :].cpu(), len(behind), LR, DECAY)
    right["apply_trits"] = agree(params[tail:].cpu(), behind[tail - start :], args)
    wrong = [name for name, holds in right.items() if not holds]
    return [{"case": f"{d:,} elements", "wrong": wrong, "met": not wrong}]


def agree(first: Tensor, second: Tensor, args: Namespace) -> bool:
    """Whether parameters in bfloat16 are equal; Triton's interpreter truncates, a GPU rounds."""
    tolerance = 2**-7 if args.small else 0.0
    return torch.allclose(first.float(), second.float(), rtol=tolerance, atol=0.0)


def compiled_kernels(args: Namespace) -> Compiled:
    """Import the Triton kernels, for a GPU or for the interpreter."""
    from dlion.kernels import triton_cuda

    return Compiled(triton_cuda, args.device, interpreted=args.small)


def bits(*shape: int, device: str) -> Tensor:
    """Return random words."""
    return torch.randint(-(2**63), 2**63 - 1, shape, device=device)


# ---- bandwidth ----------------------------------------------------------------------------------


def measure_kernels(key: Row, args: Namespace) -> list[Row]:
    """Time every kernel beside a copy that reads and writes as many bytes in all.

    Kernels that move less than LARGE at 1e8 elements are given more elements.
    """
    kernels, rows, large = compiled_kernels(args).module, [], enough_bytes(args.device)
    for case, make in arguments_of(key["d"], args.device).items():
        name, d, arguments = case.partition(",")[0], key["d"], make()
        moved = bytes_moved(name, arguments)
        if d >= 10**8 and moved < large:
            d = -(-d * large // moved)
            del arguments  # before there are larger ones
            arguments = arguments_of(d, args.device)[case]()
            moved = bytes_moved(name, arguments)
        source = torch.ones(moved // 2, dtype=torch.uint8, device=args.device)
        calls = {
            case: partial(kernel(kernels, name), *arguments),
            "copy": partial(torch.zeros_like(source).copy_, source),
        }
        times = timed(calls, args, CALLS)
        share = ratios(times["copy"].device, times[case].device)
        rows.append(
            {
                "case": case,
                "elements": d,
                "bytes": moved,
                **times[case].row(),
                "copy_seconds": spread(times["copy"].device),
                "share": share,
                "met": share["median"] >= SHARE if moved >= large else None,
            }
        )
    return rows


def enough_bytes(device: str) -> int:
    """Return how many bytes have to move for an aim: LARGE, or three times the L2 cache."""
    if device == "cpu":
        return LARGE
    return max(LARGE, 3 * torch.cuda.get_device_properties(0).L2_cache_size)


# how a kernel uses those of its arguments that hold tensors, in their order: read, write
MOVES: dict[str, list[str]] = {
    "encode_signs": ["w", "rw", "r"],  # message, momentum, gradients
    "measure": ["r", "r"],  # momentum, gradients
    "encode_levels": ["w", "rw", "r", "r"],  # message, momentum, gradients, multipliers
    "sum_planes": ["r", "w"],  # messages, sums
    "compare_sum": ["r", "w", "w"],  # messages, two masks
    "pack_votes": ["r", "r", "w"],  # two masks, trits
    "encode_deltas": ["w", "rw", "r", "rw"],  # message, momentum, gradients, coder
    "decode_deltas": ["r", "r", "rw", "w", "w"],  # messages, rows, coders, two masks
    "apply_signs": ["rw", "r"],  # parameters, answers
    "apply_levels": ["rw", "r"],
    "apply_trits": ["rw", "r"],
    "lion": ["rw", "rw", "r"],  # parameters, momentum, gradient
    "accumulate": ["rw", "rw", "r"],  # velocity, sum of velocities, gradient
    "momentum_descent": ["rw", "rw", "r"],  # parameters, momentum, answer
    "round_at_random": ["w", "r"],  # parameters, values
}


def bytes_moved(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that a kernel reads and writes, if it touches each element once."""
    sizes = [sum(tensor.nbytes for tensor in tensors_in(argument)) for argument in arguments]
    holding = [size for size in sizes if size]
    return sum(size * len(how) for size, how in zip(holding, MOVES[name], strict=True))


def tensors_in(argument: Any) -> Iterator[Tensor]:
    """Yield a tensor, or those in a tuple or a list."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple | list):
        yield from chain.from_iterable(map(tensors_in, argument))


def signs(message: Tensor, momentum: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """Return the arguments of ``encode_signs``."""
    return message, momentum, Gradients.of(grad), *BETAS, True


def arguments_of(d: int, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return functions that make the arguments of each kernel.

    A worker's message and an update are of d parameters. So is the slice for which an owner adds
    the messages of 8 workers.
    """
    size = -(-d // (64 * VOTERS))  # words of a slice
    words = VOTERS * size

    def normal(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(d, device=device).to(dtype)

    def random(*shape: int) -> Tensor:
        return bits(*shape, device=device)

    def sent(planes: int = 1) -> Tensor:
        return random(VOTERS, planes, size)

    def coder(estimates: tuple[int, ...], *rows: int) -> Coder:
        level = torch.full((*rows, 64 * words), 64, dtype=torch.uint8, device=device)
        return Coder(torch.zeros(estimates, device=device), level, random(*rows, 2, words))

    def masks() -> tuple[Tensor, Tensor]:
        greater = random(words)
        return greater, random(words) & ~greater

    def trits(*shape: int) -> Tensor:
        return torch.randint(243, shape, dtype=torch.uint8, device=device)

    def levels(bits: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        vectors = sent(bits), normal(), Gradients.of(normal(dtype))
        return *vectors, *BETAS, factor, 2 ** (bits - 1) - 1

    def voted(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        return normal(dtype), trits(VOTERS, -(-64 * size // 5)), 64 * size, LR, DECAY

    everyone = torch.arange(VOTERS, device=device)
    factor, half = torch.ones(1, device=device), torch.bfloat16
    return {
        "encode_signs": lambda: signs(sent(), normal(), normal()),
        "encode_signs, bfloat16": lambda: signs(sent(), normal(), normal(half)),
        "measure": lambda: (normal(), Gradients.of(normal()), BETAS[0], "l1"),
        "encode_levels, 2 bits": lambda: levels(2),
        "encode_levels, 4 bits": lambda: levels(4),
        "encode_levels, 8 bits": lambda: levels(8),
        "encode_levels, 8 bits, bfloat16": lambda: levels(8, half),
        "sum_planes, 1 bit": lambda: (random(VOTERS, 1, words), 1, random(4, words)),
        "compare_sum, 1 bit": lambda: (random(VOTERS, 1, words), 1, VOTERS // 2, *masks()),
        "compare_sum, 4 bits": lambda: (random(VOTERS, 4, words), 14, 7 * VOTERS, *masks()),
        "pack_votes": lambda: (*masks(), trits(-(-64 * words // 5))),
        "encode_deltas": lambda: (
            sent(),
            normal(),
            Gradients.of(normal()),
            coder((64 * words,)),
            *BETAS,
            2,
        ),
        "decode_deltas": lambda: (
            random(VOTERS, 1, words),
            everyone,
            coder((1, 64 * words), VOTERS),
            None,
            2,
            1.0,
            *masks(),
        ),
        "apply_signs": lambda: (normal(), random(VOTERS, size), LR, DECAY),
        "apply_signs, bfloat16": lambda: (normal(half), random(VOTERS, size), LR, DECAY),
        "apply_levels, mean of 8": lambda: (normal(), sent(4), VOTERS, LR, DECAY),
        "apply_levels, mean of 8, bfloat16": lambda: (normal(half), sent(4), VOTERS, LR, DECAY),
        "apply_trits": voted,
        "apply_trits, bfloat16": lambda: voted(half),
        "lion": lambda: (normal(), normal(), normal(), *BETAS, LR, DECAY),
        "accumulate": lambda: (normal(), normal(), normal(), BETAS[0]),
        "momentum_descent": lambda: (normal(), normal(), normal(), BETAS[0], LR, DECAY),
        "round_at_random": lambda: (normal(half), normal(), (1, 2)),
    }
