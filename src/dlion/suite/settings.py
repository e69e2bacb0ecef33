"""The settings of a run: meanings and allowed values.

A setting is a parameter. Those of a run are the parameters of :class:`Settings`; those of a
component are the parameters of the class or function that its ``_target_`` names. The annotation is
the type, the docstring's Args the meaning; ``conf/`` has the values. A component of one's own is
checked as far as it has annotations.
"""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Unpack,
    get_args,
    get_origin,
)

from omegaconf import DictConfig, OmegaConf

from dlion.errors import UserError
from dlion.values import (
    Called,
    Count,
    Folder,
    Limits,
    Name,
    NotNegative,
    Positive,
    PositiveShare,
    Probability,
    Share,
    Whole,
    advice,
    did_you_mean,
    hints,
    parameters,
    refusal,
    show,
    signature,
)

SPECIAL = ("name", "_target_", "_partial_", "_convert_", "_recursive_")
_OF_HYDRA = {
    "name": Name,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
}
_TARGET = "give a class or function as MODULE.NAME"
# rooms that were beside the library once: recorded configurations name what is in them so
_MOVED = re.compile(r"^dlion\.(?=(compare|data|launch|models|record|training)(\.|$))")


@dataclass
class Faults:
    """Workers that are absent or die, and workers that send false gradients.

    Args:
        byzantine: number of Byzantine workers (the last ones), which do not send their gradient.
        attack: what they send: the opposite of the gradient (flip), noise of the same norm
            (random), or an earlier gradient (stale).
        scale: factor on what they send.
        stale_steps: steps for which a stale gradient is repeated.
        drop: probability that a worker is absent from a step.
        deaths: how often each process here is killed, a minute, at random moments. With
            elastic=true the others continue and it joins again, and the last one here that has
            the run's state is spared; else all restart from the latest checkpoint. These restarts
            are not counted by max_restarts.
        away: seconds until it is started again.
    """

    byzantine: Whole
    attack: Literal["flip", "random", "stale"]
    scale: Positive
    stale_steps: Count
    drop: Probability
    deaths: NotNegative
    away: Annotated[float, Limits(ge=0, le=10**6)]


@dataclass
class Elastic:
    """Workers that come and go, each a process of its own (torchft). elastic=true is short for
    elastic.lighthouse=here.

    Args:
        lighthouse: registry of the workers. here: start one on this machine, and as many workers as
            processes= or else workers= says; HOST:PORT: join the run of that one, with
            processes= workers or else one; null: workers do not change.
        min_workers: with fewer, those present wait.
        timeout: seconds that a worker may hang, and still say that it is alive, before the others
            continue without it.
    """

    lighthouse: Annotated[str, Limits(min_length=1), Called("here, HOST:PORT")] | None
    min_workers: Count
    timeout: Annotated[float, Limits(ge=1, le=10**6)]


@dataclass
class Schedule:
    """The learning rate over the run: a linear rise, then half a cosine.

    Args:
        warmup_steps: steps of the rise, which begins at 1 / warmup_steps of the learning rate.
        final: share of the learning rate that is left at the end.
    """

    warmup_steps: Whole
    final: Share


@dataclass
class Network:
    """The links between processes.

    Args:
        rate: of the emulated Ethernet link of every process, each way; it needs Linux, root and
            iproute2. null: the machine's own network.
    """

    rate: Annotated[str, Called("a rate such as 100mbit or 2.5gbit")] | None


@dataclass
class Samples:
    """Samples of the samples of any data set.

    Args:
        sharding: partition: every sample belongs to one worker; contiguous: to the worker of its
            stretch of the set in its own order; replicate: every worker sees all samples;
            dirichlet: workers have different shares of the classes, for sets with labels.
        alpha: of dirichlet; a smaller one gives a worker fewer classes.
        validation: test on a tenth of the training data, for tuning.
    """

    sharding: Literal["partition", "contiguous", "replicate", "dirichlet"]
    alpha: Positive
    validation: bool


