"""Set up the project's pages in Weights & Biases: ``python -m dlion.results.dashboard``.

A workspace (to look around in) and a report (to show): accuracy against bits, loss against steps,
speed and traffic, grouped by optimizer, with a band over seeds. Without a key or a server it writes
what it would have created to ``-o FILE`` and says so.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlion.files import write_atomically
from dlion.results.loggers import can_sync

TITLE = "Accuracy against bandwidth"
METHOD = "optimizer.name"


def make_panels() -> dict[str, list[Any]]:
    """The panels by the name of their section."""
    from wandb_workspaces.reports import v2 as wr

    def curve(title: str, x: str, y: list[str], **options: Any) -> Any:
        band = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return wr.LinePlot(title=title, x=x, y=y, groupby=wr.Config(METHOD), **band, **options)

    def bars(title: str, metric: str, unit: str) -> Any:
        spread = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        group = wr.Config(METHOD)
        return wr.BarPlot(
            title=title, metrics=[wr.SummaryMetric(metric)], title_x=unit, groupby=group, **spread
        )

    bits = "bits sent per parameter and worker"
    return {
        "Accuracy against bandwidth": [
            curve(f"{name} against bits", "sent_bits_per_parameter", [f"test_vs_bits/{name}"],
                  log_x=True, title_x=bits)
            for name in ("accuracy", "loss")
        ] + [
            wr.ScatterPlot(title="at the end, against bytes a step", log_x=True,
                           x=wr.SummaryMetric("run/sent_bytes_per_step"),
                           y=wr.SummaryMetric("run/test_accuracy")),
        ],
        "Loss against steps": [
            curve("test loss", "step", ["test/loss"], title_x="steps"),
            curve("training loss", "step", ["train/loss"], title_x="steps"),
            curve("test accuracy", "step", ["test/accuracy"], title_x="steps"),
        ],
        "Speed": [bars("seconds a step", "run/seconds_per_step", "seconds")],
        "Traffic": [
            bars("sent by a worker, a step", "run/sent_bytes_per_step", "bytes"),
            curve("sent so far", "step", ["sent_gigabytes"], title_x="steps", title_y="GB"),
        ],
        "Configurations": [wr.RunComparer(diff_only="split")],
    }  # fmt: skip


def make_workspace(entity: str, project: str) -> Any:
    """The workspace, not saved yet."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=panels, is_open=True) for name, panels in make_panels().items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="sent_bits_per_parameter", max_runs=100),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(METHOD)]),
    )


def make_report(entity: str, project: str) -> Any:
    """The report, not saved yet."""
    from wandb_workspaces.reports import v2 as wr

    blocks: list[Any] = [
        wr.P("Bits and bytes are what a worker sent, counted where it is handed to the network.")
    ]
    for name, panels in make_panels().items():
        runs = wr.Runset(entity=entity, project=project, groupby=[f"config.{METHOD}"])
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title=TITLE, blocks=blocks, width="fluid")


def specification(entity: str, project: str) -> dict[str, Any]:
    """What would be created, as JSON. (A report's run sets cannot be written without a server.)"""

    def plain(model: Any) -> Any:
        return json.loads(model.model_dump_json(by_alias=True, exclude_none=True))

    panels = {
        name: [plain(panel._to_model()) for panel in panels]
        for name, panels in make_panels().items()
    }
    workspace = make_workspace(entity, project)._to_model()
    return {
        "workspace": plain(workspace.spec),
        "report": {"title": TITLE, "grouped_by": METHOD, "panels": panels},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.results.dashboard", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--project", default="dlion")
    parser.add_argument("--entity", default="", help="user or team; default: your own")
    parser.add_argument("-o", "--output", type=Path, default=Path("dashboard.json"), metavar="FILE")
    options = parser.parse_args()
    failed = "there is no key, or no server answers" if not can_sync() else None
    makers: tuple[Callable[..., Any], ...] = (make_workspace, make_report)
    if failed is None:
        try:
            for make in makers:
                print(make(options.entity, options.project).save().url)
            return
        except Exception as error:  # whatever the server says: nothing else depends on it
            failed = str(error).splitlines()[0] if str(error) else type(error).__name__
    specified = specification(options.entity, options.project)
    write_atomically(options.output, json.dumps(specified, indent=1) + "\n")
    print(
        f"nothing was created in Weights & Biases: {failed}. What would be is in {options.output};"
        " type `wandb login` and run this again",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
