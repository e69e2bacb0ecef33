"""Create the project's pages in Weights & Biases.

A workspace (interactive) and a report (to show): accuracy against bits, loss against steps,
speed and traffic. A curve is the mean of the runs of one data set, model, method and number of
workers, and its band goes from the lowest to the highest of them: over seeds, if nothing else was
swept (filter the runs otherwise). Without a key or a server, what would have been created is
written to FILE, and the exit code is 1.
"""

import dataclasses
import json
from typing import Any

from dlion.errors import RunFailed
from dlion.suite.arguments import DEFAULT_RUNS, make_parser, of_kind, output_file
from dlion.suite.files import write_atomically
from dlion.suite.record.loggers import why_not_sync

DEFAULT = DEFAULT_RUNS / "dashboard.json"
TITLE = "Accuracy against bandwidth"
GROUPS = ("dataset.name", "model.name", "optimizer.name", "workers")
MOST_RUNS = 500  # runs or groups in a panel; W&B's own limit is 10, a recipe has up to 120
_MEAN_WITH_BAND = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}


def make_panels() -> dict[str, list[Any]]:
    """Return the panels by the name of their section.

    A panel groups runs by the keys of its run set: on its own it could group by one key only.
    """
    from wandb_workspaces.reports import v2 as wr

    accuracy_at_end = wr.ScatterPlot(
        title="at the end, against bytes a step",
        log_x=True,
        x=wr.SummaryMetric("run/sent_bytes_per_step"),
        y=wr.SummaryMetric("run/test_accuracy"),
    )
    return {
        "Accuracy against bandwidth": [
            _curve_against_bits("accuracy"),
            _curve_against_bits("loss"),
            accuracy_at_end,
        ],
        "Loss against steps": [
            _curve("test loss", "step", "test/loss", title_x="steps"),
            _curve("training loss", "step", "train/loss", title_x="steps"),
            _curve("test accuracy", "step", "test/accuracy", title_x="steps"),
        ],
        "Speed": [_bars("seconds a step", "run/seconds_per_step", "seconds")],
        "Traffic": [
            _bars("sent by a worker, a step", "run/sent_bytes_per_step", "bytes"),
            _curve("sent so far", "step", "sent_gigabytes", title_x="steps", title_y="GB"),
        ],
        "Configurations": [wr.RunComparer(diff_only="split")],
    }


def _curve_against_bits(name: str) -> Any:
    return _curve(
        f"{name} against bits",
        "sent_bits_per_parameter",
        f"test_vs_bits/{name}",
        log_x=True,
        title_x="bits sent per parameter and worker",
    )


def _curve(title: str, x: str, y: str, **options: Any) -> Any:
    from wandb_workspaces.reports import v2 as wr

    return wr.LinePlot(
        title=title, x=x, y=[y], max_runs_to_show=MOST_RUNS, **_MEAN_WITH_BAND, **options
    )


def _bars(title: str, metric: str, unit: str) -> Any:
    from wandb_workspaces.reports import v2 as wr

    return wr.BarPlot(
        title=title,
        metrics=[wr.SummaryMetric(metric)],
        title_x=unit,
        max_runs_to_show=MOST_RUNS,
        max_bars_to_show=MOST_RUNS,
        **_MEAN_WITH_BAND,
    )


def make_workspace(entity: str, project: str) -> Any:
    """Return the workspace, not saved yet."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=panels, is_open=True) for name, panels in make_panels().items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="sent_bits_per_parameter", max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in GROUPS]),
    )


def make_report(entity: str, project: str) -> Any:
    """Return the report, not saved yet."""
    from wandb_workspaces.reports import v2 as wr

    blocks: list[Any] = [
        wr.P("Bits and bytes are those a worker sent, counted at the collectives."),
        wr.P("Curves are means of runs of one data set, model, method and number of workers."),
    ]
    for name, panels in make_panels().items():
        groups = [f"config.{key}" for key in GROUPS]
        runs = wr.Runset(entity=entity, project=project, groupby=groups)
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title=TITLE, blocks=blocks, width="fluid")


def specification(entity: str, project: str) -> dict[str, Any]:
    """Return the workspace and report as JSON: arguments of ``wandb_workspaces``' classes."""
    workspace, report = make_workspace(entity, project), make_report(entity, project)
    return {"workspace": _plain(workspace), "report": _plain(report)}


def _plain(value: Any) -> Any:
    """Return a part of a page as JSON: the name of its class, and its arguments."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    given = {key: _plain(part) for key, part in vars(value).items() if not key.startswith("_")}
    return {"class": type(value).__name__} | {k: v for k, v in given.items() if v is not None}


def create(entity: str | None, project: str) -> tuple[list[str], str | None]:
    """Create the workspace and the report.

    Returns:
        The addresses of what was created, and why no more was; None if all was.
    """
    addresses: list[str] = []
    try:
        import wandb

        owner = entity or wandb.Api().default_entity
        for make in (make_workspace, make_report):
            addresses.append(make(owner, project).save().url)
    except Exception as error:  # whatever the server answers
        return addresses, str(error).splitlines()[0] if str(error) else type(error).__name__
    return addresses, None


def main(arguments: list[str]) -> None:
    parser = make_parser("dashboard", __doc__, "--project dlion")
    parser.add_argument("--project", default="dlion", help="of the runs; default: %(default)s")
    parser.add_argument("--entity", help="user or team; default: your own")
    parser.add_argument(
        "-o",
        "--output",
        type=of_kind(".json"),
        metavar="FILE",
        help=f"write the pages here if they could not be created; default: {DEFAULT}",
    )
    options = parser.parse_args(arguments)
    addresses, reason = [], why_not_sync()
    if reason is None:
        addresses, reason = create(options.entity, options.project)
    print(*addresses, sep="\n", end="\n" if addresses else "")
    if reason is None:
        return
    specified = specification(options.entity or "", options.project)
    with output_file(options.output, DEFAULT) as file:
        write_atomically(file, json.dumps(specified, indent=1) + "\n")
    created = f"the workspace {addresses[0]} but no report" if addresses else "nothing"
    raise RunFailed(
        f"{created} was created in Weights & Biases: {reason}. All of it is described in"
        f" {options.output or DEFAULT}"
    )
