"""Neighbours of cuts against enumeration."""

from itertools import combinations, pairwise, product
from random import Random

from megaplan.partition.best_cuts import neighbours


def one_move_away(cuts: tuple[int, ...], num_positions: int, *, pairs: bool) -> set[tuple[int, ...]]:
    """Moves by every vector of −1, 0 and 1: one run of cuts moves together, or any two cuts move."""
    found = set()
    for moves in product((-1, 0, 1), repeat=len(cuts)):
        moved = [index for index, by in enumerate(moves) if by]
        is_run = bool(moved) and len({moves[index] for index in moved}) == 1 and moved[-1] - moved[0] + 1 == len(moved)
        if not is_run and not (pairs and len(moved) == 2):
            continue
        other = tuple(cut + by for cut, by in zip(cuts, moves, strict=True))
        if other[0] >= 0 and other[-1] < num_positions and all(a < b for a, b in pairwise(other)):
            found.add(other)
    return found


def test_neighbours_are_those_of_one_run_or_two_cuts() -> None:
    random = Random(3)
    for _ in range(60):
        num_positions = random.randint(4, 12)
        cuts = random.choice(list(combinations(range(num_positions), random.randint(1, 4))))
        for pairs in (True, False):
            found = list(neighbours(cuts, num_positions, pairs=pairs))
            assert len(found) == len(set(found))
            assert set(found) == one_move_away(cuts, num_positions, pairs=pairs)
