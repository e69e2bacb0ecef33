"""Loggers show a run while it goes on. A logger may break; the run goes on without it."""

import netrc
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

_SECRET = re.compile(r"(^|_)(key|token|password|secret)s?($|_)", re.IGNORECASE)
_CONNECT_TIMEOUT = 2.0  # seconds to wait for the server before going offline


class Logger(Protocol):
    """What the training loop needs of a logger."""

    def log(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Show the summary and end."""


class NoLogger:
    """Does nothing."""

    def log(self, row: dict[str, Any]) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        pass


def make_logger(node: Any, config: dict[str, Any], directory: Path, online: bool = True) -> Logger:
    """Return the logger that a config node describes.

    Args:
        node: ``name: none``, or ``name: wandb`` with project, entity, group, tags and mode.
        config: the resolved configuration, to be shown with the run.
        directory: of the run.
        online: False where no server can be reached, as on an emulated network.
    """
    if node.name == "none" or node.mode == "disabled":
        return NoLogger()
    return WandbLogger(node, config, directory, online)


class WandbLogger:
    """Logs loss and accuracy to Weights & Biases, against steps and against bits sent.

    The dashboard draws ``test_vs_bits/*`` over ``sent_bits_per_parameter`` by itself. Bits are
    those a worker sent so far, divided by the number of parameters, so that models of different
    size can share an axis.

    With ``mode=auto`` WANDB_MODE in the environment decides; without it, the run is online only if
    there is a key and the server answers. Whatever goes wrong becomes one warning.
    """

    def __init__(self, node: Any, config: dict[str, Any], directory: Path, online: bool = True):
        self._run: Any = None
        self._sync_command: str | None = None
        mode = node.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if can_sync() else "offline")
        if mode == "disabled":
            return
        if not online:
            mode = "offline"
        self._safely(lambda: self._start(node, config, directory, mode))

    def _start(self, node: Any, config: dict[str, Any], directory: Path, mode: str) -> None:
        import wandb

        self._run = wandb.init(
            project=node.project,
            entity=node.entity,
            group=node.group,
            tags=list(node.tags),
            name=_display_name(config),
            config=_without_secrets(config),
            dir=str(directory),
            id=_run_id(directory),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=20,
                x_disable_stats=True,
                disable_git=True,
                disable_code=True,
            ),
        )
        define = self._run.define_metric
        define("step")
        define("sent_bits_per_parameter")
        for name, best in (("loss", "min"), ("accuracy", "max")):
            define(f"test/{name}", step_metric="step", summary=best)
            define(f"test_vs_bits/{name}", step_metric="sent_bits_per_parameter", summary=best)
        define("train/loss", step_metric="step")
        define("sent_gigabytes", step_metric="step")
        if mode != "online":
            self._sync_command = f"wandb sync {Path(self._run.dir).parent}"

    def log(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        values = {
            "step": row["step"],
            "epoch": row["epoch"],
            "seconds": row["seconds"],
            "train/loss": row["train_loss"],
            "sent_gigabytes": row["sent_bytes"] / 1e9,
            "sent_bits_per_parameter": row["sent_bits_per_parameter"],
        }
        for name in ("loss", "accuracy"):
            if f"test_{name}" in row:
                values |= {
                    f"{axis}/{name}": row[f"test_{name}"] for axis in ("test", "test_vs_bits")
                }
        self._safely(lambda: self._run.log(values))

    def finish(self, summary: dict[str, Any]) -> None:
        if self._run is None:
            return
        values = {f"run/{key}": value for key, value in summary.items()}
        logged = self._safely(lambda: self._run.summary.update(values)) and self._safely(self._end)
        if logged and self._sync_command:
            print(
                f"recorded offline; to see it in Weights & Biases: {self._sync_command}", flush=True
            )

    def _end(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # finish() alone returns before the offline file is written

    def _safely(self, action: Callable[[], Any]) -> bool:
        """Return whether an action worked; if not, say so, and log nothing more."""
        try:
            action()
        except Exception as error:
            self._run = None
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"warning: Weights & Biases is off: {reason}", file=sys.stderr, flush=True)
            return False
        return True


def _display_name(config: dict[str, Any]) -> str:
    return f"{config['optimizer']['name']}-n{config['workers']}-s{config['seed']}"


def _run_id(directory: Path) -> str:
    """Return the id of the run in a directory, which a run that is resumed keeps."""
    file = directory / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8])
    return file.read_text()


def can_sync() -> bool:
    """Whether there is a key for the server, and the server answers."""
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = server.hostname or ""
    if not os.environ.get("WANDB_API_KEY") and not _in_netrc(host):
        return False
    port = server.port or (443 if server.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _without_secrets(node: Any) -> Any:
    """Return the configuration without the values whose names say that they are secret."""
    if isinstance(node, dict):
        return {k: _without_secrets(v) for k, v in node.items() if not _SECRET.search(str(k))}
    return [_without_secrets(v) for v in node] if isinstance(node, list) else node
