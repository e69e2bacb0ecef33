"""The board: who ends where, what it cost, and what is more than noise."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlion.suite.compare.board import main, read_task
from dlion.suite.compare.style import end_values
from dlion.suite.record.studies import PACKED, add_to_packed, find_runs
from tests.compare.runs import reconfigure, write_run
from tests.conftest import ROOT

BETTER = {"g_lion": 0.0, "dgc": -0.01, "dlion_mavo": -0.05, "signum_mavo": -0.1}
NOTHING = "title: digits\nmetric: accuracy\n"


@pytest.fixture
def task(tmp_path) -> Path:
    """Four methods with three seeds, their accuracies a point apart; noise is the best one's."""
    folder = tmp_path / "task"
    best, *others = BETTER
    for part, methods in {"": others, "noise": [best], "compute": [best]}.items():
        runs = tmp_path / f"runs{part}"
        for method in methods:
            for seed in (0, 1, 2):
                write_run(runs, method, seed, better=BETTER[method])
        (folder / part).mkdir()
        add_to_packed(folder / part / PACKED, [(r.directory.name, r) for r in find_runs([runs])])
    (folder / "task.yaml").write_text(NOTHING + "target: 0.64\n")
    return folder


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_best_is_first_and_noise_does_not_count(task, command):
    headings, _, *rows = cells(command(main, task).stdout)
    assert headings[:5] == ["test accuracy (%)", "at the end", "seeds", "behind", "last fifth"]
    assert [row[0] for row in rows] == [*BETTER]
    assert rows[0][1:3] == ["71.00 ± 1.00", "3"]
    # Student's t of three seeds, 9.92, times the deviation of a difference of two means is 8.10
    behind = ["0.00 (noise)", "1.00 (noise)", "5.00 (noise)", "10.00 (behind)"]
    assert [row[3] for row in rows] == behind
    assert {row[4] for row in rows} == {"+4.00"}  # ten points between the evaluations at 10 and 20


def test_noise_and_computing_stand_whatever_lines_are_chosen(task, command):
    everything = cells(command(main, task).stdout)
    (dgc,) = cells(command(main, task, "--only", "optimizer.name=dgc").stdout)[2:]
    assert dgc[0] == "dgc" and dgc[3] == "0.00 (noise)"
    both = command(main, task, "--only", "optimizer.name=dgc", "--only", "optimizer.name=g_lion")
    assert cells(both.stdout) == everything[:4]
    done = command(main, task, "--only", "workers=4")
    assert "none of these runs has workers=4: it is 8" in done.stderr


def test_bits_and_times_are_those_of_the_first_evaluation_at_the_target(task, command):
    headings, _, *rows = cells(command(main, task).stdout)
    at = {heading: index for index, heading in enumerate(headings)}
    lion, dgc, vote, signum = rows
    assert lion[at["sent"]] == "55.6" and lion[at["received"]] == "111"
    assert vote[at["sent to target"]] == "36" and signum[at["sent to target"]] == "never"
    # twenty steps of 1 MB that are received, or of a worker's 12.5 ms
    times = [lion[at[f"{rate} Mbit/s"]] for rate in ("10", "100", "1,000")]
    assert times == ["16 s", "1.6 s", "0.25 s"]
    assert dgc[at["10 Mbit/s"]] == ""  # nobody measured its steps


def test_a_task_may_take_the_steps_of_another(task, command):
    before = command(main, task).stdout
    (task / "compute").rename(task.parent / "elsewhere")
    assert command(main, task).stdout != before
    (task / "task.yaml").write_text(NOTHING + "target: 0.64\ncompute: ../elsewhere\n")
    assert command(main, task).stdout == before


