"""The segment of a linked order that repeats: between fill and drain a long schedule runs the same actions again and again."""

from collections.abc import Sequence
from typing import NamedTuple

Node = tuple[int, int, tuple[int, ...]]
"""An action in an order in which all can run one by one: rank, index into the linked orders' shapes, and nodes of other ranks whose
results are transferred.

Its dependencies on its own rank run before it there, so it waits only for these. A plain tuple: replays read millions, a named one takes
a quarter longer.
"""


class Repeat(NamedTuple):
    """Nodes from `start` to `stop`; from the second period on, each repeats the node one period before it for later microbatches.

    Both have the same rank and shape, and wait for nodes at equal distances before them.

    Attributes:
        start: The first node.
        stop: Position after the last node.
        period: Length of a period in nodes.
        reach: Largest distance to a node that one waits for; at least one period.
    """

    start: int
    stop: int
    period: int
    reach: int

    def is_steady(self, stops: Sequence[int], later: int) -> bool:
        """True if every node that the next nodes wait for ended `later` than the node one period before it did.

        By the equations of a replay, every further node of the stretch then ends `later` than the node one period before it.
        """
        first = len(stops) - self.reach
        if first < self.period:
            return False
        pairs = zip(stops[first:], stops[first - self.period : -self.period], strict=True)
        return all(stop - before == later for stop, before in pairs)


def repeat_of(nodes: Sequence[Node]) -> Repeat | None:
    """The segment around the middle that repeats; None if it has fewer than four periods."""
    known: dict[tuple[int, ...], int] = {}
    classes = [known.setdefault((rank, shape, *[at - node for node in far]), len(known)) for at, (rank, shape, far) in enumerate(nodes)]
    middle = len(nodes) // 2
    period = _period(classes[middle:])
    if period is None:
        return None
    start, stop = middle, middle + 2 * period
    while start and classes[start - 1] == classes[start - 1 + period]:
        start -= 1
    while stop < len(nodes) and classes[stop] == classes[stop - period]:
        stop += 1
    if stop - start < 4 * period:
        return None
    reach = max([at - far for at in range(start, start + period) for far in nodes[at][2]], default=0)
    return Repeat(start, stop, period, max(reach, period))


def _period(values: Sequence[int]) -> int | None:
    """The period of the longest prefix that contains one twice or more. Shorter prefixes may have others: of one chunk's microbatches."""
    borders, found = [0], None  # length of each prefix's longest suffix that is also a prefix
    for length, value in enumerate(values[1:], 2):
        border = borders[-1]
        while border and values[border] != value:
            border = borders[border - 1]
        border += values[border] == value
        borders.append(border)
        if 2 * border >= length:
            found = length - border
    return found
