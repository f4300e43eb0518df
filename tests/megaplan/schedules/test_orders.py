"""Action orders and in-flight vectors: closed forms, validity, refusals."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.errors import MegaplanError
from megaplan.schedules import (
    KINDS,
    SCHEDULES,
    Action,
    ActionKind,
    InFlight,
    Overlap,
    SlotTimes,
    actions,
    computations,
    in_flight,
    lane,
    num_actions,
    peak_bytes,
    placement,
    receive_buffers,
    replay,
    schedule_problems,
    shared_buffers,
    slots_of_rank,
    zbv,
)
from megaplan.schedules.states import non_dominated

SINGLE = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (pp, pp + 1, 2 * pp, 5 * pp)]
LOOPED = [(pp, vpp, m) for pp in (1, 2, 3, 4, 8) for vpp in (2, 3, 4) for m in (1, pp, pp + 1, 2 * pp, 6 * pp)]
V_SHAPED = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (2 * pp, 2 * pp + 1, 5 * pp)]
LEGAL_LOOPED = [(pp, vpp, m) for pp, vpp, m in LOOPED if m % max(1, m // pp) == 0]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "m"), SINGLE)
def test_1f1b_holds_as_many_microbatches_as_stages_ahead(pp: int, m: int) -> None:
    assert in_flight("1f1b", pp, 1, m) == tuple((InFlight((min(m, pp - rank),), (0,)),) for rank in range(pp))


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "vpp", "m"), LEGAL_LOOPED)
def test_interleaved_peak_is_the_closed_form(pp: int, vpp: int, m: int) -> None:
    group = m // max(1, m // pp)
    peaks = [peak_bytes(vectors, (1,) * vpp, (1,) * vpp) for vectors in in_flight("interleaved_1f1b", pp, vpp, m)]
    assert peaks == [min(m * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * group + 1) for rank in range(pp)]


def test_chunks_do_not_peak_together() -> None:
    vectors = in_flight("interleaved_1f1b", 4, 2, 8)[0]
    assert vectors == (((7, 4), (0, 0)), ((8, 3), (0, 0)))
    assert peak_bytes(vectors, (10, 1), (0, 0)) == 83 < 8 * 10 + 4 * 1
    assert peak_bytes(vectors, (1, 10), (0, 0)) == 47


@pytest.mark.parametrize(("pp", "vpp", "m"), [(pp, vpp, m) for pp, vpp, m in LEGAL_LOOPED if m >= pp])
def test_zero_bubble_holds_as_much_on_every_rank_until_the_weight_gradients(pp: int, vpp: int, m: int) -> None:
    group = m // max(1, m // pp)
    for rank, vectors in enumerate(in_flight("interleaved_zero_bubble", pp, vpp, m)):
        assert peak_bytes(vectors, (1,) * vpp, (1,) * vpp) == min(m * vpp, (vpp - 1) * group + pp)
        assert peak_bytes(vectors, (1,) * vpp, (0,) * vpp) == min(m * vpp, pp - 1 - rank + (vpp - 1) * group + 1)


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize(("pp", "m"), V_SHAPED)
def test_v_schedules_hold_two_chunks_a_rank(pp: int, m: int) -> None:
    for rank, (bounced, dual) in enumerate(zip(in_flight("zbv", pp, 2, m), in_flight("dualpipev", pp, 2, m), strict=True)):
        assert peak_bytes(bounced, (1, 1), (1, 1)) == 2 * pp
        assert peak_bytes(dual, (1, 1), (1, 1)) == 2 * pp + 1
        assert max(vector.full for vector in dual)[0] == 2 * pp - rank


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "m"),
    [("gpipe", pp, 1, m) for pp, m in SINGLE]
    + [("1f1b", pp, 1, m) for pp, m in SINGLE]
    + [(kind, *c) for kind in ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs") for c in LEGAL_LOOPED]
    + [("paired_1f1b", *c) for c in [*LEGAL_LOOPED, *((pp, 1, m) for pp, m in SINGLE)]]
    + [(kind, pp, 2, m) for kind in ("zbv", "dualpipev") for pp, m in V_SHAPED]
    + [("zbv", 4, 2, 3)],
)
def test_every_microbatch_goes_forward_then_backward_once_on_every_slot(kind: str, pp: int, vpp: int, m: int) -> None:
    for rank, order in enumerate(actions(kind, pp, vpp, m)):
        owned = slots_of_rank(placement(kind), rank, pp, vpp)
        position = {(a.kind, a.slot, a.microbatch): place for place, a in enumerate(computations(order))}
        assert len(position) == len(list(computations(order)))
        assert {(slot, index) for _, slot, index in position} == {(slot, index) for slot in owned for index in range(m)}
        for slot in owned:
            for index in range(m):
                whole = position.get((ActionKind.BACKWARD, slot, index))
                halves = [position.get((kind, slot, index)) for kind in (ActionKind.INPUT, ActionKind.WEIGHT)]
                done = [whole] if whole is not None else halves
                assert (whole is None) != (halves == [None, None])
                assert [position[ActionKind.FORWARD, slot, index], *done] == sorted([position[ActionKind.FORWARD, slot, index], *done])


@pytest.mark.parametrize("kind", KINDS)
def test_the_registry_says_which_schedules_have_pairs(kind: str) -> None:
    orders = actions(kind, 4, SCHEDULES[kind].least_vpp, 16)
    assert SCHEDULES[kind].pairs == any(isinstance(step, Overlap) for order in orders for step in order)


@pytest.mark.parametrize(("pp", "vpp", "m"), [*LEGAL_LOOPED, *((pp, 1, m) for pp, m in SINGLE)])
def test_pairs_of_1f1b_are_independent_and_wait_no_longer(pp: int, vpp: int, m: int) -> None:
    """No part of a pair is of the other's microbatch on its slot; a rank holds one chunk activation more than interleaved 1F1B."""
    orders = actions("paired_1f1b", pp, vpp, m)
    for rank, order in enumerate(orders):
        for step in order:
            if isinstance(step, Overlap):
                assert step.forward[1:] != step.backward[1:]
        group = m // max(1, m // pp) if vpp > 1 else 0
        (held,) = {peak_bytes(in_flight("paired_1f1b", pp, vpp, m)[rank], (1,) * vpp, (1,) * vpp)}
        assert held == min(m * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * group + 2)
    if m >= pp:
        assert replay(orders, SlotTimes.equal(pp * vpp, 2, 4, 0)).makespan == 6 * (m * vpp + pp - 1)


