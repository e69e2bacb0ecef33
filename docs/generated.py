"""Directives that write the reference from the code: methods, settings, commands, exit codes."""

import contextlib
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from docutils.nodes import Node
from docutils.statemachine import StringList
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dlion.__main__ import COMMANDS, main
from dlion.methods import METHODS, MethodEntry
from dlion.suite.config import resolve
from dlion.suite.launch.cli import run
from dlion.suite.launch.help import USAGE, Entry, settings_of_choice, settings_of_runs
from dlion.workers import Workers

CONF = Path(__file__).parent.parent / "conf"
# what paragraphs of a method's docstring begin with, and the headings that they get
TITLES = {"Source": "Source", "Memory": "State", "When not to use it": "When not to use it"}
PARTS = re.compile(r"(?<=\.)\s+(?=Source:|Everyone\b|The\s+owner\b)")


def composed(*typed: str) -> dict[str, Any]:
    """Return the settings of a run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=[*typed], return_hydra_config=True)
    return OmegaConf.to_container(resolve(config, config.hydra))


class Written(SphinxDirective):
    """A directive whose content is reStructuredText that it writes."""

    has_content = False
    optional_arguments = 1

    def run(self) -> list[Node]:
        lines = StringList(list(self.lines()), source=type(self).__name__)
        return self.parse_text_to_nodes(lines, allow_section_headings=True)

    def lines(self) -> Iterator[str]:
        raise NotImplementedError


class Methods(Written):
    """``.. methods::``: a section for each class of METHODS."""

    def lines(self) -> Iterator[str]:
        homes = dict.fromkeys(method.home for method in METHODS.values())
        for home in homes:
            names = {name: method for name, method in METHODS.items() if method.home == home}
            cls = next(iter(names.values())).name
            yield from heading(f"{cls}: {', '.join(names)}", "-")
            costs = [costs_of(name, method) for name, method in names.items()]
            yield from rows([["name", "bits up", "bits down", "state", "method"], *costs])
            yield from ("", f".. autoclass:: dlion.{cls}", "   :no-members:", "")
            for name in names:
                title = f"Settings of {name}" if len(names) > 1 else "Settings"
                yield from ("", f".. rubric:: {title}", "")
                yield from table(of_choice("optimizer", name))
            yield from specification(cls, list(names))


def costs_of(name: str, method: MethodEntry) -> list[str]:
    """Return bits and state of a method, as the table of all methods has them."""
    params = [torch.nn.Parameter(torch.zeros(512, 512))]
    optimizer = method.cls(params, workers=Workers(local=8), **method.options)
    up, down = optimizer.paper_bits
    state = f"{optimizer.state_bytes / 512**2:.3g} bytes"
    return [f"``optimizer={name}``", f"{up:.3g}", f"{down:.3g}", state, method.summary]


def give_headings(
    app: Sphinx, kind: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Set a method's docstring in sections, without its Args, which the settings repeat."""
    if kind == "class" and documented in [method.cls for method in METHODS.values()]:
        text = inspect.getdoc(documented).partition("\nArgs:")[0]
        lines[:], last = [], ""
        for title, paragraph in sections(text):
            if title != last:
                lines += [f".. rubric:: {title}", ""]
            lines += [*paragraph.splitlines(), ""]
            last = title


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of a method's docstring, each with the title of its section."""
    summary, *paragraphs = text.strip().split("\n\n")
    yield "", summary
    title = "Equations"
    for paragraph in paragraphs:
        first, *others = PARTS.split(paragraph)
        if title != "Equations" and first.partition(":")[0] not in TITLES and first[:2] != "- ":
            title = "Details"
        for part in (first, *others):
            label, _, rest = part.partition(": ")
            title, said = (TITLES[label], rest) if label in TITLES else (title, part)
            yield title, said[:1].upper() + said[1:]


