"""Workers that move on their own: what travels when, whose parameters are in the model."""

import pytest
import torch

from dlion.errors import TrainingFailed
from dlion.optim import DiLoCo, GAdamW, SparseLoCo
from dlion.workers import Workers
from tests.support.small_model import flat, loss_of, net, samples, train


def step(model: torch.nn.Module, optimizer: DiLoCo, t: int) -> None:
    """Take a step with all participants; worker i sees samples that are its own."""
    for i in optimizer.channel.local_participants:
        loss_of(model, *samples(10 * t + i)).backward()
        optimizer.collect(i)
    optimizer.step()


def shared(model: torch.nn.Module, optimizer: DiLoCo) -> torch.Tensor:
    optimizer.host(None)
    parameters = flat(model)
    optimizer.host(0)
    return parameters


def test_rounds_of_one_step_of_sgd_are_sgd_on_the_mean_gradient():
    ours, theirs = net(), net()
    one = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    workers = Workers(local=4)
    optimizer = DiLoCo(ours.parameters(), lr=0.1, inner="sgd", workers=workers, **one)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for t in range(20):
        step(ours, optimizer, t)
        reference.zero_grad()
        for i in range(4):
            (loss_of(theirs, *samples(10 * t + i)) / 4).backward()
        reference.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=1e-6)


def test_a_plain_loop_takes_the_inner_optimizers_steps_then_the_outer_one():
    ours, theirs = net(), net()
    start = flat(ours)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = DiLoCo(ours.parameters(), local_steps=5, **settings)
    inner = train(theirs, torch.optim.AdamW(theirs.parameters(), **settings), 4)
    assert torch.equal(train(ours, optimizer, 4), inner)
    assert torch.equal(shared(ours, optimizer), start) and torch.equal(flat(ours), inner)
    inner = train(theirs := net(), torch.optim.AdamW(theirs.parameters(), **settings), 5)
    optimizer.zero_grad()
    loss_of(ours, *samples(4)).backward()
    optimizer.step()
    moved = start + 0.7 * 1.9 * (inner - start)  # Nesterov's first step
    torch.testing.assert_close(flat(ours), moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inside", ["muon", torch.optim.AdamW, torch.optim.NAdam])
def test_any_torch_optimizer_may_be_inside_and_goes_on_to_the_bit(inside):
    results = []
    for cut in (False, True):
        model = net()
        options = {"lr": 1e-2, "inner": inside, "local_steps": 3, "workers": Workers(local=2)}
        optimizer = DiLoCo(model.parameters(), **options)
        for t in range(8):
            if cut and t == 4:  # in the middle of a round
                state, model = optimizer.state_dict(), net()
                optimizer = DiLoCo(model.parameters(), **options)
                optimizer.load_state_dict(state)
            step(model, optimizer, t)
        results.append(shared(model, optimizer))
    assert torch.equal(*results)
    if inside is torch.optim.AdamW:
        model = net()
        optimizer = DiLoCo(model.parameters(), **options | {"inner": "adamw"})
        for t in range(8):
            step(model, optimizer, t)
        assert torch.equal(shared(model, optimizer), results[0])


def test_muon_inside_keeps_one_momentum_of_a_matrix_and_takes_no_state_of_others():
    def made(inner: str, *dims: int) -> DiLoCo:
        parts = ([p for p in net().parameters() if p.dim() == d] for d in dims)
        return DiLoCo([{"params": part, "use_muon": True} for part in parts], inner=inner)

    muon = made("muon", 2, 1)
    momenta = ["muon_momentum"], ["exp_avg", "exp_avg_sq"]
    for group, names in zip(muon.param_groups, momenta, strict=True):
        others = {"local", "outer", "momentum_buffer", "worker", "step"}
        assert all(muon.state[p].keys() == others | {*names} for p in group["params"])
    for dims, inner in (((2, 1), "adamw"), ((2,), "lion")):
        with pytest.raises(ValueError, match=r"'muon_momentum'.*into the same model and method"):
            made("muon", *dims).load_state_dict(made(inner, *dims).state_dict())


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_model_that_is_loaded_over_a_workers_own_parameters_is_an_error(first):
    """As that of another worker is, whose round is another."""
    model = net()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, local_steps=4)
    train(model, optimizer, 2)
    own, state, of_another = flat(model), optimizer.state_dict(), net().state_dict()
    resumed = net()
    again = DiLoCo(resumed.parameters(), lr=1e-2, local_steps=4)
    loads = [lambda: resumed.load_state_dict(of_another), lambda: again.load_state_dict(state)]
    for load in loads if first == "model" else loads[::-1]:
        load()
    loss_of(resumed, *samples(2)).backward()
    if first == "model":
        assert torch.equal(flat(resumed), own)
        again.step()
    else:
        with pytest.raises(RuntimeError, match="load the model first, then the optimizer's state"):
            again.step()


