"""A run folder from somebody else writes nothing but itself, runs nothing and hangs nobody."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file

import dlion
from dlion.errors import UserError
from dlion.suite.data import images
from dlion.suite.files import whole_file, whole_folder
from dlion.suite.launch.resume import alone_in
from dlion.suite.record.runs import OWN
from tests.compare.runs import write_run
from tests.support.runs import Run, python, train

SMALL = ["dataset=digits", "model=linear", "logger=csv", "workers=2", "processes=1", "steps=4"]
SMALL += ["checkpoint_every=2", "eval_every=2"]
BELOW = [".hydra/config.yaml", "checkpoint/step-00000004", "checkpoint/step-00000006.part"]
BELOW += ["checkpoint/step-00000004/state.json", "model/config.json", "wandb/run-1"]
READ = [("summary.json", "zero"), ("summary.json", "new"), ("metrics.jsonl", "large")]
READ += [("metrics.jsonl", "pipe"), ("failure.txt", "file"), (".hydra", "folder")]
READ += [(".hydra/config.yaml", "pipe"), (".hydra/overrides.yaml", "large")]


@pytest.fixture
def mine(tmp_path):
    """A folder of the user's own, which nothing may change."""
    folder = tmp_path / "mine"
    (folder / "step-00000002").mkdir(parents=True)
    (folder / "id_rsa").write_text("secret")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


@pytest.fixture
def runs(tmp_path):
    """Two runs that no process has made, one of which gets hostile."""
    for method in ("g_lion", "dlion_mavo"):
        write_run(tmp_path / "runs", method, 0)
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def nobody_waits():
    """End a test in this process that reads what never ends."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("foreign") / "run"
    train(*SMALL, f"output_dir={directory}", code=0)
    return directory


@pytest.fixture
def foreign(finished, tmp_path):
    """A copy of a run that was cut off before its end, and has a damaged line."""
    copy = shutil.copytree(finished, tmp_path / "foreign")
    (copy / "summary.json").unlink()
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b"touch pwned\n")
    return copy


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def put(place: Path, kind: str, mine: Path) -> None:
    """Put a link, or what has no end, in place of a file or a folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    targets = {"file": mine / "id_rsa", "folder": mine, "new": mine / "new", "zero": "/dev/zero"}
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "large":
        with place.open("wb") as file:
            file.truncate(1 << 40)
    else:
        place.symlink_to(targets[kind])


def is_one_sentence(text: str) -> bool:
    return text.startswith("error: ") and len(text.splitlines()) == 1


@pytest.mark.parametrize("kind", ["file", "folder", "new", "zero", "pipe"])
@pytest.mark.parametrize("name", [*OWN, *BELOW])
def test_nobody_writes_where_a_name_of_a_run_leads_elsewhere(tmp_path, mine, name, kind):
    directory = tmp_path / "run"
    put(directory / name, kind, mine)
    with pytest.raises(UserError, match="which no run makes: remove it"), alone_in(directory):
        raise AssertionError
    way = tmp_path / "link"
    way.symlink_to(directory)
    (directory / name).unlink()
    with alone_in(way):  # which the user has made
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl.damaged", "metrics.csv", "checkpoint", ".hydra"])
def test_a_run_is_not_resumed_through_a_link(foreign, mine, name):
    put(foreign / name, "file" if "." in name[1:] else "folder", mine)
    done = train(*SMALL, f"output_dir={foreign}", "resume=auto", code=2)
    assert is_one_sentence(done.stderr) and f"{foreign / name}: it is a link" in done.stderr


@pytest.mark.slow
def test_no_run_of_a_sweep_goes_where_its_folder_leads(tmp_path, mine):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "0-dlion_mavo-n2-s0").symlink_to(mine)
    typed = ["-m", "seed=0,1", *SMALL, f"hydra.sweep.dir={sweep}"]
    done = Run(["train.py", *typed]).wait()
    assert done.returncode == 2 and "0-dlion_mavo-n2-s0: it is a link" in done.stderr
    assert (sweep / "1-dlion_mavo-n2-s1" / "summary.json").exists()
    put(sweep / "multirun.yaml", "file", mine)
    done = Run(["train.py", *typed]).wait()
    assert done.returncode == 2 and "multirun.yaml: it is a link" in done.stderr


def test_names_of_unfinished_files_cannot_be_foreseen(tmp_path, mine):
    for name in ("report.html.part", "model.part", "model.old"):
        (tmp_path / name).symlink_to(mine / ("id_rsa" if "html" in name else ""))
    with whole_file(tmp_path / "report.html") as part:
        part.write_text("new")
    for _ in range(2):
        with whole_folder(tmp_path / "model") as part:
            (part / "file").write_text("new")
    assert (tmp_path / "report.html").read_text() == (tmp_path / "model" / "file").read_text()
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(OSError, match="it is a link"), whole_folder(tmp_path / "link"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), READ)
def test_a_run_with_what_has_no_end_is_left_out(runs, mine, name, kind):
    bad = runs / "g_lion-0-0.001"
    put(bad / name, kind, mine)
    for command in ("table", "collect", "report", "plot"):
        done = python("-m", "dlion", command, runs)
        assert done.returncode == 0, done.stderr
        said = done.stdout if command == "collect" else done.stderr
        assert f"{bad / name} could not be read (it " in said
    with pytest.raises(UserError, match="could not be read"):
        dlion.load_model(bad)
    for arguments in (["export", bad], ["publish", runs, "-o", runs.parent / "study"]):
        done = python("-m", "dlion", *arguments)
        assert done.returncode == 2 and is_one_sentence(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "pipe", "zero", "large"])
