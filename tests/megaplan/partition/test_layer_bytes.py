"""Bytes that every split that fits must hold at a forward: gradients only once they exist."""

import pytest

from megaplan.partition.layer_bytes import _at_forwards
from megaplan.schedules.states import rank_states


@pytest.mark.parametrize("keeps", [True, False])
def test_weight_gradients_are_not_certain_before_the_first_weight_half(keeps: bool) -> None:
    """ZB-H1 of 4 microbatches: the last rank runs its first W after its last F; of 8, forwards follow it."""
    few, more = (_at_forwards(rank_states("interleaved_zero_bubble", 4, 1, number)[3], 1, keeps=keeps) for number in (4, 8))
    assert few == (((1, 0, int(keeps)),),)
    assert more == (((1, 1, int(keeps)),),)


def test_a_whole_backward_makes_every_gradient() -> None:
    """1F1B: on the last rank all forwards but the first find gradients; parameters are gathered from the first on."""
    assert _at_forwards(rank_states("1f1b", 2, 1, 3)[1], 1, keeps=True) == (((1, 1, 1),),)
    assert _at_forwards(rank_states("1f1b", 2, 1, 2)[0], 1, keeps=True) == (((2, 0, 1),),)


def test_the_other_chunk_of_a_rank_keeps_what_it_gathered() -> None:
    """Looped BFS: while the second chunk runs forward, the first has its parameters and all its microbatches."""
    assert _at_forwards(rank_states("looped_bfs", 2, 2, 3)[0], 2, keeps=True) == (((3, 0, 1), (3, 0, 1)),)
