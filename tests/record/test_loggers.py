"""W&B gets accuracy against bits, offline by itself, and never a secret or a say in the run."""

import json
import re
import struct
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from wandb.proto import wandb_internal_pb2

from dlion.compare.dashboard import specification
from dlion.record.loggers import make_logger

CONFIG = {"optimizer": {"name": "dlion_mavo", "lr": 1e-3}, "workers": 4, "seed": 7}
ROW = {"step": 5, "epoch": 0.5, "seconds": 1.0, "train_loss": 2.0, "sent_bytes": 1000}
ROW |= {"sent_bits_per_parameter": 80}


def node(mode: str = "auto", **options):
    return OmegaConf.create(
        {"name": "wandb", "project": "p", "entity": None, "group": "g", "tags": ["t"], "mode": mode}
        | options
    )


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user without a key, and no mode set in the environment."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def records(directory: Path):
    """The records of the offline run: blocks of 32 KiB, records of crc, length and type."""
    (file,) = directory.rglob("run-*.wandb")
    data, place, buffer = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        buffer += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            buffer = b""
            yield record


def test_offline_run_holds_curves_against_steps_and_bits(nobody, tmp_path, capsys):
    logger = make_logger(node(), CONFIG, tmp_path)
    logger.log(ROW)
    logger.log(
        {**ROW, "step": 10, "sent_bits_per_parameter": 160, "test_loss": 1.5, "test_accuracy": 0.4}
    )
    logger.finish({"test_accuracy": 0.4})
    assert f"wandb sync {tmp_path}/wandb/offline-run" in capsys.readouterr().out

    metrics, history, run = {}, [], None
    for record in records(tmp_path):
        kind = record.WhichOneof("record_type")
        if kind == "metric":
            metrics[record.metric.name] = record.metric.step_metric
        elif kind == "history":
            items = record.history.item
            history.append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            )
        elif kind == "run":
            run = record.run
    assert metrics["test/accuracy"] == "step"
    assert metrics["test_vs_bits/accuracy"] == "sent_bits_per_parameter"
    assert metrics["test_vs_bits/loss"] == "sent_bits_per_parameter"
    assert history[-1]["sent_bits_per_parameter"] == 160
    assert history[-1]["test_vs_bits/accuracy"] == 0.4
    assert (run.run_group, run.project, list(run.tags)) == ("g", "p", ["t"])
    assert run.display_name == "dlion_mavo-n4-s7"
    panels = json.dumps(specification("me", "p")["report"]["panels"])
    drawn = set(re.findall(r'"((?:train|test|test_vs_bits)/\w+|sent_\w+)"', panels))
    assert len(drawn) >= 6 and drawn <= set().union(*history)


def test_secrets_reach_no_file(nobody, tmp_path):
    secret = "hunter2-planted"
    nobody.setenv("SOME_TOKEN", secret)
    config = {**CONFIG, "logger": {"api_key": secret, "nested": [{"password": secret}]}}
    logger = make_logger(node(), config, tmp_path)
    logger.log(ROW)
    logger.finish({})
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files and not [p for p in files if secret.encode() in p.read_bytes()]


def test_a_key_without_a_network_does_not_wait(nobody, tmp_path, capsys):
    nobody.setenv("WANDB_API_KEY", "0" * 40)
    nobody.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    begun = time.monotonic()
    logger = make_logger(node(), CONFIG, tmp_path)
    logger.finish({})
    assert "wandb sync" in capsys.readouterr().out
    assert time.monotonic() - begun < 60  # an online start would wait for minutes


def test_a_broken_logger_is_one_warning(nobody, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    logger = make_logger(node("offline"), CONFIG, blocked)
    logger.log(ROW)
    logger.finish({})
    assert capsys.readouterr().err.count("warning: Weights & Biases is off") == 1


@pytest.mark.parametrize("mode", [{"name": "none"}, {"mode": "disabled"}])
def test_no_logger_writes_nothing(tmp_path, mode):
    logger = make_logger(node(**mode), CONFIG, tmp_path)
    logger.log(ROW)
    logger.finish({})
    assert not list(tmp_path.iterdir())
