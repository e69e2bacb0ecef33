"""``dlion``: one style for all commands, and what a folder from elsewhere may not do to them."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dlion
from dlion.__main__ import COMMANDS, main
from tests.compare.runs import write_run
from tests.support.runs import python

READ_RUNS = ("collect", "plot", "report", "table", "publish", "export", "sync")


@pytest.fixture
def typed(command):
    """Type a command line behind ``dlion``."""
    return lambda *arguments: command(main, *arguments)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in outputs, seen from the folder above."""
    for method in ("g_lion", "dlion_mavo"):
        write_run(tmp_path / "outputs", method, 0)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


@pytest.mark.slow
def test_help_lists_the_commands_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom dlion.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: code = end.code\n"
        "print(code, [name for name in ('torch', 'numpy', 'matplotlib', 'plotly', 'wandb', 'hydra')"
        " if name in sys.modules])"
    )
    python = [sys.executable, "-OO"]  # without docstrings
    done = subprocess.run([*python, "-c", script], capture_output=True, text=True)
    *page, imported = done.stdout.splitlines()
    assert imported == "0 []", done.stderr
    for name, (_, line) in COMMANDS.items():
        assert any(words.split()[:1] == [name] and line in words for words in page)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_with_an_example(typed, name):
    done = typed(name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: dlion {name} [-h]")
    assert f"example: dlion {name} " in done.stdout
    if name in READ_RUNS:
        assert "default: outputs" in " ".join(done.stdout.split())


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(typed, word):
    assert typed(word).stdout == f"dlion {dlion.__version__}\n"


@pytest.mark.slow
def test_words_are_checked_before_slow_imports():
    script = "import sys\nfrom dlion.__main__ import main\ntry: main(['methods', '--xx'])\n"
    script += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "2 False\n" and "unrecognized arguments: --xx" in done.stderr


def test_large_numbers_may_end_in_a_letter(typed):
    words = ["--workers", "64", "--rate", "10gbit", "--compute", "0.5"]
    for short, long in (("7B", "7e9"), ("1.1b", "1.1e9"), ("124M", "124000000")):
        one, other = (typed("predict", "--parameters", n, *words) for n in (short, long))
        assert one.returncode == 0 and one.stdout == other.stdout


def test_help_is_a_word_too(typed):
    assert typed("help").stdout == typed("--help").stdout
    assert typed("help", "plot").stdout == typed("plot", "--help").stdout


def test_settings_have_the_names_that_are_typed_for_training(typed, runs, tmp_path):
    write_run(runs, "g_lion", 1)
    for only, lines in (("optimizer=g_lion", 1), ("seed=0", 2), ("seed=1", 1)):
        table = typed("table", "--only", only)
        assert table.returncode == 0 and len(table.stdout.splitlines()) == 2 + lines, only
    assert typed("plot", "--x", "optimizer", "-o", "x.png").returncode == 0
    assert typed("plot", "--panels", "optimizer", "-o", "x.png").returncode == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "type a command, such as `dlion plot outputs`"),
        (["plto", "outputs"], "plto is not a command (did you mean plot?): choose collect, plot, "),
        (["--verbose"], "unrecognized arguments: --verbose"),
        (["plot", "--xx", "1"], "unrecognized arguments: --xx"),
        (["plot", "nowhere"], "nowhere is not a directory"),
        (["report", "empty"], "empty holds no run"),
        (["report", "outputs", "-o", "empty"], "-o empty is a folder: type -o empty/report.html"),
        (["report", "outputs", "-o", "file/x.html"], "file could not be read or written"),
        (["plot", "outputs", "-o", "x.jpg"], "x.jpg is no picture: choose .png, .svg, .pdf"),
        (["collect", "outputs", "-o", "empty"], "-o empty is a folder"),
        (
            ["report", "-o", "x.pdf"],
            "x.pdf is not a format of this command: choose .html, .htm",
        ),
        (
            ["table", "-o", "x.csv"],
            "x.csv is not a format of this command: choose .md",
        ),
        (["report", "-o", "x.txt"], "x.txt is not a format of this command: choose .html"),
        (["plot", "--x", "seed"], "seed is no axis: runs that differ by it alone are one curve"),
        (["plot", "--x", "lr"], "lr is no setting of these runs (did you mean optimizer.lr?)"),
        (["table", "--only", "lr=1"], "they have no such setting (did you mean optimizer.lr?)"),
        (["table", "outputs", "-o", "/proc/x"], "/proc/x"),
        (["publish", "outputs"], "required: -o"),
        (["export", "outputs"], "outputs holds 2 runs: name one of them, such as outputs/dlion"),
        (["export", "outputs", "-o", "m.safetensors"], "-o m.safetensors is a folder"),
        (["predict", "--parameters", "7X"], "7X is not a whole number from 1 to 1e+15"),
        (["predict", "--parameters", "0.5"], "0.5 is not a whole number"),
        (["sync", "outputs"], "outputs holds no run recorded offline"),
        (["prepare", "nowhere.txt", "-o", "x", "--held-out", "1"], "give 2 or more"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(typed, runs, tmp_path, words, sentence):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    done = typed(*words)
    assert done.returncode == 2 and sentence in done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_without_runs_outputs_is_meant_and_files_go_there(typed, runs, tmp_path):
    assert typed("plot").stdout.endswith("outputs/curves.png\n")
    assert typed("report").stdout == "outputs/report.html\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
    assert {"curves.png", "report.html"} <= {path.name for path in runs.iterdir()}
    printed = typed("collect").stdout
    assert typed("collect", "-o", "new/runs.csv").stdout == "new/runs.csv\n"
    assert (tmp_path / "new" / "runs.csv").read_bytes().decode() == printed
    assert typed("table", "-o", "t.md").returncode == 0
    assert (tmp_path / "t.md").read_text() == typed("table").stdout


def test_beside_a_packed_file_is_its_folder(typed, runs, tmp_path):
    assert typed("publish", "-o", "study").returncode == 0
    assert typed("plot", "study/runs.jsonl", "-o", "study/n0.1").stdout.endswith("n0.1.png\n")
    assert typed("report", "study/runs.jsonl").stdout == "study/report.html\n"


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_of_the_kind_of_their_suffix(typed, runs, tmp_path, suffix, start):
    assert typed("plot", "-o", f"a.{suffix}").returncode == 0
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)