class Component(NamedTuple):
    """Marks a setting that chooses a file of conf/, whose ``_target_`` has the settings.

    Attributes:
        shared: has the settings that all components of the group know besides.
        own: has the settings of components without a ``_target_``.
    """

    shared: type | None = None
    own: type | None = None


@dataclass(frozen=True)
class Traits:
    """Consequences of a setting, declared at its field of :class:`Settings`.

    Attributes:
        bits: it changes the bits of results: a run is resumed only with the same value.
        without: keys of a group that change no bit, such as where files are.
        traffic: it changes when processes exchange something: all need the same value, as they do
            with ``bits``.
        compared: runs with different values are different curves. Of two settings that split runs
            in the same way, the one with the smaller number is shown: a batch size may follow from
            the number of workers. 0: it is not compared.
        evaluated: it changes the result of evaluate=RUN, which takes the recorded value.
        typed: it may be typed beside evaluate=RUN.
        typed_keys: keys of a group that may.
        unrecorded: the value in runs that are older than the setting; ...: there are none.
    """

    bits: bool = False
    without: tuple[str, ...] = ()
    traffic: bool = False
    compared: Literal[0, 1, 2, 3] = 0
    evaluated: bool = False
    typed: bool = False
    typed_keys: tuple[str, ...] = ()
    unrecorded: Any = ...


def traits(**of: Any) -> Any:
    """Return a field without a default that has these :class:`Traits`."""
    return field(metadata={"traits": Traits(**of)})


