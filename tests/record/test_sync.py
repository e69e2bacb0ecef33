"""``dlion sync`` sends what was recorded offline with wandb's own program, each run once."""

import pytest
import wandb

from dlion.__main__ import main
from tests.record.wandb_server import serving


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Two runs that were recorded offline, by a user with a key."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("a", "b"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        options = {"dir": tmp_path / "sweep" / name, "mode": "offline", "settings": settings}
        with wandb.init(project="p", entity="e", id=name, **options) as run:
            run.log({"loss": 1.0})
    return tmp_path / "sweep"


def sync(capsys, *paths) -> tuple[int, str, str]:
    wandb.teardown()  # which keeps what it has once read of the environment
    capsys.readouterr()
    try:
        main(["sync", *map(str, paths)])
    except SystemExit as end:
        return int(end.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


@pytest.mark.slow
def test_each_run_of_a_sweep_is_sent_once_and_a_failure_is_told(sweep, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    code, _, error = sync(capsys, sweep)
    assert code == 1 and "127.0.0.1:9 does not answer" in error and len(error.splitlines()) == 1
    (damaged,) = sweep.glob("b/wandb/offline-run-*/*.wandb")
    whole = damaged.read_bytes()
    damaged.write_bytes(b"nothing of wandb's")
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{server.host}")
        code, _, error = sync(capsys, sweep)
        assert code == 1 and error.startswith("error: 1 of 2 runs were not sent: ERROR Failed to")
        assert len(error.splitlines()) == 1 and {run["name"] for run in server.runs} == {"a"}
        damaged.write_bytes(whole)
        server.runs.clear()
        code, out, error = sync(capsys, sweep, sweep / "b")
        assert code == 0 and out.endswith("sent now: 1; before: 1\n"), error
        assert {run["name"] for run in server.runs} == {"b"}
        assert sync(capsys, sweep)[:2] == (0, "sent now: 0; before: 2\n")
