"""From runs to curves: the numbers behind figures and tables. Nothing is drawn here."""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from dlion.errors import UserError
from dlion.suite.record.runs import Run
from dlion.suite.record.studies import LeftOut
from dlion.suite.settings import TRAITS, is_group, unrecorded
from dlion.suite.terminal import in_one_line, printable
from dlion.values import did_you_mean, show

Settings = dict[str, Any]  # flat: {"workers": 8, "optimizer.lr": 1e-3, ...}
Conditions = dict[str, list[str]]  # values of settings, as typed; one of each is to be met

_COMPARED = [name for name, traits in TRAITS.items() if traits.compared]
_GROUPS = [*filter(is_group, _COMPARED)]
# in the order in which they are asked whether runs differ by them
_SETTINGS = sorted(filterfalse(is_group, _COMPARED), key=lambda name: TRAITS[name].compared)
_TASK = ("model", "dataset")
_LONGEST = 200  # characters of a name
_AUTO_PRECISION = {"cpu": "float32", "cuda": "bf16"}  # of Newton-Schulz, see GMuon
_NOT_COMPARED = ("_target_", "loaders")  # of a group: they say where, not what


@dataclass(frozen=True)
class Curve:
    """Runs that differ only by their seed.

    Attributes:
        method: the name of the optimizer.
        settings: what may distinguish it from other curves.
        differing: those of the settings in which the curves of its method differ, without
            redundant ones.
        seeds: of the runs, in the order of ``values``.
        steps: ``[T]``, the evaluations that all runs have.
        bits: ``[T]``, bits sent so far per parameter, mean over workers and runs.
        times: ``[T]``, seconds of training so far, mean over runs.
        values: ``[runs, T]``, the metric; NaN where it was not finite.
        paper_bits: bits per parameter and step, both directions, as the papers count; None if no
            run is finished.
        sent_bytes, received_bytes: a worker's, per step.
        state_bytes: of the optimizer, on a worker and per parameter; None if it is not known.
        saving: how many times fewer bytes than a float32 ring all-reduce; None for one worker.
        seconds: per step.
        finished: whether all runs are.
    """

    method: str
    settings: Settings
    differing: Settings
    seeds: list[int | None]
    steps: np.ndarray
    bits: np.ndarray
    times: np.ndarray
    values: np.ndarray
    paper_bits: float | None
    sent_bytes: float
    received_bytes: float
    state_bytes: float | None
    saving: float | None
    seconds: float
    finished: bool

    @property
    def label(self) -> str:
        """The method, and the settings that distinguish this curve from others of the method."""
        return " ".join(filter(None, [self.method, self.variant()]))

    def variant(self, hidden: str | None = None) -> str:
        """Return the differing settings in words.

        Args:
            hidden: a setting to leave out, because an axis or a panel shows it.
        """
        shown = {key: value for key, value in self.differing.items() if key != hidden}
        return " ".join(f"{short_name(key)}={show(value)}" for key, value in shown.items())

    @property
    def sent_bits(self) -> float:
        """Bits that a worker sends, per parameter and step."""
        return float(self.bits[-1] / self.steps[-1])

    @property
    def received_bits(self) -> float:
        """Bits that a worker receives, per parameter and step."""
        return self.sent_bits * self.received_bytes / self.sent_bytes if self.sent_bytes else 0.0

    @property
    def final(self) -> np.ndarray:
        """The metric at the end, ``[runs]``."""
        return self.values[:, -1]

    def best(self, metric: str) -> np.ndarray:
        """Return the metric at each run's best evaluation, ``[runs]``."""
        better = np.fmax if more_is_better(metric) else np.fmin  # which pass over NaN
        return better.reduce(self.values, axis=1)


