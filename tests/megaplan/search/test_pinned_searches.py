"""Random small problems: the rows of a search, why the others lost, its bounds, and what is advised, match the committed ones.

Other tests check that bounds are valid. One that is too low changes no result and only costs time: it is seen here, in the
number of evaluations and in the bounds themselves. `MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/search/test_pinned_searches.py` writes
the table anew.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from pinned_estimates import codes_of, digest
from pinned_rows import PinnedRows
from random_plans.choices import SMALL
from random_plans.draw import draw
from small_problems import problem

import megaplan
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.space import Space

FIELDS = (
    "kind",
    "seed",
    "refused",
    "step_microseconds",
    "peak_bytes",
    "layouts",
    "evaluated",
    "bound_microseconds",
    "rows",
    "lost",
    "bounds",
)
SEARCHES = [
    *(("megarun", seed) for seed in range(2000, 2020)),
    *(("megatron", seed) for seed in (3000, 3002, 3003, 3004, 3005, 3007, 3010, 3011, 3014, 3016)),
    *(("advice", seed) for seed in range(8)),
]
OBJECTIVES = ("time", "headroom", "tokens_per_second_per_device")
MORE = 64 << 20
EVERY = 7
"""One in so many of a search's layouts with a policy has its bounds in the table."""


def searched(host: str, seed: int) -> dict[str, str]:
    """A search and the bounds of its layouts."""
    space, headroom = problem(seed)
    document = space.base.as_document()
    if host == "megatron":  # whose workspaces are larger than these models
        document |= {"host": {"name": host}, "device": document["device"] | {"capacity": space.base.device.capacity + MORE}}
    fixed = {f"mesh.{name}": value for name, value in space.fixed.items()}
    objective = OBJECTIVES[seed % len(OBJECTIVES)]
    found = megaplan.search(
        document,
        devices=space.devices,
        fix=fixed,
        vary=space.varied,
        objective=objective,
        headroom_bytes=headroom,
        top=4,
        processes=1,
        seconds=None,
    )
    row = {"layouts": str(found.num_layouts), "evaluated": str(found.num_evaluated)}
    if found.best is not None:
        row |= {
            "step_microseconds": str(round(found.best.step_seconds * 1e6)),
            "peak_bytes": str(found.best.peak_bytes),
            "bound_microseconds": str(round(found.bound_seconds * 1e6)),
        }
    rows = [(each.changes, each.exact.spans, each.step_seconds, each.mfu, each.peak_bytes, each.terms, each.pareto) for each in found.rows]
    assert not any(each.reason == "slower" and ", -" in each.detail for each in found.why_not if objective != "headroom")
    lost = [(each.name, each.count, each.reason, each.detail, each.example) for each in found.why_not]
    own = Space(megaplan.load(document).spec, space.devices, space.fixed, space.varied)
    return row | {"rows": digest((rows, found.gap_reason)), "lost": digest(lost), "bounds": digest([*bounds_of(own)])}


def bounds_of(space: Space) -> Iterator[tuple[int, ...]]:
    """Bounds of some layouts: the least time and bytes of any cuts, and how far each policy is from fitting."""
    evaluator = Evaluator(space)
    for mesh in space.meshes():
        yield evaluator.fits_nowhere(mesh), evaluator.bound_ns(mesh)
    pairs = [(layout, policy) for layout in space.layouts() for policy in space.policies(layout)]
    for layout, policy in pairs[::EVERY]:
        spec = space.spec_of(layout, policy)
        floors = evaluator.side(spec).floors
        times = evaluator.step_bound_ns(spec, tight=False), evaluator.step_bound_ns(spec)
        yield *times, evaluator.floor_bytes(spec), floors.shared_bytes(spec), floors.kept_bytes(spec)


def advised(seed: int) -> dict[str, str]:
    """Changes that would make a plan faster, and those that would make it fit a device with four fifths of the bytes it needs."""
    document = draw(seed, size=SMALL)
    before = megaplan.estimate(document)
    device: dict[str, Any] = dict(document.get("device") or {"name": "h200"})
    reserve = before.budget.device.capacity_bytes - before.budget.device.usable_bytes
    found = megaplan.estimate(document | {"device": device | {"capacity": before.peak_bytes * 4 // 5 + reserve}})
    faster = [str(each) for each in before.faster]
    said = [(item.code, item.detail, *item.hints) for item in found.diagnostics]
    return {"peak_bytes": str(found.peak_bytes), "rows": digest(said), "lost": digest(faster)}


def row_of(kind: str, seed: int) -> dict[str, str]:
    row = dict.fromkeys(FIELDS, "") | {"kind": kind, "seed": str(seed)}
    try:
        return row | (advised(seed) if kind == "advice" else searched(kind, seed))
    except megaplan.MegaplanError as error:
        return row | {"refused": codes_of(error)}


@pytest.fixture(scope="module")
def table() -> Iterator[PinnedRows]:
    found = PinnedRows("searches.csv", FIELDS, num_keys=2)
    yield found
    found.write([(kind, str(seed)) for kind, seed in SEARCHES])


@pytest.mark.parametrize(("kind", "seed"), SEARCHES)
def test_a_search_is_what_was_committed(kind: str, seed: int, table: PinnedRows) -> None:
    row = row_of(kind, seed)
    assert row == table.committed(row)
