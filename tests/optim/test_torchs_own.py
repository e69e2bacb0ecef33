"""What torch's own test_optim.py asks of an optimizer, asked of every method.

The structures are torch's (torch.testing._internal.common_optimizers): a method is an OptimizerInfo
with its inputs, and what is wrong for all optimizers is wrong here. The checks are written anew:
each runs over all methods, and EXCEPTIONS says which of them differ, and why. An exception that no
longer holds fails, too.

Left out, as no method has them: ``foreach``, ``fused``, ``capturable``, ``differentiable`` and
``maximize`` (negate the loss), several devices in one optimizer, and tests of single optimizers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dlion.methods.adm import DeltaVoteOptimizer
from dlion.methods.dlion import SignVoteOptimizer
from dlion.methods.muon import MatricesApart
from dlion.optim import METHODS, EF21Sign, LionCub
from tests.support import methods
from tests.support.methods import Tested

if TYPE_CHECKING:  # an import of five seconds, which the processes of other tests need not do
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerInfo,
        OptimizerInput,
    )

pytestmark = pytest.mark.slow  # half a minute in all

ALL = [methods.tested(method) for method in METHODS]
Check = Callable[["OptimizerInfo", dict[str, Any]], None]
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, gamma=0.99, step_size=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.CosineAnnealingLR(o, 90)], [10]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 2e-3, 100, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.99**t),
}


def info(each: Tested) -> OptimizerInfo:
    """Return a method as torch's tests know optimizers."""
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerInfo,
        OptimizerInput,
        get_error_inputs_for_all_optims,
    )

    # the import has forbidden to set flags of backends in this process, where other tests run
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True

    def inputs(device: str = "cpu", dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        given = {"default": {}, "decay": {"lr": torch.tensor(1e-3), "weight_decay": 0.1}}
        return [
            OptimizerInput(None, {"lr": 1e-3} | each.options | kwargs, desc)
            for desc, kwargs in given.items()
        ]

    def wrong(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        more = [
            ErrorOptimizerInput(OptimizerInput(None, kwargs), error_type=ValueError, error_regex=r)
            for kwargs, r in (
                ({"lr": -1.0}, "lr=-1.0 is not possible"),
                ({"lr": math.nan}, "lr=nan"),
                ({"weight_decay": -0.5}, "weight_decay=-0.5 is not possible"),
            )
        ]
        of_all = get_error_inputs_for_all_optims(device, dtype)
        for error in of_all:
            if "1-element" in error.error_regex:  # ours says what is allowed
                error.error_regex = (
                    r"lr=tensor\(\[0.0010, 0.0010\]\) is not possible: give a number"
                )
        return of_all + more

    return OptimizerInfo(
        each.cls,
        optim_inputs_func=inputs,
        supported_impls=(),
        supports_complex=False,
        optim_error_inputs_func=wrong,
    )


@functools.cache
def infos() -> dict[str, OptimizerInfo]:
    return {each.method: info(each) for each in ALL}


# where a check does not hold, and why
_RESIDUAL = "a residual counts a missing gradient as zero: what it held back must still be sent"
_SIGNS = "one bit has no zero: zero votes alternate, and move nothing in the mean over steps"
_RESIDUALS = dict.fromkeys(
    ("graddrop", "dgc", "ef_signsgd", "powersgd", "onebit_adam", "demo"), _RESIDUAL
)
_OF_SIGNS = [
    name
    for name, method in METHODS.items()
    if issubclass(method.cls, (SignVoteOptimizer, DeltaVoteOptimizer, EF21Sign))
    and not issubclass(method.cls, LionCub)  # levels have a zero
]
_OF_MATRICES = [
    name
    for name, method in METHODS.items()
    if issubclass(method.cls, MatricesApart) and name not in ("diloco", "sparseloco")  # of AdamW
]
_VECTORS = "it has only vectors, which a method for matrices refuses"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "test_empty_parameters_are_no_trouble": dict.fromkeys(_OF_MATRICES, _VECTORS),
    "test_without_gradients_nothing_moves": _RESIDUALS,
    "test_all_state_is_of_tensors_with_a_step": _RESIDUALS,
    "test_gradients_of_zero_move_nothing": {
        **dict.fromkeys(_OF_MATRICES, _VECTORS),
        **dict.fromkeys(_OF_SIGNS, _SIGNS),
    },
}


def over_all_methods(check: Check) -> Callable[[], None]:
    """Let a check run for every method and each of its inputs."""

    def test() -> None:
        expected, failed = EXCEPTIONS.get(check.__name__, {}), {}
        for method, each in infos().items():
            for given in each.optim_inputs_func():
                torch.manual_seed(0)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        warnings.filterwarnings("ignore", "which matrices are embeddings or heads")
                        check(each, given.kwargs)
                except Exception as error:
                    failed.setdefault(method, f"{given.desc}: {type(error).__name__}: {error}")
        unexpected = [f"{m}, {why}" for m, why in failed.items() if m not in expected]
        assert not unexpected, "\n".join(unexpected)
        assert failed.keys() == expected.keys()

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


class Problem:
    """A linear model of one sample: ``(W x + b)^2``, as in torch's tests."""

    def __init__(self, contiguous: bool = True):
        weight, bias = torch.randn(10, 5, 2), torch.randn(10, 2)
        pick = (lambda t: t[..., 0].clone()) if contiguous else (lambda t: t[..., 0])
        self.weight, self.bias = Parameter(pick(weight)), Parameter(pick(bias))
        self.input = torch.randn(5)

    @property
    def params(self) -> list[Parameter]:
        return [self.weight, self.bias]

    def copy(self) -> Problem:
        return copy.deepcopy(self)

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).square().sum()

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()