def choose_metric(runs: list[Run], requested: str | None = None) -> str:
    """Return the requested metric, or ``accuracy`` where all runs have it, or ``loss``.

    ``accuracy`` and ``loss`` are those of the test; else a metric is a key of metrics.jsonl.

    Raises:
        UserError: if not all runs can be compared by it.
    """
    have_accuracy = {
        "test_accuracy" in row for run in runs for row in run.metrics if "test_loss" in row
    }
    if not have_accuracy:
        raise UserError(
            "no run holds an evaluation yet: wait for the first, or set eval_every=STEPS"
        )
    if requested == "loss":
        return "loss"
    if requested not in (None, "accuracy"):
        measured = [item for run in runs for row in run.metrics for item in row.items()]
        words = {key for key, value in measured if value is not None and not _is_number(value)}
        known = {key for key, _ in measured} - words
        if requested not in known:
            raise UserError(
                f"no run has {requested}: choose accuracy, loss, {', '.join(sorted(known))}"
            )
        return requested
    if len(have_accuracy) > 1 and requested is None:
        raise UserError("some runs have an accuracy and some only a loss: give runs of one kind")
    if requested == "accuracy" and have_accuracy != {True}:
        raise UserError("these runs have no accuracy: type --metric loss")
    return "accuracy" if have_accuracy == {True} else "loss"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def metric_key(metric: str) -> str:
    """Return the key of a metric in metrics.jsonl."""
    return f"test_{metric}" if metric in ("accuracy", "loss") else metric


def is_accuracy(metric: str) -> bool:
    """Whether a metric is an accuracy: recorded as a share, shown in per cent."""
    return "accuracy" in metric


def more_is_better(metric: str) -> bool:
    """Whether a higher value of a metric is the better one."""
    return is_accuracy(metric) or metric == "agreement"


def best_first(curves: list[Curve], metric: str) -> list[Curve]:
    """Return the curves by their mean at the end, the best first; diverged ones last."""
    sign = -1 if more_is_better(metric) else 1
    return sorted(curves, key=lambda c: np.nan_to_num(sign * c.final.mean(), nan=math.inf))


def short_name(key: str) -> str:
    """Return the name of a setting without its group."""
    return key.rpartition(".")[2]


def meant(key: str, known: Collection[str]) -> str:
    """Return the setting that a name without its group, or a misspelled one, may mean."""
    same_end = sorted(name for name in known if short_name(name) == key)
    return f" (did you mean {same_end[0]}?)" if same_end else did_you_mean(key, known)


def sort_key(value: Any) -> tuple[float, str]:
    """Return where a setting's value stands in order: numbers by size, then the rest by name."""
    is_number = isinstance(value, int | float)
    return (float(value) if is_number else math.inf, str(value))


def settings_of(run: Run) -> Settings:
    """Return the settings that may distinguish a run from others; the seed is none of them."""
    config = run.config or {}
    settings: Settings = {"optimizer.name": run.directory.name}
    for group in _GROUPS:
        for key, value in (config.get(group) or {}).items():
            if key not in _NOT_COMPARED and not isinstance(value, dict):
                settings[f"{group}.{key}"] = value
    for key in ("model.path", "dataset.path"):  # where that lies is another matter
        if isinstance(settings.get(key), str):
            settings[key] = Path(settings[key]).name
    settings.pop("network.name", None)  # its rate says it
    settings["elastic"] = (config.get("elastic") or {}).get("lighthouse") is not None
    for group in _TASK:
        settings[group] = settings.pop(f"{group}.name", "?")
    for key in _SETTINGS:
        if key in config:
            settings.setdefault(key, config[key])
    if "local_steps" in settings:
        settings = unrecorded(_SETTINGS) | settings
    if settings.get("nonfinite", "") is None:  # not looked at: trained like what would be stopped
        settings["nonfinite"] = "stop"
    if run.summary is not None:
        settings["optimizer.name"] = run.summary["optimizer"]
        settings |= {key: run.summary[key] for key in ("model", "dataset", "workers")}
        if settings.get("optimizer.ns_precision") == "auto":
            meant = _AUTO_PRECISION.get(run.summary.get("device"), "auto")
            settings["optimizer.ns_precision"] = meant
    return {_shown(key): _plain(value) for key, value in settings.items()}