def test_a_warm_up_takes_its_own_time(task, command, tmp_path):
    for part in ("", "compute"):
        for seed in (0, 1, 2):
            write_run(tmp_path / f"new{part}", "onebit_adam", seed, warmup_bytes=484_000)
        runs = [(run.directory.name, run) for run in find_runs([tmp_path / f"new{part}"])]
        add_to_packed(task / part / PACKED, runs)
    headings, _, *rows = cells(command(main, task).stdout)
    onebit = next(row for row in rows if row[0] == "onebit_adam")
    # ten steps of 1 MB received and ten of 32 kB, or of a worker's 12.5 ms
    times = [onebit[headings.index(f"{rate} Mbit/s")] for rate in ("10", "100", "1,000")]
    assert times == ["8.26 s", "0.925 s", "0.25 s"]


def test_the_page_and_its_figures_are_made_in_one_command(task, command):
    run = command(main, task, "--page")
    assert run.returncode == 2 and "README.md is missing" in run.stderr
    mark = f"# Digits\n\n<!-- table: dlion board {task} -->\n"
    (task / "README.md").write_text(mark)
    for packed in task.rglob(PACKED):
        packed.rename(packed.with_suffix(".away"))
    run = command(main, task, "--page")
    assert run.returncode == 2 and "has no run yet: dlion publish RUNS" in run.stderr
    for packed in task.rglob("*.away"):
        packed.rename(packed.with_suffix(".jsonl"))
    printed = command(main, task, "--page").stdout
    assert (task / "README.md").read_text() == mark + printed
    for bits in ("sent_bits", "received_bits"):
        assert (task / f"{bits}.png").read_bytes().startswith(b"\x89PNG")


def test_what_diverged_is_last(task, command, tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / "lost", "terngrad", seed, better=float("nan"))
    add_to_packed(task / PACKED, [(r.directory.name, r) for r in find_runs([tmp_path / "lost"])])
    (task / "README.md").write_text("# Digits\n")
    *_, last = cells(command(main, task, "--page").stdout)
    assert last[:4] == ["terngrad", "diverged", "3", ""]


def test_steps_over_links_are_held_against_what_times_take_for_granted(task, command, tmp_path):
    (task / "links").mkdir()
    for rate in (None, "1mbit", "10mbit"):
        write_run(tmp_path / f"{rate}", "dgc", 0, rate=rate)
        (run,) = find_runs([tmp_path / f"{rate}"])
        add_to_packed(task / "links" / PACKED, [(f"dgc-{rate}", run)])
    headings, _, row = cells(command(main, task, "--links").stdout)
    assert headings == ["ms a step", "1 Mbit/s", "10 Mbit/s", "no link"]
    # 0.1 s each; 32 KB are received, 256 ms at 1 Mbit/s
    assert row == ["dgc", "100 (0.39)", "100 (1.00)", "100"]
    for rate in (None, "1mbit", "10mbit"):  # after local steps nothing travels beside computing
        write_run(tmp_path / f"local{rate}", "diloco", 0, rate=rate)
        settings = {"name": "diloco", "local_steps": 2}
        reconfigure(tmp_path / f"local{rate}" / "diloco-0-0.001", optimizer=settings)
        (run,) = find_runs([tmp_path / f"local{rate}"])
        add_to_packed(task / "links" / PACKED, [(f"diloco-{rate}", run)])
    *_, row = cells(command(main, task, "--links").stdout)
    assert row == ["diloco", "100 (0.28)", "100 (0.80)", "100"]
    write_run(tmp_path / "one", "g_lion", 0)
    add_to_packed(task / "links" / PACKED, [("g_lion", find_runs([tmp_path / "one"])[0])])
    assert "lacks a rate" in command(main, task, "--links").stderr
    (task / "links" / PACKED).unlink()
    for seed in (0, 1):
        write_run(tmp_path / "two", "g_lion", seed)
    two = [(run.directory.name, run) for run in find_runs([tmp_path / "two"])]
    add_to_packed(task / "links" / PACKED, two)
    assert "has two runs of g_lion at no link: publish one" in command(main, task, "--links").stderr
    (task / "links" / PACKED).unlink()
    empty = replace(find_runs([tmp_path / "one"])[0], metrics=[])
    add_to_packed(task / "links" / PACKED, [("g_lion", empty)])
    assert "has no measurements" in command(main, task, "--links").stderr


