"""All-gathers in flight while a unit of a chunk runs, without the unit's own."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from megaplan.budget.tape import NOTHING_AHEAD, Ahead
from megaplan.budget.unit import Unit
from megaplan.hosts.megarun.sizes import NOTHING, GroupBytes
from megaplan.tuples import new

SENT: Callable[[GroupBytes], int] = attrgetter("sent_bytes")
SENT_AGAIN: Callable[[GroupBytes], int] = attrgetter("sent_again_bytes")


def next_ahead(units: Sequence[Unit]) -> list[Ahead]:
    """The all-gathers that each unit's backward begins in FSDP2's order: a group begins the gather of the group that ran forward before it.

    In a group of several layers that may be the bank of an earlier layer. A layer with nothing to gather itself begins
    none.
    """
    found, inner, outer = [], NOTHING_AHEAD, NOTHING_AHEAD
    for unit in units:
        inner = inner if unit.joins else outer
        begins = not unit.layer or unit.closes is not NOTHING or unit.bank.has_tasks
        found.append(inner if begins else inner._replace(cast_bytes=0))
        if unit.bank.has_tasks:
            inner = _one_ahead(unit.bank)
        if unit.closes is not NOTHING:
            outer = _one_ahead(unit.closes)
    return found


def _one_ahead(group: GroupBytes) -> Ahead:
    sent = group.sent_again_bytes
    return Ahead(group.flat_bytes, group.flat_bytes + sent if sent else 0)


def several_ahead(units: Sequence[Unit], depth: int, *, headless: bool) -> list[Ahead]:
    """The all-gathers if each group of layers begins the gathers of `depth` groups, with their banks.

    The first to run backward begins all of them. Without a head, the last group has copied out its own parameters before the stage
    begins the gathers of its banks.
    """
    found, groups, banks = [], list[list[GroupBytes]](), list[GroupBytes]()
    last = max((index for index, unit in enumerate(units) if unit.layer), default=-1)
    for index, unit in enumerate(units):
        banks = banks if unit.joins else []  # banks of the preceding layers in the unit's group
        begins = not unit.layer or (index == last and headless)
        before = [] if begins or depth == 1 else groups[1 - depth :]
        new_ones = groups[-depth:] if begins else groups[-depth : max(0, len(groups) - depth + 1)]
        pending = sum([group.flat_bytes for group in chain.from_iterable(before)])
        below = 0 if begins else sum([bank.flat_bytes for bank in banks])
        own = [unit.bank._replace(flat_bytes=0), *banks[::-1]] * begins
        issued, most = _issued(pending + below, [*chain.from_iterable(new_ones[::-1]), *own], SENT_AGAIN)
        starts = unit.closes is not NOTHING or not unit.layer
        arrived = pending + below + unit.bank.flat_bytes * (not begins)
        found.append(Ahead(issued, most if most > issued and starts else 0, arrived, explicit=True))
        banks = [*banks, unit.bank] if unit.layer else []
        if unit.closes is not NOTHING:
            groups.append([unit.closes, *banks[::-1]])
    return found


def _issued(issued: int, groups: Iterable[GroupBytes], sent: Callable[[GroupBytes], int]) -> tuple[int, int]:
    """Outputs of these all-gathers in addition to earlier ones, and the maximum of outputs and an input together.

    0 if no gather has a separate input.
    """
    most = 0
    for group in groups:
        issued += group.flat_bytes
        most = max(most, issued + sent(group) if sent(group) else 0)
    return issued, most


class Later(NamedTuple):
    """All-gathers ahead in a forward: a unit's forward begins the gather of a group some units later.

    Attributes:
        copied: All-gather outputs of later groups while the unit's own group is copied out.
        running: All-gather outputs while the unit runs, with banks of later layers in its group.
        issued: Maximum of these outputs and an input (a cast of the shard) while the unit begins them, without the banks of its group; 0 if
            none has its own input or it begins none.
    """

    copied: int
    running: int
    issued: int


NOTHING_LATER = Later(0, 0, 0)


def later_gathers(units: Sequence[Unit], depth: int, *, again: bool) -> tuple[list[Later], int]:
    """The gathers ahead for each unit, and `Later.issued` of the stage, which begins those of the first `depth` groups.

    Args:
        units: The chunk's units.
        depth: Groups ahead.
        again: True if parameters are gathered from the parts that a rank has kept.
    """
    sent = SENT_AGAIN if again else SENT
    found, following, banks = [], list[list[GroupBytes]](), list[GroupBytes]()
    for unit in reversed(units):
        ahead = following[:depth]
        banks = [] if unit.closes is not NOTHING or not unit.layer else banks
        copied = _flats(chain.from_iterable(ahead[: depth - 1]))
        begun = chain.from_iterable(ahead[depth - 1 :]) if unit.layer and not unit.joins else ()
        issued = _issued(copied, begun, sent)[1]
        found.append(new(Later, (copied, _flats((*chain.from_iterable(ahead), *banks)), issued)))
        banks = [unit.bank, *banks]
        if unit.layer and not unit.joins:
            following = [[unit.opens, *banks], *following]
    return found[::-1], _issued(0, chain.from_iterable(following[:depth]), sent)[1]


def _flats(groups: Iterable[GroupBytes]) -> int:
    return sum([group.flat_bytes for group in groups])
