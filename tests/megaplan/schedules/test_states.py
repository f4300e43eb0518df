"""The points of a schedule: the counts of its orders, none that another one dominates, and the same for any number of microbatches."""

import pytest

from megaplan.schedules import actions, in_flight, num_copies, placement, receive_buffers, registry, slot_owner, slots_of_rank
from megaplan.schedules.actions import ActionKind, ScheduleStep, computations
from megaplan.schedules.registry import schedule_problems
from megaplan.schedules.states import (
    BACKWARD,
    BACKWARDED,
    FORWARD,
    FORWARD_AFTER_BACKWARD,
    FORWARDED,
    REDUCE,
    UNTOUCHED,
    RankState,
    non_dominated,
    rank_states,
    sequential_states,
    states_of,
)

ZERO_BUBBLE = "interleaved_zero_bubble"
SCHEDULES = [
    ("1f1b", 4, 1, 4),
    ("1f1b", 4, 1, 9),
    ("gpipe", 2, 1, 3),
    ("looped_bfs", 2, 2, 4),
    ("interleaved_1f1b", 2, 2, 16),
    ("interleaved_1f1b", 4, 3, 8),
    (ZERO_BUBBLE, 4, 1, 8),
    (ZERO_BUBBLE, 2, 2, 4),
    ("zbv", 2, 2, 5),
    ("zbv", 4, 2, 8),
    ("dualpipev", 4, 2, 9),
    ("dualpipe", 4, 1, 14),
    ("dualpipe", 2, 1, 4),
    ("paired_1f1b", 3, 1, 11),
    ("paired_1f1b", 2, 3, 8),
]


def chunks_of(kind: str, pp: int, vpp: int) -> list[int]:
    """The chunk of every slot."""
    return [slot_owner(placement(kind), slot, pp)[1] for slot in range(pp * vpp * num_copies(placement(kind)))]


