"""Tables of runs as Markdown."""

import json
from functools import partial
from pathlib import Path

import pytest

from dlion.suite.compare.table import main
from tests.compare.runs import reconfigure, write_run


@pytest.fixture
def table(command):
    return partial(command, main)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for lr in (1e-3, 1e-2):
            write_run(root, "dlion_mavo", seed, lr=lr)
        write_run(root, "g_lion", seed)
    return root


def cells(text: str) -> list[list[str]]:
    lines = text.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_row_for_each_method_and_setting(runs, table):
    headings, rule, *rows = cells(table(runs, "--show", "seeds,end,paper_bits,saving").stdout)
    assert headings == ["test accuracy (%)", "seeds", "at the end", "paper bits", "saving"]
    assert rule == ["---", "---:", "---:", "---:", "---:"]
    assert [row[0] for row in rows] == ["dlion_mavo lr=0.001", "dlion_mavo lr=0.01", "g_lion"]
    assert rows[0][1:] == ["2", "70.50 ± 0.71", "2", "31.5x"]


def test_a_column_for_each_value_of_a_setting(runs, table):
    headings, _, *rows = cells(table(runs, "--columns", "optimizer.lr", "--metric", "loss").stdout)
    assert headings == ["test loss (nats)", "lr = 0.001", "lr = 0.01"]
    assert rows == [
        ["dlion_mavo", "1.0000 ± 0.0000", "1.0000 ± 0.0000"],
        ["g_lion", "1.0000 ± 0.0000", ""],
    ]


def test_differences_are_seed_for_seed(runs, tmp_path, table):
    # the seeds differ by a point, the methods of one seed by nothing
    headings, _, *rows = cells(table(runs, "--show", "end", "--against", "g_lion").stdout)
    assert headings[-1] == "minus g_lion"
    assert [row[-1] for row in rows] == ["+0.00 ± 0.00", "+0.00 ± 0.00", ""]
    write_run(tmp_path, "g_lion", 3)
    write_run(tmp_path, "dlion_mavo", 4)
    done = table(tmp_path, "--against", "g_lion")
    assert done.returncode == 2 and "no seed in common" in done.stderr
    done = table(runs, "--against", "dlion_mavo")
    assert done.returncode == 0  # g_lion's rate is that of one of its two curves
    done = table(runs, "--against", "dgc")
    assert done.returncode == 2 and "there are 0 curves of dgc" in done.stderr


def test_only_the_runs_with_a_value_of_a_setting_are_shown(runs, table):
    rows = cells(table(runs, "--only", "optimizer.lr=0.01").stdout)[2:]
    assert [row[0] for row in rows] == ["dlion_mavo"]
    either = ("--only", "optimizer.lr=1e-2", "--only", "optimizer.lr=0.5", "--only", "workers=8.0")
    assert table(runs, *either).stdout == table(runs, "--only", "optimizer.lr=0.01").stdout


def test_a_value_is_chosen_as_it_is_shown(tmp_path, table):
    for seed, (weighted, pattern) in enumerate([(True, "narrow"), (False, None)]):
        write_run(tmp_path, "dgc", seed)
        settings = {"name": "dgc", "weighted": weighted, "sync_pattern": pattern}
        reconfigure(tmp_path / f"dgc-{seed}-0.001", optimizer=settings)
    columns = cells(table(tmp_path, "--columns", "optimizer.weighted").stdout)[0]
    assert columns[1:] == ["weighted = false", "weighted = true"]
    for condition, end in (("weighted=true", "70.00"), ("sync_pattern=null", "71.00")):
        done = table(tmp_path, "--only", f"optimizer.{condition}", "--show", "end")
        assert cells(done.stdout)[2:] == [["dgc", end]], done.stderr


def test_a_number_is_one_value_however_it_is_typed(tmp_path, table):
    for seed, (momentum, betas) in enumerate([(0, [1, 0.5]), (0.0, [1.0, 0.5])]):
        write_run(tmp_path, "dgc", seed)
        settings = {"name": "dgc", "momentum": momentum, "betas": betas}
        reconfigure(tmp_path / f"dgc-{seed}-0.001", optimizer=settings)
    assert cells(table(tmp_path, "--show", "seeds").stdout)[2:] == [["dgc", "2"]]


def test_a_precision_chosen_by_the_device_is_what_it_was_there(tmp_path, table):
    for seed, (chosen, device) in enumerate([("auto", "cpu"), ("auto", "cuda"), ("bf16", "cpu")]):
        write_run(tmp_path, "g_muon", seed)
        directory = tmp_path / f"g_muon-{seed}-0.001"
        reconfigure(directory, optimizer={"name": "g_muon", "ns_precision": chosen})
        summary = json.loads((directory / "summary.json").read_text())
        (directory / "summary.json").write_text(json.dumps(summary | {"device": device}))
    rows = cells(table(tmp_path, "--show", "seeds").stdout)[2:]
    assert rows == [["g_muon ns_precision=bf16", "2"], ["g_muon ns_precision=float32", "1"]]


def test_a_run_from_before_a_setting_is_a_seed_of_runs_with_its_default(tmp_path, table):
    for seed, recorded in enumerate([{}, {"label_smoothing": 0.0}]):
        write_run(tmp_path, "dgc", seed)
        reconfigure(tmp_path / f"dgc-{seed}-0.001", local_steps=1, **recorded)
    assert cells(table(tmp_path, "--show", "seeds").stdout)[2:] == [["dgc", "2"]]