def test_packed_runs_with_no_end_are_left_out(runs, mine, kind):
    put(runs / "study" / "runs.jsonl", kind, mine)
    done = python("-m", "dlion", "table", runs)
    assert done.returncode == 0 and "runs.jsonl: it " in done.stderr and "g_lion" in done.stdout


@pytest.mark.slow
def test_an_export_has_the_files_of_a_model_and_goes_nowhere_else(runs, mine):
    run = runs / "g_lion-0-0.001"
    (run / "model").mkdir()
    save_file({}, run / "model" / "model.safetensors")
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "authorized_keys").write_text("ssh-rsa")
    put(run / "export", "folder", mine)
    done = python("-m", "dlion", "export", run)
    assert done.returncode == 2 and "export: it is a link" in done.stderr
    (run / "export").unlink()
    done = python("-m", "dlion", "export", run)
    assert done.returncode == 0 and "left out" in done.stderr and "authorized_keys" in done.stderr
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        *("config.json", "config.yaml", "model.safetensors", "summary.json")
    ]
    put(run / "model" / "vocab.txt", "file", mine)
    done = python("-m", "dlion", "export", run, "-o", runs / "taken")
    assert done.returncode == 2 and "vocab.txt: it is a link" in done.stderr
    assert not (runs / "taken").exists()


@pytest.mark.slow
def test_what_a_foreign_folder_of_wandb_leads_to_is_not_sent(tmp_path, mine):
    offline = tmp_path / "run" / "wandb" / "offline-run-20260101_000000-a"
    (offline / "files").mkdir(parents=True)
    (offline / "run-a.wandb").write_bytes(b"")
    put(offline / "files" / "keys", "file", mine)
    done = python("-m", "dlion", "sync", tmp_path / "run")
    assert done.returncode == 2 and "files/keys: it is a link" in done.stderr


@pytest.mark.slow
def test_nobody_is_asked_to_run_the_code_of_a_tokenizer(tmp_path):
    run, canary = tmp_path / "run", tmp_path / "executed"
    text = ["dataset=stdlib_text", "model=gpt_tiny", "model.depth=1", "logger=none"]
    train(*text, "workers=1", "steps=1", "eval_limit=8", f"output_dir={run}", code=0)
    with safe_open(run / "model.safetensors", "pt") as stored:
        tensors, metadata = {n: stored.get_tensor(n) for n in stored.keys()}, stored.metadata()  # noqa: SIM118
    facts = json.dumps({"tokenizer": "tokenizer", "context": 8})
    save_file(tensors, run / "model.safetensors", metadata | {"input": facts})
    (run / "tokenizer").mkdir()
    asking = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (run / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(asking))
    (run / "tokenizer" / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    script = (
        "import builtins, sys, dlion\nfrom dlion.errors import UserError\n"
        "builtins.input = lambda *_: 'y'\n"
        f"try: dlion.load_model({str(run)!r})\nexcept UserError as error: print(error)"
    )
    done = python("-c", script)
    assert "is a tokenizer with code of its own, which is not run" in done.stdout, done.stderr
    assert not canary.exists()


HOSTILE = "[red]x[/]\x1b[31m$\\frac$|`b`<script>alert(1)</script>[a](http://b)\n\u202e_"


@pytest.mark.slow
def test_names_are_shown_as_they_are(runs):
    run = runs / "g_lion-0-0.001"
    summary = json.loads((run / "summary.json").read_text())
    facts = {"optimizer": HOSTILE, "model": HOSTILE, "commit": f"1\n{HOSTILE}"}
    (run / "summary.json").write_text(json.dumps(summary | facts))
    config = f"optimizer: {{name: x, {json.dumps('k{0}' + HOSTILE)}: {json.dumps(HOSTILE)}}}\n"
    (run / ".hydra" / "config.yaml").write_text(config)
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps([f"a={HOSTILE}"]))
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + "[31m\x1b\n")
    write_run(runs, "other", 1, method_name=HOSTILE)
    for command in ("plot", "table", "collect", "report"):
        done = python("-m", "dlion", command, runs)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr and "\u202e" not in done.stdout
        if command == "plot":
            assert done.stdout.count(r"[red]x[/]\x1b[31m$\frac$|`b`<script>") >= 2
        if command == "table":
            rows = done.stdout.splitlines()
            signs = [row.replace("\\\\", "").replace("\\|", "").count("|") for row in rows]
            assert len({*signs}) == 1 and r"\<script>" in done.stdout
            assert "](" not in done.stdout.replace(r"\](", "")
    page = (runs / "report.html").read_text()
    assert "<script>alert(1)" not in page and "\u202e" not in page
    assert "&lt;script" in page or "\\u0026lt;script" in page
    good = python("-m", "dlion", "publish", runs, "-o", runs.parent / "study")
    assert good.returncode == 0, good.stderr
    assert "\x1b" not in (runs.parent / "study" / "provenance.txt").read_text()
    again = python("-m", "dlion", "table", runs.parent / "study")
    assert again.returncode == 0 and not again.stderr


@pytest.mark.parametrize("name", ["../mine/a.png", "link.png", "/dev/zero", "pipe.png"])
def test_a_table_names_pictures_below_its_own_folder_alone(tmp_path, mine, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(mine / "id_rsa")
    os.mkfifo(folder / "pipe.png")
    cells = 20 * [{"bytes": None, "path": name}]
    table = Dataset.from_dict({"image": cells, "label": [i % 2 for i in range(20)]})
    table.to_parquet(folder / "train-0.parquet")
    with pytest.raises(UserError, match=r"not below that folder|is no picture, but"):
        images(str(folder), image_column="image")