@pytest.mark.slow
def test_a_reader_that_leaves_and_a_full_disk_end_it_without_a_traceback(runs, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        process = [sys.executable, "-m", "dlion", "collect"]
        done = subprocess.run(process, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == ""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(process, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_what_was_typed_is_shown_as_typed_and_never_looked_up(typed, runs, monkeypatch):
    monkeypatch.setenv("PLANTED", "hunter2")
    directory = runs / "g_lion-0-0.001"
    texts = ["optimizer.lr=${oc.env:PLANTED}", "schedule.warmup_steps=${steps}"]
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(texts))
    sweep = {"sweeper": {"params": {"seed": "${oc.env:PLANTED}"}}, "overrides": {"task": texts}}
    (runs / "multirun.yaml").write_text(yaml.safe_dump({"hydra": sweep}))
    done = typed("collect")
    assert done.returncode == 0, done.stderr
    _, row = rows(done.stdout)
    assert row["overrides"] == " ".join(texts)
    assert typed("publish", "-o", "study").returncode == 0
    written = [path.read_text() for path in runs.parent.glob("study/*.[jt]*")]
    assert "hunter2" not in "".join([done.stdout, *written])
    assert "warmup_steps=${steps}" in "".join(written)


@pytest.mark.parametrize("start", ["=HYPERLINK()", "@SUM(1)", "+1", "-x", "\t=1"])
def test_no_cell_is_a_formula(typed, runs, start):
    directory = runs / "g_lion-0-0.001"
    summary = json.loads((directory / "summary.json").read_text()) | {"optimizer": start}
    summary["test_loss"] = -1.5
    (directory / "summary.json").write_text(json.dumps(summary))
    (row,) = (row for row in rows(typed("collect").stdout) if row["test_loss"] == "-1.5")
    assert row["optimizer"] == f"'{start}"


# what writes where -o says, with a name of the right kind, and what the file begins with
WRITERS = [
    (("collect",), "a.csv", b"status"),
    (("table",), "a.md", b"| "),
    (("report",), "a.html", b"<!DOCTYPE html>"),
    (("plot",), "a.svg", b"<?xml"),
    (("dashboard",), "a.json", b"{"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "name", "start"), WRITERS)
def test_what_is_no_regular_file_is_written_into_and_links_are_followed(
    runs, tmp_path, words, name, start
):
    stream = tmp_path / f"pipe-{name}"
    os.mkfifo(stream)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("old")
    with (tmp_path / "read").open("wb") as read:
        reader = subprocess.Popen(["cat", stream], stdout=read)
    piped = python("-m", "dlion", *words, "-o", stream, cwd=tmp_path)
    assert reader.wait(60) == 0
    assert (tmp_path / "read").read_bytes().startswith(start), piped.stderr
    assert stream.is_fifo() and str(stream) not in piped.stdout
    linked = name.replace("a", "link-a")
    (tmp_path / linked).symlink_to(tmp_path / "target")
    done = python("-m", "dlion", *words, "-o", linked, cwd=tmp_path)
    assert linked in done.stdout and (tmp_path / linked).is_symlink()
    assert (tmp_path / "target").read_bytes().startswith(start)
    full = python("-m", "dlion", *words, "-o", "/dev/full", cwd=tmp_path)
    assert Path("/dev/full").is_char_device() and full.returncode == 2
    assert full.stderr.endswith(
        "/dev/full could not be read or written (No space left on device): name another place\n"
    )


@pytest.mark.slow
def test_what_is_written_to_stdout_is_all_of_it(runs, tmp_path):
    command = [sys.executable, "-m", "dlion", "collect", "-o", "/dev/stdout"]
    printed = subprocess.run([*command[:-2]], capture_output=True).stdout
    assert subprocess.run(command, capture_output=True).stdout == printed
    with (tmp_path / "all.csv").open("ab") as file:
        file.write(b"before\n")
        file.flush()
        subprocess.run(command, stdout=file, check=True)
    assert (tmp_path / "all.csv").read_bytes() == b"before\n" + printed


@pytest.mark.parametrize("place", ["report.html", "curves.png"])
def test_a_link_in_a_folder_from_elsewhere_leads_nowhere(typed, runs, tmp_path, place):
    (tmp_path / "mine").write_text("precious")
    (runs / place).symlink_to(tmp_path / "mine")
    assert typed(place.replace("curves.png", "plot").removesuffix(".html")).returncode == 0
    assert (tmp_path / "mine").read_text() == "precious"
    (runs / place).unlink()
    os.mkfifo(runs / place)
    done = typed(place.replace("curves.png", "plot").removesuffix(".html"))
    assert done.returncode == 2 and "it is not a regular file" in done.stderr


LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 12)
)
WHOLE = {"optimizer": "g", "model": "m", "dataset": "d", "workers": 8}
WHOLE |= {"paper_bits_up": 1, "paper_bits_down": 1}
ODD = [
    (".hydra/config.yaml", "workers: x", "workers must be a whole number, got 'x'"),
    (".hydra/config.yaml", "optimizer: [1]", "optimizer must be a group of settings, got [1]"),
    (".hydra/config.yaml", "model: {name: 3}", "name must be a word, got 3"),
    (".hydra/config.yaml", "lr: [1", "is damaged ("),
    ("summary.json", "{}", "optimizer must be a word, got None"),
    ("summary.json", "[1]", "is damaged (it is not an object)"),
    ("summary.json", "[" * 100_000, "recursion"),
    ("metrics.jsonl", '{"step": 0, "test_loss": 1}\n', "step must be above 0, got 0"),
    ("metrics.jsonl", '{"step": 1, "test_loss": 1}\n', "seconds must be a number, got None"),
    (".hydra/overrides.yaml", "[1", "is damaged ("),
    ("metrics.jsonl", f'{{"step": {10**400}, "test_loss": 1}}\n', "step is above 2^63"),
    ("summary.json", json.dumps(WHOLE | {"steps": -(10**400)}), "steps is above 2^63"),
    (".hydra/config.yaml", LAUGHS, "aliases"),
    (".hydra/overrides.yaml", LAUGHS, "aliases"),
]


