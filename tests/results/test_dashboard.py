"""The dashboard command where there is no server: it writes what it would create."""

import json
import os
import subprocess
import sys

from dlion.results.dashboard import specification


def test_without_a_key_the_specification_is_written_and_it_says_so(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "WANDB_API_KEY"} | {"HOME": str(tmp_path)}
    env["NETRC"] = str(tmp_path / "netrc")
    command = [sys.executable, "-m", "dlion.results.dashboard", "-o", str(tmp_path / "spec.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "nothing was created" in done.stderr and "spec.json" in done.stderr
    written = json.loads((tmp_path / "spec.json").read_text())
    sections = written["workspace"]["section"]["panelBankConfig"]["sections"]
    names = ["Accuracy against bandwidth", "Loss against steps", "Speed", "Traffic"]
    assert [s["name"] for s in sections][:4] == names == list(written["report"]["panels"])[:4]


def test_curves_are_grouped_by_method_with_a_band_over_seeds():
    panels = specification("me", "dlion")["report"]["panels"]
    first = panels["Accuracy against bandwidth"][0]["config"]
    assert first["xAxis"] == "sent_bits_per_parameter" and first["xLogScale"]
    assert first["metrics"] == ["test_vs_bits/accuracy"]
    assert first["groupBy"] == "optimizer.value.name" and first["groupArea"] == "minmax"