def walked(kind: str, pp: int, vpp: int, m: int, steps: int = 1) -> list[tuple[RankState, ...]]:
    """The points of every rank from its whole order."""
    found = []
    for rank, order in enumerate(actions(kind, pp, vpp, m)):
        slots = slots_of_rank(placement(kind), rank, pp, vpp)
        copies = num_copies(placement(kind))
        neighbours = len(slots) == 2 and slots[1] == slots[0] + 1 and copies == 1
        found.append(states_of(order * steps, chunks_of(kind, pp, vpp), len(slots), m // copies * steps, neighbours=neighbours))
    return found


def counts_of(order: tuple[ScheduleStep, ...], chunks: list[int], vpp: int) -> set[tuple[int, ...]]:
    """Microbatches in flight, then waiting, by chunk, at every action: its own tally."""
    forwards, ended, done = ([0] * vpp for _ in range(3))
    found = set()
    for action in computations(order):
        chunk = chunks[action.slot]
        forwards[chunk] += action.kind is ActionKind.FORWARD
        found.add((*(a - b for a, b in zip(forwards, ended, strict=True)), *(a - b for a, b in zip(ended, done, strict=True))))
        ended[chunk] += action.kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        done[chunk] += action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)
    return found


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
def test_moments_have_the_largest_counts_of_the_orders(kind: str, pp: int, vpp: int, m: int) -> None:
    """Each chunk is reduced once, with none of its own microbatches alive; `in_flight` gives the same counts."""
    found = rank_states(kind, pp, vpp, m)
    for rank, order, vectors in zip(found, actions(kind, pp, vpp, m), in_flight(kind, pp, vpp, m), strict=True):
        num_chunks = vpp * num_copies(placement(kind))
        largest = non_dominated(counts_of(order, chunks_of(kind, pp, vpp), num_chunks))
        assert non_dominated({(*point.in_flight, *point.waiting) for point in rank}) == largest
        assert tuple((*vector.full, *vector.pending_weight) for vector in vectors) == largest
        reduced = [point for point in rank if point.kind is REDUCE]
        assert sorted(point.chunk for point in reduced) == list(range(num_chunks))
        assert all(point.in_flight[point.chunk] == point.waiting[point.chunk] == 0 for point in reduced)
        assert all(point.states[point.chunk] is BACKWARDED for point in reduced)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "pp", "vpp"),
    [
        *(("1f1b", pp, 1) for pp in (1, 2, 5)),
        *((kind, pp, vpp) for kind in ("interleaved_1f1b", ZERO_BUBBLE) for pp in (1, 2, 4) for vpp in (2, 3)),
        (ZERO_BUBBLE, 4, 1),
        *((kind, pp, 2) for kind in ("zbv", "dualpipev") for pp in (1, 2, 5)),
        *(("dualpipe", pp, 1) for pp in (2, 6)),
        *(("paired_1f1b", pp, vpp) for pp in (1, 2, 4) for vpp in (1, 3)),
    ],
)
def test_more_microbatches_than_enough_have_no_other_moments(kind: str, pp: int, vpp: int, steps: int) -> None:
    """The order, which decides between equal peaks, is the same too."""
    enough = registry.SCHEDULES[kind].enough_microbatches
    longer = [m for m in range(pp, 6 * pp + 1) if not schedule_problems(kind, pp, vpp, m) and enough(pp, vpp, m) < m]
    assert len(longer) > 1
    for m in longer[:: max(1, len(longer) // 3)]:
        assert rank_states(kind, pp, vpp, m, steps) == tuple(walked(kind, pp, vpp, m, steps))


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
def test_a_fourth_step_of_an_update_has_no_other_moments(kind: str, pp: int, vpp: int, m: int) -> None:
    """Two steps between the first, which finds no gradients, and the last, which reduces them, are alike."""
    assert [set(rank) for rank in rank_states(kind, pp, vpp, m, 3)] == [set(rank) for rank in walked(kind, pp, vpp, m, 4)]


@pytest.mark.parametrize(("vectors", "kept"), [([(1, 2), (2, 1), (1, 1)], [(1, 2), (2, 1)]), ([(3,), (1,), (3,)], [(3,)]), ([], [])])
def test_a_vector_is_dropped_where_another_reaches_all_of_it(vectors: list[tuple[int, ...]], kept: list[tuple[int, ...]]) -> None:
    assert non_dominated(vectors) == tuple(kept)


def test_without_a_pipeline_the_last_microbatch_finds_gradients() -> None:
    """One backward and one forward; of one microbatch, both are the first."""
    for microbatches, states in (
        (1, (FORWARDED, UNTOUCHED)),
        (2, (FORWARD_AFTER_BACKWARD, BACKWARDED)),
        (9, (FORWARD_AFTER_BACKWARD, BACKWARDED)),
    ):
        backward, forward = sequential_states(microbatches)
        assert (backward.kind, forward.kind) == (BACKWARD, FORWARD)
        assert (backward.states[0], forward.states[0]) == states
        assert backward.in_flight == forward.in_flight == (1,)


def test_the_turn_of_a_v_receives_nothing_from_itself() -> None:
    """Middle stages hand over on one rank; a handed gradient is alive between the I of the later and the I of the earlier."""
    assert receive_buffers("zbv", 2, 2, 5) == (((0, 5), (5, 0)), ((5, 0), (0, 5)))
    assert receive_buffers(ZERO_BUBBLE, 2, 2, 4) == (((0, 4), (4, 4)), ((4, 4), (4, 0)))
    first, last = rank_states("zbv", 2, 2, 5)
    assert {point.passed_gradients for point in first} == {0}
    assert min(point.passed_gradients for point in last) == 0
    assert max(point.passed_gradients for point in last) > 0
    assert all(point.passed_gradients == 0 for point in last if point.kind is REDUCE and point.chunk == 0)


@pytest.mark.parametrize(("kind", "pp", "m"), [("zbv", 2, 5), ("zbv", 4, 9), ("zbv", 6, 12), ("dualpipev", 2, 4), ("dualpipev", 4, 10)])
def test_w_keeps_what_the_turn_of_a_v_sent_after_the_earlier_backward(kind: str, pp: int, m: int) -> None:
    """Counted once more by microbatch, from the places of its actions in the order."""
    *others, last = rank_states(kind, pp, 2, m)
    assert all(point.kept_inputs == 0 and not point.owns_input for rank in others for point in rank)
    order = list(computations(actions(kind, pp, 2, m)[-1]))
    at = {(action.kind, action.slot - pp + 1, action.microbatch): place for place, action in enumerate(order)}
    halved = [number for number in range(m) if (ActionKind.WEIGHT, 1, number) in at]
    ends = {number: at.get((ActionKind.INPUT, 0, number), at.get((ActionKind.BACKWARD, 0, number), -1)) for number in halved}
    spans = {
        number: (ends[number], at[ActionKind.WEIGHT, 1, number]) for number in halved
    }  # alive after the first, until the second has run
    counts = [sum(start < place < stop for start, stop in spans.values()) for place in range(len(order))]
    assert max(point.kept_inputs for point in last) == max(counts)
    assert any(point.owns_input for point in last) == any(start < stop for start, stop in spans.values())
    assert all(point.kind is ActionKind.WEIGHT and point.chunk == 1 for point in last if point.owns_input)
