"""Moves of cuts, and the climb that repeats them while they gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product

from megaplan.partition.constraints import Constraints


def climb(
    cuts: tuple[int, ...],
    rules: Constraints,
    num_layers: int,
    gains: Callable[[tuple[int, ...]], bool | None],
    ended: Callable[[], bool],
    *,
    pairs: bool = True,
    places: Sequence[int] = (1,),
) -> tuple[int, ...]:
    """Move cuts repeatedly to the first neighbour that gains more.

    Args:
        cuts: Cuts that keep the constraints.
        rules: Constraints.
        num_layers: Layers of the model.
        gains: True if cuts are better than the best so far, which they then replace; None ends the climb.
        ended: True if the climb ends; called before the neighbours of each best cuts.
        pairs: See `neighbours`.
        places: See `neighbours`.
    """
    positions, pins = rules.allowed_cuts(num_layers), frozenset(rules.pin)
    index = {cut: position for position, cut in enumerate(positions)}
    best = cuts
    found: bool | None = True
    while found and not ended():
        found = False
        for moved in neighbours([index[cut] for cut in best], len(positions), pairs=pairs, places=places):
            tried = tuple([positions[position] for position in moved])
            if pins.issubset(tried) and (found := gains(tried)) is not False:
                best = tried if found else best
                break
    return best


def neighbours(cuts: Sequence[int], num_positions: int, *, pairs: bool = True, places: Sequence[int] = (1,)) -> Iterator[tuple[int, ...]]:
    """First one cut moved, then runs of neighbouring cuts, then two cuts, each by the given number of positions either way.

    Args:
        cuts: Ascending positions from 0 to num_positions − 1.
        num_positions: Number of positions for a cut.
        pairs: True if two cuts that are no run move too.
        places: Positions by which a cut may move.
    """
    number = len(cuts)
    for size in range(1, number + 1):
        for first in range(number - size + 1):
            for by in (sign * place for place in places for sign in (-1, 1)):
                yield from _legal([cut + by * (first <= index < first + size) for index, cut in enumerate(cuts)], num_positions)
    for one, other in combinations(range(number if pairs else 0), 2):
        for far_one, far_other in product(places, repeat=2):
            for by_one, by_other in ((-far_one, far_other), (far_one, -far_other), (-far_one, -far_other), (far_one, far_other)):
                if by_one == by_other and other == one + 1:
                    continue  # a run
                moves = {one: by_one, other: by_other}
                yield from _legal([cut + moves.get(index, 0) for index, cut in enumerate(cuts)], num_positions)


def _legal(cuts: list[int], num_positions: int) -> Iterator[tuple[int, ...]]:
    if cuts[0] >= 0 and cuts[-1] < num_positions and all(a < b for a, b in pairwise(cuts)):
        yield tuple(cuts)
