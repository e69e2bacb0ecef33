"""Recorded runs to look at."""

import json
import math
from pathlib import Path

import yaml


def write_run(
    root: Path,
    method: str,
    seed: int,
    accuracy: bool = True,
    lr: float = 1e-3,
    method_name: str | None = None,
    better: float = 0.0,
    rate: str | None = None,
    warmup_bytes: int = 0,
) -> None:
    """A finished run with two evaluations, in ``root/METHOD-SEED-LR``.

    It is so much ``better`` than others, or diverged, if that is NaN. In each of its first ten
    steps it sends ``warmup_bytes`` more.
    """
    directory = root / f"{method}-{seed}-{lr}"
    (directory / ".hydra").mkdir(parents=True)
    method = method_name or method
    config = {"optimizer": {"name": method, "lr": lr}, "workers": 8, "seed": seed, "steps": 20}
    config |= {"model": {"name": "m"}, "dataset": {"name": "d"}, "network": {"rate": rate}}
    (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    per_step = 500_000 if method == "g_lion" else 16_000
    rows = []
    for step in (10, 20):
        row = {"step": step, "seconds": step / 10, "test_loss": 1.0}
        row["sent_bytes"] = step * per_step + 10 * warmup_bytes
        row["received_bytes"] = 2 * row["sent_bytes"]
        row["sent_bits_per_parameter"] = 8 * row["sent_bytes"] / 72_000
        if accuracy:
            value = 0.5 + step / 100 + seed / 100 + better
            row["test_accuracy"] = None if math.isnan(value) else value
        rows.append(row)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"optimizer": method, "model": "m", "dataset": "d", "workers": 8}
    summary |= {"parameters": 72_000, "paper_bits_up": 1, "paper_bits_down": 1}
    (directory / "summary.json").write_text(json.dumps(summary))


def reconfigure(directory, **settings) -> None:
    """Give a recorded run other settings."""
    file = directory / ".hydra" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))