@pytest.mark.parametrize(("name", "text", "reason"), ODD)
def test_a_run_with_an_odd_file_is_left_out_by_name_and_the_others_are_shown(
    typed, runs, name, text, reason
):
    directory = runs / "g_lion-0-0.001"
    (directory / name).write_text(text)
    done = typed("table")
    assert done.returncode == 0 and "dlion_mavo" in done.stdout and "g_lion" not in done.stdout
    assert done.stderr.startswith("warning: left out: outputs/g_lion-0-0.001")
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1
    done = typed("collect")
    assert done.returncode == 0 and not done.stderr
    good, bad = rows(done.stdout)
    assert good["status"] == "finished" and bad["status"] == "damaged"
    assert bad["directory"] == "outputs/g_lion-0-0.001" and reason in bad["failure"]
    done = typed("publish", "-o", "study")
    assert done.returncode == 2 and reason in done.stderr  # results are not published in part


@pytest.mark.parametrize("line", ["{", '{"step": ' + 5000 * "9" + "}", '{"step": ' + 9999 * "["])
def test_damaged_lines_are_left_out_and_counted(typed, runs, line):
    file = runs / "g_lion-0-0.001" / "metrics.jsonl"
    file.write_text(f"{line}\n{file.read_text()}")
    done = typed("table")
    assert done.returncode == 0 and "g_lion" in done.stdout
    assert f"left out: 1 damaged lines of outputs/{file.parent.name}" in done.stderr


@pytest.mark.parametrize("name", ["multirun.yaml", "g_lion-0-0.001/.hydra/hydra.yaml"])
@pytest.mark.parametrize(
    "text", ["hydra: 3", "a: [1", "hydra: {launcher: {_target_: SlurmLauncher}}"]
)
def test_an_odd_file_of_hydra_does_not_end_the_table(typed, runs, name, text):
    (runs / name).write_text(text)
    done = typed("collect")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert [row["status"] for row in table] == ["finished", "finished", "damaged"]
    assert name in table[-1]["failure"]


def test_where_nothing_can_be_read_it_is_said(typed, runs):
    for directory in runs.iterdir():
        (directory / "summary.json").write_text("{}")
    done = typed("plot")
    assert done.returncode == 2 and "none of these runs can be read" in done.stderr
