"""Rows of a committed table, one a case, that tests compare with; MEGAPLAN_UPDATE_GOLDEN=1 writes the table anew."""

import csv
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
UPDATE = os.environ.get("MEGAPLAN_UPDATE_GOLDEN") == "1"
Row = dict[str, str]


class PinnedRows:
    """The rows of `tests/golden/NAME`, by the values of its first `num_keys` columns."""

    def __init__(self, name: str, fields: Sequence[str], num_keys: int = 1) -> None:
        self._path, self._fields, self._num_keys = GOLDEN / name, fields, num_keys
        self._made: dict[tuple[str, ...], Row] = {}
        self.rows: dict[tuple[str, ...], Row] = {}
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                self.rows = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in self._fields[: self._num_keys])

    def committed(self, row: Row) -> Row:
        """The committed row of the same case; with MEGAPLAN_UPDATE_GOLDEN=1 it becomes this one."""
        if UPDATE:
            self.rows[self._key(row)] = self._made[self._key(row)] = row
        return self.rows[self._key(row)]

    def differences(self, row: Row) -> list[str]:
        """Columns of a row that are not as committed, one text each; with MEGAPLAN_UPDATE_GOLDEN=1 the row is committed."""
        known = self.committed(row)
        return [f"{name} {known[name]} -> {row[name]}" for name in self._fields if row[name] != known[name]]

    def write(self, order: Sequence[tuple[str, ...]]) -> None:
        """Write the rows of these cases, with MEGAPLAN_UPDATE_GOLDEN=1 alone; each worker of a run adds its own."""
        if not UPDATE:
            return
        with self._path.open("a+", encoding="utf-8", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            rows = self.rows | {self._key(row): row for row in csv.DictReader(file)} | self._made
            file.truncate(0)
            writer = csv.DictWriter(file, self._fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in order if key in rows)
