"""Of random plans: the cuts, the bytes of every rank, the time of a step and the launch files of other hosts are those that were committed.

`make accuracy-random` shows that such bytes are right; this shows that they stay. A change that means to move them writes the table anew
(`MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/random_plans/test_pinned_plans.py`), and the commit says which plans moved and why.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pinned_rows import PinnedRows
from random_plans.choices import LARGE, SMALL, Size
from random_plans.draw import draw

import megaplan
from megaplan.exporters.hosts import EXPORTERS
from megaplan.exporters.values import Source
from megaplan.layout.step_time import PlannedTime

FIELDS = ("size", "seed", "spec", "refused", "cuts", "peak_bytes", "memory", "step_microseconds", "time", "exports", "said")
AT_ONCE = 40
DRAWS = [(size, first) for size, count in ((SMALL, 720), (LARGE, 280)) for first in range(0, count, AT_ONCE)]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def row_of(size: Size, seed: int) -> dict[str, str]:
    """What megaplan says of a drawn plan; digests of what is too long to read."""
    document = draw(seed, size=size)
    row = dict.fromkeys(FIELDS, "") | {"size": size.name, "seed": str(seed), "spec": digest(document)}
    try:
        found = megaplan.estimate(document)
    except megaplan.MegaplanError as error:
        return row | {"refused": " ".join(sorted({item.code for item in error.diagnostics}))}
    time = found.step_time
    if isinstance(time, PlannedTime):
        row |= {"step_microseconds": str(round(time.seconds * 1e6)), "time": digest(time.as_document())}
    memory = [(rank.ranks, rank.cells, rank.moments, rank.parameters) for rank in found.ranks], found.serving, found.routing
    return row | {
        "cuts": " ".join(str(slot.stop) for slot in found.job.layout.slots),
        "peak_bytes": str(found.peak_bytes),
        "memory": digest(memory),
        "exports": digest([*exports_of(found.job)]),
        "said": digest([*said_of(found)]),
    }


def said_of(found: megaplan.Estimate) -> Iterator[tuple[str, ...]]:
    """Diagnostics, and what a split says of its cuts; the advice for a plan that does not fit has tests of its own."""
    if found.fits:
        yield from ((item.code, item.detail, *item.hints) for item in found.diagnostics)
    yield megaplan.split(found.job).notes


def exports_of(job: megaplan.LoadedJob) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Host, text and lost keys of each exporter that takes the plan, or the codes of its refusal."""
    source = Source(job.spec, job.inventory, job.layout)
    for host in EXPORTERS:
        try:
            exported = EXPORTERS[host](source)
            yield host, exported.text, tuple(loss.key for loss in exported.losses)
        except megaplan.MegaplanError as error:
            yield host, "", tuple(item.code for item in error.diagnostics)


@pytest.fixture(scope="module")
def table() -> Iterator[PinnedRows]:
    found = PinnedRows("random_plans.csv", FIELDS, num_keys=2)
    yield found
    found.write([(size.name, str(seed)) for size, first in DRAWS for seed in range(first, first + AT_ONCE)])


@pytest.mark.parametrize(("size", "first"), DRAWS, ids=lambda value: str(getattr(value, "name", value)))
def test_a_random_plan_is_what_was_committed(size: Size, first: int, table: PinnedRows) -> None:
    moved = []
    for seed in range(first, first + AT_ONCE):
        row = row_of(size, seed)
        known = table.committed(row)
        moved += [f"{size.name} {seed}: {name} {known[name]} -> {row[name]}" for name in FIELDS if row[name] != known[name]]
    assert not moved, "\n".join(moved)


def test_the_table_has_every_plan_and_few_that_are_refused() -> None:
    rows = PinnedRows("random_plans.csv", FIELDS, num_keys=2).rows
    assert {size for size, _ in rows} == {SMALL.name, LARGE.name}
    assert len(rows) == AT_ONCE * len(DRAWS)
    assert sum(1 for row in rows.values() if row["refused"]) < 0.1 * len(rows)