def test_an_action_prints_as_torch_writes_it() -> None:
    assert str(Action(ActionKind.BACKWARD, 12, 3)) == "12B3"
    assert str(Overlap(Action(ActionKind.FORWARD, 0, 3), Action(ActionKind.BACKWARD, 3, 1))) == "(0F3;3B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "m", "code"),
    [
        ("zero_bubble", 2, 2, 4, "MP310"),
        ("gpipe", 2, 2, 4, "MP313"),
        ("interleaved_zero_bubble", 4, 2, 9, "MP312"),
        ("zbv", 2, 1, 4, "MP313"),
        ("dualpipev", 2, 3, 4, "MP313"),
        ("dualpipev", 2, 2, 3, "MP311"),
        ("1f1b", 4, 1, 3, "MP311"),
        ("1f1b", 2, 2, 4, "MP313"),
        ("interleaved_1f1b", 4, 2, 9, "MP312"),
        ("interleaved_1f1b", 4, 1, 4, "MP313"),
        ("looped_bfs", 4, 1, 4, "MP313"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_by_name(kind: str, pp: int, vpp: int, m: int, code: str) -> None:
    assert [found.code for found in schedule_problems(kind, pp, vpp, m)] == [code]
    if (kind, code) == ("1f1b", "MP311"):  # Megatron-Core runs it: one microbatch held for each, as far as there are any
        assert schedule_problems(kind, pp, vpp, m, few=True) == []
        assert [held[0].full for held in in_flight(kind, pp, vpp, m)] == [(3,), (3,), (2,), (1,)]
        return
    with pytest.raises(MegaplanError) as refusal:
        in_flight(kind, pp, vpp, m)
    assert [found.code for found in refusal.value.diagnostics] == [code]


def test_the_hints_of_uneven_rounds_are_legal() -> None:
    (found,) = schedule_problems("interleaved_1f1b", 4, 2, 9)
    assert "9 % 2 = 1" in found.detail
    ((_, legal),) = found.remedies
    assert legal == (8, 12)
    assert not any(schedule_problems("interleaved_1f1b", 4, 2, count) for count in legal)


def test_a_schedule_means_the_same_in_a_spec_and_alone() -> None:
    """A spec's rule refuses what a schedule alone refuses, and one pipeline rank, except where microbatches then accumulate."""
    for kind, schedule in SCHEDULES.items():
        for pp, vpp, m in product((1, 2, 4), (1, 2, 3), (1, 4, 8, 9)):
            alone, planned = schedule_problems(kind, pp, vpp, m), schedule_problems(kind, pp, vpp, m, planned=True)
            assert [found.code for found in planned if found not in alone] == ["MP313"] * (pp == 1 and not schedule.accumulates)
            keys = {"mesh.vpp", "schedule.num_microbatches"} | ({"mesh.pp"} if kind == "dualpipe" else set())
            assert {found.key for found in alone} <= keys
            assert vpp >= schedule.least_vpp or any(found.key == "mesh.vpp" for found in alone)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_non_dominated_keeps_exactly_what_any_weights_can_prefer(vectors: list[tuple[int, int, int]]) -> None:
    kept = non_dominated(vectors)
    for vector in vectors:
        assert any(all(a <= b for a, b in zip(vector, best, strict=True)) for best in kept)
    for one in kept:
        assert not any(one != other and all(a <= b for a, b in zip(one, other, strict=True)) for other in kept)


def test_receive_buffers_leave_out_the_ends_of_the_pipeline() -> None:
    assert receive_buffers("1f1b", 1, 1, 5) == (((0, 0),),)
    assert receive_buffers("1f1b", 2, 1, 5) == (((0, 5),), ((5, 0),))
    assert receive_buffers("interleaved_1f1b", 2, 2, 6) == (((0, 6), (6, 6)), ((6, 6), (6, 0)))


def test_shared_receive_buffers_do_not_grow_with_microbatches() -> None:
    assert shared_buffers("1f1b", 3, 1, 480) == (((0, 1),), ((2, 1),), ((1, 0),))
    assert shared_buffers("gpipe", 2, 1, 5) == (((0, 1),), ((5, 0),))
    for kind, vpp in (("interleaved_1f1b", 3), ("interleaved_zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)):
        few, many = (shared_buffers(kind, 4, vpp, count) for count in (64, 480))
        assert few == many
        assert max(number for chunks in many for numbers in chunks for number in numbers) <= 3 * 4 * vpp


@pytest.mark.parametrize("pp", [2, 5, 9])
def test_zbv_of_few_microbatches_leaves_out_the_others(pp):
    for m in range(1, 2 * pp - 1):
        whole = zbv.orders(pp, 2, 2 * pp - 1)
        assert zbv.orders(pp, 2, m) == tuple(tuple(step for step in order if step.microbatch < m) for order in whole)


def test_zbv_writes_no_more_than_its_microbatches(monkeypatch):
    """A schedule of many ranks wrote the actions of 2p - 1 microbatches first: over ten seconds for 1,024 ranks and 19 microbatches."""
    written = 0

    def count(*values):
        nonlocal written
        written += 1
        return Action(*values)

    monkeypatch.setattr(lane, "Action", count)
    zbv.orders(100, 2, 2)
    assert written <= 3 * num_actions(100, 2, 2)
