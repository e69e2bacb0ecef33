"""Extensions alone and in every combination: they keep each other's promises, to the bit."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlion.errors import TrainingFailed
from dlion.exchange.transport import Gloo
from dlion.extensions.protocol import Extension
from dlion.extensions.transaction import Transaction
from dlion.optim import DistributedOptimizer, DLion, LionCub
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.small_model import loss_of, net, samples

STEPS, REFUSED, BROKEN = 5, 2, "2.weight"


def everything(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """Parameters, momenta and all other state of this process, copied."""
    own = [optimizer.worker_state(local) for local in range(optimizer.workers.local)]
    found = {f"{i}.{name}": rows for i, each in enumerate(own) for name, rows in each.items()}
    taken = [group["steps"] for group in optimizer.param_groups]
    found |= optimizer.common_state() | {"steps": torch.tensor(taken)}
    return {name: tensor.clone() for name, tensor in found.items()}


def differ(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def trained(
    steps: Sequence[int],
    local: int = 1,
    sync: int = 0,
    rounds: bool = False,
    scaled: bool = False,
    commit: Callable[[int], bool] | None = None,
    broken: int | None = None,
    others: Sequence[Extension] = (),
    **options: Any,
) -> dict[str, Tensor]:
    """Train a small model, and return all that is of bits.

    Args:
        steps: whose samples are read.
        sync: steps between averages of Lion Cub's momenta; 0: Distributed Lion.
        rounds: whether parameters are bfloat16, rounded at random.
        scaled: whether a GradScaler takes the steps.
        commit: of a Transaction, by step; None: without one.
        broken: the step in which worker 1 has a gradient that is not finite.
    """
    model, at = net().to(torch.bfloat16 if rounds else torch.float32), [0]
    extensions = [*others]
    if commit is not None:
        extensions.insert(0, Transaction(lambda: commit(at[0])))
    method = partial(LionCub, momentum_sync=sync) if sync else DLion
    workers = None if dist.is_initialized() else Workers(local=local)
    first = dist.get_rank() if dist.is_initialized() else 0
    given = {"workers": workers, "stochastic_rounding": rounds, "bucket_cap_mb": 1e-3, **options}
    optimizer = method(model.named_parameters(), lr=1e-2, extensions=extensions, **given)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    breaks = [False]
    weight = model.get_parameter(BROKEN)
    weight.register_hook(lambda grad: grad * torch.nan if breaks[0] else grad)
    for at[0] in steps:
        for worker in range(first, first + local):
            breaks[0] = at[0] == broken and worker == 1
            inputs = [part.to(weight.dtype) for part in samples(10 * at[0] + worker)]
            scaler.scale(loss_of(model, *inputs)).backward()
            if worker < first + local - 1:
                optimizer.collect(worker)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return everything(optimizer)


def all_but(step: int) -> list[int]:
    return [each for each in range(STEPS) if each != step]


def refuses(step: int) -> bool:
    return step != REFUSED


def commits(step: int) -> bool:
    return True


class KeepsBack(Extension):
    """Lets no answer be applied in one step."""

    calls = 0

    def may_update(self) -> bool:
        self.calls += 1
        return self.calls != REFUSED + 1


many = pytest.mark.parametrize(("sync", "rounds"), [*itertools.product([0, 2], [False, True])])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("local", [1, 2])
@many
def test_a_step_that_is_not_committed_was_never_taken(sync, rounds, local, overlap):
    same = {"local": local, "sync": sync, "rounds": rounds}
    found = trained(range(STEPS), commit=refuses, overlap=overlap, **same)
    assert differ(found, trained(all_but(REFUSED), **same)) == []


def test_a_transaction_is_undone_where_another_extension_refuses():
    found = trained(range(STEPS), commit=commits, others=[KeepsBack()])
    assert differ(found, trained(all_but(REFUSED))) == []


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
@many
def test_overlap_transactions_and_looks_at_gradients_change_no_bit(sync, rounds, nonfinite):
    same = {"local": 2, "sync": sync, "rounds": rounds}
    expected = trained(range(STEPS), nonfinite=None, **same)
    for commit, overlap in itertools.product([None, commits], [False, True]):
        found = trained(range(STEPS), nonfinite=nonfinite, commit=commit, overlap=overlap, **same)
        assert differ(found, expected) == [], (commit, overlap)


@pytest.mark.filterwarnings("ignore:the gradient of 2.weight is not finite")
@many
def test_a_gradient_that_is_skipped_is_skipped_in_every_combination(sync, rounds):
    same = {"local": 2, "sync": sync, "rounds": rounds, "nonfinite": "skip", "broken": 3}
    expected = trained(range(STEPS), **same)
    for commit, overlap in itertools.product([None, commits], [False, True]):
        found = trained(range(STEPS), commit=commit, overlap=overlap, **same)
        assert differ(found, expected) == [], (commit, overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("commit", [None, commits, refuses])
@many
def test_a_stop_names_parameter_worker_and_step_in_every_combination(sync, rounds, commit, overlap):
    step = STEPS - 1 if commit is refuses else STEPS  # one step fewer has counted
    sentence = f"the gradient of {BROKEN} is not finite on worker 1 in step {step}:"
    options = {"local": 2, "sync": sync, "rounds": rounds, "commit": commit, "overlap": overlap}
    with pytest.raises(TrainingFailed, match=sentence):
        trained(range(STEPS), broken=STEPS - 1, **options)


@pytest.mark.parametrize("nonfinite", [None, "stop", "skip"])
@many
def test_a_grad_scaler_changes_no_bit_beside_others(sync, rounds, nonfinite):
    same = {"sync": sync, "rounds": rounds}
    options = {"scaled": True, "nonfinite": nonfinite, **same}
    for commit in (None, commits):
        found = trained(range(STEPS), commit=commit, **options)
        assert differ(found, trained(range(STEPS), **same)) == []
    found = trained(range(STEPS), commit=refuses, **options)
    assert differ(found, trained(all_but(REFUSED), **same)) == []


COMBINATIONS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "overlap, rounding": {"overlap": True, "rounds": True},
    "overlap, transaction, sync": {"overlap": True, "commit": commits, "sync": 2},
    "transaction refuses, sync, rounding": {"commit": refuses, "sync": 2, "rounds": True},
    "overlap, transaction refuses": {"overlap": True, "commit": refuses},
    "scaler, transaction, sync": {"scaled": True, "commit": commits, "sync": 2},
    "scaler overflows, transaction, sync": {
        "scaled": True, "commit": commits, "sync": 2, "broken": REFUSED,
    },
}  # fmt: skip


def paces() -> list[bool]:
    """Let process 0 find its links slow in the first step: who is slow after each of four."""
    model, found = net(), []
    optimizer = DLion(model.parameters(), lr=1e-2)
    gloo = optimizer.channel.transports["cpu"]
    assert isinstance(gloo, Gloo)
    gloo.fastest = 1e6 if dist.get_rank() == 0 else 0.0
    for step in range(4):
        loss_of(model, *samples(10 * step + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(gloo.slow)
    return found


def in_each_process() -> list[dict[str, Any]]:
    join_process_group("gloo", 60)
    seen: dict[str, Any] = {}
    for name, options in COMBINATIONS.items():
        kept = {key: options[key] for key in ("sync", "rounds") if key in options}
        skips = options.get("commit") is refuses or "broken" in options
        expected = trained(all_but(REFUSED) if skips else range(STEPS), **kept)
        seen[name] = differ(trained(range(STEPS), **options), expected)
    seen["slow"] = paces()
    for name, options in COMBINATIONS.items():
        if not options.get("scaled"):
            try:
                trained(range(STEPS), **{**options, "broken": STEPS - 1})
            except TrainingFailed as error:
                seen[f"{name} stops"] = str(error)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, seen)
    dist.destroy_process_group()
    return everyone


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_processes(2, in_each_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    COMBINATIONS,
)
def test_processes_change_no_bit_either(seen, name):
    assert [each[name] for each in seen] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, each in COMBINATIONS.items() if "scaled" not in each])
def test_both_processes_name_the_gradient(seen, name):
    step = STEPS - 1 if COMBINATIONS[name].get("commit") is refuses else STEPS
    for each in seen:
        assert f"{BROKEN} is not finite on worker 1 in step {step}:" in each[f"{name} stops"]


@pytest.mark.slow
def test_the_slow_links_of_one_process_slow_all_two_steps_later(seen):
    assert [each["slow"] for each in seen] == [[False, True, False, False]] * 2