def _plain(value: Any) -> Any:
    """Return a setting's value so that equal ones are written in the same way: 1.0 as 1."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _shown(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(name: str) -> str:
    """Return a name, which may be anybody's, as tables and figures can show it."""
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST // 2]}...{name[-_LONGEST // 2 :]}"
    return printable(name)


def group_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs that can be compared, by a title: of one study, data set and model."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        settings = settings_of(run)
        study = f"{_shown(run.study)}: " if run.study else ""
        groups[f"{study}{settings['model']} on {settings['dataset']}"].append(run)
    return groups


def select_runs(runs: list[Run], conditions: Conditions) -> list[Run]:
    """Return the runs that have one of these values of each setting.

    Raises:
        UserError: if there are none.
    """
    chosen = [(run, settings_of(run) | {"seed": _seed(run)}) for run in runs]
    for key, texts in conditions.items():
        known = {show(settings[key]) for _, settings in chosen if key in settings}
        chosen = [
            (run, settings)
            for run, settings in chosen
            if key in settings and any(_is_typed(settings[key], text) for text in texts)
        ]
        if not chosen:
            keys = set().union(*map(settings_of, runs))
            is_ = f"it is {', '.join(sorted(known))}" if known else "they have no such setting"
            is_ += "" if known else meant(key, keys)
            raise UserError(f"none of these runs has {key}={' or '.join(texts)}: {is_}")
    return [run for run, _ in chosen]


def _is_typed(value: Any, text: str) -> bool:
    """Whether a text can be typed as the value of a setting."""
    if _is_number(value):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text in (show(value), str(value))


def make_curves(
    runs: list[Run], metric: str, first: Sequence[str] = (), left_out: LeftOut | None = None
) -> list[Curve]:
    """Return one curve for all runs that differ only by seed, sorted by method and settings.

    Of runs that differ in nothing, the last is taken, and a line on standard error names the rest.

    Args:
        runs: those without the metric are left out.
        metric: as :func:`choose_metric` gives it.
        first: settings that distinguish curves before all others do.
        left_out: called for each run of a curve whose runs share no evaluation.

    Raises:
        UserError: if there is such a curve, without ``left_out``.
    """
    methods: dict[str, list[tuple[Run, Settings]]] = defaultdict(list)
    for run in runs:
        if any(metric_key(metric) in row for row in run.metrics):
            settings = settings_of(run)
            methods[settings["optimizer.name"]].append((run, settings))
    curves = []
    everything = [settings for pairs in methods.values() for _, settings in pairs]
    tasks = [key for key in _TASK if len({s[key] for s in everything}) > 1]
    for pairs in methods.values():
        keys = _differing_keys([settings for _, settings in pairs], first)
        groups: dict[str, list[tuple[Run, Settings]]] = defaultdict(list)
        for run, settings in pairs:
            groups[_identity(settings, keys)].append((run, settings))
        for group in groups.values():
            settings = group[0][1]
            names = dict.fromkeys([*tasks, *keys])
            differing = {key: settings[key] for key in names if key in settings}
            one_each = _one_of_each_seed([run for run, _ in group])
            try:
                curves.append(_make_curve(one_each, metric, settings, differing))
            except UserError as error:
                if left_out is None:
                    raise
                for run in one_each:
                    left_out(run.directory, str(error))
    return sorted(
        curves, key=lambda curve: (curve.method, [*map(sort_key, curve.differing.values())])
    )