@dataclass
class Settings:
    """All settings of a run.

    Args:
        optimizer: the method, what workers send each other.
        model: what is trained; it takes its shape from the data set.
        dataset: what it is trained on; text brings its model along.
        schedule: the learning rate over the run.
        network: the links between processes.
        logger: where the run is shown, beside its own record.
        workers: n; each has its own data, momentum and random streams.
        processes: P, a divisor of n; each hosts n / P virtual workers. null: as many as cores or
            GPUs.
        steps: optimizer steps; null: epochs decide.
        epochs: passes of the workers over their data.
        batch_size: samples per worker and step.
        accumulate: backward passes a batch is cut into, where memory is short.
        label_smoothing: share of a training label that is spread over all classes.
        precision: bf16_mixed is autocast, bf16 has parameters in bfloat16 too, and bf16_stochastic
            rounds their updates at random, so that small steps add up.
        seed: of all random choices.
        device: null: cuda where there is one.
        backend: null: gloo on cpu, nccl on cuda.
        overlap: exchange messages during the backward pass.
        bucket_cap_mb: MB of float32 parameters that are exchanged together; auto: 5, and more in
            proportion to the workers beyond 8; null: all.
        threads: compute threads per process; another number may change the last bit of results.
        participation: share of the workers that take part in a step, drawn for each step.
        local_steps: steps of SGD of each worker between two exchanges; epochs count them.
        local_lr: the learning rate of local steps.
        faults: absent, dying or Byzantine workers.
        elastic: workers that come and go; then workers= is how many the run is planned for, which
            decides the steps of an epoch.
        init_from: weights to start from: a run's directory, a .safetensors file, or a folder of
            save_pretrained.
        init_from_except: a pattern of names of weights that init_from leaves out, such as head.*
            of a model for other classes.
        evaluate: measure the model of this finished run again, and train nothing.
        eval_every: steps between evaluations.
        eval_limit: number of test batches per evaluation; null: all.
        log_every: steps between lines of the log.
        checkpoint_every: steps between checkpoints; null: at the end only.
        keep_checkpoints: number of checkpoints that are kept, the latest.
        resume: auto: resume from the latest good checkpoint in output_dir or, if none is typed, of
            the newest unfinished run of the same settings; a run's directory: from that of this
            run.
        stop_after: steps after which the run ends with a checkpoint, as if interrupted.
        max_restarts: how often the processes are restarted from the latest checkpoint after a
            failure; of an elastic run, how often a worker here that dies is started again, which
            then joins.
        timeout: seconds to wait for another process before the run fails.
        nonfinite: what to do when a gradient has NaN or inf: stop the run (elastic: that worker
            alone), skip it as if that worker had none, or null: send it. With null a run may end
            with such a model, too.
        box: evaluations also measure the two phases of Lion's theory
            (dlion.suite.training.evaluation).
        agreement: evaluations also measure what the vote keeps of the workers' mean, and how far
            their momenta are apart (dlion.suite.training.agreement).
        profile: print and write to profile.json where a step's time goes; with a GPU, where the
            host's goes, which does not wait for it.
        check_replicas_every: steps between comparisons of all parameters of all processes; 0:
            never.
        output_dir: folder in which the run is recorded.
    """

    optimizer: Annotated[Any, Component()] = traits(bits=True, without=("exchange",), compared=1)
    model: Annotated[Any, Component()] = traits(
        bits=True, compared=1, evaluated=True, typed_keys=("_target_",)
    )
    dataset: Annotated[Any, Component(shared=Samples)] = traits(
        bits=True,
        without=("path", "loaders"),
        compared=1,
        evaluated=True,
        typed_keys=("path", "loaders", "tokenizer", "_target_"),
    )
    schedule: Annotated[Any, Component(own=Schedule)] = traits(bits=True, compared=1)
    network: Annotated[Any, Component(own=Network)] = traits(compared=1)
    logger: Annotated[Any, Component()] = traits(typed=True)

    workers: Count = traits(bits=True, compared=1, evaluated=True)
    processes: Count | None = traits(typed=True)
    steps: Count | None = traits(compared=3)
    epochs: Count = traits(compared=3)
    batch_size: Count = traits(bits=True, compared=2, evaluated=True)
    accumulate: Count = traits(bits=True, compared=3)
    label_smoothing: Share = traits(bits=True, compared=1, unrecorded=0.0)
    precision: Literal["float32", "bf16_mixed", "bf16", "bf16_stochastic"] = traits(
        bits=True, compared=1, evaluated=True
    )
    seed: Whole = traits(bits=True, evaluated=True)
    device: Literal["cpu", "cuda"] | None = traits(typed=True)
    backend: Literal["gloo", "nccl"] | None = traits(typed=True)
    overlap: bool = traits(traffic=True)
    bucket_cap_mb: Positive | Literal["auto"] | None = traits(bits=True)
    threads: Annotated[int, Limits(ge=1, le=256)] = traits(bits=True, evaluated=True, typed=True)

    participation: PositiveShare = traits(bits=True, compared=1)
    local_steps: Count = traits(bits=True, compared=1)
    local_lr: Positive = traits(bits=True, compared=1)
    faults: Faults = traits(bits=True, without=("deaths", "away"), compared=1)
    elastic: Elastic

    init_from: Name | None = traits(compared=3)
    init_from_except: Name | None = traits(bits=True, compared=3, unrecorded=None)
    evaluate: Name | None

    eval_every: Count = traits(traffic=True)
    eval_limit: Count | None = traits(traffic=True, compared=3, evaluated=True, typed=True)
    log_every: Count = traits(traffic=True)
    checkpoint_every: Count | None = traits(traffic=True)
    keep_checkpoints: Count
    resume: Name | None
    stop_after: Count | None = traits(traffic=True)
    max_restarts: Whole
    timeout: Annotated[int, Limits(ge=1, le=10**6)] = traits(typed=True)
    nonfinite: Literal["stop", "skip"] | None = traits(bits=True, compared=1)
    box: bool = traits(traffic=True)
    agreement: bool = traits(traffic=True)
    profile: bool
    check_replicas_every: Whole = traits(traffic=True)

    output_dir: Folder


