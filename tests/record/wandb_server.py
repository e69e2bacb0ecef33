"""A Weights & Biases server that fits on a page: it takes one run's rows and its summary."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Listens on loopback.

    Args:
        silent: take requests and never answer those that ask for something.
        sent: the summary of what an earlier part of the run has sent; None: the run is new.

    Attributes:
        runs: the variables of each request to make or change a run.
        rows: the history that was sent.
        summary: the latest one.
        credentials: that requests came with.
    """

    daemon_threads = True

    def __init__(self, silent: bool = False, sent: dict[str, Any] | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.silent, self.sent = silent, sent
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.credentials: set[str | None] = set()
        self.ended = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # wandb leaves without a word

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    with Server(**options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.ended.set()
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        self.server.credentials.add(self.headers["Authorization"])
        if self.server.silent:
            self.server.ended.wait()
            self.close_connection = True
        elif self.path == "/graphql":
            request = json.loads(body)
            self._answer({"data": self._look_up(request["query"], request.get("variables") or {})})
        else:
            self._take(json.loads(body).get("files") or {})
            self._answer({})

    def _look_up(self, query: str, asked: dict[str, Any]) -> dict[str, Any]:
        server = self.server
        entity = {"id": "e", "name": asked.get("entity")}
        bucket = {"id": "r", "name": asked.get("name"), "config": "{}", "tags": []}
        if "upsertBucket" in query:
            server.runs.append(asked)
            bucket["project"] = {"id": "p", "name": asked["project"], "entity": entity}
            return {"upsertBucket": {"bucket": bucket, "inserted": server.sent is None}}
        if "RunResumeStatus" in query and server.sent is not None:
            bucket |= {
                "summaryMetrics": json.dumps(server.sent),
                "displayName": "",
                "historyLineCount": 1,
                "eventsLineCount": 0,
                "logLineCount": 0,
                "historyTail": json.dumps([json.dumps({"_step": 0, "_runtime": 1})]),
                "eventsTail": "[]",
                "wandbConfig": '{"t": {}}',
            }
            return {"model": {"id": "p", "name": "p", "entity": entity, "bucket": bucket}}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"http://{server.host}"} for name in asked["files"]
            ]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _take(self, files: dict[str, Any]) -> None:
        for name, part in files.items():
            if name == "wandb-history.jsonl":
                self.server.rows += map(json.loads, part["content"])
            elif name == "wandb-summary.json":
                self.server.summary = json.loads(part["content"][-1])

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
