"""The hub is asked where it answers; where it does not, the cache is, and at once."""

import os
import subprocess
import sys

import pytest

from tests.data.formats import write_cifar
from tests.data.hub import serve
from tests.support.runs import train

pytestmark = pytest.mark.slow

SIZES = (
    "from dlion.suite.data import cifar10; data = cifar10(); print(data.train_size, data.test_size)"
)


def test_a_data_set_is_downloaded_and_then_in_the_cache(tmp_path):
    write_cifar(tmp_path)
    with serve(tmp_path / "plain_text", "uoft-cs/cifar10") as endpoint:
        env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
        command = [sys.executable, "-c", SIZES]
        assert subprocess.check_output(command, env=env, text=True, timeout=120) == "24 12\n"
    assert subprocess.check_output(command, env=env, text=True, timeout=120) == "24 12\n"


def test_without_hub_and_cache_one_sentence_says_what_to_type(tmp_path):
    nowhere = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = train("dataset=cifar10", f"output_dir={tmp_path / 'run'}", env=nowhere)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr  # no attempts
    assert "no connection, and no copy in the cache): type dataset.path=DIR" in done.stderr
