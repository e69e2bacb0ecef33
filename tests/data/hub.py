"""A hub on this machine that answers the requests of ``datasets``."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = 40 * "a"


@contextmanager
def serve(folder: Path, name: str) -> Iterator[str]:
    """Serve the files of a folder as the data set ``name``; yield the value for HF_ENDPOINT."""
    files = list(folder.iterdir())
    facts = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": p.name} for p in files]}
    tree = [
        {"type": "file", "oid": COMMIT, "size": p.stat().st_size, "path": p.name} for p in files
    ]
    pages = {
        f"/api/datasets/{name}": json.dumps(facts).encode(),
        f"/api/datasets/{name}/revision/{COMMIT}": json.dumps(facts).encode(),
        f"/api/datasets/{name}/tree/{COMMIT}": json.dumps(tree).encode(),
        **{f"/datasets/{name}/resolve/{COMMIT}/{p.name}": p.read_bytes() for p in files},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            page = pages.get(path)
            headers = (
                {"X-Error-Code": "EntryNotFound"}
                if page is None
                else {"ETag": f'"{Path(path).stem}"'}
            )
            self.send_response(404 if page is None else 200)
            headers |= {"X-Repo-Commit": COMMIT, "Content-Length": str(len(page or b"{}"))}
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(page or b"{}")

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
