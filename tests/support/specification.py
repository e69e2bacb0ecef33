"""The comparison of a method with its specification, to the bit."""

import inspect
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dlion.methods import METHODS, DistributedOptimizer, simple
from dlion.streams import stream
from dlion.wire import packing
from dlion.workers import Workers
from tests.support.methods import SMALL

SHAPES = [(7,), (33, 20), (), (128,), (130,)]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
D = sum(SIZES)
LR, WD, SEED, STEPS = 1e-2, 0.1, 5, 8
QUINTIC = 5, torch.float32, "quintic"
SPANS = [(sum(SIZES[:t]), sum(SIZES[: t + 1])) for t in range(len(SIZES))]
OTHERS = [SPANS[0], *SPANS[2:]]
MATRICES = [(*SPANS[1], 33)]  # the second tensor is the one matrix

# names in a specification, and what they are in a class: hyperparameters, and vectors of state
VALUES = {"wd": "weight_decay", "mu": "momentum"}
VECTORS = {
    "m": ["momentum", "exp_avg"],
    "v": ["exp_avg_sq"],
    "r": ["residual"],
    "b": ["momentum_buffer"],
}


class Spec:
    """The state of a specification, and the random draws of the optimizer that it is held to."""

    def __init__(self, optimizer: DistributedOptimizer, n: int):
        self.optimizer, self.n = optimizer, n
        self.exchange = optimizer.buckets[0].exchange
        self.momentum, self.variance, self.residual, self.estimate = torch.zeros(4, n, D)
        self.shared_momentum, self.shared_variance = torch.zeros(2, D)
        self.shared_error, self.total = torch.zeros(2, D)
        self.outcome = torch.ones(D)  # of the vote before
        self.level = torch.zeros(n, D, dtype=torch.int64)
        self.last, self.repeated = torch.zeros(2, n, D, dtype=torch.bool)
        self.agreement = torch.full((len(optimizer.buckets) * n, n), 0.75)
        self.queries: list[Tensor] = []
        self.local = torch.zeros(n, D)  # parameters of workers that move on their own
        self.named: dict[str, Tensor] = {}

    def compact(self, padded: Tensor) -> Tensor:
        """``[..., padded]`` in the layout of the bucket -> ``[..., d]``."""
        spans = self.optimizer.buckets[0].spans
        return torch.cat([padded[..., start:stop] for start, stop in spans], dim=-1)

    def argument(self, name: str) -> Any:
        """A hyperparameter or a vector of state, by its name in a function or in the class."""
        group, optimizer = self.optimizer.param_groups[0], self.optimizer
        if VALUES.get(name, name) in group:
            return group[VALUES.get(name, name)]
        for long in VECTORS.get(name, [name]):
            if long in (*optimizer.own_state, *optimizer.shared_state):
                shape = (self.n, D) if long in optimizer.own_state else (D,)
                return self.named.setdefault(long, torch.zeros(shape))
        return getattr(optimizer, name)

    def untie(self, balance: Tensor, step: int, ties: str) -> Tensor:
        words, seed = torch.empty(self.exchange.words, dtype=torch.int64), self.exchange.seed
        draws = [
            words.random_(-(2**63), None, generator=stream(seed, "ties", owner, step)).clone()
            for owner in range(self.n)
        ]
        heads = packing.unpack_bits(torch.cat(draws).view(torch.uint8), self.exchange.numel)
        coin = self.compact(heads) * 2.0 - 1
        return simple.untie(balance, step, ties, self.outcome, coin)

    def vote(self, step: int) -> Callable[[Tensor], Tensor]:
        """What becomes of signs, as the optimizer is set."""
        optimizer: Any = self.optimizer
        if optimizer.aggregation == "avg":
            return simple.average
        if optimizer.weighted:
            return lambda signs: self.weighted(signs, step)
        return lambda signs: self.untie(signs.sum(0), step, optimizer.ties)

    def weighted(self, signs: Tensor, step: int) -> Tensor:
        """Every owner weighs the votes on its slice of a bucket by what it has seen there."""
        slices = []
        for bucket in self.optimizer.buckets:
            places = torch.cat([torch.arange(*SPANS[int(slot.name)]) for slot in bucket.slots])
            at = torch.cat([torch.arange(*span) for span in bucket.spans])
            owners = at // bucket.exchange.slice
            slices += [places[owners == owner] for owner in range(self.n)]
        balance = torch.zeros(D)
        for mine, agreement in zip(slices, self.agreement, strict=True):
            balance[mine] = simple.weigh(signs[:, mine], agreement)
        outcome = self.untie(balance, step, "previous")
        for mine, agreement in zip(slices, self.agreement, strict=True):
            if len(mine):
                simple.learn(agreement, signs[:, mine], outcome[mine])
        return outcome

    def pieces(self) -> list[tuple[int, int]]:
        """``(start, stop)`` in d of each tensor's part in each owner's slice."""
        owners = self.compact(torch.arange(self.exchange.numel) // self.exchange.slice)
        cuts = owners.bincount(minlength=self.n).cumsum(0).tolist()
        edges = sorted({0, *cuts, *(stop for _, stop in SPANS)})
        return list(itertools.pairwise(edges))


def by_name(function: Callable[..., None]):
    """Bind the arguments of a function by their names."""

    def step(s: Spec, x: Tensor, g: Tensor, t: int) -> None:
        given = {"x": x, "g": g, "step": t, "spans": SPANS}
        names = inspect.signature(function).parameters
        if "vote" in names:
            given["vote"] = s.vote(t)
        function(*(given[name] if name in given else s.argument(name) for name in names))

    return step


Step = Callable[[Spec, Tensor, Tensor, int], None]  # x [d] and g [n, d] at a step
# options of the class, the specification, and how far apart they may be
Case = tuple[dict[str, Any], Step, float]


def cases(specification: ModuleType, rows: dict[str, Case]) -> dict[str, Case]:
    """Return the cases of the methods of a package.

    A method without a row is bound to its function by the names of the arguments.
    """
    with_rows = {row.split()[0] for row in rows}
    return {
        name: (SMALL.get(name, {}), by_name(getattr(specification, name)), 0)
        for name, method in METHODS.items()
        if method.module.startswith(specification.__package__) and name not in with_rows
    } | rows


def gradients(n: int, step: int) -> Tensor:
    """Random ones, some of which are exactly zero on all or on all but one worker."""
    rows = torch.randn(n, D, generator=torch.Generator().manual_seed(1000 * n + step))
    rows[:, :3] = 0
    rows[1:, 3:9] = 0
    return rows


def assert_is_specification(name: str, case: Case, n: int) -> None:
    """Compare a method with its specification, for n workers."""
    options, step, tolerance = case
    method = METHODS[name.split()[0]]
    start = torch.randn(D, generator=torch.Generator().manual_seed(n))
    params = [
        torch.nn.Parameter(part.view(shape).clone())
        for part, shape in zip(start.split(SIZES), SHAPES, strict=True)
    ]
    named = [(str(t), param) for t, param in enumerate(params)]
    settings = {"lr": LR, "weight_decay": WD, "seed": SEED, **method.options, **options}
    optimizer = method.cls(named, workers=Workers(local=n), **settings)
    spec, x = Spec(optimizer, n), start.clone()
    for t in range(STEPS):
        rows = gradients(n, t)
        for worker in range(n):
            for param, part in zip(params, rows[worker].split(SIZES), strict=True):
                param.grad = part.view(param.shape).clone()
            optimizer.collect(worker)
        optimizer.step()
        optimizer.host(None)
        step(spec, x, rows, t)
        ours = torch.cat([param.detach().flatten() for param in params])
        if tolerance:
            torch.testing.assert_close(ours, x, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(ours, x), f"step {t}: {(ours - x).abs().max()}"
