"""Runs into curves: numbers for figures and tables, and nothing drawn."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlion.errors import UserError
from dlion.record.runs import Run

# of the run as a whole; in the order in which they tell runs apart
_SETTINGS = (
    *("dataset", "model", "workers", "local_steps", "participation", "precision", "nonfinite"),
    *("local_lr", "batch_size", "steps", "epochs"),
)


@dataclass(frozen=True)
class Curve:
    """Runs that differ only by their seed.

    Attributes:
        method: the name of the optimizer.
        told: the settings that tell it from other curves of its method, flat.
        steps: ``[T]``, the evaluations that all runs have.
        bits: ``[T]``, bits sent so far per parameter, mean over workers and runs.
        values: ``[runs, T]``, the metric.
        paper_bits: per parameter and step, both directions, as the papers count; None if a run is
            not finished.
        sent_bytes: a worker's, per step.
        saving: how many times fewer bytes than a float32 ring all-reduce; None for one worker.
        seconds: per step.
        finished: whether all runs are.
        settings: what may tell it from other curves, flat.
    """

    method: str
    told: dict[str, Any]
    steps: np.ndarray
    bits: np.ndarray
    values: np.ndarray
    paper_bits: float | None
    sent_bytes: float
    saving: float | None
    seconds: float
    finished: bool
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """The method, and whatever else tells this curve from the others."""
        return " ".join(filter(None, [self.method, self.variant()]))

    def variant(self, without: str | None = None) -> str:
        """What tells it from other curves of its method, in words; ``without`` one setting."""
        told = {key: value for key, value in self.told.items() if key != without}
        return " ".join(f"{short(key)}={value}" for key, value in told.items())

    @property
    def seeds(self) -> int:
        return len(self.values)

    @property
    def final(self) -> np.ndarray:
        """The metric at the end, ``[runs]``."""
        return self.values[:, -1]

    def best(self, metric: str) -> np.ndarray:
        """The metric at each run's best evaluation, ``[runs]``."""
        return self.values.max(1) if "accuracy" in metric else self.values.min(1)


def choose_metric(runs: list[Run], asked: str | None = None) -> str:
    """What was asked for, or ``accuracy`` where all runs have it, or ``loss``.

    ``accuracy`` and ``loss`` are those of the test; else a key of metrics.jsonl.

    Raises:
        UserError: if not all runs can be compared by it.
    """
    kinds = {"test_accuracy" in row for run in runs for row in run.metrics if "test_loss" in row}
    if not kinds:
        raise UserError(
            "no run holds an evaluation yet: wait for the first, or set eval_every=STEPS"
        )
    if asked == "loss":
        return "loss"
    if asked not in (None, "accuracy"):
        known = {key for run in runs for row in run.metrics for key in row}
        if asked not in known:
            raise UserError(
                f"no run has {asked}: choose accuracy, loss, {', '.join(sorted(known))}"
            )
        return asked
    if len(kinds) > 1 and asked is None:
        raise UserError("some runs have an accuracy and some only a loss: give runs of one kind")
    if asked == "accuracy" and kinds != {True}:
        raise UserError("these runs have no accuracy: type --metric loss")
    return "accuracy" if kinds == {True} else "loss"


def group_runs(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs that can be compared, by data set and model."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        settings = _settings(run)
        groups[settings["dataset"], settings["model"]].append(run)
    return groups


def column_of(metric: str) -> str:
    """The key of a metric in metrics.jsonl."""
    return f"test_{metric}" if metric in ("accuracy", "loss") else metric


def short(key: str) -> str:
    """A setting's name without its group."""
    return key.rpartition(".")[2]


def place_of(value: Any) -> tuple[float, str]:
    """Where a setting's value stands on an axis: numbers by size, then the rest by name."""
    is_number = isinstance(value, int | float)
    return (float(value) if is_number else math.inf, str(value))


def make_curves(runs: list[Run], metric: str, first: Sequence[str] = ()) -> list[Curve]:
    """One curve for all runs that differ only by seed, by method and then by setting.

    ``first``: settings to tell curves apart by before all others.
    """
    methods: dict[str, list[tuple[Run, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        if any(column_of(metric) in row for row in run.metrics):
            settings = _settings(run)
            methods[settings["optimizer.name"]].append((run, settings))
    curves = []
    for own in methods.values():
        keys = _telling([settings for _, settings in own], first)
        groups: dict[str, list[tuple[Run, dict[str, Any]]]] = defaultdict(list)
        for run, settings in own:
            groups[_at(settings, keys)].append((run, settings))
        for group in groups.values():
            settings = group[0][1]
            told = {key: settings[key] for key in keys if key in settings}
            curves.append(_curve([run for run, _ in group], metric, settings, told))
    return sorted(curves, key=lambda c: (c.method, [place_of(v) for v in c.told.values()]))


def _telling(settings: list[dict[str, Any]], first: Sequence[str]) -> list[str]:
    """The settings that tell runs of a method apart, without those that follow from others."""
    known = sorted(set().union(*settings))
    found: list[str] = []
    for key in dict.fromkeys([*first, *_SETTINGS, *known]):
        values = {repr(s[key]) for s in settings if key in s}
        if len(values) > 1 and _classes(settings, [*found, key]) > _classes(settings, found):
            found.append(key)
    return found


def _at(settings: dict[str, Any], keys: list[str]) -> str:
    return repr([settings.get(key) for key in keys])


def _classes(settings: list[dict[str, Any]], keys: list[str]) -> int:
    return len({_at(each, keys) for each in settings})


def _settings(run: Run) -> dict[str, Any]:
    """What may tell runs apart, flat; not the seed."""
    config = run.config or {}
    found: dict[str, Any] = {"optimizer.name": run.directory.name}
    for group in ("optimizer", "model", "dataset", "schedule", "faults"):
        for key, value in (config.get(group) or {}).items():
            if key not in ("_target_", "path", "loaders") and not isinstance(value, dict):
                found[f"{group}.{key}"] = value
    for key in ("model", "dataset"):
        found[key] = found.pop(f"{key}.name", "?")
    found |= {key: config[key] for key in _SETTINGS if key in config and key not in found}
    if run.summary is not None:
        found["optimizer.name"] = run.summary["optimizer"]
        found |= {key: run.summary[key] for key in ("model", "dataset", "workers")}
    return found


def _curve(runs: list[Run], metric: str, settings: dict[str, Any], told: dict[str, Any]) -> Curve:
    name = column_of(metric)
    tables = [
        {row["step"]: row for row in run.metrics if row.get(name) is not None} for run in runs
    ]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    if not common:
        raise UserError(
            f"the runs like {runs[0].directory} share no evaluation: give runs with one eval_every"
        )
    rows = [[table[step] for step in common] for table in tables]
    first = next((run.summary for run in runs if run.summary is not None), {})
    bits = np.array([[row["sent_bits_per_parameter"] for row in line] for line in rows]).mean(0)
    steps = np.array(common)
    n = settings.get("workers", 1)
    ring = 2 * (n - 1) / n * 32 * steps[-1]
    return Curve(
        method=settings["optimizer.name"],
        told=told,
        steps=steps,
        bits=bits,
        values=np.array([[row[name] for row in line] for line in rows]),
        paper_bits=first["paper_bits_up"] + first["paper_bits_down"] if first else None,
        sent_bytes=float(np.mean([line[-1]["sent_bytes"] for line in rows]) / steps[-1]),
        saving=ring / bits[-1] if ring and bits[-1] else None,
        seconds=float(np.mean([line[-1]["seconds"] for line in rows]) / steps[-1]),
        finished=all(run.finished for run in runs),
        settings=settings,
    )