def equal(one: Any, two: Any) -> bool:
    """Whether nested values, of tensors too, are equal to the bit."""
    if isinstance(one, dict):
        same = one.keys() == two.keys()
        return same and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, Tensor) else one == two


def without_names(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state["param_groups"]]
    return {k: v for k, v in state.items() if k != "by_name"} | {"param_groups": groups}


# ------------------------------------------------------------------ arguments


@over_all_methods
def test_errors(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    for wrong in each.optim_error_inputs_func("cpu", torch.float32):
        given = wrong.optimizer_error_input
        params = [Parameter(torch.randn(1, 1))] if given.params is None else given.params
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            each.optim_cls(params, **(kwargs | given.kwargs))


@over_all_methods
def test_parameters_come_in_every_form(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    forms = {
        "list": lambda a, b: [a, b],
        "generator": lambda a, b: (p for p in (a, b)),
        "dictionary": lambda a, b: {"a": a, "b": b}.values(),
        "named": lambda a, b: iter([("a", a), ("b", b)]),
        "groups": lambda a, b: [{"params": [a, b]}],
        "groups of a generator": lambda a, b: [{"params": (p for p in (a, b))}],
        "groups of one tensor": lambda a, b: [{"params": a}, {"params": b}],
        "generator of groups": lambda a, b: ({"params": p} for p in (a, b)),
        "named groups": lambda a, b: [{"params": [("a", a)]}, {"params": [("b", b)]}],
    }
    for form in forms.values():
        problem = Problem()
        before = problem.loss()
        optimizer = each.optim_cls(form(*problem.params), **kwargs)
        assert optimizer.params == problem.params
        problem.train(optimizer)
        assert problem.loss() != before


@over_all_methods
def test_plain_tensors_are_parameters_too(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    param = torch.rand(2, 3, requires_grad=True)
    optimizer = each.optim_cls([param], **kwargs)
    optimizer.state[param]["mine"] = 3
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["mine"] == 3 and equal(optimizer.state_dict(), saved)


@over_all_methods
def test_complex_parameters_are_refused(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be real"):
        each.optim_cls([Parameter(torch.zeros(2, 2, dtype=torch.complex64))], **kwargs)


@over_all_methods
def test_sparse_gradients_are_refused(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    param = Parameter(torch.rand(4, 3))
    optimizer = each.optim_cls([param], **kwargs)
    param.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match=r"Embedding\(sparse=False\)"):
        optimizer.step()


@over_all_methods
def test_unknown_settings_are_refused(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="maximize"):
        each.optim_cls([Parameter(torch.rand(2, 2))], **kwargs, maximize=True)


@over_all_methods
def test_it_can_be_printed(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    text = repr(each.optim_cls(Problem().params, **kwargs))
    assert text.startswith(f"{each.name} (\nParameter Group 0") and "lr: 0.001" in text


# ------------------------------------------------------------------ steps


@over_all_methods
def test_it_goes_in_the_right_direction(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    for contiguous in (True, False):
        problem = Problem(contiguous)
        optimizer, first = each.optim_cls(problem.params, **kwargs), problem.loss()
        calls = []

        def closure(problem: Problem = problem, calls: list[float] = calls) -> Tensor:
            assert torch.is_grad_enabled()
            for param in problem.params:
                param.grad = None
            loss = problem.loss()
            loss.backward()
            calls.append(loss.item())
            return loss

        for _ in range(10):
            with torch.no_grad():
                assert optimizer.step(closure) == calls[-1]
        assert len(calls) == 10 and problem.loss() < first


@over_all_methods
def test_it_goes_in_the_right_direction_with_schedules(
    each: OptimizerInfo, kwargs: dict[str, Any]
) -> None:
    for make in SCHEDULERS.values() if kwargs.get("weight_decay") else []:
        problem = Problem()
        groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 2e-3}]
        optimizer, first = each.optim_cls(groups, **kwargs), problem.loss()
        schedule = make(optimizer)
        rates = set()
        for _ in range(5):
            problem.train(optimizer)
            loss = problem.loss()
            takes_loss = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            schedule.step(*[loss.item()] * takes_loss)
            rates.add(tuple(float(group["lr"]) for group in optimizer.param_groups))
        assert problem.loss() < first
        assert takes_loss or len(rates) > 1


@over_all_methods
def test_groups_have_rates_and_decays_of_their_own(
    each: OptimizerInfo, kwargs: dict[str, Any]
) -> None:
    problem, still = Problem(), Parameter(torch.randn(2))
    before, first = still.detach().clone(), problem.loss()
    given = {"lr": kwargs["lr"], "weight_decay": 0.1}
    groups = [
        {"params": [problem.weight], **given},
        {"params": [problem.bias], **given, "weight_decay": 0.0},
        {"params": [still]},
    ]
    optimizer = each.optim_cls(groups, **(kwargs | {"lr": 1e-28, "weight_decay": 0.0}))
    for _ in range(10):
        still.grad = torch.rand_like(still)
        optimizer.step(lambda: problem.loss().backward())
        for param in problem.params:
            param.grad = None
    assert problem.loss() < first
    assert torch.equal(still, before)


@over_all_methods
def test_numbers_may_be_tensors(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    one = Problem()
    two = one.copy()
    plain = each.optim_cls(one.params, **kwargs)
    (group, *_), names = plain.param_groups, ("lr", "weight_decay", "betas")
    numbers = {name: group[name] for name in names if name in group}
    precise = functools.partial(torch.tensor, dtype=torch.float64)
    as_tensors = {
        key: tuple(map(precise, value)) if isinstance(value, tuple) else precise(value)
        for key, value in numbers.items()
    }
    given = each.optim_cls(two.params, **(kwargs | as_tensors))
    for rate in (None, 2e-3, 5e-4):
        if rate is not None:  # what is written later is a tensor, too
            plain.param_groups[0]["lr"] = rate
            given.param_groups[0]["lr"] = precise(rate)
        one.train(plain, 2)
        two.train(given, 2)
        assert all(map(torch.equal, one.params, two.params))


@over_all_methods
def test_without_gradients_nothing_moves(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    for requires in (False, True):
        params = [torch.randn(2, 3, requires_grad=requires) for _ in range(2)]
        before = [param.detach().clone() for param in params]
        optimizer = each.optim_cls(params, **kwargs)
        assert optimizer.step(lambda: 1.0) == 1.0
        assert all(map(torch.equal, before, params))


@over_all_methods
def test_gradients_of_zero_move_nothing(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    param = Parameter(torch.randn(5, 1))
    before = param.detach().clone()
    optimizer = each.optim_cls([param], **(kwargs | {"weight_decay": 0.0}))
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


@over_all_methods
def test_empty_parameters_are_no_trouble(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    empty, full = Parameter(torch.empty(0, 3)), Parameter(torch.ones(4))
    for params in ([empty, full], [empty]):
        optimizer, before = each.optim_cls(params, **kwargs), full.detach().clone()
        for param in params:
            param.grad = torch.arange(float(param.numel())).view(param.shape) - 1
        optimizer.step()
        assert torch.equal(full, before) == (full not in optimizer.state)
        assert empty not in optimizer.state


@over_all_methods
def test_parameters_of_mixed_dtypes_train(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [Parameter(torch.zeros(4, 3, dtype=dtype)) for dtype in dtypes]
    optimizer = each.optim_cls(params, **kwargs)
    for param in params:
        param.grad = torch.rand_like(param)
    optimizer.step()
    assert all(param.any() and param.isfinite().all() for param in params)


@over_all_methods
def test_a_later_group_trains(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls([problem.weight], **kwargs)
    problem.train(optimizer)
    before = problem.bias.detach().clone()
    optimizer.add_param_group({"params": problem.bias, "lr": 1e-2, "mine": "kept"})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [problem.weight]})
    problem.train(optimizer, 2)
    assert not torch.equal(problem.bias, before)
    assert optimizer.param_groups[-1]["mine"] == "kept"
    assert optimizer.state_dict()["param_groups"][-1]["params"] == [1]


@over_all_methods
def test_zero_grad(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.loss().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in problem.params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in problem.params)


# ------------------------------------------------------------------ hooks of steps


@over_all_methods
def test_step_hooks(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    param, seen = Parameter(torch.rand(2, 3)), []
    optimizer = each.optim_cls([param], **kwargs)
    param.grad = torch.rand_like(param)

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        seen.append("before")
        return (optimizer, lambda: 7.0), {}  # in place of what step() was given

    with contextlib.ExitStack() as stack:
        hooks = (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: seen.append("after")),
            register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
            register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
        )
        for hook in hooks:
            stack.callback(hook.remove)
        assert optimizer.step() == 7.0
    assert seen == ["before all", "before", "after", "after all"]
    assert optimizer.step() is None and len(seen) == 4


# ------------------------------------------------------------------ state


@over_all_methods
def test_all_state_is_of_tensors_with_a_step(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    for t in range(3):
        problem.train(optimizer)
        optimizer.zero_grad()
        if t == 1:  # a step without a gradient of the bias
            problem.loss().backward()
            problem.bias.grad = None
            optimizer.step()
    assert optimizer.state.keys() == {*problem.params}
    for param, steps in zip(problem.params, (4, 3), strict=True):
        state = optimizer.state[param]
        assert all(isinstance(value, Tensor) for value in state.values())
        assert state["step"].item() == float(state["step"]) == steps
        assert state["step"].dtype == torch.float32 and state["step"].device.type == "cpu"


@over_all_methods
def test_a_state_continues_to_the_bit(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    for names in ((0,), (1,)):  # which of both optimizers has names

        def given(problem: Problem, index: int, names: Any = names) -> list[Any]:
            return [*zip("wb", problem.params)] if index in names else problem.params  # noqa: B905

        problem = Problem()
        optimizer = each.optim_cls(given(problem, 0), **kwargs)
        problem.train(optimizer, 4)
        other = problem.copy()
        resumed = each.optim_cls(given(other, 1), **kwargs)
        state = copy.deepcopy(optimizer.state_dict())
        untouched = copy.deepcopy(state)
        resumed.load_state_dict(state)
        assert equal(state, untouched)
        for _ in range(4):
            problem.train(optimizer), other.train(resumed)
            assert all(map(torch.equal, problem.params, other.params))
        assert equal(state, untouched)  # nothing of it was taken as it is
        assert equal(*(without_names(each.state_dict()) for each in (optimizer, resumed)))
        if names:
            groups = resumed.state_dict()["param_groups"]
            assert [name for group in groups for name in group["param_names"]] == ["w", "b"]


@over_all_methods
def test_an_older_state_loads(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    """One without what was added later: ``step`` of methods that do without it."""
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        del values["step"]
    optimizer.load_state_dict(state)
    assert all(optimizer.state[param]["step"] == 3 for param in problem.params)
    problem.train(optimizer)
    assert all(optimizer.state[param]["step"] == 4 for param in problem.params)


@over_all_methods
def test_files_are_read_with_weights_only(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 3)
    state, file = optimizer.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), state)


@over_all_methods
def test_numbers_in_a_state_need_not_be_tensors(
    each: OptimizerInfo, kwargs: dict[str, Any]
) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["step"] = values["step"].item()
    optimizer.load_state_dict(state)
    assert optimizer.state[problem.weight]["step"] == 3
    optimizer.state[problem.weight]["step"] = 5  # as others write it
    problem.train(optimizer)
    assert optimizer.state[problem.weight]["step"] == 6


@over_all_methods
def test_state_dict_hooks(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 2)
    seen = []

    def before(optimizer: Any) -> None:
        optimizer.state["test"] = 1

    def after(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state["state"].pop("test"))
        values = state["state"][0]
        values["step"] = values["step"] + 10  # in the dictionary alone
        return {**state, "more": True}

    hooks = [optimizer.register_state_dict_pre_hook(before)]
    assert optimizer.state_dict()["state"]["test"] == 1
    hooks += [
        optimizer.register_state_dict_post_hook(after),
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("first"), prepend=True),
    ]
    state = optimizer.state_dict()
    assert seen == ["first", 1] and state["more"] and "test" not in state["state"]
    assert state["state"][0]["step"] == 12 and optimizer.state[problem.weight]["step"] == 2
    for hook in hooks:
        hook.remove()
    assert "more" not in optimizer.state_dict()


@over_all_methods
def test_load_state_dict_hooks(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)
    order = []

    def first(optimizer: Any, state: dict[str, Any]) -> None:
        order.append("first")
        state["state"][0]["step"] = 5  # changed in place

    def second(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        order.append("second")
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 3e-3
        return state  # in its place

    def after(optimizer: Any) -> None:
        order.append(
            (optimizer.param_groups[0]["lr"], float(optimizer.state[problem.weight]["step"]))
        )

    optimizer.register_load_state_dict_pre_hook(second)
    optimizer.register_load_state_dict_pre_hook(first, prepend=True)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert order == ["first", "second", (3e-3, 5.0)]
    assert equal(saved, untouched)


@over_all_methods
def test_entries_of_others_are_saved(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    optimizer.state[problem.weight]["sam"] = torch.ones(10, 5)
    optimizer.state["global"] = {"best": 2.5}
    optimizer.param_groups[0]["initial_lr"] = 0.5
    problem.train(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = problem.copy()
    resumed = each.optim_cls(other.params, **kwargs)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state[other.weight]["sam"], torch.ones(10, 5))
    assert resumed.state["global"] == {"best": 2.5}
    assert resumed.param_groups[0]["initial_lr"] == 0.5
    problem.train(optimizer), other.train(resumed)
    assert all(map(torch.equal, problem.params, other.params))


@over_all_methods
def test_an_optimizer_is_not_copied(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    """Torch's are: this one talks to other processes, and says what to do instead."""
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"make another, and load this one's state_dict"):
            copied(each.optim_cls(Problem().params, **kwargs))


@over_all_methods
def test_a_failed_load_changes_nothing(each: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    problem = Problem()
    optimizer = each.optim_cls(problem.params, **kwargs)
    problem.train(optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["params"].append(9)
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(wrong)
    assert equal(optimizer.state_dict(), before)
