"""A run in Weights & Biases, online or recorded for later."""

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dlion.errors import UserError
from dlion.suite.files import write_atomically
from dlion.suite.inside import read
from dlion.suite.record.loggers.base import Logger, Recording, curves, first_line, warn
from dlion.suite.record.loggers.wandb_server import has_key, obstacle

ID = "wandb_id"
_PROJECT = "dlion"
_MODES = {  # wandb's own words, and what they mean for one process
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
# seconds for the server to take what it is sent; training waits, and nothing is lost without it
_PATIENCE_AT_START, _PATIENCE_AT_END = 4, 10


class WandbLogger(Logger):
    """Logs loss, accuracy and their costs, against steps and against bits sent.

    The dashboard draws ``test_vs_bits/*`` over ``sent_bits_per_parameter`` by itself. Bits are
    those a worker sent so far, divided by the number of parameters, so that models of different
    size can share an axis.

    Server, key and whatever is null here are taken from where wandb looks for them: variables
    ``WANDB_*``, its settings files, netrc. A run that cannot be online is recorded offline. One
    that is resumed sends all rows that the server, or the new offline record, lacks.

    Args:
        project: name of the project; null: that of wandb's settings, else dlion.
        entity: user or team; null: that of wandb's settings, else your default.
        group: the dashboard compares the runs of a group; null: that of wandb's settings, else one
            for all runs that differ in their seed alone.
        tags: words to find the run by.
        mode: auto: that of wandb's settings, else online if there are a key and a server that
            answers; disabled: nothing is recorded.
    """

    def __init__(
        self,
        recording: Recording,
        /,
        project: str | None,
        entity: str | None,
        group: str | None,
        tags: list[str],
        mode: Literal["auto", "online", "offline", "disabled"],
    ):
        self._run: Any = None
        self._to_sync: str | None = None  # why the run is not all there
        given = os.environ.get("WANDB_MODE") if mode == "auto" else mode
        if given and _MODES[given] == "disabled":
            return
        # wandb's reports about itself, which a process waits for at its end
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        options = {
            "project": project or settings.project or _PROJECT,
            "entity": entity,
            "group": group or settings.run_group or recording.group,
            "tags": list(tags) or None,
            "name": settings.run_name or recording.name,
            "config": recording.config,
            "dir": os.environ.get("WANDB_DIR") or str(recording.directory),
            "id": _run_id(recording.directory),
        }
        if _MODES[given or settings.mode] == "online":  # `wandb offline` is kept in its settings
            reason = "an emulated network leads nowhere else"
            if recording.online:
                reason = obstacle(settings) or self._start_online(options)
            if reason is not None and (given or has_key(settings)):
                warn(f"Weights & Biases is recorded offline: {reason}")
        if self._run is None:
            self._run, self._to_sync = _init("offline", options), "recorded offline"
        _define_metrics(self._run)
        self._known = self._run.summary.get("step", 0) if self._run.resumed else 0
        for row in recording.rows:
            self.log(row)

    @classmethod
    def check(cls, *, project: str | None, tags: list[str], **settings: Any) -> None:
        mode, server = os.environ.get("WANDB_MODE"), os.environ.get("WANDB_BASE_URL")
        if mode and mode not in _MODES:
            raise UserError(
                f"WANDB_MODE={mode} is unknown: choose online, offline or disabled, or unset it"
            )
        if server and not re.match("https?://[^/]", server):
            raise UserError(
                f"WANDB_BASE_URL={server} is no address: give that of a server, https://HOST"
            )
        source, name = "logger.project", project
        if name is None:
            source, name = "WANDB_PROJECT", os.environ.get("WANDB_PROJECT") or _PROJECT
        if not re.fullmatch(r"[^/\\#?%:]{1,128}", name):
            raise UserError(
                rf"{source}={name} is not possible: give 1 to 128 characters, none of /\#?%:"
            )
        _check_variables()
        for tag in tags:
            if not 1 <= len(tag) <= 64:
                raise UserError(f"logger.tags={tag} is not possible: give 1 to 64 characters each")

    def _start_online(self, options: dict[str, Any]) -> str | None:
        """Start a run on the server, or return why that is not possible."""
        import wandb

        try:
            self._run = _init("online", options)
        except Exception as error:
            wandb.teardown()  # what it still tries
            return first_line(error)
        print(f"shown in Weights & Biases: {self._run.url}", flush=True)
        return None

    def log(self, row: dict[str, Any]) -> None:
        if self._run is None or row["step"] <= self._known:
            return
        values = {key: row[key] for key in ("step", "epoch", "seconds")} | curves(row)
        for name in ("loss", "accuracy"):
            if f"test/{name}" in values:
                values[f"test_vs_bits/{name}"] = values[f"test/{name}"]
        self._run.log(values)

    def finish(self, summary: dict[str, Any] | None) -> None:
        if self._run is None:
            return
        import wandb

        if summary is not None:
            self._run.summary.update({f"run/{key}": value for key, value in summary.items()})
        folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=int(summary is None))
        except TimeoutError:
            self._to_sync = "not all of it was sent"
        finally:
            wandb.teardown()  # finish() alone returns before the offline file is written
            _remove_temporary_folders()
        if self._to_sync:
            print(
                f"{self._to_sync}; to see it in Weights & Biases: wandb sync {folder}", flush=True
            )


