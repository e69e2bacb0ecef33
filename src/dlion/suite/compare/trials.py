"""The trials of a search, as ``dlion collect`` lists them: the best of every method."""

import csv
import io
import math
import re
from collections import defaultdict
from pathlib import Path

from dlion.errors import UserError
from dlion.suite.compare.style import number_format, title_of
from dlion.suite.compare.table import Table
from dlion.suite.inside import read

_CANDIDATE = re.compile(r"(?:^| )candidate=(\w+)")


def to_search_table(file: Path, metric: str) -> Table:
    """Return each method's best trial and those that failed, the best method first.

    Trials are called what was typed of them, ``candidate=NAME``. Those that have not ended are
    left out.

    Args:
        file: a table of ``dlion collect``.
        metric: ``accuracy`` or ``loss``.

    Raises:
        UserError: if the file is not a table of trials.
    """
    unit = -100 if metric == "accuracy" else 1  # the less, the better
    trials: dict[str, dict[str, float]] = defaultdict(dict)  # infinite: failed
    try:
        with io.StringIO((read(file.parent, file.name) or b"").decode(), newline="") as lines:
            table = csv.DictReader(lines)
            if missing := {"status", "optimizer", "overrides"} - {*(table.fieldnames or ())}:
                raise ValueError(f"it has no column {min(missing)}")
            for row in table:
                if row["status"] not in ("finished", "failed"):
                    continue  # it has not ended, or nothing is known of it
                found = _CANDIDATE.search(row["overrides"])
                if found is None:
                    raise ValueError(f"{row['overrides']!r} names no candidate")
                name = found[1]
                if name in trials[row["optimizer"]]:
                    raise ValueError(f"trial {name} of {row['optimizer']} stands there twice")
                end = float(row[f"test_{metric}"]) if row["status"] == "finished" else math.inf
                trials[row["optimizer"]][name] = unit * end if math.isfinite(end) else math.inf
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} does not list trials ({error}): dlion collect makes such a table, of runs with"
            " candidate=NAME"
        ) from error
    if not trials:
        raise UserError(f"{file} lists no trial that has ended: collect them again when some have")
    rows = []
    for method, ends in sorted(trials.items(), key=lambda item: min(item[1].values())):
        best = min(ends, key=ends.__getitem__)
        value = f"{abs(ends[best]):{number_format(metric)}}"
        failed = sorted(name for name, end in ends.items() if end == math.inf)
        shown = ["diverged", ""] if best in failed else [value, best]
        rows.append([method, *shown, str(len(ends)), " ".join(failed)])
    return [[f"{title_of(metric)}", "best", "trial", "trials", "failed"], *rows]
