"""The site is built without a warning, tutorials work word for word, pages keep to a form."""

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

import dlion
from dlion.methods import METHODS
from dlion.suite.record.runs import OWN
from tests.conftest import ROOT
from tests.support.form import Form, form_of
from tests.support.readmes import commands, words
from tests.support.runs import FORKED_PYTHON, python, train

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
MARKED = re.compile(r"<!-- (test|prints|file: \S+) -->\n```\w+\n(.*?)^```", re.M | re.S)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "sweep/README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "results").rglob("*.md"))
# longer than pages are written, so that only what rots is found
LIMITS = Form(mean_words=17, longest_sentence=32, longest_row=240, words_to_code=60)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built by the command that the README says."""
    folder = tmp_path_factory.mktemp("site")
    (typed,) = {c.text for c in commands() if c.text.startswith("sphinx-build")}
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    built = python("-m", "sphinx", "-q", *words(typed)[1:-1], folder, env=offline)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_public_name_and_method_and_setting(site):
    reference = "".join(page.read_text() for page in (site / "docs/reference").glob("*.html"))
    assert set(dlion.__all__) <= set(re.findall(r'id="dlion\.(\w+)"', reference))
    assert all(f"optimizer={name}" in reference for name in METHODS)
    assert "checkpoint_every=null" in reference and "dataset.alpha=0.5" in reference


@pytest.mark.slow
def test_the_site_has_all_of_each_method(site):
    _, *methods = (site / "docs/reference/methods.html").read_text().split("<section id=")
    assert len(methods) == len({method.cls for method in METHODS.values()})
    parts = "bits up", "bits down", "state", "Equations", "Source", "When not to use it", "Settings"
    for text in methods:
        lacks = [part for part in (*parts, "Specification") if part not in text]
        assert not lacks, f"{text[:60]} lacks {lacks}"


@pytest.mark.slow
def test_the_site_is_searched_without_a_network(site):
    page = (site / "search.html").read_text()
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]+)"', page)
    assert loaded and not [address for address in loaded if "//" in address]
    assert "byzantin" in (site / "searchindex.js").read_text()  # stems of words


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works_word_for_word(tmp_path, page):
    for name in ("train.py", "conf", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    programs = {"python": "", "dlion": "-m dlion", "torchrun": "-m torch.distributed.run"}
    for name, module in programs.items():
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {FORKED_PYTHON} {module} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    printed = ""
    for mark, block in MARKED.findall(page.read_text()):
        if mark == "test":
            typed = ["bash", "-euc", block]
            done = subprocess.run(
                typed, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PATH": path}
            )
            assert done.returncode == 0, done.stdout + done.stderr
            printed = done.stdout
        elif mark == "prints":
            pattern = ".*".join(map(re.escape, block.strip().split("...")))
            assert re.search(pattern, printed, re.S), printed
        else:
            (tmp_path / mark.removeprefix("file: ")).write_text(block)


@pytest.mark.slow
def test_the_page_of_files_names_what_a_run_leaves(tmp_path):
    typed = ["dataset=digits", "model=linear", "workers=2", "steps=2", "eval_every=2"]
    typed += ["logger=none", "box=true", "agreement=true", "profile=true", "nonfinite=skip"]
    train(*typed, f"output_dir={tmp_path / 'run'}", code=0)
    page = (ROOT / "docs/reference/files.md").read_text()
    files, fields, keys, _ = (
        re.findall(r"^\| (`.*?`) \| [^|]* \|(?: (.*?) \|)?$", part, re.M)
        for part in page.split("\n## ")
    )
    allowed, always = names(files), names(row for row in files if "always" in row[1])
    assert allowed <= {*OWN}  # where nothing may lead elsewhere
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert always | {"profile.json"} == left <= allowed
    assert names(keys) == {*json.loads((tmp_path / "run" / "summary.json").read_text())}
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    parts = {
        name.replace(".bias", ".KIND").replace(".weight", ".KIND") for name in json.loads(last)
    }
    elastic = names(row for row in fields if "`elastic=true`" in row[1])
    assert names(fields) - {"accuracy_TASK"} - elastic == parts


def names(rows: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names in the first cells of a table."""
    return {name for cell, _ in rows for name in re.findall(r"`(.*?)`", cell)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_keeps_to_the_form(page):
    form = form_of(page.read_text())
    limits = LIMITS if page == ROOT / "README.md" else LIMITS._replace(words_to_code=10_000)
    assert [None for found, most in zip(form, limits, strict=True) if found > most] == [], form


def test_a_page_knows_how_long_a_script_is():
    for page in PAGES:
        for script, count in re.findall(r"\((\S+\.py)\) has (\d+) lines", page.read_text()):
            assert len((page.parent / script).read_text().splitlines()) == int(count), script


def test_the_form_is_measured():
    text = "# A title\n\nOne two **three.** Four `x y` five.\n\n| a | b |\n\n    a line of code\n\n"
    text += "- six\n\n```sh\nls\n```"
    assert form_of(text) == Form(2.3, longest_sentence=3, longest_row=9, words_to_code=11)
