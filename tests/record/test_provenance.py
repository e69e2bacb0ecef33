"""A run tells which code and which machine made it."""

import json
import platform
import subprocess
from pathlib import Path

import pytest

from dlion.suite.record.provenance import commit, provenance
from tests.conftest import ROOT


def git(folder, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *who, *command], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def source(tmp_path):
    """A folder with one file, beside another, in a repository."""
    for name in ("source", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("as it was")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path / "source"


def test_the_commit_says_if_the_source_was_changed(source):
    head = git(source, "rev-parse", "HEAD")
    (source.parent / "results" / "file").write_text("another figure")
    assert commit(source) == head
    (source / "file").write_text("edited")
    assert commit(source) == f"{head}+changes"
    git(source, "checkout", "-q", "file")
    (source / "new").write_text("not added yet")
    assert commit(source) == f"{head}+changes"
    (source / "new").unlink()
    (source.parent / "conf").mkdir()
    (source.parent / "conf" / "recipe.yaml").write_text("other values")
    assert commit(source) == f"{head}+changes"


def test_there_is_no_commit_where_nothing_is_kept(source, tmp_path, monkeypatch):
    installed = source.parent / "site-packages"  # inside a checkout, but not of it
    installed.mkdir()
    (installed / "file").write_text("")
    assert commit(installed) is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / ".git").rename(tmp_path / "elsewhere")
    assert commit(source) is None
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_what_is_told_names_no_person_and_no_place():
    told = provenance("cpu")
    assert told["machine"].endswith(" cores")
    assert told["versions"]["python"] == platform.python_version()
    text = json.dumps(told)
    assert not [word for word in (platform.node(), str(Path.home()), str(ROOT)) if word in text]
