"""Bytes counted at the collectives are those of the direct-send formula, for every method."""

import json
import math

import pytest
import torch

from dlion.optim import (
    METHODS,
    DiLoCo,
    DLion,
    GLion,
    LionCub,
    LocalUpdate,
    OneBitAdam,
    PowerSGD,
)
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers

D = 200_000
HEADER = 16  # bytes a slice: the step, a checksum, which gradients are there (up to 63)


def bits(up: float, down: float):
    """Bytes a worker sends a step: its slices up, and its own slice's answer, to n - 1 others."""
    return lambda n: (
        (n - 1) * (D / n * (up(n) if callable(up) else up) / 8)
        + (n - 1) * (D / n * (down(n) if callable(down) else down) / 8)
    )


def sparse(density: float):
    """64 bits an entry up; down the union of n random choices, or float32 if that is less."""

    def expected(n: int) -> float:
        union = D / n * (1 - (1 - density) ** n)
        return (n - 1) * (D / n * density * 8 + min(8 * union, 4 * D / n) + 8)

    return expected


def to_everyone(bits: float):
    """Bytes a worker sends a step: its whole message to n - 1 others."""
    return lambda n: (n - 1) * D * bits / 8


def one_per_count(largest):
    """Bits of a count up to ``largest(n)``."""
    return lambda n: math.ceil(math.log2(largest(n) + 1))


# what a worker sends, where it is not what ``paper_bits`` says: counts and trits take whole bits
FORMULAS = {
    "dlion_avg": bits(1, one_per_count(lambda n: n)),
    "signum_avg": bits(1, one_per_count(lambda n: n)),
    "sign_muon_avg": bits(1, one_per_count(lambda n: n)),
    "terngrad": bits(1.6, one_per_count(lambda n: 2 * n)),
    "graddrop": sparse(0.04),
    "dgc": sparse(0.04),
    "lion_cub": bits(4, 1.6),
    "demo": to_everyone(32 / 64 * (6 + 32)),  # a vector: 32 of each 64 values
    "sparseloco": to_everyone(64 / 4082 * (12 + 2.5)),
    "onebit_adam": bits(32, 32),  # in the first step
}
VARIANTS = {
    "dlion_mavo ties=zero": (DLion, {"ties": "zero"}, bits(1, lambda n: 1 if n % 2 else 1.6)),
    "lion_cub bits=2": (LionCub, {"bits": 2}, bits(2, 1.6)),
    "lion_cub ties=plus": (LionCub, {"ties": "plus"}, bits(4, 1)),
    "lion_cub bits=8": (LionCub, {"bits": 8}, bits(8, 1.6)),
    "lion_cub headroom": (
        LionCub,
        {"bits": 8, "headroom": True},
        bits(lambda n: {2: 7, 3: 7, 8: 5}[n], 1.6),
    ),
    **{
        f"diloco wire={wire}": (DiLoCo, {"local_steps": 1, "wire": wire}, bits(size, size))
        for wire, size in (("bf16", 16), ("int8", 8), ("sign", 1))
    },
}


def case(name: str):
    """Return class, options and formula of a method; by default it sends what it says."""
    method = METHODS[name]
    every = {"local_steps": 1} if issubclass(method.cls, LocalUpdate) else {}
    options = method.options | every

    def stated(n: int) -> float:
        rest = {"params": [torch.nn.Parameter(torch.zeros(D))], "use_muon": False}
        optimizer = method.cls([rest], workers=Workers(local=n), **options)
        return bits(*optimizer.paper_bits)(n)

    return method.cls, options, FORMULAS.get(name, stated)


CASES = {name: case(name) for name in METHODS} | VARIANTS


def one_step(cls, options, workers: Workers):
    """The optimizer after one step on random gradients."""
    param = torch.nn.Parameter(torch.zeros(D))
    optimizer = cls([{"params": [param], "use_muon": False}], workers=workers, **options)
    for i, worker in enumerate(workers.ids):
        param.grad = torch.randn(D, generator=torch.Generator().manual_seed(worker))
        optimizer.collect(i)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_sent_bytes_are_the_formula_within_one_percent(name, n):
    cls, options, formula = CASES[name]
    traffic = one_step(cls, options, Workers(local=n)).channel.traffic
    assert traffic.sent_bytes / n == pytest.approx(formula(n) + (n - 1) * HEADER, rel=0.01)
    assert traffic.received_bytes == traffic.sent_bytes
    assert traffic.process_sent_bytes == 0


@pytest.mark.parametrize("n", [2, 4, 8])
def test_powersgd_sends_two_thin_matrices_and_says_so(n):
    """Of a convolution as [out, rest]; a matrix that is not larger than both goes as it is."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((60, 50, 3, 3), (3, 40), (60,))]
    optimizer = PowerSGD(params, rank=3, workers=Workers(local=n))
    values = 3 * (60 + 450) + 120 + 60
    for worker in range(n):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.collect(worker)
    optimizer.step()
    sent = optimizer.channel.traffic.sent_bytes / n
    assert sent == pytest.approx(2 * (n - 1) * 4 * values / n + (n - 1) * HEADER, rel=0.02)
    assert optimizer.paper_bits == pytest.approx((32 * values / 27180,) * 2)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_bit_adam_sends_one_bit_after_the_warm_up(n):
    optimizer = one_step(OneBitAdam, {"warmup_steps": 1}, Workers(local=n))
    traffic, param = optimizer.channel.traffic, optimizer.param_groups[0]["params"][0]
    before = traffic.sent_bytes
    for worker in range(n):
        param.grad = torch.randn(D)
        optimizer.collect(worker)
    optimizer.step()
    expected = bits(1, 1)(n) + (n - 1) * (HEADER + 8)
    assert (traffic.sent_bytes - before) / n == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_distributed_lion_sends_31_times_less_than_lion(n):
    dense, voted = (one_step(c, {}, Workers(local=n)).channel.traffic for c in (GLion, DLion))
    assert dense.sent_bytes / voted.sent_bytes >= 31


def _count(processes, n, path):
    import torch.distributed as dist

    join_process_group("gloo")
    workers = Workers.current(n // processes)
    counts = {
        name: vars(one_step(cls, options, workers).channel.traffic)
        for name, (cls, options, _) in CASES.items()
    }
    everyone = [None] * processes
    dist.all_gather_object(everyone, counts)
    if workers.rank == 0:
        path.write_text(json.dumps(everyone))
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_count_belongs_to_the_workers_not_to_their_spread(tmp_path):
    totals = {}
    for processes in (2, 4):
        run_processes(processes, _count, processes, 4, tmp_path / "counts")
        everyone = json.loads((tmp_path / "counts").read_text())
        for name in CASES:
            sent = sum(counts[name]["sent_bytes"] for counts in everyone)
            physical = sum(counts[name]["process_sent_bytes"] for counts in everyone)
            assert physical < sent if processes == 2 else physical == sent
            assert totals.setdefault(name, sent) == sent
    alone = one_step(DLion, {}, Workers(local=4)).channel.traffic.sent_bytes
    assert totals["dlion_mavo"] == alone
