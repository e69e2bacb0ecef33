"""The plot command on recorded runs."""

import subprocess
import sys

import pytest

from dlion.results.curves import make_curves
from dlion.results.record import find_runs
from tests.results.runs import write_run


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlion.results.plot", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_figures_and_table(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs", "dlion_mavo", seed)
        write_run(tmp_path / "runs", "g_lion", seed)
    run = plot(tmp_path / "runs", "-o", tmp_path / "out" / "figure")
    assert run.returncode == 0, run.stderr
    assert "dlion_mavo" in run.stdout and "31.5x" in run.stdout
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_make_one_curve_and_settings_tell_curves_apart(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "dlion_mavo", seed)
    write_run(tmp_path, "dlion_mavo", 0, lr=1e-2)
    write_run(tmp_path, "g_lion", 0)
    curves = {c.label: c for c in make_curves(find_runs([tmp_path]), "accuracy")}
    assert set(curves) == {"dlion_mavo lr=0.001", "dlion_mavo lr=0.01", "g_lion"}
    curve = curves["dlion_mavo lr=0.001"]
    assert curve.seeds == 2 and curve.final.tolist() == [0.7, 0.71]
    assert curve.bits.tolist() == pytest.approx([8 * 160_000 / 72_000, 8 * 320_000 / 72_000])


@pytest.mark.parametrize("x", ["step", "workers", "optimizer.lr"])
def test_other_figures(tmp_path, x):
    for lr in (1e-3, 1e-2):
        write_run(tmp_path / "runs", "dlion_mavo", 0, lr=lr)
        write_run(tmp_path / "runs", "g_lion", 0, lr=lr)
    run = plot(tmp_path / "runs", "--x", x, "--metric", "test_loss", "-o", tmp_path / "figure")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_setting_may_be_a_number_or_a_word(tmp_path):
    for lr in (1e-3, "exponential", 10):
        write_run(tmp_path / "runs", "lion_cub", 0, lr=lr)
    run = plot(tmp_path / "runs", "--x", "optimizer.lr", "-o", tmp_path / "figure")
    assert run.returncode == 0, run.stderr


def test_text_runs_are_drawn_by_loss_and_unfinished_runs_are_marked(tmp_path):
    write_run(tmp_path / "runs", "g_lion", 0, accuracy=False)
    (tmp_path / "runs" / "g_lion-0-0.001" / "summary.json").unlink()
    run = plot(tmp_path / "runs", "-o", tmp_path / "figure")
    assert run.returncode == 0, run.stderr
    assert "test loss" in run.stdout and "not finished" in run.stdout


def test_wrong_input_is_one_clear_line(tmp_path):
    write_run(tmp_path, "g_lion", 0)
    write_run(tmp_path, "dlion_mavo", 0, accuracy=False)
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "is not a directory"),
        ([tmp_path], "give runs of one kind"),
        ([tmp_path, "--metric", "accuracy"], "type --metric loss"),
        (
            [tmp_path, "--metric", "kkt"],
            "no run has kkt: choose accuracy, loss, seconds, sent_bits",
        ),
        ([tmp_path, "--metric", "loss", "--x", "n"], "--x=n: choose step, batch_size, dataset"),
    ):
        run = plot(*arguments, "-o", tmp_path / "x")
        assert run.returncode == 2
        assert sentence in run.stderr and len(run.stderr.splitlines()) == 1
