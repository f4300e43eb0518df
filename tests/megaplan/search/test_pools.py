"""A search of layouts on several types of devices: rows that estimate repeats, the rows of an exhaustive search, and bounds."""

import random
import shlex
from typing import Any

import pytest
from small_problems import problem

import megaplan
from megaplan.budget.peaks import build_budget
from megaplan.cli.search_text import search_lines
from megaplan.exploration.engine import SearchTask, explore
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.space import Space
from megaplan.exploration.values import Exact, LayoutChoice
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.spec.host import DeviceRef, Pool

TINY = "plans/tiny-hybrid-pp2.yaml"
FIGURES = ("memory_bytes_per_second", "node_bytes_per_second", "network_bytes_per_second")
TOP = 4
PLAIN = ["mesh.tp=1", "mesh.cp=1", "mesh.ep=1", "mesh.etp=1"]


def second(draw: random.Random) -> dict[str, Any]:
    """Rates of a second device."""
    return {"peak_flops": {"fp32": 10 ** draw.randint(12, 14)}, **{name: 10 ** draw.randint(10, 12) for name in FIGURES}}


def pooled(seed: int) -> tuple[Space, int]:
    """A small problem on two types of devices, the second with rates, and often a memory, of its own; and the headroom asked for."""
    while True:
        space, headroom = problem(seed)
        draw, first = random.Random(seed), space.base.device
        more = draw.choice((1, 2)) * first.capacity if first.capacity is not None else None
        device = DeviceRef(name="a100-80gb", per_node=first.per_node, capacity=more, **second(draw))
        spec = space.base.model_copy(update={"pools": (Pool(count=space.devices // 2, device=device),)})
        fixed = {name: degree for name, degree in space.fixed.items() if name != "pp"}
        found = Space(spec, space.devices, fixed, tuple(space.varied))
        if found.meshes():
            return found, headroom
        seed += 10_000


def agrees(space: Space, exact: Exact) -> None:
    """Memory and time of a result, from the functions that every command uses."""
    spec = space.spec_of(exact.layout, exact.policy)
    inventory = build_inventory(spec)
    worst = build_budget(spec, inventory, build_layout(spec, inventory, exact.spans)).worst
    assert (worst.peak_bytes, worst.headroom_bytes) == (exact.peak_bytes, exact.headroom_bytes)
    time = planned_time(spec, exact.spans, inventory)
    assert isinstance(time, PlannedTime)
    assert round(time.seconds * 1e9) == exact.step_ns


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_all_layouts(seed: int) -> None:
    space, headroom = pooled(seed)
    evaluator, best = Evaluator(space, headroom), dict[LayoutChoice, Exact]()
    for layout in space.layouts():
        found = [each for policy in space.policies(layout) if isinstance(each := evaluator.exact(layout, policy), Exact)]
        if found:
            best[layout] = min(found, key=lambda one: one.order("time"))
    searched = explore(SearchTask(space, "time", headroom, TOP), 1)
    assert searched.complete
    assert searched.rows == sorted(best.values(), key=lambda one: one.order("time"))[:TOP]
    assert all(searched.bound_ns <= row.step_ns for row in searched.rows)
    for row in searched.rows:
        agrees(space, row)


@pytest.mark.parametrize("seed", range(1000, 1003))
def test_no_bound_is_above_what_it_bounds(seed: int) -> None:
    """Bounds of every layout and policy, whether or not it fits: a bound of time for any cuts, and of memory."""
    space, _ = pooled(seed)
    evaluator = Evaluator(space, -(1 << 50))  # everything fits
    for mesh in space.meshes():
        over, least = evaluator.fits_nowhere(mesh), evaluator.bound_ns(mesh)
        for layout in space.layouts_of(mesh):
            for policy in space.policies(layout):
                exact = evaluator.exact(layout, policy)
                assert isinstance(exact, Exact)
                assert least <= exact.step_ns
                assert evaluator.exact(layout, policy, exact.step_ns) == exact
                assert evaluator.exact(layout, policy, exact.step_ns - 1) in (exact, None)
                assert evaluator.step_bound_ns(space.spec_of(layout, policy)) <= exact.step_ns
                assert over <= evaluator.headroom_bytes - exact.headroom_bytes


def test_a_row_is_its_command_and_its_plan() -> None:
    """Step, peak and the room of each type of device are those of the row's command and of its plan."""
    pool = "pools=[{count: 2, device: {name: a100-80gb, capacity: 68719476736}}]"
    found = megaplan.search(
        TINY,
        "schedule.num_microbatches=8",
        pool,
        "mesh={pp: 2, dp_shard: 2}",
        fix=PLAIN,
        vary=["schedule"],
        top=3,
        processes=1,
        seconds=None,
    )
    assert found.complete
    assert {row.spec.mesh.pp for row in found.rows} <= {2, 4}
    for row in found.rows:
        words = shlex.split(found.command(row))
        assert words[:2] == ["megaplan", "estimate"]
        for again in (megaplan.estimate(words[2], *words[4::2]), megaplan.estimate(found.plan(row))):
            assert not isinstance(again.step_time, str)
            assert again.step_time.seconds == pytest.approx(row.step_seconds, abs=1e-9)
            assert (again.peak_bytes, again.headroom_bytes) == (row.peak_bytes, row.headroom_bytes)
            of_pool = {rank: pool.device.name for pool in again.budget.pools for rank in range(*pool.ranks)}
            for pool in row.pools:
                ranks = [each for each in again.budget.ranks if of_pool[each.ranks[0]] == pool.device]
                assert pool.headroom_bytes == min(each.headroom_bytes for each in ranks)
    text = "\n".join(line for line, _ in search_lines(found, ()))
    assert "on 2 x h200 + 2 x a100-80gb" in text
    assert "peaks of the first row: h200" in text
    assert "MP509: pools[0].count = 2, but a stage has 4 / 1 = 4 devices" in " ".join(text.split())


def test_pools_of_all_devices_are_refused() -> None:
    with pytest.raises(megaplan.MegaplanError, match="pools count 2 devices, the mesh has 2"):
        megaplan.search(TINY, "pools=[{count: 2, device: {name: a100-80gb}}]", "mesh={pp: 2, dp_shard: 2}", devices=2)


@pytest.mark.parametrize("kind", ["1f1b", "zbv", "interleaved_1f1b"])
def test_equal_devices_are_one(kind: str) -> None:
    texts = ["schedule.num_microbatches=8", "mesh={pp: 2, dp_shard: 2}"]
    alone, found = (
        megaplan.search(
            TINY, *texts, *pools, fix=[*PLAIN, "mesh.pp=2", f"schedule.kind={kind}"], vary=["schedule"], top=5, processes=1, seconds=None
        )
        for pools in ((), ("pools=[{count: 2, device: {name: h200}}]",))
    )
    assert [row.exact for row in found.rows] == [row.exact for row in alone.rows]
    assert [row.terms for row in found.rows] == [row.terms for row in alone.rows]
    assert found.bound_seconds <= alone.bound_seconds


@pytest.mark.parametrize("seed", range(3))
def test_a_faster_pool_never_slows_the_best_row(seed: int) -> None:
    draw, before = random.Random(seed), float("inf")
    figures = {"peak_flops": {"fp32": 10**12}, **dict.fromkeys(FIGURES, 10**10)}
    for _ in range(4):
        pool = Pool(count=2, device=DeviceRef(name="a100-80gb", **figures)).model_dump(mode="json", exclude_unset=True)
        texts = {"mesh": {"pp": 2, "dp_shard": 2}, "pools": [pool], "schedule.num_microbatches": 8}
        found = megaplan.search(
            TINY, *(f"{key}={value}" for key, value in texts.items()), fix=PLAIN, vary=["schedule"], top=1, processes=1, seconds=None
        )
        assert found.rows[0].step_seconds <= before
        before = found.rows[0].step_seconds
        figures["peak_flops"] = {"fp32": figures["peak_flops"]["fp32"] * draw.choice((1, 3))}
        figures[draw.choice(FIGURES)] *= draw.choice((2, 20))