# settings without effect unless another one has certain values: that one, a test of its value, and
# what to type
NEEDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "dataset.alpha": ("dataset.sharding", lambda way: way == "dirichlet", "dirichlet"),
    **{
        f"elastic.{key}": ("elastic.lighthouse", lambda place: place is not None, "here")
        for key in ("min_workers", "timeout")
    },
    "epochs": ("steps", lambda steps: steps is None, "null"),
    "faults.away": ("faults.deaths", lambda often: often > 0, "1"),
    "faults.attack": ("faults.byzantine", lambda count: count > 0, "1"),
    "faults.scale": ("faults.byzantine", lambda count: count > 0, "1"),
    "faults.stale_steps": ("faults.attack", lambda attack: attack == "stale", "stale"),
    "init_from_except": ("init_from", lambda source: source is not None, "RUN"),
    "local_lr": ("local_steps", lambda steps: steps > 1, "8"),
    "model.architecture": ("model.path", lambda path: path is None, "null"),
    "optimizer.betas": ("optimizer.inner", lambda inner: inner != "sgd", "adamw"),
    "optimizer.scale": ("optimizer.bits", lambda bits: bits != 1, "4"),
    "optimizer.sync_rate": (
        "optimizer.momentum_sync",
        lambda steps: isinstance(steps, str),
        "exponential",
    ),
    "optimizer.sync_wire": ("optimizer.momentum_sync", lambda steps: steps != 0, "20"),
    "optimizer.ties": ("optimizer.aggregation", lambda way: way != "avg", "mavo"),
}

TRAITS: dict[str, Traits] = {
    setting.name: setting.metadata.get("traits", Traits()) for setting in fields(Settings)
}


def check(settings: DictConfig) -> None:
    """Check every value of a run's settings, those of its components included.

    Raises:
        UserError: one sentence about the first wrong value, missing setting, or unknown keyword.
    """
    check_values(settings)
    plain: Any = OmegaConf.to_container(settings, resolve=True)
    for group, hint in parameters(Settings).items():
        if (component := component_of(hint)) is not None:
            _check_component(group, plain[group], component)


def check_values(settings: DictConfig) -> None:
    """Check the values of a run's settings, without those of components; this imports nothing.

    Raises:
        UserError: as :func:`check`.
    """
    plain: Any = OmegaConf.to_container(settings)
    for key, hint in parameters(Settings).items():
        if component_of(hint) is None:
            _check_value(key, plain[key], hint)


def check_effects(settings: DictConfig, words: Iterable[str], varied: Collection[str] = ()) -> None:
    """Refuse a typed setting that does nothing, as another one has the wrong value.

    Args:
        settings: of a run.
        words: that were typed, such as ``dataset.alpha=0.1``.
        varied: settings and groups that a sweep varies, of which nothing is known.

    Raises:
        UserError: the first such setting, and what to type besides.
    """
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        other, works, advice = NEEDS.get(key, ("", bool, ""))
        now = OmegaConf.select(settings, other, default=...) if other else ...
        if now is ... or {other, other.partition(".")[0]} & {*varied} or works(now):
            continue
        raise UserError(
            f"{key}={value} has no effect with {other}={show(now)}: type {other}={advice} as well,"
            f" or leave {key} out"
        )


def check_complete(keys: Container[Any]) -> None:
    """Refuse settings that lack one which every run has.

    Raises:
        UserError: naming it.
    """
    for key, hint in parameters(Settings).items():
        if key not in keys:
            value = "VALUE" if component_of(hint) is None else "NAME"
            raise UserError(f"{key} is required: type {key}={value}")


@contextmanager
def naming(settings: DictConfig, *keys: str) -> Iterator[None]:
    """Name the setting whose value a UserError inside begins with."""
    try:
        yield
    except UserError as error:
        for key in keys:
            if settings[key] is not None and str(error).startswith(str(settings[key])):
                raise UserError(f"{key}={error}") from error
        raise


def is_group(key: str) -> bool:
    """Whether a setting of a run has settings of its own."""
    hint = parameters(Settings)[key]
    return is_dataclass(hint) or component_of(hint) is not None


