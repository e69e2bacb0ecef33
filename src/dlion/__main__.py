"""``dlion COMMAND``: show runs, prepare data and export models. ``train.py`` trains."""

import argparse
import importlib
import os
import sys

import dlion
from dlion.suite.arguments import Parser, errors_end_the_command
from dlion.suite.terminal import patience
from dlion.values import did_you_mean

# the module of dlion.suite with the function ``main``, and what it does; imported when it is used
COMMANDS = {
    "collect": ("compare.collect", "print a CSV table: status and results of each run"),
    "plot": ("compare.plot", "draw accuracy against bandwidth, or against a setting"),
    "report": ("compare.report", "write an interactive HTML report"),
    "table": ("compare.table", "print a Markdown table for a README"),
    "board": ("compare.board", "print final results of methods, their costs and the noise"),
    "methods": ("compare.methods", "print a Markdown table of the methods"),
    "publish": ("compare.publish", "pack finished runs, with figure and origin"),
    "export": ("record.export", "copy the trained model of a run to a folder"),
    "sync": ("record.sync", "send runs that were recorded offline to Weights & Biases"),
    "dashboard": ("compare.dashboard", "make a workspace and a report in Weights & Biases"),
    "prepare": ("data.prepare", "turn text into tokens to train on"),
    "lighthouse": ("lighthouse", "start the meeting point of elastic workers"),
    "predict": ("predict", "predict the time of a step on your machines"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name; without arguments, those of this process.

    Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.
    """
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="dlion",
        usage="dlion COMMAND [ARGUMENT ...]",
        description="show runs, prepare data and export models; train.py trains",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()),
                "",
                "RUNS: directories of a run or above many, or packed files (runs.jsonl); default:",
                "outputs. Files are written beside them. `dlion COMMAND --help` tells more.",
                "Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dlion {dlion.__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    typed = sys.argv[1:] if arguments is None else arguments
    if typed[:1] == ["help"]:
        typed = [*typed[1:2], "--help"]
    elif typed == ["version"]:
        typed = ["--version"]
    name = parser.parse_args(typed[:1]).command
    if name not in COMMANDS:
        parser.error(_no_command(name))
    os.environ["MPLBACKEND"] = "agg"  # figures are files, whatever a notebook has set
    with errors_end_the_command():
        with patience("loading Python's modules", 5, sys.stderr):
            module = importlib.import_module(f"dlion.suite.{COMMANDS[name][0]}")
        module.main(typed[1:])


def _no_command(name: str | None) -> str:
    if name is None:
        return "type a command, such as `dlion plot outputs`; `dlion --help` lists them"
    return f"{name} is not a command{did_you_mean(name, COMMANDS)}: choose {', '.join(COMMANDS)}"


if __name__ == "__main__":
    main()
