"""The replay: bubbles of equal stages in closed form, uneven stages by hand, orders that cannot run."""

from __future__ import annotations

import pytest

from megaplan.schedule import Action, Kind, actions, replay


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 4), (4, 8), (8, 16)])
def test_equal_stages_wait_for_fill_and_drain(pp: int, m: int) -> None:
    timeline = replay(actions("1f1b", pp, 1, m), [2] * pp, [5] * pp)
    assert timeline.makespan == (m + pp - 1) * 7
    assert timeline.bubbles == ((pp - 1) * 7,) * pp
    assert timeline.bubbles_inside[-1] == 0
    assert timeline.busy == (m * 7,) * pp


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp: int, vpp: int, m: int) -> None:
    timeline = replay(actions("interleaved_1f1b", pp, vpp, m), [2] * pp * vpp, [5] * pp * vpp)
    assert timeline.bubbles == ((pp - 1) * 7,) * pp


def test_uneven_stages_by_hand() -> None:
    timeline = replay(actions("1f1b", 2, 1, 2), [1, 3], [2, 4])
    assert [(str(t.action), t.start, t.stop) for t in timeline.ranks[0]] == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 10), ("0B1", 15, 17)]
    assert [(str(t.action), t.start, t.stop) for t in timeline.ranks[1]] == [("1F0", 1, 4), ("1B0", 4, 8), ("1F1", 8, 11), ("1B1", 11, 15)]
    assert (timeline.makespan, timeline.bubbles, timeline.bubbles_inside) == (17, (11, 3), (11, 0))


def test_an_order_that_waits_forever_names_who_waits() -> None:
    orders = ((Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)), (Action(Kind.BACKWARD, 1, 0), Action(Kind.FORWARD, 1, 0)))
    with pytest.raises(ValueError, match="0B0, 1B0 wait"):
        replay(orders, [1, 1], [1, 1])