def _remove_temporary_folders() -> None:
    """Remove the folders that an import of wandb makes: a forked process leaves them behind."""
    with suppress(ImportError, AttributeError):  # another version's are elsewhere
        from wandb.sdk.artifacts.artifact import Artifact
        from wandb.sdk.data_types._private import MEDIA_TMP

        for folder in (MEDIA_TMP, Artifact._TMP_DIR):
            folder.cleanup()


def _check_variables() -> None:
    """Refuse a variable ``WANDB_*`` whose value wandb would not take, with its own words.

    (wandb is imported for that, which takes a second, where there are any that are not read here.)
    """
    given = ((name, value) for name, value in os.environ.items() if value)
    variables = {name: value for name, value in given if name.startswith("WANDB_")}
    if variables.keys() <= {"WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR", "WANDB_API_KEY"}:
        return
    import wandb

    for name, value in variables.items():
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except Exception as error:  # pydantic's, and wandb's own
            lines = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
            reason = (lines[0] if lines else first_line(error)).partition(" [type=")[0]
            shown = "..." if "KEY" in name else value
            raise UserError(
                f"{name}={shown} is not possible ({reason}): set another value, or unset it"
            ) from None


def _init(mode: Literal["online", "offline"], options: dict[str, Any]) -> Any:
    import wandb

    patience = {"init_timeout": _PATIENCE_AT_START, "finish_timeout": _PATIENCE_AT_END}
    for name in [name for name in patience if f"WANDB_{name.upper()}" in os.environ]:
        del patience[name]
    return wandb.init(
        **options,
        mode=mode,
        resume="allow" if mode == "online" else None,
        settings=wandb.Settings(
            silent=True,
            console="off",
            finish_timeout_raises=True,
            x_disable_stats=True,
            disable_git=True,
            disable_code=True,
            **patience,
        ),
    )


def _define_metrics(run: Any) -> None:
    """Define the x-axis of each curve, and its summary in the table of runs."""
    for axis in ("step", "sent_bits_per_parameter"):
        run.define_metric(axis)
    for name, best in (("loss", "min"), ("accuracy", "max")):
        shown = f"{best},last"
        run.define_metric(f"test/{name}", step_metric="step", summary=shown)
        run.define_metric(
            f"test_vs_bits/{name}", step_metric="sent_bits_per_parameter", summary=shown
        )
    costs = ("sent_gigabytes", "learning_rate", "gradient_norm", "seconds_per_step")
    for name in ("train/loss", *costs):
        run.define_metric(name, step_metric="step")


def _run_id(directory: Path) -> str:
    """Return the id of the run in a directory, which a run that is resumed keeps."""
    known = (read(directory, ID) or b"").decode(errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", known, re.ASCII):
        known = uuid.uuid4().hex[:8]
        write_atomically(directory / ID, known)
    return known
