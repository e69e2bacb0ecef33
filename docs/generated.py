"""Directives that write the reference from the code: methods, settings, commands, exit codes."""

import contextlib
import importlib
import inspect
import io
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
from dlion.methods import METHODS, Method, simple
from dlion.suite.config import resolve
from dlion.suite.launch.cli import run
from dlion.suite.launch.help import USAGE, Entry, settings_of_choice, settings_of_runs
from dlion.workers import Workers

CONF = Path(__file__).parent.parent / "conf"


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
    """``.. methods::``: a section for each class of METHODS, with its names, settings, source."""

    def lines(self) -> Iterator[str]:
        homes = dict.fromkeys(method.home for method in METHODS.values())
        for home in homes:
            names = {name: method for name, method in METHODS.items() if method.home == home}
            cls = next(iter(names.values())).name
            yield from heading(f"{cls}: {', '.join(names)}", "-")
            for name, method in names.items():
                yield from (
                    "",
                    f"| ``optimizer={name}``: {method.summary}.",
                    f"| {traffic(method)}",
                )
            yield from ("", f".. autoclass:: dlion.{cls}", "")
            for name in names:
                title = f"Settings of {name}" if len(names) > 1 else "Settings"
                yield from ("", f".. rubric:: {title}", "")
                yield from table(of_choice("optimizer", name))
            yield from specification(cls, list(names))


def traffic(method: Method) -> str:
    """Return bits and state of a method, as the table of all methods has them."""
    params = [torch.nn.Parameter(torch.zeros(512, 512))]
    optimizer = method.cls(params, workers=Workers(local=8), **method.options)
    up, down = optimizer.paper_bits
    state = optimizer.state_bytes / 512**2
    return f"Bits up {up:.3g}, down {down:.3g}; state {state:.3g} bytes a parameter."


def specification(cls: str, names: list[str]) -> Iterator[str]:
    """Yield the function of the specification, without what type checkers need alone."""
    known = [name for name in (*names, cls.lower()) if hasattr(simple, name)]
    for name in known[:1]:
        source = inspect.getsource(getattr(simple, name)).rstrip()
        yield from ("", ".. rubric:: Specification", "")
        yield from ("It is tested against this function of ``dlion.methods.simple``:", "")
        yield from (".. code-block:: python", "", textwrap.indent(source, "   "), "")


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
        yield from ("", ".. code-block:: text", "", textwrap.indent(USAGE.rstrip(), "   "), "")
        for name, (module, _) in COMMANDS.items():
            yield from heading(f"dlion {name}", "-")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                importlib.import_module(f"dlion.suite.{module}").main(["--help"])
            text = textwrap.indent(printed.getvalue().rstrip(), "   ")
            yield from ("", ".. code-block:: text", "", text, "")


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
    yield from ("", ".. list-table::", "   :header-rows: 1", "")
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
    return {"parallel_read_safe": True}
