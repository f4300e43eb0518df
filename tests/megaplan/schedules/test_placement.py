"""Slot to rank and back, for every placement."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.schedules import Placement, num_copies, placement, slot_owner, slots_of_rank


@pytest.mark.requirement("R-27")
def test_v_placement_folds_twice_as_many_slots() -> None:
    assert [slot_owner("v", slot, 4) for slot in range(8)] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1)]
    assert [slots_of_rank("v", rank, 4, 2) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_loop_placement_goes_round() -> None:
    assert [slot_owner("loop", slot, 2) for slot in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("where", "pp", "vpp"), [("single", 5, 1), ("loop", 3, 4), ("v", 6, 2), ("mirror", 6, 1)])
def test_owner_and_slots_are_inverse(where: Placement, pp: int, vpp: int) -> None:
    owned = {(rank, chunk): slot for rank in range(pp) for chunk, slot in enumerate(slots_of_rank(where, rank, pp, vpp))}
    assert sorted(owned.values()) == list(range(pp * vpp * num_copies(where)))
    assert all(slot_owner(where, slot, pp) == owner for owner, slot in owned.items())


@pytest.mark.parametrize(
    ("where", "slot", "pp"), [("single", 4, 4), ("single", -1, 4), ("loop", -1, 4), ("v", 8, 4), ("v", -1, 4), ("mirror", 8, 4)]
)
def test_a_slot_that_does_not_exist_is_refused(where: Placement, slot: int, pp: int) -> None:
    with pytest.raises(ValueError, match=str(slot)):
        slot_owner(where, slot, pp)


@pytest.mark.parametrize(("where", "rank", "pp", "vpp"), [("single", 0, 4, 2), ("v", 0, 4, 3), ("mirror", 0, 4, 2), ("loop", 4, 4, 2)])
def test_a_rank_that_cannot_hold_those_slots_is_refused(where: Placement, rank: int, pp: int, vpp: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        slots_of_rank(where, rank, pp, vpp)


def test_every_schedule_of_the_spec_has_a_placement() -> None:
    kinds = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev", "dualpipe", "paired_1f1b")
    assert [placement(kind) for kind in kinds] == ["single", "single", "loop", "loop", "loop", "v", "v", "mirror", "loop"]
    with pytest.raises(MegaplanError, match="MP310"):
        placement("unheard_of")