def test_a_state_without_that_of_the_optimizer_inside_is_refused():
    """As torch.distributed.checkpoint makes it."""
    optimizer = DiLoCo(net().parameters(), inner=torch.optim.NAdam)
    state = optimizer.state_dict()
    del state["inner"]
    with pytest.raises(ValueError, match="lacks the inner optimizer"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("n", [2, 4])
def test_nothing_travels_within_a_round_and_the_flag_waits(n):
    model, every = net(), net()
    optimizer = DiLoCo(model.parameters(), local_steps=4, workers=Workers(local=n))
    dense = GAdamW(every.parameters(), workers=Workers(local=n))
    for t in range(8):
        optimizer.flag = t == 1 or optimizer.flag
        step(model, optimizer, t)
        step(every, dense, t)
        assert optimizer.flagged == (t in (3, 7))
        rounds = (t + 1) // 4
        assert optimizer.channel.traffic.sent_bytes * (t + 1) == (
            dense.channel.traffic.sent_bytes * rounds
        )


def test_a_round_may_end_early_and_the_next_one_is_as_it_was():
    model = net()
    optimizer = DiLoCo(model.parameters(), local_steps=4, workers=Workers(local=2))
    before, exchanged = shared(model, optimizer), []
    for t in range(8):
        if t == 1:
            optimizer.end_round()
        step(model, optimizer, t)
        after = shared(model, optimizer)
        if not torch.equal(before, after):
            exchanged.append(t)
            assert torch.equal(after, flat(model))  # all begin anew from there
        before = after
    assert exchanged == [1, 3, 7]


def test_who_is_absent_at_the_end_of_a_round_begins_anew_with_the_others():
    """Worker 0 is alone in the exchange, so its displacement is the mean."""
    results = []
    for n in (2, 1):
        model = net()
        optimizer = DiLoCo(model.parameters(), lr=1e-2, local_steps=2, workers=Workers(local=n))
        for t, present in enumerate(([0, 1], [0])):
            optimizer.set_participants(present if n == 2 else None)
            step(model, optimizer, t)
        results.append(shared(model, optimizer))
        if n == 2:
            optimizer.host(1)
            assert torch.equal(flat(model), results[0])
    assert torch.equal(*results)


def test_steps_below_the_precision_of_bfloat16_add_up():
    """Parameters of 1 move by 1e-3, half of what bfloat16 can tell apart there."""
    param = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = DiLoCo([param], lr=1e-3, inner="sgd", local_steps=30, outer_momentum=0.0)
    for _ in range(30):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert param.dtype == torch.bfloat16
    torch.testing.assert_close(param.float(), torch.full((100,), 1 - 0.7 * 0.03), rtol=4e-3, atol=0)


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_gradients_that_are_not_finite_within_a_round(nonfinite):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = DiLoCo([("w", param)], nonfinite=nonfinite, local_steps=2)
    param.grad = torch.tensor([1.0, torch.nan, 1.0])
    if nonfinite == "stop":
        with pytest.raises(TrainingFailed, match="gradient of w is not finite on worker 0"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped == 1
    assert param.tolist() == [1, 1, 1]


def clamp(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)


def replace_data(param: torch.nn.Parameter) -> None:
    param.data = param.data.clamp(-0.1, 0.1)


def write_to_data(param: torch.nn.Parameter) -> None:
    """No version of the parameter counts this."""
    param.data.clamp_(-0.1, 0.1)


def from_vector(param: torch.nn.Parameter) -> None:
    torch.nn.utils.vector_to_parameters(param.detach().flatten().clamp(-0.1, 0.1), [param])


@pytest.mark.parametrize("write", [clamp, replace_data, write_to_data, from_vector])
@pytest.mark.parametrize("cls", [DiLoCo, SparseLoCo])
def test_what_a_loop_writes_into_the_model_is_trained_on(cls, write):
    pretrained, model = net(), net()
    train(pretrained, torch.optim.SGD(pretrained.parameters(), lr=0.1), 3)
    results = []
    for late in (False, True):
        model = net()
        if not late:
            model.load_state_dict(pretrained.state_dict())
        optimizer = cls(model.parameters(), lr=1e-2, local_steps=2)
        if late:  # "load after making" is a usual order
            model.load_state_dict(pretrained.state_dict())
        train(model, optimizer, 3)
        write(model[2].weight)  # in the middle of a round: a move of this worker
        train(model, optimizer, 2)
        results.append(flat(model))
    assert torch.equal(*results)
    assert model[2].weight.abs().max() < 0.2


@pytest.mark.parametrize("write", [clamp, replace_data, write_to_data, from_vector])
def test_what_a_loop_does_not_write_into_a_bfloat16_model_keeps_its_precision(write):
    param = torch.nn.Parameter(torch.linspace(-0.2, 0.2, 9).bfloat16())
    optimizer = DiLoCo([param], lr=1e-4, local_steps=9)
    for written in (False, True):
        before = optimizer.worker_state(0)["0.local"][:9].clone()
        if written:
            write(param)
        param.grad = torch.zeros_like(param)  # moves nothing
        optimizer.step()
        own = optimizer.worker_state(0)["0.local"][:9]
        expected = before.clamp(-0.1, 0.1).bfloat16().float() if written else before
        inside = before.abs() < 0.1
        assert (torch.equal(own[inside], before[inside]) and torch.equal(own, expected)) or written
        assert torch.equal(own[~inside].bfloat16(), expected[~inside].bfloat16())
        param.grad = torch.ones_like(param)
        optimizer.step()
