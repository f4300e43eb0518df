"""A search gives the result of an exhaustive one without bounds, on random small problems; and every bound is valid."""

from dataclasses import replace

import pytest
from small_problems import exhaustive, problem

from megaplan.exploration.engine import SearchTask, explore
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.values import Exact, LayoutChoice, MemoryPolicy
from megaplan.layout.build import Spans
from megaplan.partition.stack import stack_of

TOP = 4
FAST = range(16)


def _agrees(seed: int, *, mirrored: bool = False, turns: bool = False) -> None:
    space, headroom = problem(seed, mirrored=mirrored, turns=turns)
    expected = sorted(exhaustive(space, headroom).values(), key=lambda one: one.order("time"))[:TOP]
    found = explore(SearchTask(space, "time", headroom, TOP), 1)
    assert found.complete
    assert found.rows == expected
    assert all(found.bound_ns <= row.step_ns for row in found.rows)


@pytest.mark.parametrize("seed", [*FAST, 172])  # 172: saved bytes under a policy once depended on the order of calls
def test_small_problems(seed: int) -> None:
    _agrees(seed)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_small_problems_with_two_copies_of_the_model(seed: int) -> None:
    _agrees(seed, mirrored=True)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_small_problems_with_pairs_in_turns(seed: int, mirrored: bool) -> None:
    _agrees(seed, mirrored=mirrored, turns=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(FAST), 200))
def test_more_small_problems(seed: int) -> None:
    _agrees(seed)


KINDS = {"plain": {}, "mirrored": {"mirrored": True}, "turns": {"turns": True}, "mirrored-turns": {"mirrored": True, "turns": True}}
BOUNDED = [*(("plain", seed) for seed in range(1000, 1012)), *((kind, seed) for kind in list(KINDS)[1:] for seed in range(4))]


@pytest.mark.parametrize(("kind", "seed"), BOUNDED)
def test_no_bound_is_above_what_it_bounds(kind: str, seed: int) -> None:
    """Bounds of every layout and policy, whether or not it fits: a bound of time for any cuts, and of memory."""
    space, _ = problem(seed, **KINDS[kind])
    evaluator = Evaluator(space, -(1 << 50))  # everything fits
    stored = evaluator.fits_on_no_mesh()
    for mesh in space.meshes():
        over, least = evaluator.fits_nowhere(mesh), evaluator.bound_ns(mesh)
        for layout in space.layouts_of(mesh):
            for policy in space.policies(layout):
                spec = space.spec_of(layout, policy)
                exact = evaluator.exact(layout, policy)
                assert isinstance(exact, Exact)
                assert least <= exact.step_ns
                assert evaluator.exact(layout, policy, exact.step_ns) == exact
                assert evaluator.exact(layout, policy, exact.step_ns - 1) in (exact, None)
                assert evaluator.step_bound_ns(spec) <= exact.step_ns
                assert evaluator.floor_bytes(spec) <= exact.peak_bytes
                assert stored < over <= exact.peak_bytes - evaluator.usable_bytes + evaluator.headroom_bytes


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_where_the_thriftiest_policy_exceeds_the_sums_of_memory_every_policy_does(seed: int) -> None:
    """The other policies exceed the sums by as much at least: a layout is given up if its thriftiest policy is proven not to fit."""
    space, _ = problem(seed)
    evaluator = Evaluator(space, -(1 << 50))
    layouts = [layout for layout in space.layouts() if layout.pp > 1]
    for layout in layouts[:: max(1, len(layouts) // 8)]:
        thrifty = evaluator.thriftiest(layout)
        exact = evaluator.exact(layout, thrifty)
        assert isinstance(exact, Exact)

        def excess(policy: MemoryPolicy, layout: LayoutChoice = layout, spans: Spans = exact.spans) -> int:
            spec = space.spec_of(layout, policy)
            stack = stack_of(spec, evaluator.side(spec).clock.costs(spec))
            limited = replace(stack, sums=evaluator._memory(spec).sums(spans))
            return max(limited.rank_excess(rank, spans) for rank in range(stack.pp))

        least = excess(thrifty)
        assert all(least <= excess(policy) for policy in space.policies(layout))
