"""Parameter groups share buckets: as many messages as one group has, and each has its own rates."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dlion import kernels
from dlion.methods import DGC, METHODS, DiLoCo, DistributedOptimizer, DLion, GAdamW, GLion
from dlion.workers import Workers
from tests.support.methods import of_all

SHAPES = [(16, 8), (70,), (8, 16), (3, 5, 4), (128,), (9, 9)]
BETAS = [(0.9, 0.99), (0.8, 0.95)]


def weights() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def rates(index: int, defaults: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of the group of a parameter: every second group has the same."""
    own = {"lr": 1e-3 * (1 + index // 2), "weight_decay": 0.1 * (index % 2)}
    if "betas" in defaults:
        own["betas"] = BETAS[index // 3]
    if "momentum" in defaults:
        own["momentum"] = 0.9 - 0.3 * (index // 3)
    return own


def train(
    optimizer: DistributedOptimizer, params: list[torch.nn.Parameter], first: int, steps: int
) -> Tensor:
    """Train on gradients of each step and worker; rates halve in step 2."""
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if step == 2 else 1
        for local in range(optimizer.workers.local):
            draw = torch.Generator().manual_seed(100 * step + local)
            pull = [torch.randn(param.shape, generator=draw) for param in params]
            sum(((p - x) ** 2).sum() for p, x in zip(params, pull, strict=True)).backward()
            optimizer.collect(local)
        optimizer.step()
    optimizer.host(None)
    return torch.cat([param.detach().flatten() for param in params])


def make(cls: Any, options: dict[str, Any], apart: bool, **common: Any) -> tuple[Any, Any]:
    """Return an optimizer with a group for each parameter, of ``apart`` those of unlike buckets."""
    params = weights()
    defaults = cls(weights(), **options).defaults
    groups = [{"params": [p], **rates(i, defaults)} for i, p in enumerate(params)]
    workers = Workers.current(local=2)
    cut = {"bucket_cap_mb": 1e-6} if apart else {}
    return cls(groups, workers=workers, **options, **cut, **common), params


# its answer depends on how slices are cut, or on draws that belong to buckets
OF_BUCKETS = {"ef_signsgd", "ef21_sign", "onebit_adam", "terngrad", "powersgd", "dion", "muon_adm"}
CLIPPED = "clip_norm"  # of the whole gradient, which is to be in one bucket


@of_all
def test_a_group_for_each_parameter_is_as_separate_buckets(method, cls, options):
    scaled = options.get("wire") in ("sign", "int8") or "weighted" in options
    if method in OF_BUCKETS or CLIPPED in options or scaled:
        pytest.skip("its answers depend on the buckets")
    together, params = make(cls, options, apart=False, overlap=True)
    one_by_one, others = make(cls, options, apart=True)
    assert len(together.buckets) == len({bucket.kind for bucket in together.buckets})
    assert len(one_by_one.buckets) == len(SHAPES)
    assert torch.equal(train(together, params, 0, 4), train(one_by_one, others, 0, 4))


@of_all
def test_groups_that_are_alike_are_as_one(method, cls, options):
    params, others = weights(), weights()
    common = {"workers": Workers.current(local=3), **options}
    one = cls(params, **common)
    many = cls([{"params": [param]} for param in others], **common)
    assert len(one.buckets) == len(many.buckets)
    assert torch.equal(train(one, params, 0, 4), train(many, others, 0, 4))
    assert one.channel.traffic == many.channel.traffic


@pytest.mark.parametrize("cap", [1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("vectors", [False, True])
def test_many_groups_make_no_more_buckets_than_one(cap, vectors):
    params = [torch.nn.Parameter(torch.zeros(n, n) if n % 2 else torch.zeros(n)) for n in range(60)]
    groups = [{"params": [param], "lr": 1e-3 / (1 + i)} for i, param in enumerate(params)]
    if vectors:
        kinds = [[p for p in params if (p.dim() < 2) is flat] for flat in (False, True)]
        groups = [{"params": kind, "weight_decay": 0.1 * i} for i, kind in enumerate(kinds)]
    many = DLion(groups, bucket_cap_mb=cap)
    assert len(many.buckets) <= len(DLion(params, bucket_cap_mb=cap).buckets)
    if vectors and cap == 1e-3:  # they come last, unless that makes more
        flat = [slot.tensor.dim() < 2 for bucket in many.buckets for slot in bucket.slots]
        assert flat == sorted(flat)


@of_all
def test_groups_are_resumed_to_the_bit(method, cls, options):
    straight, params = make(cls, options, apart=False)
    train(straight, params, 0, 4)
    saved = copy.deepcopy(straight.state_dict())
    values = [param.detach().clone() for param in params]
    resumed, others = make(cls, options, apart=False)
    with torch.no_grad():
        for param, value in zip(others, values, strict=True):
            param.copy_(value)
    resumed.load_state_dict(saved)
    assert torch.equal(train(straight, params, 4, 4), train(resumed, others, 4, 4))


def test_groups_that_are_added_after_a_step_have_buckets_and_steps_of_their_own():
    params, late = weights(), torch.nn.Parameter(torch.zeros(5))
    optimizer = DLion([{"params": [param]} for param in params], lr=1e-2)
    train(optimizer, params, 0, 2)
    later = torch.nn.Parameter(torch.zeros(5))
    for param in (late, later):
        optimizer.add_param_group({"params": [param], "lr": 0.5})
    assert [bucket.step for bucket in optimizer.buckets] == [2, 0, 0]
    assert optimizer.state[params[0]]["step"] == 2 and optimizer.state[late]["step"] == 0
    train(optimizer, [*params, late, later], 2, 1)
    assert torch.cat([late, later]).abs().eq(0.25).all()


def test_earlier_states_of_groups_are_refused_where_buckets_differ():
    with pytest.raises(ValueError, match="that it was saved with"):
        make(DLion, {}, apart=False)[0].load_state_dict(make(DLion, {}, apart=True)[0].state_dict())
    earlier, params = make(GAdamW, {}, apart=True)  # what is kept of each parameter has no buckets
    train(earlier, params, 0, 2)
    now, _ = make(GAdamW, {}, apart=False)
    now.load_state_dict(earlier.state_dict())
    assert torch.equal(now.state[now.params[3]]["exp_avg"], earlier.state[params[3]]["exp_avg"])


def test_kinds_that_cannot_share_a_bucket_stay_apart():
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    groups = [{"params": [half]}, *({"params": [param]} for param in weights())]
    assert [bucket.dtype for bucket in GLion(groups).buckets] == [torch.bfloat16, torch.float32]


def test_a_norm_is_clipped_over_all_groups():
    params, others = weights(), weights()
    one = DGC(params, clip_norm=0.5)
    many = DGC([{"params": [param]} for param in others], clip_norm=0.5)
    assert torch.equal(train(one, params, 0, 3), train(many, others, 0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_signs_are_applied_by_run_as_run_by_run(dtype):
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (2, 5), generator=draw)
    params = torch.randn(640, generator=draw).to(dtype)
    edges, rates = [0, 64, 448, 640], [(0.1, 0.5), (0.2, 0.0), (0.3, 1.0)]
    expected, flat = params.clone(), words.view(1, -1)
    for start, stop, run in zip(edges, edges[1:], rates, strict=False):
        part = flat[:, start // 64 : stop // 64]
        kernels.apply_signs(expected[start:stop], part, *run)
    kernels.apply_signs_by_run(params, words, edges, rates)
    assert torch.equal(params, expected)


@of_all
def test_a_group_that_cannot_be_added_leaves_nothing_behind(method, cls, options):
    old, new, vector = (torch.nn.Parameter(torch.randn(shape)) for shape in [(4, 2), (9, 7), (6,)])
    if "clip_norm" in options:
        pytest.skip("it has one bucket")
    optimizer = cls([old], overlap=True, **options)
    complex_one = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    for given in ([new, old], [new, vector, complex_one]):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group({"params": given})
        assert [group["params"] for group in optimizer.param_groups] == [[old]]
        sum(param.sum() for param in (old, new, vector)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.add_param_group({"params": [new]})
    sum(param.sum() for param in (old, new)).backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 2


def test_a_group_without_parameters_stays_in_its_place():
    one, two = weights()[:2]
    for cls in (DLion, METHODS["g_muon"].cls, METHODS["sign_muon_mavo"].cls):
        optimizer = cls([{"params": [one]}, {"params": []}, {"params": [two]}])
        assert [group["params"] for group in optimizer.param_groups] == [[one], [], [two]]
        (one.sum() + two.sum()).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("method", ["g_muon", "sign_muon_mavo", "muon_adm", "dion", "ef21_muon"])
def test_a_state_of_other_adamw_names_is_refused(method):
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))

    def made(names: str) -> DistributedOptimizer:
        return METHODS[method].cls(layers.named_parameters(), adamw_names=names)

    before, after = made(r"^0\."), made(r"^[01]\.")
    layers(torch.randn(2, 8)).sum().backward()
    before.step()
    with pytest.raises(ValueError, match=r"the saved state of (parameter 1 has|the exchanges)"):
        after.load_state_dict(before.state_dict())
    made(r"^0\.").load_state_dict(before.state_dict())


def test_a_state_of_other_names_for_its_numbers_is_refused():
    named = [*torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).named_parameters()]
    before = DLion([{"params": named[:2]}, {"params": named[2:]}])
    after = DLion([{"params": named[2:]}, {"params": named[:2]}])
    with pytest.raises(ValueError, match=r"has 0\.bias, 0\.weight in another parameter group"):
        after.load_state_dict(before.state_dict())


@of_all
def test_param_groups_are_those_that_were_given(method, cls, options):
    """So that a schedule for each of them, or an index, means the group that it means in torch."""
    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    optimizer = cls([{"params": body.parameters()}, {"params": head.parameters()}], **options)
    rates = [lambda t: 1.0, lambda t: 0.0]
    torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    before = [[p.detach().clone() for p in layer.parameters()] for layer in (body, head)]
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["outer_lr"] = 0.0
    for _ in range(2):
        head(body(torch.ones(2, 8))).square().sum().backward()
        optimizer.step()
    moved = [
        [not torch.equal(p, old) for p, old in zip(layer.parameters(), olds, strict=True)]
        for layer, olds in zip((body, head), before, strict=True)
    ]
    assert moved == [[True, True], [False, False]]


def test_a_checkpoint_goes_by_name_whatever_the_order_was():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def made(names: list[Any]) -> DistributedOptimizer:
        optimizer = METHODS["g_muon"].cls(names)
        model(torch.arange(8.0)).square().sum().backward()
        return optimizer

    named = [*model.named_parameters()]
    before, after = made(named), made(named[::-1])
    before.step()
    saved = get_optimizer_state_dict(model, before)
    set_optimizer_state_dict(model, after, saved)
    for param in model.parameters():
        for name, value in before.state[param].items():
            assert torch.equal(torch.as_tensor(after.state[param][name]), torch.as_tensor(value))


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_group_says_whether_its_matrices_are_the_inner_muons(asked):
    (matrix,) = torch.nn.Linear(6, 6, bias=False).parameters()
    group = {"params": [("lm_head.weight", matrix)]}
    if asked is None:
        group["params"].append(("hidden.weight", torch.nn.Parameter(torch.randn(3, 3))))
    else:
        group["use_muon"] = asked
    start = matrix.detach().clone()
    optimizer = DiLoCo([group], inner="muon", lr=1e-2)
    matrix.grad = torch.outer(torch.arange(1.0, 7.0), torch.ones(6))
    optimizer.step()
    moved = start - matrix.detach()
    if asked:  # a polar factor of one direction
        torch.testing.assert_close(moved, moved[:, :1].expand(6, 6))
        assert moved[5, 0] / moved[0, 0] == pytest.approx(6, rel=1e-3)
    else:
        torch.testing.assert_close(moved, torch.full((6, 6), 1e-2))


def test_inner_optimizers_have_the_groups():
    def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups)

    straight, params = make(DiLoCo, {"local_steps": 2, "inner": adam}, apart=False)
    apart, others = make(DiLoCo, {"local_steps": 2, "inner": adam}, apart=True)
    assert torch.equal(train(straight, params, 0, 4), train(apart, others, 0, 4))
    assert METHODS["diloco"].cls is DiLoCo
