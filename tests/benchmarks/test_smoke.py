"""Every benchmark runs from end to end in its smallest form, as the pages say to start it."""

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.readmes import commands, words
from tests.support.runs import Run, assert_all_gone, python, until
from tests.support.scripts import BENCHMARKS, script

pytestmark = pytest.mark.slow

LEAVES = {  # by the first word of a command that is a key, else by its script
    "local_step": {"local_step.json", "local_step.png", "newton_schulz.json"},
    "kernel_code": {"kernel_code.json"},
    "host_time": {"host_time.json"},
    "exchange": {"exchange.json", "exchange.png"},
    "two_levels": {"two_levels.json"},
    "grid": {"grid.json", "grid.png"},
    "end_to_end": {"end_to_end.json", "end_to_end.png"},
    "workers": {"workers.json", "workers.png"},
    "buckets": {"buckets.json", "buckets.png"},
    "groups": {"groups.json"},
    "time_to_accuracy": {"time_to_accuracy.json", "time_to_accuracy.png"},
    "--search": {"time_to_accuracy_search.json"},
    "soak": {"soak.json", "soak.png"},
    "elastic": {"elastic.json"},
    "joiner": {"joiner.csv"},
    "rare_rows": {"rare_rows.json"},
    "delta_tracking": {"delta_tracking.json", "delta_tracking.png"},
    "delta_theory": {"delta_theory.json"},
    "kkt_quadratic": {"kkt_quadratic.json", "kkt_quadratic.png"},
    "polar_factor": {"polar_factor.json"},
    "kernels,steps": {"accelerator.json"},  # of accelerator.py
    "train,nccl": {"accelerator.json"},
}
TESTED_ALONE = "benchmarks/same_bits.py"


def typed_in_pages() -> dict[tuple[str, ...], str]:
    """Return the benchmarks' commands of all pages, each once, and what each is in LEAVES.

    Those of same_bits.py, which compares and does not measure, are run in test_same_bits.py.
    """
    found = {}
    for command in commands():
        typed = [] if command.python else words(command.text)
        starts = [i for i, word in enumerate(typed) if word.startswith("benchmarks/")]
        if starts and typed[starts[0]] != TESTED_ALONE:
            arguments = tuple(typed[starts[0] :])
            special = [word for word in arguments if word in LEAVES]
            found[arguments] = special[0] if special else Path(arguments[0]).stem
    return found


COMMANDS = typed_in_pages()


@pytest.mark.parametrize("typed", COMMANDS, ids=" ".join)
def test_what_a_page_says_to_measure_can_be_typed(typed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    script(Path(typed[0]).stem).parse([*typed[1:], "--smoke"])


@pytest.mark.parametrize("form", LEAVES)
def test_the_smallest_form_measures_everything_and_leaves_results_alone(form, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "results").rglob("*")}
    typed = next(arguments for arguments, name in COMMANDS.items() if name == form)
    # read when Triton is imported: in a process of its own
    env = {"TRITON_INTERPRET": "1"} if form == "kernels,steps" else None
    done = python(*typed, "--output", str(tmp_path / "out"), "--smoke", env=env)
    assert done.returncode == 0, done.stderr
    left = {path.name for path in (tmp_path / "out").glob("*")}
    assert left == LEAVES[form]
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "results").rglob("*")} == before
    if form == "soak":
        measured = json.loads((tmp_path / "out" / "soak.json").read_text())
        assert measured["equal"] is True
        assert len({event["fault"] for event in measured["events"]}) == 4
    else:
        for file in (tmp_path / "out").glob("*.json"):
            measured = json.loads(file.read_text())
            rows = measured.get("points") or measured["rows"]
            assert rows
            assert not [
                row for row in rows if {"error", "skipped"} & row.keys() or row.get("wrong")
            ]


def test_no_benchmark_is_left_out():
    runnable = {path.stem for path in BENCHMARKS.glob("*.py") if "\ndef parse(" in path.read_text()}
    assert {Path(typed[0]).stem for typed in COMMANDS} >= runnable
    assert set(COMMANDS.values()) == set(LEAVES)


def test_an_interrupted_benchmark_keeps_its_points_goes_on_and_leaves_nobody_behind(tmp_path):
    file = tmp_path / "exchange.json"
    command = ["benchmarks/exchange.py", "--rates", "loopback", "--workers", "2", "8"]
    command += ["--d", "1e5", "--rounds", "20", "--output", str(tmp_path)]
    for number in (signal.SIGINT, signal.SIGTERM):
        run = Run(command)
        children = _children_at_the_second_point(run)
        assert len(children) == 8
        run.send_signal(number)
        done = run.wait()
        assert done.returncode == 130, done.stderr
        assert done.stderr.endswith("what was measured is kept\n")
        assert_all_gone(children)
        assert {row["workers"] for row in json.loads(file.read_text())["points"]} == {2}
    assert "1 of 2 points are in" in done.stdout + done.stderr


def _children_at_the_second_point(run: Run) -> list[int]:
    def found() -> list[int]:
        children = run.children()
        begun = "workers 8" in run.stdout + run.stderr and len(children) == 8
        return children if begun else []

    return until(found, lambda: run.stdout + run.stderr)
