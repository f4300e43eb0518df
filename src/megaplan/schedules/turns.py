"""A pair of a forward and a backward in turns, on a clock: one stream of computations, and one of exchanges, which runs them in order.

A computation is a sequence of legs, each up to the start of an exchange. The forward begins. After the start of an exchange the other
computation continues as soon as its own exchange has ended; when one has ended, the other runs alone. While the remaining computation
waits, only exchanges run. So a pair takes at least the sum of its computations, at least the sum of its exchanges, and at most the sum of
both.
"""

from typing import NamedTuple


class Leg(NamedTuple):
    """A computation up to the start of an exchange.

    Attributes:
        computing: Time of the computation.
        exchanging: Time of the exchange.
        passes_turn: True if the other computation of the pair continues during the exchange; else this one waits for its end.
    """

    computing: int
    exchanging: int
    passes_turn: bool = True


Legs = tuple[Leg, ...]
"""The legs of a computation that end with an exchange, in order. The rest of its time follows the last exchange."""


def exchanged(legs: Legs) -> int:
    """Time of all exchanges."""
    return sum([leg.exchanging for leg in legs])


def rest(legs: Legs, length: int) -> int:
    """Time after the last exchange of a computation that takes `length` when it runs alone, exchanges included."""
    return length - sum([leg.computing + leg.exchanging for leg in legs])


def joined(first: Legs, length: int, then: Legs) -> Legs:
    """Legs of two computations one after the other; `length` is the first one's."""
    return (*first, then[0]._replace(computing=then[0].computing + rest(first, length)), *then[1:]) if then else first


class Course(NamedTuple):
    """A forward or a backward.

    Attributes:
        legs: Legs up to each exchange.
        length: Time alone.
        launched: Time in which the host launches it, at most its length.
    """

    legs: Legs
    length: int
    launched: int = 0


def pair_length(forward: Course, backward: Course) -> int:
    """Time of a pair in turns; at least the time in which one host launches both."""
    courses = [[*each.legs, Leg(rest(each.legs, each.length), 0)] for each in (forward, backward)]
    place, resumes, now, free, turn = [0, 0], [0, 0], 0, 0, 0
    while any(place[side] < len(courses[side]) for side in (0, 1)):
        leg = courses[turn][place[turn]]
        place[turn] += 1
        now = max(now, resumes[turn]) + leg.computing
        ended = place[turn] == len(courses[turn])
        if not ended:
            resumes[turn] = free = max(now, free) + leg.exchanging
        if (leg.passes_turn or ended) and place[1 - turn] < len(courses[1 - turn]):
            turn = 1 - turn
    return max(now, forward.launched + backward.launched)
