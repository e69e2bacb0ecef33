"""metrics.csv: the rows of metrics.jsonl as a table for spreadsheets."""

import csv
import io
from typing import Any

from dlion.suite.files import write_atomically
from dlion.suite.inside import append
from dlion.suite.record.loggers.base import Logger, Recording
from dlion.suite.record.runs import finite

TABLE = "metrics.csv"


class CsvLogger(Logger):
    """Writes the rows of metrics.jsonl to metrics.csv beside it.

    A column has the name of its key; its cells are empty in rows that lack it. A row is appended;
    where it brings new columns (a test accuracy comes with evaluations alone), and where a run is
    resumed, the table is written again, whole or not at all.
    """

    def __init__(self, recording: Recording, /):
        self._file = recording.directory / TABLE
        self._rows = [finite(row) for row in recording.rows]
        self._columns: list[str] = []
        self._write()

    def log(self, row: dict[str, Any]) -> None:
        self._rows.append(finite(row))
        if row.keys() <= set(self._columns):
            with append(self._file) as file:
                csv.DictWriter(file, self._columns).writerow(self._rows[-1])
        else:
            self._write()

    def _write(self) -> None:
        """Write all rows, with the columns that they have by now."""
        self._columns = list(dict.fromkeys(key for row in self._rows for key in row))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns)
        table.writeheader()
        table.writerows(self._rows)
        write_atomically(self._file, text.getvalue())