def _differing_keys(all_settings: list[Settings], first: Sequence[str]) -> list[str]:
    """Return the settings in which the runs differ, without redundant ones.

    A setting is redundant if those before it split the runs into the same groups already: a batch
    size that follows from the number of workers, say. Switches come before sizes, which people
    change because of them: a gated MLP is narrower.
    """

    def is_no_switch(key: str) -> bool:
        return any(not isinstance(settings.get(key, False), bool) for settings in all_settings)

    known = sorted(set().union(*all_settings), key=lambda key: (is_no_switch(key), key))
    keys: list[str] = []
    for key in dict.fromkeys([*first, *_TASK, *_SETTINGS, *known]):
        values = {repr(settings[key]) for settings in all_settings if key in settings}
        if len(values) > 1:
            groups_with = {_identity(settings, [*keys, key]) for settings in all_settings}
            groups_without = {_identity(settings, keys) for settings in all_settings}
            if len(groups_with) > len(groups_without):
                keys.append(key)
    return keys


def _identity(settings: Settings, keys: list[str]) -> str:
    """Return a text that is equal for runs with equal values of these settings."""
    return repr([settings.get(key) for key in keys])


def _one_of_each_seed(runs: list[Run]) -> list[Run]:
    """Leave out all but the last run of a seed, of finished ones if there are any, and say so."""
    chosen: dict[Any, Run] = {}
    for run in runs:
        seed = _seed(run)
        key = run.directory if seed is None else seed
        before = chosen.get(key, run)
        kept, left = (before, run) if before.finished and not run.finished else (run, before)
        chosen[key] = kept
        if kept is not left:
            sentence = f"{left.directory} has the settings and the seed of {kept.directory}"
            print(in_one_line(f"warning: left out: {sentence}"), file=sys.stderr)
    return [*chosen.values()]


def _seed(run: Run) -> int | None:
    return (run.config or run.summary or {}).get("seed")


def _make_curve(runs: list[Run], metric: str, settings: Settings, differing: Settings) -> Curve:
    key = metric_key(metric)
    evaluations = [{row["step"]: row for row in run.metrics if key in row} for run in runs]
    common = sorted(set.intersection(*map(set, evaluations)))
    if not common:
        raise UserError(
            f"the runs like {runs[0].directory} share no evaluation: give runs with one eval_every"
        )
    rows = [[by_step[step] for step in common] for by_step in evaluations]
    last_rows = [row[-1] for row in rows]
    bits = np.array([[row["sent_bits_per_parameter"] for row in line] for line in rows]).mean(0)
    steps = np.array(common)
    return Curve(
        method=settings["optimizer.name"],
        settings=settings,
        differing=differing,
        seeds=[_seed(run) for run in runs],
        steps=steps,
        bits=bits,
        times=np.array([[row["seconds"] for row in line] for line in rows]).mean(0),
        values=np.array([[row[key] for row in line] for line in rows], dtype=float),  # None: NaN
        paper_bits=_paper_bits(runs),
        sent_bytes=_a_step(last_rows, "sent_bytes", common),
        received_bytes=_a_step(last_rows, "received_bytes", common),
        state_bytes=next(
            (run.summary.get("state_bytes_per_parameter") for run in runs if run.summary), None
        ),
        saving=_saving(settings.get("workers") or 1, steps[-1], bits[-1]),
        seconds=float(np.mean([row["seconds"] for row in last_rows]) / steps[-1]),
        finished=all(run.finished for run in runs),
    )


def _a_step(rows: list[dict[str, Any]], key: str, steps: list[int]) -> float:
    """Return the mean over runs of a count until the last step, per step."""
    return float(np.mean([row.get(key, math.nan) for row in rows]) / steps[-1])


def _paper_bits(runs: list[Run]) -> float | None:
    for run in runs:
        if run.summary is not None:
            return run.summary["paper_bits_up"] + run.summary["paper_bits_down"]
    return None


def _saving(workers: int, steps: int, bits: float) -> float | None:
    """Return how many times more bits per parameter a float32 ring all-reduce would have sent."""
    ring = 2 * (workers - 1) / workers * 32 * steps
    return ring / bits if ring and bits else None
