"""Storages behind a difference: those of the column at the trace's peak, and those of either side that are exactly as large."""

from collections.abc import Iterator
from itertools import combinations

from megaplan.columns import Column, Phase
from megaplan.dtypes import DType
from megaplan.hosts.megarun.ledger import block_ledger
from megarun.job.job import Job
from megarun.trace.compare import RankComparison

MOST_ROWS = 6
MOST_MATCHES = 4


def differing_owners(job: Job, compared: RankComparison, phase: Phase, column: Column) -> Iterator[str]:
    """The phase's estimated peak, all columns that are off, storages of exactly the difference, and the largest rows."""
    yield f"the estimate peaks at: {compared.budget.peak_places.get(phase, '')}"
    off = {own: pair.difference for own, pair in compared.columns(phase).items() if pair.difference}
    yield f"columns that differ in {phase}: " + ", ".join(f"{own} {size:+,}" for own, size in off.items())
    difference = compared.columns(phase)[column].difference
    rows = [row for row in compared.trace.rows[phase] if row.column is column]
    if difference:
        matches = list(_matches(job, compared, phase, column, abs(difference)))
        for match in matches[:MOST_MATCHES]:
            yield f"exactly the difference: {match}"
    for item in compared.trace.differences[:MOST_ROWS]:
        yield f"one side only: {item.name} ({item.column}, estimate {item.estimate:,}, trace {item.trace:,})"
    yield f"largest rows of {column} in the trace:"
    for row in rows[:MOST_ROWS]:
        yield f"  {row.nbytes:,}  {row.describe()}"


def _matches(job: Job, compared: RankComparison, phase: Phase, column: Column, size: int) -> Iterator[str]:
    """Storages of the trace, tensors of the inventory and entries of the ledger, alone or two together, that are as large."""
    rows = [row for row in compared.trace.rows[phase] if row.column is column]
    for row in rows:
        each = row.nbytes // row.count
        if each and size % each == 0 and size // each <= row.count:
            yield f"{size // each} of {row.count} in the trace, {row.describe()}"
    for one, two in combinations(rows[:40], 2):
        if one.nbytes // one.count + two.nbytes // two.count == size:
            yield f"in the trace, {one.describe()} and {two.describe()}"
    for name, nbytes in _estimated(job):
        if nbytes == size:
            yield f"of the estimate, {name}"


def _estimated(job: Job) -> Iterator[tuple[str, int]]:
    """Names and bytes of the parts of a budget: tensors whole and in shards, in every dtype of the plan, and kept activations."""
    mesh, precision = job.spec.mesh, job.spec.precision
    roles: dict[str, DType] = {role: getattr(precision, role) for role in ("params", "grads", "master", "moments", "reduce")}
    for name, tensor in job.inventory.tensors():
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        rows = -(-tensor.shape[0] // mesh.dp_shard)
        for role, dtype in roles.items():
            yield f"{name} {list(tensor.shape)} in precision.{role}", elements * dtype.bytes
            yield f"{name}, a shard of {mesh.dp_shard}, in precision.{role}", rows * (elements // tensor.shape[0]) * dtype.bytes
    for name, block in job.inventory.blocks():
        for entry in block_ledger(job.spec, name, block).saved:
            yield f"{name}: {entry.name} {list(entry.shape)} {entry.dtype}, {entry.why}", entry.bytes
