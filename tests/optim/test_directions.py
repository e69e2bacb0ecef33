"""A direction and the message about it: taken together in one pass, or one after the other."""

import copy

import pytest
import torch

from dlion.methods.adm import DeltaVoteOptimizer
from dlion.methods.dlion import SignVoteOptimizer
from dlion.optim import METHODS
from dlion.workers import Workers

BASES = SignVoteOptimizer, DeltaVoteOptimizer
OPTIONS = {"lion_cub": {"bits": 1}}


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if issubclass(m.cls, BASES)])
def test_one_pass_sends_what_the_direction_says(name):
    torch.manual_seed(0)
    cls, options = METHODS[name].cls, METHODS[name].options | OPTIONS.get(name, {})
    base = next(base for base in BASES if issubclass(cls, base))
    momentum = "momentum" if name.startswith("signum") else "betas"
    found = []
    for encode in (cls.encode, base.encode):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((9, 20), (70,), (5, 3))]
        groups = [
            {"params": params[:2]},
            {"params": params[2:], momentum: 0.5 if momentum == "momentum" else (0.5, 0.6)},
        ]
        optimizer = cls(groups, workers=Workers(), **options)
        for step in range(3):
            for index, param in enumerate(params):
                param.grad = None if index == step else torch.randn_like(param)
            for bucket in optimizer.buckets:
                encode(optimizer, bucket, 0)
                own = bucket.own["momentum"][0]
                found.append(copy.deepcopy((bucket.exchange.messages[0], own)))
                if isinstance(optimizer, DeltaVoteOptimizer):
                    bucket.exchange.state["begun"].fill_(1)
    half = len(found) // 2
    for (message, own), (other, moved) in zip(found[:half], found[half:], strict=True):
        assert torch.equal(message, other)
        assert torch.equal(own, moved)
