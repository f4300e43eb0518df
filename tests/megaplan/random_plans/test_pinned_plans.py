"""Random plans: the cuts, the bytes of every rank, the time of a step and the launch files of other hosts match the committed ones.

`make accuracy-random` shows that such bytes are right; this shows that they stay. A change that means to move them writes the table anew
(`MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/random_plans/test_pinned_plans.py`), and the commit says which plans moved and why.
"""

from collections.abc import Iterator

import pytest
from pinned_estimates import ESTIMATED, digest, estimated
from pinned_rows import PinnedRows
from random_plans.choices import LARGE, SMALL, Size
from random_plans.draw import draw

FIELDS = ("size", "seed", "spec", *ESTIMATED)
AT_ONCE = 40
CI_TAKES_EVERY = 5
DRAWS = [(size, first) for size, count in ((SMALL, 720), (LARGE, 280)) for first in range(0, count, AT_ONCE)]


def row_of(size: Size, seed: int) -> dict[str, str]:
    """Row of a drawn plan."""
    document = draw(seed, size=size)
    return {"size": size.name, "seed": str(seed), "spec": digest(document), **estimated(document)}


@pytest.fixture(scope="module")
def table() -> Iterator[PinnedRows]:
    found = PinnedRows("random_plans.csv", FIELDS, num_keys=2)
    yield found
    found.write([(size.name, str(seed)) for size, first in DRAWS for seed in range(first, first + AT_ONCE)])


@pytest.mark.parametrize(
    ("size", "first"),
    [
        pytest.param(size, first, id=f"{size.name}-{first}", marks=pytest.mark.slow if index % CI_TAKES_EVERY else ())
        for index, (size, first) in enumerate(DRAWS)
    ],
)
def test_a_random_plan_is_what_was_committed(size: Size, first: int, table: PinnedRows) -> None:
    moved = []
    for seed in range(first, first + AT_ONCE):
        moved += [f"{size.name} {seed}: {text}" for text in table.differences(row_of(size, seed))]
    assert not moved, "\n".join(moved)


def test_the_table_has_every_plan_and_few_that_are_refused() -> None:
    rows = PinnedRows("random_plans.csv", FIELDS, num_keys=2).rows
    assert {size for size, _ in rows} == {SMALL.name, LARGE.name}
    assert len(rows) == AT_ONCE * len(DRAWS)
    assert sum(1 for row in rows.values() if row["refused"]) < 0.1 * len(rows)
