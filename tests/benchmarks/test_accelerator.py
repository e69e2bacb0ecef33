"""The benchmark for GPUs, as far as it can be tried without one."""

import json
import subprocess
import sys
import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.conftest import ROOT
from tests.support.scripts import BENCHMARKS, script

accelerator = script("accelerator")
timing, kernels, steps = (script(f"gpu.{name}") for name in ("timing", "kernels", "steps"))


def on_a_bare_machine(tmp_path, packages: str, parts: str) -> dict[str, list[dict]]:
    """Run the benchmark where only torch and the packages are found; return rows by part."""
    bare = [sys.executable, ROOT / "tests" / "benchmarks" / "bare.py", packages]
    command = [*bare, BENCHMARKS / "accelerator.py", "--device", "cpu", "--only", parts]
    done = subprocess.run([*command, "--output", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[dict]] = {}
    for row in json.loads((tmp_path / "accelerator.json").read_text())["points"]:
        assert not row.get("wrong")
        assert "error" not in row
        rows.setdefault(row["part"], []).append(row)
    return rows


@pytest.mark.slow
def test_it_needs_torch_and_its_compilers_only_and_says_what_training_needs(tmp_path):
    rows = on_a_bare_machine(tmp_path, "triton,numba,llvmlite", "kernels,steps,train,nccl")
    for part in ("kernels", "steps", "nccl"):
        assert len(rows[part]) > 3
        assert not any("skipped" in row for row in rows[part])
    assert "lion-pytorch" not in {row["case"] for row in rows["steps"]}
    missing = {row["skipped"] for row in rows["train"]}
    assert missing == {"type pip install timm torchvision transformers"}


@pytest.mark.slow
def test_without_compilers_every_part_says_what_it_needs_and_is_measured_once_it_is_there(tmp_path):
    rows = on_a_bare_machine(tmp_path, "", "kernels,nccl")
    assert {row["skipped"] for row in rows["kernels"]} == {"type pip install triton"}
    assert {row["skipped"] for row in rows["nccl"]} == {"type pip install numba"}
    rows = on_a_bare_machine(tmp_path, "numba,llvmlite", "nccl")  # other facts than with triton
    assert {row["met"] for row in rows["nccl"]} == {True}


def test_two_parts_and_imports_take_less_than_five_minutes():
    seconds = accelerator.SECONDS
    assert set(seconds) == {"kernels", "steps", "train", "nccl"}
    assert seconds["kernels"] + seconds["steps"] <= 280
    assert seconds["train"] + seconds["nccl"] <= 280


def test_what_the_budget_does_not_reach_is_an_error_that_the_next_call_repeats():
    args = accelerator.parse(["--smoke"])
    (key, *_) = accelerator.keys("steps", args)
    (row,) = accelerator.measured(key, args, seconds=0.5)
    assert row["error"].endswith("the next call continues here")
    assert row["met"] is False


@pytest.mark.parametrize(
    ("case", "each"),
    [
        ("encode_signs", 1 / 8 + 8 + 4),
        ("encode_signs, bfloat16", 1 / 8 + 8 + 2),
        ("measure", 4 + 4),
        ("encode_levels, 4 bits", 4 / 8 + 8 + 4),
        ("sum_planes, 1 bit", 8 / 8 + 4 / 8),
        ("compare_sum, 4 bits", 8 * 4 / 8 + 2 / 8),
        ("pack_votes", 2 / 8 + 1 / 5),
        ("encode_deltas", 1 / 8 + 8 + 4 + (8 + 2 + 4 / 8)),
        ("decode_deltas", 8 / 8 + (8 + 8 * (2 + 4 / 8)) + 2 / 8),
        ("apply_trits", 8 + 1 / 5),
        ("accumulate", 8 + 8 + 4),
    ],
)
def test_bytes_of_a_kernel_are_those_of_one_pass_over_its_arguments(case, each):
    d = 64 * 5 * 8 * 50
    arguments = kernels.arguments_of(d, "cpu")[case]()
    moved = kernels.bytes_moved(case.partition(",")[0], arguments)
    assert moved == pytest.approx(each * d, rel=1e-3)


def test_every_kernel_that_is_timed_runs_on_its_arguments():
    from dlion.kernels import reference

    for case, make in kernels.arguments_of(1000, "cpu").items():
        name, arguments = case.partition(",")[0], make()
        kernels.kernel(reference, name)(*arguments)
        assert kernels.bytes_moved(name, arguments) > 0


@pytest.mark.slow
def test_shapes_are_those_of_gpt2():
    from dlion.suite.data.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1024, n_head=16))
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert steps.TENSORS["GPT-2 345M"](False) == shapes


@pytest.fixture
def waiting_gpu(monkeypatch):
    """A GPU whose operations wait, as torch shows it: a function that waits once."""
    mode = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)

    def wait() -> None:
        if mode and mode[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    return wait


def test_waits_are_counted_in_all_threads_by_place(waiting_gpu):
    def run(name: str) -> None:
        thread = threading.Thread(target=waiting_gpu, name=name)
        thread.start()
        thread.join()

    with timing.waits() as places:
        waiting_gpu()
        for name in ("exchange_0", "exchange_0", "Dummy-1"):
            run(name)
        warnings.warn("something else", stacklevel=1)
    waiting_gpu()  # is not counted any more
    assert Counter({place.split()[0]: count for place, count in places.items()}) == {
        "main": 1,
        "exchange": 2,
        "hook": 1,
    }
    assert all("tests/benchmarks/test_accelerator.py:" in place for place in places)


class Event:
    """An event of a GPU that is done."""

    def synchronize(self) -> None:
        self.waited = True


def test_waits_for_events_are_counted_too(waiting_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    event = Event()
    with timing.waits() as places:
        event.synchronize()
    assert event.waited
    assert places.total() == 1
    event.synchronize()
    assert places.total() == 1


class Graph:
    """A CUDA graph that counts its replays."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def graphs(monkeypatch, waiting_gpu):
    monkeypatch.setattr(Graph, "replays", 0)
    for name, stub in {
        "CUDAGraph": Graph,
        "Stream": lambda: None,
        "stream": nullcontext,
        "synchronize": lambda: None,
        "graph": lambda graph, pool, capture_error_mode: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return waiting_gpu


def test_calls_are_captured_once_and_replayed(graphs):
    calls = []
    run, note = timing._captured(partial(calls.append, 1), 5, pool=None)
    assert len(calls) == 1 + 1 + 5  # to compile, to look for waits, to capture
    run()
    assert (len(calls), Graph.replays, note) == (7, 1, None)


def test_what_waits_or_cannot_be_captured_is_called_instead_and_noted(graphs, monkeypatch):
    run, note = timing._captured(graphs, 5, pool=None)
    assert note.startswith("no CUDA graph: waits at main tests/benchmarks/test_accelerator.py:")
    calls = []

    def refuses() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("capturable is False\nmore")

    run, note = timing._captured(refuses, 5, pool=None)
    assert note == "no CUDA graph: capturable is False"
    run()
    assert (len(calls), Graph.replays) == (3 + 5, 0)
