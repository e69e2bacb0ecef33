"""The plot command on recorded runs."""

import json
import math
import re
from functools import partial

import pytest
import yaml
from matplotlib import pyplot

from dlion.suite.compare.curves import make_curves
from dlion.suite.compare.plot import main
from dlion.suite.compare.style import styles_of
from dlion.suite.record.studies import find_runs
from tests.compare.runs import write_run


@pytest.fixture
def plot(command):
    return partial(command, main)


def test_figures_and_table(tmp_path, plot):
    for seed in (0, 1):
        write_run(tmp_path / "runs", "dlion_mavo", seed)
        write_run(tmp_path / "runs", "g_lion", seed)
    run = plot(tmp_path / "runs", "-o", tmp_path / "out" / "figure")
    assert run.returncode == 0, run.stderr
    assert "dlion_mavo" in run.stdout and "31.5x" in run.stdout
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    run = plot(tmp_path / "runs", "-o", tmp_path / "out" / "figure.pdf")
    assert run.returncode == 0 and (tmp_path / "out" / "figure.pdf").read_bytes()[:4] == b"%PDF"
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_switch_names_a_curve_before_the_sizes_that_follow_from_it(tmp_path):
    for seed, (modern, width) in enumerate(((False, 256), (True, 168))):
        write_run(tmp_path, "g_lion", seed)
        file = tmp_path / f"g_lion-{seed}-0.001" / ".hydra" / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["model"] |= {"mlp_dim": width, "modern": modern}
        file.write_text(yaml.safe_dump(config))
    curves = make_curves(find_runs([tmp_path]), "accuracy")
    assert [curve.label for curve in curves] == ["g_lion modern=false", "g_lion modern=true"]


def test_seeds_make_one_curve_and_settings_distinguish_curves(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "dlion_mavo", seed)
    write_run(tmp_path, "dlion_mavo", 0, lr=1e-2)
    write_run(tmp_path, "g_lion", 0)
    curves = {c.label: c for c in make_curves(find_runs([tmp_path]), "accuracy")}
    assert set(curves) == {"dlion_mavo lr=0.001", "dlion_mavo lr=0.01", "g_lion"}
    curve = curves["dlion_mavo lr=0.001"]
    assert curve.seeds == [0, 1] and curve.final.tolist() == [0.7, 0.71]
    assert curve.bits.tolist() == pytest.approx([8 * 160_000 / 72_000, 8 * 320_000 / 72_000])


def test_a_rate_that_a_recipe_looks_up_distinguishes_curves(tmp_path, plot):
    for lr in (1e-3, 1e-2):
        write_run(tmp_path, "g_lion", 0, lr=lr)
    for file in tmp_path.rglob("config.yaml"):
        config = yaml.safe_load(file.read_text())
        config["rates"] = {"g_lion": config["optimizer"]["lr"]}
        config["optimizer"]["lr"] = "${rates.${optimizer.name}}"
        config["output_dir"] = "${hydra:runtime.output_dir}"  # known to a running Hydra only
        file.write_text(yaml.safe_dump(config))
    curves = make_curves(find_runs([tmp_path]), "accuracy")
    assert [curve.label for curve in curves] == ["g_lion lr=0.001", "g_lion lr=0.01"]
    assert plot(tmp_path, "--x", "optimizer.lr", "-o", tmp_path / "figure").returncode == 0


def test_settings_that_follow_from_others_or_are_not_known_are_left_out(tmp_path):
    for seed, workers in enumerate((4, 16)):
        write_run(tmp_path, "g_lion", seed)
        directory = tmp_path / f"g_lion-{seed}-0.001"
        config = yaml.safe_load((directory / ".hydra" / "config.yaml").read_text())
        config |= {"workers": workers, "batch_size": 64 // workers}
        config |= {"precision": "float32"} if seed else {}
        (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
        summary = json.loads((directory / "summary.json").read_text()) | {"workers": workers}
        (directory / "summary.json").write_text(json.dumps(summary))
    curves = make_curves(find_runs([tmp_path]), "accuracy")
    assert [curve.label for curve in curves] == ["g_lion workers=4", "g_lion workers=16"]


def test_a_method_keeps_its_colour_and_settings_have_lines(tmp_path):
    for method in ("dlion_mavo", "g_lion"):
        for lr in (1e-3, 1e-2):
            write_run(tmp_path, method, 0, lr=lr)
    styles = styles_of(make_curves(find_runs([tmp_path]), "accuracy"))
    assert len({style.colour for style in styles.values()}) == 2
    assert len({(style.colour, style.line) for style in styles.values()}) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--x", "step"], ["8 workers", "step", "take turns"]),
        (["--x", "workers", "--best"], ["best test_loss", "workers"]),
        (["--x", "optimizer.lr"], ["learning rate", "0.01"]),
        (["--x", "paper_bits"], ["bits per parameter and step, both ways"]),
        (["--x", "sent_bits"], ["bits that a worker sends, per parameter and step"]),
        (["--x", "seconds"], ["seconds of training", "take turns"]),
        (["--x", "received_bits"], ["bits that a worker receives, per parameter and step"]),
        (["--x", "step", "--panels", "optimizer.lr"], ["lr = 0.001", "lr = 0.01"]),
        (["--panels", "workers"], ["workers = 8", "bits sent per parameter"]),
        (["--x", "bits", "--only", "optimizer.lr=0.001"], ["bands: worst to best of 2 seeds"]),
    ],
)
def test_a_figure_says_what_it_shows(tmp_path, plot, options, words):
    for lr, seed in ((1e-3, 0), (1e-3, 1), (1e-2, 0)):
        write_run(tmp_path / "runs", "dlion_mavo", seed, lr=lr)
        write_run(tmp_path / "runs", "g_lion", seed, lr=lr)
    run = plot(tmp_path / "runs", *options, "--metric", "test_loss", "-o", tmp_path / "figure.svg")
    assert run.returncode == 0, run.stderr
    drawn = " ".join(re.findall("<text[^>]*>(.*?)</text>", (tmp_path / "figure.svg").read_text()))
    for sentence in ("m on d", "20 steps", *words):
        assert sentence in drawn or all(word in drawn for word in sentence.split()), drawn