def specification(cls: str, names: list[str]) -> Iterator[str]:
    """Yield the function of the specification, without what type checkers need alone."""
    package = METHODS[names[0]].module.rpartition(".")[0]
    simple = importlib.import_module(f"{package}.simple")
    (name,) = {n for n in vars(simple) if n in names or n.replace("_", "") == cls.lower()}
    function = getattr(simple, name)
    _, _, body = inspect.getsource(function).partition(":\n")
    parameters = ", ".join(inspect.signature(function).parameters)
    first = textwrap.fill(f"def {name}({parameters}):", 80, subsequent_indent=" " * 8)
    yield from ("", ".. rubric:: Specification", "")
    yield from (f"It is tested against this function of ``{package}.simple``:", "")
    yield from code("python", f"{first}\n{body}")


def code(language: str, text: str) -> Iterator[str]:
    """Yield a block of code."""
    yield from ("", f".. code-block:: {language}", "")
    yield from (f"   {line}" for line in text.rstrip().splitlines())
    yield ""


class Choices(Written):
    """``.. choices:: GROUP``: each file of a group of settings, and its settings."""

    def lines(self) -> Iterator[str]:
        (group,) = self.arguments
        for file in sorted((CONF / group).glob("*.yaml")):
            yield from heading(f"{group}={file.stem}", "~")
            lines = file.read_text().splitlines()
            comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
            said = " ".join(line for line in comments if not line.startswith("@package"))
            yield from ("", escaped(said[:1].upper() + said[1:] + "."), "")
            yield from table(of_choice(group, file.stem))


class RunSettings(Written):
    """``.. run-settings::``: the settings that do not depend on a choice."""

    def lines(self) -> Iterator[str]:
        settings = composed("output_dir=outputs/DATE/TIME-NAME")
        yield from table(settings_of_runs(settings))


class Commands(Written):
    """``.. commands::``: the help of ``train.py``, and of each command of ``dlion``."""

    def lines(self) -> Iterator[str]:
        yield from heading("python train.py", "-")
        yield from code("text", USAGE)
        for name, (module, _) in COMMANDS.items():
            yield from heading(f"dlion {name}", "-")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                importlib.import_module(f"dlion.suite.{module}").main(["--help"])
            yield from code("text", printed.getvalue())


class ExitCodes(Written):
    """``.. exit-codes::``: those of ``train.py`` and ``dlion``, from the docstrings."""

    def lines(self) -> Iterator[str]:
        for program, function in (("train.py", run), ("dlion", main)):
            _, _, text = inspect.getdoc(function).partition("Exit codes: ")
            codes = " ".join(text.split("\n\n")[0].split()).rstrip(".")
            yield from ("", f"**{program}**", "")
            yield from rows(
                [["code", "meaning"], *(code.split(" ", 1) for code in codes.split(", "))]
            )


def of_choice(group: str, name: str) -> Iterator[Entry]:
    """Yield the settings of a choice."""
    return settings_of_choice(group, composed(f"{group}={name}")[group])


def table(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield a table of settings."""
    cells = []
    for entry in entries:
        kind = f" ({entry.kind})" if entry.kind else ""
        cells.append([f"``{entry.typed}``", escaped(entry.sentence + kind)])
    if cells:
        yield from rows([["setting", "meaning and values"], *cells])


def rows(cells: list[list[str]]) -> Iterator[str]:
    """Yield a table whose first row is its heading."""
    yield from ("", ".. list-table::", "   :header-rows: 1", f"   :class: of-{len(cells[0])}", "")
    for row in cells:
        for number, cell in enumerate(row):
            yield f"   {'  ' if number else '* '}- {cell}"
    yield ""


def heading(title: str, line: str) -> Iterator[str]:
    """Yield a title of a section."""
    yield from ("", title, line * len(title), "")


def escaped(text: str) -> str:
    """Return a text in which nothing is markup."""
    return "".join(f"\\{c}" if c in "*`|_\\" else c for c in text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    for name, directive in {
        "methods": Methods,
        "choices": Choices,
        "run-settings": RunSettings,
        "commands": Commands,
        "exit-codes": ExitCodes,
    }.items():
        app.add_directive(name, directive)
    app.connect("autodoc-process-docstring", give_headings, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
