"""Set up the project's pages in Weights & Biases.

A workspace (to look around in) and a report (to show): accuracy against bits, loss against steps,
speed and traffic. A curve is the mean of the runs of one data set, model, method and number of
workers, its band goes from the lowest to the highest of them: over seeds, if nothing else was swept
(filter the runs otherwise). Without a key or a server it writes what it would have created to
FILE and says so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dlion.files import write_atomically
from dlion.record.loggers import can_sync

TITLE = "Accuracy against bandwidth"
GROUPS = ("dataset.name", "model.name", "optimizer.name", "workers")
MOST = 500  # runs or groups in a panel; W&B's own limit is 10, a recipe has up to 120


def make_panels() -> dict[str, list[Any]]:
    """The panels by the name of their section.

    A panel alone can group by one key only; without, it draws the groups of its run set.
    """
    from wandb_workspaces.reports import v2 as wr

    many: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    many |= {"max_runs_to_show": MOST}

    def curve(title: str, x: str, y: list[str], **options: Any) -> Any:
        return wr.LinePlot(title=title, x=x, y=y, **many, **options)

    def bars(title: str, metric: str, unit: str) -> Any:
        metrics = [wr.SummaryMetric(metric)]
        return wr.BarPlot(title=title, metrics=metrics, title_x=unit, max_bars_to_show=MOST, **many)

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
        settings=ws.WorkspaceSettings(x_axis="sent_bits_per_parameter", max_runs=MOST),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in GROUPS]),
    )


def make_report(entity: str, project: str) -> Any:
    """The report, not saved yet."""
    from wandb_workspaces.reports import v2 as wr

    blocks: list[Any] = [
        wr.P("Bits and bytes are what a worker sent, counted where it is handed to the network."),
        wr.P("Curves are means of runs of one data set, model, method and number of workers."),
    ]
    for name, panels in make_panels().items():
        groups = [f"config.{key}" for key in GROUPS]
        runs = wr.Runset(entity=entity, project=project, groupby=groups)
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
        "report": {"title": TITLE, "grouped_by": GROUPS, "panels": panels},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dlion.compare.dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--project", default="dlion", help="of the runs; default: dlion")
    parser.add_argument("--entity", help="user or team; default: your own")
    explained = "what would be created, if it cannot be; default: %(default)s"
    parser.add_argument(
        "-o", "--output", type=Path, default="dashboard.json", metavar="FILE", help=explained
    )
    options = parser.parse_args()
    created: list[str] = []
    failed = None
    if can_sync():
        try:
            import wandb

            entity = options.entity or wandb.Api().default_entity
            for make in (make_workspace, make_report):
                created.append(make(entity, options.project).save().url)
                print(created[-1])
            return
        except Exception as error:  # whatever the server says
            failed = str(error).splitlines()[0] if str(error) else type(error).__name__
    options.output.parent.mkdir(parents=True, exist_ok=True)
    specified = specification(options.entity or "", options.project)
    write_atomically(options.output, json.dumps(specified, indent=1) + "\n")
    made = f"the workspace {created[0]} but no report" if created else "nothing"
    reason = failed or "there is no key, or no server answers; type `wandb login` to have one"
    print(
        f"{made} was created in Weights & Biases: {reason}. All of it is described in"
        f" {options.output}",
        file=sys.stderr,
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