def test_the_best_trial_of_each_method_is_read_from_the_list(task, command):
    lines = [
        "status,optimizer,test_accuracy,overrides",
        "finished,dgc,0.51,optimizer=dgc candidate=a",
        "finished,dgc,0.53,candidate=b optimizer=dgc",
        "failed,dgc,,optimizer=dgc candidate=c",
        "finished,g_lion,0.6,optimizer=g_lion candidate=a",
        "running,g_lion,0.1,optimizer=g_lion candidate=b",
        "failed,diloco,,optimizer=diloco candidate=a",
        "damaged,,,",
    ]
    (task / "search.csv").write_text("\n".join(lines))
    headings, _, *rows = cells(command(main, task, "--search").stdout)
    assert headings == ["test accuracy (%)", "best", "trial", "trials", "failed"]
    lion, dgc, diloco = rows
    assert lion == ["g_lion", "60.00", "a", "1", ""] and dgc == ["dgc", "53.00", "b", "3", "c"]
    assert diloco == ["diloco", "diverged", "", "1", "a"]
    (task / "search.csv").write_text("\n".join([*lines, lines[1]]))
    assert "(trial a of dgc stands there twice)" in command(main, task, "--search").stderr
    (task / "search.csv").write_text(f"{lines[0]}\nfinished,dgc,0.5,optimizer=dgc")
    assert "('optimizer=dgc' names no candidate)" in command(main, task, "--search").stderr
    (task / "search.csv").write_text("status,optimizer,test_loss,overrides\n" + lines[1])
    assert "does not list trials ('test_accuracy')" in command(main, task, "--search").stderr
    (task / "search.csv").write_text("a,b\n")
    assert "(it has no column optimizer)" in command(main, task, "--search").stderr
    (task / "search.csv").write_text(lines[0])
    assert "lists no trial that has ended" in command(main, task, "--search").stderr
    (task / "README.md").write_text("no marks")
    assert "README.md has no place for a table" in command(main, task, "--page").stderr


def test_one_seed_measures_no_noise(task, command, tmp_path):
    write_run(tmp_path / "one", "g_lion", 0)
    (task / "noise" / PACKED).unlink()
    runs = [(run.directory.name, run) for run in find_runs([tmp_path / "one"])]
    add_to_packed(task / "noise" / PACKED, runs)
    _, _, *rows = cells(command(main, task).stdout)
    assert [row[3] for row in rows] == ["0.00", "0.00", "4.00", "9.00"]


def test_steps_of_several_gradients_are_no_steps_of_the_board(task, command, tmp_path):
    write_run(tmp_path / "local", "terngrad", 0)
    reconfigure(tmp_path / "local" / "terngrad-0-0.001", local_steps=8)
    add_to_packed(task / PACKED, [(r.directory.name, r) for r in find_runs([tmp_path / "local"])])
    assert "has terngrad, whose steps are of 8 gradients each" in command(main, task).stderr


def test_what_is_no_task_is_said(task, command):
    (task / "task.yaml").write_text(NOTHING)
    run = command(main, task)
    assert run.returncode == 2 and "holds no task: task.yaml has a title" in run.stderr
    run = command(main, task.parent)
    assert run.returncode == 2 and "holds no task" in run.stderr


@pytest.mark.parametrize("task", ["text", "cifar10", "vit"])
def test_a_target_is_the_mean_of_the_noise_runs_less_what_the_rules_say(task):
    task = read_task(ROOT / "results/board" / task, {})
    (noise,) = (curve for curve in task.curves if len(curve.seeds) >= 10)
    ends = end_values(noise, task.metric)
    allowed = -0.01 if task.up else 0.02
    assert task.target == pytest.approx(noise.final.mean() + allowed, abs=5e-5)
    t = 3.2498  # Student's, of 9 degrees of freedom, two-sided p = 0.01
    assert task.apart == pytest.approx(2**0.5 * t * ends.std(ddof=1), rel=1e-4)
