"""Groups equal storages into rows for the report."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from megaplan.columns import Column
from megarun.trace.tracker import StorageRecord
from megarun.trace.values import Row


def row_of(column: Column, record: StorageRecord, nbytes: int) -> Row:
    """The row of one storage."""
    dtype = str(record.dtype).removeprefix("torch.")
    return Row(column, record.kind.label, record.name or record.place, record.op, record.shape, dtype, 1, nbytes)


def group_rows(storages: Iterable[tuple[StorageRecord, int]], column: Callable[[StorageRecord], Column]) -> tuple[Row, ...]:
    """Equal storages grouped, largest first."""
    groups: dict[Row, list[int]] = {}
    for record, nbytes in storages:
        group = groups.setdefault(replace(row_of(column(record), record, 0), count=0), [0, 0])
        group[0] += 1
        group[1] += nbytes
    rows = [replace(row, count=count, nbytes=nbytes) for row, (count, nbytes) in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.name, row.op)))
