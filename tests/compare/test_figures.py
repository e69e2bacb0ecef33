"""Figures that README and the guides type by hand are those of the records in results/."""

import json
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dlion.suite.compare.board import read_task
from dlion.suite.compare.reading import read_runs
from dlion.suite.compare.style import end_values
from dlion.suite.record.studies import PACKED
from tests.conftest import ROOT

README = ROOT / "README.md"
CHOICE = ROOT / "docs/how-to/choose-a-method.md"
SPEED = ROOT / "results/speed"
TEXT = ROOT / "results/board/text"


@cache
def ends(folder: Path) -> dict[str, np.ndarray]:
    """The final losses of every method of a task, of all its seeds and precisions."""
    losses: dict[str, list[float]] = {}
    for curve in read_task(folder, {}).curves:
        losses.setdefault(curve.method, []).extend(end_values(curve, "loss"))
    return {method: np.array(values) for method, values in losses.items()}


def noise(*seeds: int) -> float:
    """The gap that means over so many seeds of text may have by chance."""
    return read_task(TEXT, {}).apart * math.sqrt(sum(1 / count for count in seeds) / 2)


def said(pattern: str) -> tuple[str, ...]:
    """The groups of a sentence of README."""
    found = re.search(pattern, README.read_text().replace("\n", " "))
    assert found, f"README does not say: {pattern}"
    return found.groups()


def rows(page: Path, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``first``, without code marks."""
    _, table = page.read_text().split(f"| {first} |", 1)
    lines = f"| {first} |{table}".split("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_the_headline_is_what_the_board_measured():
    muon, adamw, ours = (ends(TEXT)[name] for name in ("g_muon", "g_adamw", "sign_muon_mavo"))
    loss = said(r"Muon loses (\S+) nats \(\[(\S+)M-parameter GPT, (\d) workers, (\d) seeds\]")
    (lead,) = said(r"Its (\S+) lead over AdamW is noise with 4 or 32 workers, or 4x the steps")
    (curve,) = [c for c in read_task(TEXT, {}).curves if c.method == "g_adamw"]
    model = read_runs([TEXT / PACKED])[0].summary["parameters"] / 1e6
    assert loss == (f"{ours.mean() - muon.mean():.3f}", f"{model:.1f}", "8", str(len(ours)))
    assert lead == f"{adamw.mean() - ours.mean():.3f}" and len(adamw) >= len(ours) == len(muon)
    assert curve.settings["workers"] == 8
    assert adamw.mean() - ours.mean() > noise(len(adamw), len(ours))
    for workers in ("n4", "n32"):
        other = ends(TEXT / "workers" / workers)["sign_muon_mavo"]
        assert 0 < adamw.mean() - other.mean() < noise(len(adamw), len(other))
    longer = ends(TEXT / "long")
    assert 0 < longer["g_adamw"].mean() - longer["sign_muon_mavo"].mean() < noise(1, 1)


@pytest.mark.parametrize("page", [README, CHOICE], ids=lambda page: page.name)
def test_the_table_of_methods_is_the_boards(page):
    curves = {curve.method: curve for curve in read_task(TEXT, {}).curves}
    baseline = ends(TEXT)["g_adamw"].mean()
    _, _, *table = rows(page, "your situation")
    assert len(table) == 8
    for _, typed, bits, loss, state in table:
        name = typed.split()[0]
        gap = ends(TEXT)[name].mean() - baseline
        measured = [f"{curves[name].sent_bits:.3g}", f"{gap:+.3f}" if gap else "0"]
        assert [bits, loss, state] == [*measured, f"{curves[name].state_bytes:.3g}"], name
        assert len(ends(TEXT)[name]) >= 5


def test_the_guide_compares_what_was_measured_on_data_that_differ():
    studies = {"unlike_data": "accuracy", "unlike_cifar10": "accuracy", "unlike_text": "loss"}
    means = []
    for study, metric in studies.items():
        values: dict[str, list[float]] = {}
        for run in read_runs([ROOT / "results" / study / PACKED]):
            data = run.config["dataset"]
            if data.get("alpha") == 0.1 or data["sharding"] == "contiguous":
                name = run.config["optimizer"]["name"]
                values.setdefault(name, []).append(run.summary[f"test_{metric}"])
        assert {len(seeds) for seeds in values.values()} == {5}
        unit = 100 if metric == "accuracy" else 1
        means.append({name: unit * np.mean(seeds) for name, seeds in values.items()})
    _, _, *table = rows(CHOICE, "optimizer")
    assert len(table) == 7
    for typed, *cells, _ in table:
        name = "sign_muon_sync_20" if "momentum_sync=20" in typed else typed
        for cell, mean, half in zip(cells, means, (0.051, 0.051, 0.00051), strict=True):
            assert float(cell.removesuffix(" %")) == pytest.approx(mean[name], abs=half)


def test_the_milliseconds_are_those_of_the_benchmark():
    points = json.loads((SPEED / "end_to_end.json").read_text())["points"]
    measured = {
        (point["rate"], point["method"]): f"{1e3 * point['seconds']['median']:,.0f}"
        for point in points
        if point["model"] == "gpt2"
    }
    rates = {"1 Gbit/s": 10**9, "100 Mbit/s": 10**8, "10 Mbit/s": 10**7}
    columns = ["DDP float32 Lion", "DDP bf16 hook", "DDP PowerSGD 2", "dlion_mavo", "compute"]
    headings, _, *table = rows(README, "link")
    assert headings[1:4] == ["DDP float32", "DDP bf16 hook", "DDP PowerSGD, rank 2"]
    assert [row[0] for row in table] == [*rates]
    for link, *cells in table:
        assert cells == [measured[rates[link], method] for method in columns]


def test_the_sentence_on_a_gpu_has_the_best_and_the_worst_case():
    points = json.loads((SPEED / "accelerator.json").read_text())["points"]
    over = {
        (point["model"], point["processes"], point["case"]): point["over_adamw"]["median"]
        for point in points
        if point["part"] == "train" and point["case"].startswith("dlion_mavo")
    }
    (model, *_), worst = max(over.items(), key=lambda item: item[1])
    assert model == "ViT-B/16"
    cases = [over["GPT-2 345M", processes, "dlion_mavo"] for processes in (1, 2)]
    ratios = said(
        r"takes (\S+) times fused.*processes on it take (\S+) times, ViT-B/16 up to (\S+) "
    )
    assert ratios == tuple(f"{ratio:.2f}" for ratio in (*cases, worst))
