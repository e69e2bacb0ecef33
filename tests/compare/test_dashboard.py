"""The dashboard command: what it creates on a server, and what it says where it cannot."""

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import wandb

from dlion.suite.compare.dashboard import main

GROUPS = ["dataset", "model", "optimizer", "workers"]


class Weights(ThreadingHTTPServer):
    """As much of the W&B server as saves views; ``refuse``: the type of those that it does not."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.saved: list[dict[str, Any]] = []
        self.refuse = ""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in query and variables["type"] != self.refuse:
            self.saved.append(variables)
            view = {"id": "v1", "name": "n", "type": variables["type"], "spec": variables["spec"]}
            view |= {"displayName": "d", "description": "", "updatedAt": "2026-01-01T00:00:00Z"}
            view |= {"project": {"id": "p1", "name": "dlion", "entityName": "somebody"}}
            return {"upsertView": {"view": view, "inserted": True}}
        if "viewer" in query:
            viewer = {"id": "u1", "username": "somebody", "entity": "somebody", "email": ""}
            return {"viewer": viewer | {"flags": "{}", "admin": False, "teams": {"edges": []}}}
        if "GetProjects" in query:
            return {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}}
        if "internalId" in query:
            return {"project": {"id": "p1", "internalId": "UHJvamVjdEludGVybmFsSWQ6MQ=="}}
        return {}


class Answer(BaseHTTPRequestHandler):
    server: Weights

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(sent) if self.path == "/graphql" else {"query": "telemetry"}
        data = self.server.answer(asked["query"], asked.get("variables") or {})
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Weights]:
    with Weights() as weights:
        threading.Thread(target=weights.serve_forever).start()
        yield weights
        weights.shutdown()


@pytest.fixture
def dashboard(command, monkeypatch, tmp_path):
    """Run the command as a user whose only key is for this server, if one is given."""

    def run(*arguments: object, server: Weights | None = None):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            monkeypatch.delenv(name)
        if server is not None:
            monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.chdir(tmp_path)
        wandb.teardown()  # which keeps what it has once read of the environment
        return command(main, *arguments)

    return run


def grouping(run_set: dict[str, Any]) -> list[str]:
    return [key["name"].partition(".")[0] for key in run_set["grouping"]]


def test_a_workspace_and_a_report_are_saved_under_the_users_own_name(server, dashboard, tmp_path):
    done = dashboard(server=server)
    assert done.returncode == 0, done.stderr
    assert [view["entityName"] for view in server.saved] == ["somebody", "somebody"]
    assert all("/somebody/dlion" in url for url in done.stdout.split())
    assert len(done.stdout.split()) == 2 and not (tmp_path / "outputs").exists()
    workspace, report = (json.loads(view["spec"]) for view in server.saved)
    assert grouping(workspace["section"]["runSets"][0]) == GROUPS
    assert workspace["section"]["settings"]["maxRuns"] > 120
    grids = [block["metadata"] for block in report["blocks"] if block["type"] == "panel-grid"]
    assert {str(grouping(grid["runSets"][0])) for grid in grids} == {str(GROUPS)}
    # curves have a band over the runs of a group
    first, *_, scatter = (panel["config"] for panel in grids[0]["panelBankSectionConfig"]["panels"])
    assert first["xAxis"] == "sent_bits_per_parameter" and first["xLogScale"]
    assert first["metrics"] == ["test_vs_bits/accuracy"]
    assert first["groupArea"] == "minmax" and first["limit"] > 120
    # one key would be all that a panel can group by; its run set groups by all
    assert "groupBy" not in first and "groupBy" not in scatter


def test_what_was_created_before_a_failure_is_said(server, dashboard, tmp_path):
    server.refuse = "runs"  # the report
    done = dashboard("--entity", "team", server=server)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert [view["entityName"] for view in server.saved] == ["team"]
    assert re.search(r"the workspace http\S+/team/dlion\S+ but no report was created", done.stderr)
    assert "outputs/dashboard.json" in done.stderr
    assert (tmp_path / "outputs" / "dashboard.json").exists()


def test_without_a_key_the_specification_is_written_and_it_says_so(dashboard, tmp_path):
    done = dashboard("-o", "new/spec.json")
    assert done.returncode == 1
    assert "nothing was created" in done.stderr and "new/spec.json" in done.stderr
    written = json.loads((tmp_path / "new" / "spec.json").read_text())
    workspace, report = written["workspace"], written["report"]
    names = ["Accuracy against bandwidth", "Loss against steps", "Speed", "Traffic"]
    assert [section["name"] for section in workspace["sections"]][:4] == names
    assert [block["text"] for block in report["blocks"] if block["class"] == "H2"][:4] == names
    keys = workspace["runset_settings"]["groupby"]
    assert [key["name"].partition(".")[0] for key in keys] == GROUPS
    curve = workspace["sections"][0]["panels"][0]
    assert curve["class"] == "LinePlot" and curve["y"] == ["test_vs_bits/accuracy"]
