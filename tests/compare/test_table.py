"""Tables of runs as Markdown."""

from functools import partial

import pytest

from dlion.compare.table import main
from tests.compare.runs import write_run


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


def test_an_unknown_column_is_named(runs, table):
    done = table(runs, "--show", "end,speed")
    assert done.returncode == 2 and "speed is no column: choose of seeds, end" in done.stderr


def test_a_bar_in_a_name_stays_in_its_cell(tmp_path, table):
    for method in ("a|b", "c"):
        write_run(tmp_path / method[0], "dgc", 0, method_name=method)
    assert "| a\\|b |" in table(tmp_path).stdout