def test_a_figure_says_how_many_seeds_there_are_where_methods_differ(tmp_path, plot):
    for method, seeds in (("dlion_mavo", 3), ("g_lion", 2), ("signum_mavo", 1)):
        for seed in range(seeds):
            write_run(tmp_path / "runs", method, seed)
    run = plot(tmp_path / "runs", "--x", "step", "-o", tmp_path / "figure.svg")
    assert run.returncode == 0, run.stderr
    assert "worst to best of 2 to 3 seeds" in (tmp_path / "figure.svg").read_text()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_curves_take_turns_beside_one_that_diverged(tmp_path, plot):
    for method, better in (("dlion_mavo", 0.0), ("signum_mavo", 0.0), ("dgc", math.nan)):
        write_run(tmp_path / "runs", method, 0, better=better)
    run = plot(tmp_path / "runs", "--x", "step", "-o", tmp_path / "figure.svg")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "figure.svg").read_text().count("stroke-dashoffset: 7.5") == 1


def test_a_setting_may_be_a_number_or_a_word(tmp_path, plot):
    for lr in (1e-3, "exponential", 10):
        write_run(tmp_path / "runs", "lion_cub", 0, lr=lr)
    run = plot(tmp_path / "runs", "--x", "optimizer.lr", "-o", tmp_path / "figure")
    assert run.returncode == 0, run.stderr


def test_text_runs_are_drawn_by_loss_and_unfinished_runs_are_marked(tmp_path, plot):
    write_run(tmp_path / "runs", "g_lion", 0, accuracy=False)
    (tmp_path / "runs" / "g_lion-0-0.001" / "summary.json").unlink()
    run = plot(tmp_path / "runs", "-o", tmp_path / "figure")
    assert run.returncode == 0, run.stderr
    assert "test loss" in run.stdout and "not finished" in run.stdout


def test_nothing_may_have_been_sent_yet_or_ever(tmp_path, plot):
    """As by DiLoCo in its first rounds, and by a single worker."""
    write_run(tmp_path / "runs", "diloco", 0)
    file = tmp_path / "runs" / "diloco-0-0.001" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for silent in (rows[:1], rows):
        for row in silent:
            row |= {"sent_bytes": 0, "received_bytes": 0, "sent_bits_per_parameter": 0}
            if silent is rows:  # older runs did not count them
                del row["received_bytes"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for options in ([], ["--x", "sent_bits"], ["--x", "received_bits"], ["--x", "bits"]):
            run = plot(tmp_path / "runs", *options, "-o", tmp_path / "figure.png")
            assert run.returncode == 0, run.stderr


def test_wrong_input_is_one_clear_line(tmp_path, plot):
    write_run(tmp_path, "g_lion", 0)
    write_run(tmp_path, "dlion_mavo", 0, accuracy=False)
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "is not a directory"),
        ([tmp_path], "give runs of one kind"),
        ([tmp_path, "--metric", "accuracy"], "type --metric loss"),
        (
            [tmp_path, "--metric", "kkt"],
            "no run has kkt: choose accuracy, loss, received_bytes, seconds, sent_bits",
        ),
        (
            [tmp_path, "--metric", "loss", "--x", "n"],
            "n is no setting of these runs: choose dataset, ",
        ),
        ([tmp_path, "--only", "workers=9"], "none of these runs has workers=9: it is 8"),
        ([tmp_path, "--only", "n=9"], "they have no such setting"),
        ([tmp_path, "--only", "workers"], "type SETTING=VALUE"),
    ):
        run = plot(*arguments, "-o", tmp_path / "x")
        assert run.returncode == 2
        assert sentence in run.stderr and len(run.stderr.splitlines()) == 1


def test_a_table_of_methods_in_the_configuration_is_no_setting(tmp_path):
    """Recipes record a table of all methods' values beside the values of the run's own method."""
    table = {"g_lion": {"lr": 1e-3, "betas": [0.9, 0.99]}, "dgc": {"lr": 0.2}}
    for seed in (0, 1):
        write_run(tmp_path, "g_lion", seed)
    file = tmp_path / "g_lion-1-0.001" / ".hydra" / "config.yaml"
    config = yaml.safe_load(file.read_text()) | {"methods": table}
    config["optimizer"] |= {"lr": "${methods.${optimizer.name}.lr}"}
    file.write_text(yaml.safe_dump(config))
    (curve,) = make_curves(find_runs([tmp_path]), "accuracy")
    assert curve.seeds == [0, 1] and curve.settings["optimizer.lr"] == 1e-3


@pytest.mark.parametrize("x", [[], ["--x", "step"], ["--panels", "workers"]])
def test_a_legend_of_many_curves_covers_neither_title_nor_panels(tmp_path, plot, monkeypatch, x):
    for number in range(30):
        write_run(tmp_path, f"a_method_with_a_long_name_{number}", 0)
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    run = plot(tmp_path, *x, "-o", tmp_path / "x.png")
    assert run.returncode == 0, run.stderr
    (canvas,) = shown
    box = canvas.legends[0].get_window_extent()
    assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1
    assert canvas.bbox.y0 <= box.y0 and box.y1 <= canvas.bbox.y1
    texts = [canvas._suptitle.get_window_extent(), *(a.get_tightbbox() for a in canvas.axes)]
    assert not any(box.overlaps(other) for other in texts)
