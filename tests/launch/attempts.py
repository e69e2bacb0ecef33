"""Calls train.py once for each list of arguments in a file, in one process.

Prints a line of JSON for each: the exit code, and what was written to standard error.
"""

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path

from tests.conftest import ROOT


def attempt(arguments: list[str]) -> tuple[object, str]:
    sys.argv = ["train.py", *arguments]
    stderr, code = io.StringIO(), 0
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, stderr.getvalue()


sys.path.insert(0, "")  # components of one's own are beside where a command is typed
for line in json.loads(Path(sys.argv[1]).read_text()):
    print(json.dumps(attempt(line)), flush=True)
