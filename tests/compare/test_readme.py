"""Tables in READMEs are those that their commands print."""

import re
from functools import partial

import pytest

from dlion.suite.compare import table
from dlion.suite.compare.readme import main
from tests.compare.runs import write_run
from tests.conftest import ROOT

READMES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/README.md")]
)


@pytest.fixture
def readme(command):
    return partial(command, main)


def test_a_table_is_put_behind_its_command_and_the_rest_stays(tmp_path, readme, command):
    write_run(tmp_path / "runs", "g_lion", 0)
    mark = f"<!-- table: dlion table {tmp_path}/runs -->"
    file = tmp_path / "README.md"
    by_hand = "| by | hand |\n| --- | --- |\n"
    for old in ("", "| old |\n| --- |\n| 1 |\n"):
        file.write_text(f"before\n\n{mark}\n{old}\nafter\n\n{by_hand}")
        assert readme("--check", file).returncode == 1
        assert readme(file).stdout == f"{file} is refreshed\n"
        printed = command(table.main, tmp_path / "runs").stdout
        assert file.read_text() == f"before\n\n{mark}\n{printed}\nafter\n\n{by_hand}"
        assert readme(file).stdout == "" and readme("--check", file).returncode == 0


@pytest.mark.parametrize("words", ["touch owned", "dlion plot x", "dlion 'table"])
def test_no_other_command_is_run(tmp_path, monkeypatch, readme, words):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "README.md"
    file.write_text(f"<!-- table: {words} -->\n")
    done = readme(file)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_the_tables_of_this_repository_are_those_that_the_commands_print(monkeypatch, readme):
    monkeypatch.chdir(ROOT)
    assert any("<!-- table:" in file.read_text() for file in READMES)
    done = readme("--check", *READMES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", file.read_text())
    assert not [link for link in links if "//" not in link and not (file.parent / link).exists()]
