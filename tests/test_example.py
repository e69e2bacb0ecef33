"""The example script trains under torchrun, on its own."""

import re
import subprocess
import sys

from tests.conftest import ROOT


def test_plain_loop_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc_per_node=4", "examples/plain_loop.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    accuracy, sent = re.search(r"accuracy ([\d.]+)%, ([\d.]+) kB", run.stdout).groups()
    assert float(accuracy) > 85
    assert float(sent) < 2 * 3 / 4 * 101_770 / 8 / 1000 * 1.02