def unrecorded(keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of settings in runs that are older than these settings."""
    values = {key: TRAITS[key].unrecorded for key in keys}
    return {key: value for key, value in values.items() if value is not ...}


def component_of(hint: Any) -> Component | None:
    """Return the mark of a component at a parameter of :class:`Settings`."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Component)), None)


def locate(path: Any, group: str) -> Any:
    """Import the class or function that a component's ``_target_`` names.

    Raises:
        UserError: the reason why it could not be imported.
    """
    from hydra._internal.utils import _locate

    if not isinstance(path, str):
        raise UserError(f"{group}._target_={show(path)} is not possible: {_TARGET}")
    try:
        target = _locate(present_name(path))
    except Exception as error:
        cause = root_cause(error)
        reason = " ".join(str(cause).split())
        module = getattr(cause, "name", None) or ""
        if (name := present_name(module)) != module:
            reason += f", which is {name} now"
        raise UserError(
            f"{group}._target_={path} could not be imported ({type(cause).__name__}: {reason}):"
            f" {_TARGET}"
        ) from error
    if not callable(target):
        raise UserError(f"{group}._target_={path} is no class or function: {_TARGET}")
    return target


def present_name(path: str) -> str:
    """Return the name that a class, function or module of an earlier version has today."""
    return _MOVED.sub("dlion.suite.", path)


def with_present_names(settings: Any) -> Any:
    """Return settings with the :func:`present_name` of each ``_target_``, at any depth."""
    if isinstance(settings, list):
        return [with_present_names(value) for value in settings]
    if not isinstance(settings, dict):
        return settings
    renewed = {key: with_present_names(value) for key, value in settings.items()}
    if isinstance(target := renewed.get("_target_"), str):
        renewed["_target_"] = present_name(target)
    return renewed


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an error was raised from in the first place."""
    return error if error.__cause__ is None else root_cause(error.__cause__)


def _check_component(group: str, node: Any, component: Component) -> None:
    """Check the values of a group that chose a file of conf/."""
    check_table(group, node)
    if "name" not in node:
        raise UserError(f"{group} has no name: write name: NAME in its file of conf/{group}")
    for key in _OF_HYDRA.keys() & node.keys():
        _check_value(f"{group}.{key}", node[key], _OF_HYDRA[key])
    values = {key: value for key, value in node.items() if key not in SPECIAL}
    if component.shared is not None:
        known = parameters(component.shared)
        for key in known.keys() & values.keys():
            _check_value(f"{group}.{key}", values.pop(key), known[key])
    if "_target_" in node:
        target = locate(node["_target_"], group)
        _check_keys(group, values, target, shared=component.shared)
    elif component.own is not None:
        for key in parameters(component.own):
            if key not in values:
                raise UserError(f"{group}.{key} is required: type {group}.{key}=VALUE")
        _check_keys(group, values, component.own)
    else:
        raise UserError(f"{group} has no _target_: {_TARGET}")


def check_table(group: str, node: Any) -> None:
    """Refuse a group that is no table, as files of conf/ are.

    Raises:
        UserError: in that case.
    """
    if not isinstance(node, dict):
        raise UserError(
            f"{group}={show(node)} is not possible: choose a file of conf/{group} with lines"
            " KEY: VALUE"
        )


def _check_keys(where: str, values: dict[str, Any], target: Any, shared: Any = None) -> None:
    """Check the values of a function's parameters; ``where`` is the group that has them."""
    known = parameters(target)
    for key, value in values.items():
        if key in known:
            _check_value(f"{where}.{key}", value, known[key])
        elif not _is_open(target):
            others = [*known, *(parameters(shared) if shared else ())]
            raise UserError(
                f"{where}.{key} is not a setting{did_you_mean(key, others)}: see `python train.py"
                f" --help {where}{'=NAME' * (not is_dataclass(target))}`"
            )


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Check one value, or those of a group of settings.

    Raises:
        UserError: one sentence about the first wrong one.
    """
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{key} has settings of its own: see `python train.py --help {key}`")
        for name in parameters(hint):
            if name not in value:
                raise UserError(f"{key}.{name} is required: type {key}.{name}=VALUE")
        _check_keys(key, value, hint)
        return
    if (
        "." in key and isinstance(value, dict) and "_target_" in value
    ):  # an object of the user's own
        return
    if value == "???":
        raise UserError(f"{key} has no value: {advice(hint)}")
    wrong = refusal(value, hint)
    if wrong is not None:
        raise UserError(f"{key}={show(value)} {wrong}")


def _is_open(target: Any) -> bool:
    """Whether any keyword may be given; ``**common: Unpack[...]`` are those of the run itself."""
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        and get_origin(hints(target).get(name)) is not Unpack
        for name, parameter in signature(target).items()
    )
