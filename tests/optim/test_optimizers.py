"""The optimizers in plain loops: equal to others' code, and at home in torch's machinery."""

import copy
import math
import threading

import pytest
import torch
from lion_pytorch import Lion
from omegaconf import OmegaConf

from dlion.errors import TrainingFailed
from dlion.methods.sync import MomentumSync
from dlion.optim import (
    DGC,
    DeMo,
    DiLoCo,
    DLion,
    DLionADM,
    EFSignSGD,
    GAdamW,
    GLion,
    GMuon,
    GradDrop,
    LionCub,
    LocalUpdate,
    OneBitAdam,
    PowerSGD,
    SignMuon,
    Signum,
    SparseLoCo,
    TernGrad,
)
from dlion.suite.config import instantiate
from dlion.workers import Workers
from tests.conftest import ROOT
from tests.methods import ALL, IDS, OF_PIECES

of_all = pytest.mark.parametrize(("method", "cls", "options"), ALL, ids=IDS)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7))


def samples(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 20, generator=generator), torch.randn(64, 7, generator=generator)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, *samples(t)).backward()
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cls", [GLion, DLion])
def test_one_worker_is_lion_pytorch_to_the_bit(cls, weight_decay):
    ours, theirs = net(), net()
    settings = {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": weight_decay}
    expected = train(theirs, Lion(theirs.parameters(), **settings), 100)
    assert torch.equal(train(ours, cls(ours.parameters(), **settings), 100), expected)


def test_one_worker_average_is_lion_too():
    ours, theirs = net(), net()
    expected = train(theirs, Lion(theirs.parameters(), lr=1e-3), 100)
    result = train(ours, DLion(ours.parameters(), lr=1e-3, aggregation="avg"), 100)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("local", [1, 4])
def test_g_adamw_is_torch_adamw_on_the_mean_gradient(local):
    ours, theirs = net(), net()
    optimizer = GAdamW(ours.parameters(), lr=1e-2, weight_decay=0.1, workers=Workers(local=local))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for t in range(100):
        for i in range(local):
            loss_of(ours, *samples(4 * t + i)).backward()
            optimizer.collect(i)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for i in range(local):
            (loss_of(theirs, *samples(4 * t + i)) / local).backward()
        reference.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)


def test_one_bit_lion_cub_is_distributed_lion():
    one, two = net(), net()
    first = train(one, LionCub(one.parameters(), bits=1, ties="alternate", lr=1e-3), 20)
    assert torch.equal(first, train(two, DLion(two.parameters(), lr=1e-3), 20))


@of_all
def test_every_method_learns(method, cls, options):
    """With the values of its YAML file."""
    settings = OmegaConf.load(ROOT / "conf" / "optimizer" / f"{method}.yaml")
    if method == "onebit_adam":
        settings.lr = 1e-4  # its variance is that of two steps
    model = net()
    optimizer = instantiate(settings, model.parameters(), workers=Workers(local=4), **options)
    x, y = samples()
    before = loss_of(model, x, y).item()
    for _ in range(100):
        for i in range(4):
            loss_of(model, x[i::4], y[i::4]).backward()
            optimizer.collect(i)
        optimizer.step()
    assert loss_of(model, x, y).item() < 0.85 * before


@of_all
def test_state_dict_resumes_to_the_bit(method, cls, options, tmp_path):
    straight = net()
    expected = train(straight, cls(straight.parameters(), **options), 10)

    model = net()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, 5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = net()
    resumed.load_state_dict(weights)
    optimizer = cls(resumed.parameters(), **options)
    optimizer.load_state_dict(state)
    for t in range(5, 10):
        optimizer.zero_grad()
        loss_of(resumed, *samples(t)).backward()
        optimizer.step()
    assert torch.equal(flat(resumed), expected)


