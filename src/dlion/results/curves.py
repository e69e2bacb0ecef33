"""Runs into curves: numbers for figures and tables, and nothing drawn."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlion.errors import UserError
from dlion.results.record import Run

_SETTINGS = (
    *("workers", "batch_size", "steps", "epochs", "precision", "participation", "local_steps"),
    *("local_lr", "nonfinite"),
)


@dataclass(frozen=True)
class Curve:
    """Runs that differ only by their seed.

    Attributes:
        label: the method, and whatever else tells this curve from the others.
        method: the name of the optimizer.
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

    label: str
    method: str
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
    def seeds(self) -> int:
        return len(self.values)

    @property
    def final(self) -> np.ndarray:
        """The metric at the end, ``[runs]``."""
        return self.values[:, -1]


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
        groups[str(settings["dataset"]), str(settings["model"])].append(run)
    return groups


def column_of(metric: str) -> str:
    """The key of a metric in metrics.jsonl."""
    return f"test_{metric}" if metric in ("accuracy", "loss") else metric


def make_curves(runs: list[Run], metric: str) -> list[Curve]:
    """One curve for all runs that differ only by seed, in the order of their labels."""
    runs = [run for run in runs if any(column_of(metric) in row for row in run.metrics)]
    settings = [_settings(run) for run in runs]
    varying = {
        key
        for key in set().union(*settings)
        if key != "optimizer.name" and len({repr(s.get(key)) for s in settings}) > 1
    }
    # settings of a method that all its runs share do not tell its curves apart
    values_of = defaultdict(set)
    for setting in settings:
        for key in varying:
            values_of[setting["optimizer.name"], key].add(repr(setting.get(key)))
    groups: dict[str, list[Run]] = defaultdict(list)
    for run, setting in zip(runs, settings, strict=True):
        method = setting["optimizer.name"]
        told = {
            k: setting[k] for k in sorted(varying) if len(values_of[method, k]) > 1 and k in setting
        }
        label = " ".join([method, *(f"{k.rpartition('.')[2]}={v}" for k, v in told.items())])
        groups[label].append(run)
    return [_curve(label, group, metric) for label, group in sorted(groups.items())]


def _settings(run: Run) -> dict[str, Any]:
    """What may tell runs apart, flat; not the seed."""
    config = run.config or {}
    found = {f"optimizer.{k}": v for k, v in config.get("optimizer", {}).items()}
    for group in ("model", "dataset", "schedule", "faults"):
        for key, value in (config.get(group) or {}).items():
            if key not in ("name", "path", "loaders") and not isinstance(value, dict):
                found[f"{group}.{key}"] = value
    for group in ("model", "dataset"):
        found[group] = config.get(group, {}).get("name")
    for key in _SETTINGS:
        found[key] = config.get(key)
    if run.summary is not None:
        found["optimizer.name"] = run.summary["optimizer"]
        for key in ("model", "dataset", "workers"):
            found[key] = run.summary[key]
    found.setdefault("optimizer.name", run.directory.name)
    return found


def _curve(label: str, runs: list[Run], metric: str) -> Curve:
    name = column_of(metric)
    tables = [
        {row["step"]: row for row in run.metrics if row.get(name) is not None} for run in runs
    ]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    if not common:
        raise UserError(f"the runs of {label} share no evaluation: give runs with one eval_every")
    rows = [[table[step] for step in common] for table in tables]
    first = next((run.summary for run in runs if run.summary is not None), {})
    bits = np.array([[row["sent_bits_per_parameter"] for row in line] for line in rows]).mean(0)
    steps = np.array(common)
    n = _settings(runs[0])["workers"]
    ring = 2 * (n - 1) / n * 32 * steps[-1]
    return Curve(
        label=label,
        method=label.split()[0],
        steps=steps,
        bits=bits,
        values=np.array([[row[name] for row in line] for line in rows]),
        paper_bits=first["paper_bits_up"] + first["paper_bits_down"] if first else None,
        sent_bytes=float(np.mean([line[-1]["sent_bytes"] for line in rows]) / steps[-1]),
        saving=ring / bits[-1] if bits[-1] else None,
        seconds=float(np.mean([line[-1]["seconds"] for line in rows]) / steps[-1]),
        finished=all(run.finished for run in runs),
        settings=_settings(runs[0]),
    )