def test_runs_that_would_have_been_stopped_are_seeds_of_those_that_would_not(tmp_path, table):
    for seed, nonfinite in enumerate(["stop", None, "skip"]):
        write_run(tmp_path, "dgc", seed)
        reconfigure(tmp_path / f"dgc-{seed}-0.001", nonfinite=nonfinite)
    rows = cells(table(tmp_path, "--show", "seeds").stdout)[2:]
    assert rows == [["dgc nonfinite=skip", "1"], ["dgc nonfinite=stop", "2"]]


def test_an_unknown_column_is_named(runs, table):
    done = table(runs, "--show", "end,speed")
    assert done.returncode == 2 and "speed is no column: choose of seeds, end" in done.stderr


def test_a_bar_in_a_name_stays_in_its_cell(tmp_path, table):
    for method in ("a|b", "c"):
        write_run(tmp_path / method[0], "dgc", 0, method_name=method)
    assert "| a\\|b |" in table(tmp_path).stdout


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("init_from", (None, "elsewhere")),
        ("eval_limit", (None, 2)),
        ("accumulate", (1, 4)),
        ("network", ({"name": "none", "rate": None}, {"name": "ethernet_10m", "rate": "10mbit"})),
        ("model", ({"name": "m", "path": "/here/small"}, {"name": "m", "path": "/there/big"})),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_two_rows(tmp_path, table, key, values):
    for seed, value in enumerate(values):
        write_run(tmp_path, "dgc", seed)
        reconfigure(tmp_path / f"dgc-{seed}-0.001", **{key: value})
    _, _, *rows = cells(table(tmp_path, "--show", "seeds").stdout)
    assert [row[1] for row in rows] == ["1", "1"]
    assert rows[0][0] != rows[1][0]


def test_a_folder_of_data_may_lie_anywhere(tmp_path, table):
    for seed, path in enumerate(("/here/cifar10", "/there/cifar10")):
        write_run(tmp_path, "dgc", seed)
        reconfigure(tmp_path / f"dgc-{seed}-0.001", dataset={"name": "d", "path": path})
    assert cells(table(tmp_path, "--show", "seeds").stdout)[2:] == [["dgc", "2"]]


def test_a_run_counts_once(tmp_path, table, monkeypatch):
    for copy in ("a", "b"):
        write_run(tmp_path / copy, "dgc", 0)
    write_run(tmp_path / "a", "dgc", 1)
    monkeypatch.chdir(tmp_path)
    assert cells(table("a", tmp_path / "a", "--show", "seeds").stdout)[2:] == [["dgc", "2"]]
    done = table(tmp_path, "--show", "seeds")
    assert cells(done.stdout)[2:] == [["dgc", "2"]]
    assert "a/dgc-0-0.001 has the settings and the seed of" in done.stderr
    (tmp_path / "b" / "dgc-0-0.001" / "summary.json").unlink()
    assert "left out: " + str(tmp_path / "b") in table(tmp_path).stderr  # as it is not finished


def test_runs_of_several_tasks_say_which(tmp_path, table):
    for method, name in (("dgc", "large"), ("g_lion", "m")):
        write_run(tmp_path, method, 0)
        run = tmp_path / f"{method}-0-0.001"
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"model": name}))
    rows = cells(table(tmp_path).stdout)[2:]
    assert [row[0] for row in rows] == ["dgc model=large", "g_lion model=m"]


def test_an_unfinished_run_says_how_far_its_method_is_compared(tmp_path, table):
    for seed in (0, 1):
        write_run(tmp_path, "dgc", seed)
    stopped = tmp_path / "dgc-1-0.001"
    (stopped / "summary.json").unlink()
    first, _ = (stopped / "metrics.jsonl").read_text().splitlines()
    (stopped / "metrics.jsonl").write_text(first + "\n")
    assert cells(table(tmp_path).stdout)[2][0] == "dgc (not finished, to step 10)"


def measure(run: Path, **columns: tuple[object, object]) -> None:
    """Add measurements to the two rows of a run."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for index, row in enumerate(rows):
        row |= {name: values[index] for name, values in columns.items()}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_best_of_a_metric_may_be_its_highest(tmp_path, table):
    write_run(tmp_path, "dgc", 0)
    measure(tmp_path / "dgc-0-0.001", agreement=(0.8, 0.6))
    _, _, row = cells(table(tmp_path, "--metric", "agreement", "--show", "end,best").stdout)
    assert row == ["dgc", "0.6000", "0.8000"]


def test_every_accuracy_is_in_per_cent_and_words_are_no_metric(tmp_path, table):
    write_run(tmp_path, "dgc", 0)
    measure(tmp_path / "dgc-0-0.001", accuracy_next_line=(0.1, 0.265), note=("a", "b"))
    done = table(tmp_path, "--metric", "accuracy_next_line", "--show", "end")
    assert cells(done.stdout) == [
        ["accuracy_next_line (%)", "at the end"],
        ["---", "---:"],
        ["dgc", "26.50"],
    ]
    done = table(tmp_path, "--metric", "note")
    assert done.returncode == 2 and "no run has note: choose accuracy" in done.stderr


def test_odd_records_are_left_out_by_name(tmp_path, table):
    for seed, settings in enumerate([{"network": "none"}, {"workers": None}, {}]):
        write_run(tmp_path, "dgc", seed)
        reconfigure(tmp_path / f"dgc-{seed}-0.001", **settings)
    (tmp_path / "dgc-1-0.001" / "summary.json").unlink()
    done = table(tmp_path, "--show", "seeds")
    assert "network must be a group of settings, got 'none'" in done.stderr
    assert [row[1] for row in cells(done.stdout)[2:]] == ["1", "1"]