def test_state_of_another_spread_or_cut_is_refused():
    workers = Workers(local=2)
    for cls, options in ((DLion, {"aggregation": "avg"}), (LionCub, {})):
        saved = cls(net().parameters(), workers=workers, **options).state_dict()
        with pytest.raises(ValueError, match="workers 0, 1 of 2, but"):
            cls(net().parameters(), **options).load_state_dict(saved)
    saved = DLion(net().parameters(), workers=workers).state_dict()
    with pytest.raises(ValueError, match="bucket_cap_mb, ties and shards"):
        DLion(net().parameters(), workers=workers, bucket_cap_mb=1e-3).load_state_dict(saved)


def test_state_of_another_method_or_with_gaps_is_refused():
    optimizer = DLion(net().parameters())
    with pytest.raises(ValueError, match="has no betas: it is of another method"):
        optimizer.load_state_dict(Signum(net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"parameter 0 has \{'exp_avg'"):
        optimizer.load_state_dict(GAdamW(net().parameters()).state_dict())
    saved = optimizer.state_dict()
    del saved["state"][1]
    with pytest.raises(ValueError, match=r"saved state of parameter 1 has \{\}"):
        optimizer.load_state_dict(saved)
    one = DLion(net()[0].parameters())
    for ours, other in ((one, optimizer), (optimizer, one)):
        with pytest.raises(ValueError, match=r"groups of \[\d\] param.* into the same model with"):
            ours.load_state_dict(other.state_dict())


@of_all
def test_frozen_parameters_are_not_moved_and_cost_nothing(method, cls, options):
    """The same bytes, state and steps as for the other parameters alone."""
    whole, part = net(), net()
    whole[0].weight.requires_grad_(False)
    before = whole[0].weight.clone()
    workers = Workers(local=2)
    all_ = cls(whole.parameters(), weight_decay=0.1, workers=workers, **options)
    trained = [param for param in part.parameters() if param is not part[0].weight]
    some = cls(trained, weight_decay=0.1, workers=workers, **options)
    for t in range(3):
        for optimizer, model in ((all_, whole), (some, part)):
            for i in range(2):
                loss_of(model, *samples(2 * t + i)).backward()
                part[0].weight.grad = None
                optimizer.collect(i)
            optimizer.step()
    assert torch.equal(flat(whole), flat(part)) and torch.equal(whole[0].weight, before)
    assert all_.channel.traffic == some.channel.traffic
    assert whole[0].weight not in all_.state


@of_all
@pytest.mark.parametrize("local", [1, 2])
def test_unfrozen_parameters_learn_with_overlap_as_without(method, cls, options, local):
    options = {name: value for name, value in options.items() if name != "clip_norm"}
    results = []
    for overlap in (False, True):
        model = net()
        model[0].requires_grad_(False)
        optimizer = cls(
            model.parameters(),
            lr=1e-2,
            overlap=overlap,
            bucket_cap_mb=1e-3,
            workers=Workers(local=local),
            **options,
        )
        before = flat(model[0])
        for t in range(6):
            if t == 2:
                assert torch.equal(flat(model[0]), before)
                model[0].requires_grad_(True)
            if t == 4:
                model[2].requires_grad_(False)
            for i in range(local):
                loss_of(model, *samples(10 * t + i)).backward()
                optimizer.collect(i)
            optimizer.step()
        assert not torch.equal(flat(model[0]), before)
        results.append(flat(model))
    assert torch.equal(*results)


def test_a_second_optimizer_takes_over_from_one_that_overlapped():
    one, two = net(), net()
    first = DLion(one.parameters(), lr=1e-2, overlap=True)
    train(one, first, 3)
    del first
    expected = train(two, DLion(two.parameters(), lr=1e-2), 3)
    assert torch.equal(flat(one), expected)
    second = [DLion(model.parameters(), lr=1e-2, overlap=model is one) for model in (one, two)]
    assert torch.equal(train(one, second[0], 3), train(two, second[1], 3))


@of_all
def test_a_parameter_without_gradient_anywhere_is_left_alone(method, cls, options):
    model = net()
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([*model.parameters(), unused], weight_decay=0.1, **options)
    train(model, optimizer, 3)
    state = dict(optimizer.state[unused])
    for name in ("worker", "local", "outer"):  # the last are parameters themselves
        state.pop(name, None)
    assert state and all(not value.any() for value in state.values())
    decayed = 1.0
    # one of them may have had something left to send, so it decays; but in no inner step
    if not optimizer.skips_missing and not issubclass(cls, LocalUpdate):
        decayed = (1 - 0.1 * optimizer.param_groups[0]["lr"]) ** 3
    torch.testing.assert_close(unused.detach(), torch.full((3,), decayed))


def test_a_gradient_missing_on_one_worker_counts_as_zero_there():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = DLion([param], lr=1.0, workers=Workers(local=3), ties="zero")
    for i, grad in enumerate((-1.0, -1.0, None)):
        param.grad = None if grad is None else torch.tensor([grad])
        optimizer.collect(i)
    optimizer.step()
    assert param.item() == 1.0
    assert optimizer.state[param]["momentum"].flatten().tolist() == pytest.approx([-0.01, -0.01, 0])


VOTERS = [
    (DLion, {}),
    (DLion, {"ties": "zero"}),
    (DLion, {"ties": "random"}),
    (DLion, {"aggregation": "avg"}),
    (DLion, {"weighted": True}),
    (Signum, {"momentum": 0.9}),
    (LionCub, {"bits": 1}),
    (LionCub, {"bits": 4}),
]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(("cls", "options"), VOTERS)
def test_what_nobody_knows_stays_and_what_one_knows_moves(cls, options, n):
    """Entry w has a gradient on worker w alone, the last one on none."""
    param, steps = torch.nn.Parameter(torch.zeros(n + 1)), 8 * n
    optimizer = cls([param], lr=1.0, workers=Workers(local=n), **options)
    for _ in range(steps):
        for worker in range(n):
            param.grad = torch.zeros(n + 1)
            param.grad[worker] = 1.0
            optimizer.collect(worker)
        optimizer.step()
    full = 1 / n if options.get("aggregation") == "avg" else 1.0
    assert param[n].abs() < 1e-5  # it went back and forth, an even number of times
    for worker in range(n):
        share = -param[worker].item() / steps / full
        assert share >= 0.25 and share <= 1.01, (worker, share)


@pytest.mark.parametrize("options", [{}, {"limit": 1}, {"limit": 2.0, "weighted": True}])
@pytest.mark.parametrize("n", [1, 4])
def test_delta_modulation_keeps_both_ends_in_step_whoever_is_absent(n, options):
    """From the first step on; one parameter gets its gradients late, on some workers only."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((70, 3), (1,), (200,))]
    optimizer = DLionADM(params, workers=Workers(local=n), **options)
    generator = torch.Generator().manual_seed(n)
    for step, present in enumerate(([1, 3], [1, 3], [2], None, [0], None) if n > 1 else [[0]] * 6):
        optimizer.set_participants(present)
        for worker in range(n) if present is None else present:
            for param in params if step > 1 and worker != 1 else params[:2]:
                param.grad = torch.randn(param.shape, generator=generator) + worker
            optimizer.collect(worker)
        optimizer.step()
    bucket = optimizer.buckets[0]
    state = bucket.exchange.state
    received = state["received_level"].transpose(0, 1).flatten(1)
    assert torch.equal(state["level"][:, : bucket.numel], received[:, : bucket.numel])
    total = state["received_estimate"].sum(1).flatten()
    torch.testing.assert_close(state["estimate"].sum(0)[: bucket.numel], total[: bucket.numel])
    assert total.any()


def test_parameter_groups_schedulers_and_closures():
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = DLion(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    frozen, moving = model[0].weight.clone(), model[2].weight.clone()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *samples())
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    step = (model[2].weight - moving).abs().max().item()
    schedule.step()
    moving = model[2].weight.clone()
    optimizer.step(closure)
    assert torch.equal(model[0].weight, frozen)
    assert (model[2].weight - moving).abs().max().item() == pytest.approx(step / 2, rel=1e-3)


def test_gradients_accumulate_over_backward_passes():
    one, two = net(), net()
    x, y = samples()
    first, second = GLion(one.parameters(), lr=1e-3), GLion(two.parameters(), lr=1e-3)
    loss_of(one, x, y).backward()
    for part in (slice(0, 32), slice(32, 64)):
        (loss_of(two, x[part], y[part]) / 2).backward()
    first.step(), second.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first.state[p]["momentum"], second.state[q]["momentum"])


@of_all
@pytest.mark.parametrize("local", [1, 2])
def test_overlap_and_buckets_keep_every_bit(method, cls, options, local):
    options = {name: value for name, value in options.items() if name != "clip_norm"}
    results = []
    for overlap in (False, True):
        model = net()
        optimizer = cls(
            model.parameters(),
            workers=Workers(local=local),
            overlap=overlap,
            bucket_cap_mb=1e-3,
            **options,
        )
        assert len(optimizer.buckets) > 1
        for t in range(4):
            for i in range(local):
                loss_of(model, *samples(10 * t + i)).backward()
                optimizer.collect(i)
            optimizer.step()
        results.append(flat(model))
    assert torch.equal(*results)


def test_with_overlap_frozen_and_unused_parameters_wait_for_nobody():
    results = []
    for overlap in (False, True):
        model = net()
        model[0].bias.requires_grad_(False)
        unused = torch.nn.Parameter(torch.ones(5))
        params = [*model.parameters(), unused]
        optimizer = DLion(params, overlap=overlap, bucket_cap_mb=1e-3, weight_decay=0.1)
        results.append(train(model, optimizer, 3))
        assert torch.equal(unused.detach(), torch.ones(5))
    assert torch.equal(*results)


def test_with_overlap_gradients_accumulate_in_no_sync():
    x, y = samples()
    momenta = []
    for overlap in (False, True):
        model = net()
        optimizer = DLion(model.parameters(), overlap=overlap)
        with optimizer.no_sync():
            with optimizer.no_sync():
                loss_of(model, x[:16], y[:16]).backward()
            loss_of(model, x[16:32], y[16:32]).backward()
        loss_of(model, x[32:], y[32:]).backward()
        optimizer.step()
        momenta.append(optimizer.buckets[0].own["momentum"])
    assert torch.equal(*momenta)


def test_with_overlap_a_second_backward_pass_is_refused():
    model = net()
    optimizer = DLion(model.parameters(), overlap=True)
    loss_of(model, *samples()).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        loss_of(model, *samples()).backward()
    del optimizer


def test_with_overlap_gradients_may_come_from_several_threads():
    """As autograd has one for every device."""
    results = []
    for together in (False, True):
        model = torch.nn.ParameterList(torch.full((64,), float(i)) for i in range(40))
        optimizer = DLion(model.parameters(), overlap=True, bucket_cap_mb=1e-4)

        def backward(half: int, model: torch.nn.ParameterList = model) -> None:
            torch.stack([p.square().sum() for p in [*model][half::2]]).sum().backward()

        for _ in range(10):
            threads = [threading.Thread(target=backward, args=[half]) for half in (0, 1)]
            for thread in threads:
                thread.start()
                if not together:
                    thread.join()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        results.append(flat(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@of_all
def test_the_default_dtype_changes_nothing(method, cls, options, dtype):
    results = []
    for default in (torch.float32, dtype):
        model = net()
        gradients = [[torch.randn(p.shape) for p in model.parameters()] for _ in range(6)]
        torch.set_default_dtype(default)
        try:
            optimizer = cls(model.parameters(), lr=1e-2, workers=Workers(local=2), **options)
            for worker, grads in enumerate(gradients):
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.grad = grad
                optimizer.collect(worker % 2)
                if worker % 2:
                    optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        sent = optimizer.channel.traffic.sent_bytes
        results.append((flat(model).tolist(), sent, optimizer.state_bytes))
    assert results[0] == results[1]


def test_bfloat16_parameters_and_autocast():
    model = net().to(torch.bfloat16)
    optimizer = DLion(model.parameters(), lr=1e-2)
    x, y = samples()
    before = loss_of(model, x.bfloat16(), y.bfloat16()).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, x.bfloat16(), y.bfloat16()).backward()
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert loss_of(model, x.bfloat16(), y.bfloat16()).item() < before

    model = net()
    optimizer = DLion(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_nan_on_one_worker_is_outvoted():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = DLion([param], lr=1.0, workers=Workers(local=3))
    for i, grad in enumerate((1.0, 1.0, math.nan)):
        param.grad = torch.full((4,), grad)
        optimizer.collect(i)
    optimizer.step()
    assert param.tolist() == 4 * [-1.0]


def test_momentum_is_synchronised_when_and_where_asked():
    model = net()
    optimizer = LionCub(
        model.named_parameters(),
        momentum_sync=2,
        sync_pattern=r"^0\.weight",
        workers=Workers(local=3),
    )
    for t in range(2):
        for i in range(3):
            loss_of(model, *samples(3 * t + i)).backward()
            optimizer.collect(i)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.step()
    momenta = [state["momentum"] for state in optimizer.state_dict()["state"].values()]
    assert torch.equal(momenta[0][0], momenta[0][1]) and torch.equal(momenta[0][0], momenta[0][2])
    assert not torch.equal(momenta[2][0], momenta[2][1])
    assert not torch.equal(before[0]["momentum"][0], before[0]["momentum"][1])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("exponential",), [1, 2, 4, 8, 16]),
        (("floored",), [1, 2, 4, 8, 16]),
        (("exponential", 16.0), [*range(1, 8), 9, 10, 11, 13, 14, 16, 18, 19, *range(21, 30, 2)]),
        (("floored", 16.0), [*range(1, 18), *range(19, 30, 2)]),
        (("floored", 16.0, None, 20), [*range(1, 18), 19]),
        ((3, 1.0, None, 7), [3, 6]),
        ((7,), [7, 14, 21, 28]),
    ],
)
def test_the_steps_after_which_momenta_are_averaged(settings, steps):
    sync = MomentumSync(*settings)
    assert [t for t in range(1, 30) if sync.is_due(t)] == steps


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: DLion(p, ties="maybe"), "ties=maybe is unknown"),
        (lambda p: DLion(p, aggregation="sum"), "choose mavo or avg"),
        (
            lambda p: DLion(p, exchange="ring"),
            "exchange=ring is not possible: give direct, grid, auto or the sizes of a grid",
        ),
        (lambda p: DLion(p, weighted=True, exchange="grid"), "owners see sums, not single votes"),
        (lambda p: DLion(p, lr=-1.0), "lr=-1.0 is not possible: give a number, at least 0"),
        (lambda p: DLion(p, lr=None), "lr=None is not possible: give a number"),
        (lambda p: DLion(p, betas=(1.0, 0.9)), "betas="),
        (lambda p: DLion(p, betas=("a", 0.9)), "'a', 0.9. is not possible: give two numbers"),
        (lambda p: DLion(p, betas=(0.9,)), "0.9,. is not possible: give two numbers"),
        (lambda p: DLion(p, betas=0.9), "betas=0.9 is not possible: give two numbers"),
        (lambda p: DLion(p, lr=float("inf")), "lr=inf is not possible"),
        (lambda p: DLion(p, exchange=4), "exchange=4 is not possible: give direct, grid"),
        (lambda p: DLion(p, nonfinite="maybe"), "nonfinite=maybe is unknown: choose stop, sk"),
        (lambda p: DLion(p, overlap="no"), "overlap=no is not possible: give True or False"),
        (lambda p: DLion([{"params": p, "lr": -1}]), "lr=-1 is not possible: give a number"),
        (lambda p: DGC(p, clip_norm=-1.0), "clip_norm=-1.0 is not possible: give a number, above"),
        (lambda p: DGC(p, warmup_steps=-5), "warmup_steps=-5 is not possible"),
        (lambda p: TernGrad(p, clip=-1.0), "clip=-1.0 is not possible: give a number, at least"),
        (lambda p: SparseLoCo(p, decay=5.0), "decay=5.0 is not possible: give a number, at least"),
        (
            lambda p: EFSignSGD(p, momentum=None),
            "momentum=None is not possible: give a number, at least 0 and below",
        ),
        (lambda p: DLionADM(p, rise=2.0), "rise=2.0 is not possible: give a whole number"),
        (lambda p: DLionADM(p, lookahead="far"), "lookahead=far is not possible: give a number"),
        (
            lambda p: DLionADM(p, limit="no"),
            "limit=no is not possible: give a number, at least 1, or None",
        ),
        (lambda p: DLionADM(p, weighted="no"), "weighted=no is not possible: give True or False"),
        (lambda p: LionCub(p, bits=3), "bits=3 is not possible: choose 1, 2, 4 or 8"),
        (lambda p: LionCub(p, scale="l2"), "scale=l2 is unknown"),
        (lambda p: LionCub(p, momentum_sync="often"), "momentum_sync=often"),
        (lambda p: SignMuon(p, rest="adamw"), "rest=adamw needs aggregation=avg"),
        (lambda p: SignMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: LionCub(p, momentum_sync=1, sync_pattern="w"), "matches no parameter name"),
        (lambda p: LionCub(p, sync_pattern="w"), "has no effect with momentum_sync=0"),
        (lambda p: LionCub(p, sync_until=9), "sync_until=9 has no effect with momentum_sync=0"),
        (lambda p: LionCub(p, headroom=True, bits=1), "it needs bits=2, 4 or 8"),
        (
            lambda p: LionCub(p, headroom=True, workers=Workers(local=8)),
            "bits=4 and 8 workers is not possible: it needs at most 7 workers",
        ),
        (
            lambda p: LionCub(p, momentum_sync="exponential", sync_rate=0),
            "sync_rate=0 is not possible",
        ),
        (lambda p: DGC(p, density=0.0), "density=0.0 is not possible: give a number, above 0"),
        (lambda p: DGC(p, clip_norm=1.0, bucket_cap_mb=1e-3), "needs the whole gradient"),
        (lambda p: DeMo(p, topk=0), "topk=0 is not possible: give a whole number, at least 1"),
        (lambda p: DeMo(p, chunk=1.5), "chunk=1.5 is not possible: give a whole number"),
        (lambda p: DeMo(p, value_bits=8), "value_bits=8 is not possible: choose 2, 16 or 32"),
        (
            lambda p: SparseLoCo(p, topk=0),
            "topk=0 is not possible: give a whole number, at least 1",
        ),
        (
            lambda p: DiLoCo(p, inner="adam"),
            "inner=adam is not possible: give adamw, lion, muon, sgd or in",
        ),
        (
            lambda p: DiLoCo(p, wire="fp8"),
            "wire=fp8 is unknown: choose float32, bf16, int8 or sign",
        ),
        (lambda p: DiLoCo(p, local_steps=0), "local_steps=0 is not possible: give a whole number"),
        (
            lambda p: DiLoCo(p, outer_momentum=1),
            "outer_momentum=1 is not possible: give a number, at least 0 and below",
        ),
        (
            lambda p: DLion(p, bucket_cap_mb=0),
            "bucket_cap_mb=0 is not possible: give a number, above 0, auto or",
        ),
        (lambda p: GMuon(p, adjust_lr="rms"), "choose match_rms_adamw or original"),
        (lambda p: GMuon(p, ns_precision="fp16"), "choose bf16 or float32"),
        (lambda p: GMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: SignMuon(p, rest="adamw"), "rest=adamw needs aggregation=avg"),
        (lambda p: SignMuon(p, adamw_names="["), "is no regular expression: unterminated"),
        (lambda p: LionCub(p, momentum_sync=1, sync_pattern="("), "is no regular expression: miss"),
        (lambda p: PowerSGD(p, rank=0), "rank=0 is not possible: give a whole number"),
        (
            lambda p: OneBitAdam(p, warmup_steps=0),
            "warmup_steps=0 is not possible: give a whole number, at least 1",
        ),
    ],
)
def test_wrong_values_are_named(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(net().parameters())


def test_collecting_a_worker_twice_is_refused():
    optimizer = DLion(net().parameters(), workers=Workers(local=2))
    optimizer.collect(0)
    with pytest.raises(RuntimeError, match="worker 0 was collected twice"):
        optimizer.collect(0)


def test_step_before_collect_says_who_is_missing():
    optimizer = DLion(net().parameters(), workers=Workers(local=2))
    with pytest.raises(RuntimeError, match=r"virtual workers \[0, 1\]"):
        optimizer.step()


@of_all
def test_the_absent_keep_their_state_and_do_not_count(method, cls, options):
    """Steps with two of four workers are steps of those two alone."""
    some, pair = net(), net()
    four = cls(some.parameters(), lr=1e-2, workers=Workers(local=4), **options)
    two = cls(pair.parameters(), lr=1e-2, workers=Workers(local=2), **options)
    for t in range(4):
        four.set_participants([1, 3])
        for optimizer, model, ids in ((four, some, (1, 3)), (two, pair, (0, 1))):
            for position, i in enumerate(ids):
                loss_of(model, *samples(10 * t + position)).backward()
                if method == "terngrad":  # coins are each worker's own: leave nothing to them
                    for param in model.parameters():
                        param.grad.sign_()
                optimizer.collect(i)
            optimizer.step()
    # scales are of pieces, weights and limits of slices, which four cut otherwise
    if method not in OF_PIECES and not {"limit", "wire"} & options.keys():
        torch.testing.assert_close(flat(some), flat(pair), rtol=0, atol=1e-6)
    for param in some.parameters():
        for name in set(four.own_state) - {"local"}:
            rows = four.state[param][name]
            if method != "powersgd" or param.dim() > 1:  # it sends vectors whole
                assert rows[1].any() and rows[3].any()
            assert not rows[0].any() and not rows[2].any()


def test_attendance_that_cannot_be():
    model = net()
    optimizer = DLion(model.parameters(), workers=Workers(local=2))
    for wrong in ([], [2], [-1]):
        with pytest.raises(ValueError, match="give at least one of the 2 workers"):
            optimizer.set_participants(wrong)
    optimizer.set_participants([1])
    loss_of(model, *samples()).backward()
    with pytest.raises(RuntimeError, match="worker 0 does not take part"):
        optimizer.collect(0)
    optimizer.collect(1)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        optimizer.set_participants(None)
    optimizer.step()
    optimizer.set_participants(None)


@pytest.mark.parametrize("cls", [DLion, GLion, GradDrop])
def test_gradients_that_are_not_finite(cls):
    model = net()
    with pytest.raises(ValueError, match="nonfinite=never is unknown"):
        cls(model.parameters(), nonfinite="never")
    optimizer = cls(model.named_parameters(), lr=1e-2, nonfinite="skip", workers=Workers(local=2))
    for i in range(2):
        loss_of(model, *samples(i)).backward()
        if i == 1:
            model[0].weight.grad[3, 3] = math.inf
        optimizer.collect(i)
    optimizer.step()
    assert optimizer.skipped == 1 and flat(model).isfinite().all()
    optimizer.nonfinite = "stop"
    before = flat(model)
    for i in range(2):
        loss_of(model, *samples(i)).backward()
        model[0].weight.grad[3, 3] = math.nan
        optimizer.collect(i)
    with pytest.raises(TrainingFailed, match=r"the gradient of 0.weight is not finite on worker 0"):
        optimizer.step()
    assert torch.equal(flat(model), before)
