"""Action orders and in-flight vectors: closed forms, validity, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.errors import MegaplanError
from megaplan.schedule import Action, Kind, actions, in_flight, receive_buffers, schedule_problems
from megaplan.schedule.in_flight import non_dominated

SINGLE = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (pp, pp + 1, 2 * pp, 5 * pp)]
LOOPED = [(pp, vpp, m) for pp in (1, 2, 3, 4, 8) for vpp in (2, 3, 4) for m in (1, pp, pp + 1, 2 * pp, 6 * pp)]
LEGAL_LOOPED = [(pp, vpp, m) for pp, vpp, m in LOOPED if m % max(1, m // pp) == 0]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "m"), SINGLE)
def test_1f1b_holds_as_many_microbatches_as_stages_ahead(pp: int, m: int) -> None:
    assert in_flight("1f1b", pp, 1, m) == tuple(((min(m, pp - rank),),) for rank in range(pp))


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "vpp", "m"), LEGAL_LOOPED)
def test_interleaved_peak_is_the_closed_form(pp: int, vpp: int, m: int) -> None:
    group = m // max(1, m // pp)
    peaks = [max(map(sum, vectors)) for vectors in in_flight("interleaved_1f1b", pp, vpp, m)]
    assert peaks == [min(m * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * group + 1) for rank in range(pp)]


def test_chunks_do_not_peak_together() -> None:
    assert in_flight("interleaved_1f1b", 4, 2, 8)[0] == ((7, 4), (8, 3))


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "m"), [("1f1b", pp, 1, m) for pp, m in SINGLE] + [("interleaved_1f1b", *c) for c in LEGAL_LOOPED]
)
def test_every_microbatch_goes_forward_then_backward_once_on_every_slot(kind: str, pp: int, vpp: int, m: int) -> None:
    for rank, order in enumerate(actions(kind, pp, vpp, m)):
        expected = {(slot, microbatch) for slot in range(rank, pp * vpp, pp) for microbatch in range(m)}
        position = {(a.kind, a.slot, a.microbatch): place for place, a in enumerate(order)}
        assert len(order) == len(position) == 2 * len(expected)
        assert all(position[Kind.FORWARD, *item] < position[Kind.BACKWARD, *item] for item in expected)


def test_an_action_prints_as_torch_writes_it() -> None:
    assert str(Action(Kind.BACKWARD, 12, 3)) == "12B3"


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "m", "code"),
    [
        ("gpipe", 2, 1, 4, "MP310"),
        ("looped_bfs", 2, 2, 4, "MP310"),
        ("interleaved_zero_bubble", 2, 2, 4, "MP310"),
        ("zbv", 2, 2, 4, "MP310"),
        ("dualpipev", 2, 2, 4, "MP310"),
        ("1f1b", 4, 1, 3, "MP311"),
        ("1f1b", 2, 2, 4, "MP313"),
        ("interleaved_1f1b", 4, 2, 9, "MP312"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_by_name(kind: str, pp: int, vpp: int, m: int, code: str) -> None:
    with pytest.raises(MegaplanError) as refusal:
        in_flight(kind, pp, vpp, m)
    assert [found.code for found in refusal.value.diagnostics] == [code]
    assert [found.code for found in schedule_problems(kind, pp, vpp, m)] == [code]


def test_the_hints_of_uneven_rounds_are_legal() -> None:
    (found,) = schedule_problems("interleaved_1f1b", 4, 2, 9)
    assert "9 % 2 = 1" in found.detail
    for hint in found.hints[:-1]:
        assert not schedule_problems("interleaved_1f1b", 4, 2, int(hint.rpartition("=")[2]))


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
