"""The order of a rank in a V-shaped schedule while it is written: two chunks, and the next microbatch of each kind of computation."""

from __future__ import annotations

from collections import Counter, deque

from megaplan.schedules.actions import Action, ActionKind, Overlap, ScheduleStep


class OrderWriter:
    """Writes an order by chunk and kind; it counts the microbatches.

    Attributes:
        order: Actions written so far.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self.order: list[ScheduleStep] = []
        self._slots = (rank, 2 * pp - 1 - rank)
        self._next: Counter[tuple[ActionKind, int]] = Counter()
        self._owed: deque[Action] = deque()

    def done(self, kind: ActionKind, chunk: int) -> int:
        """Number of actions of a kind that were written for a chunk; a whole backward counts for each half."""
        return self._next[kind, chunk]

    def forward(self, chunk: int) -> None:
        """F."""
        self.order.append(self._take(ActionKind.FORWARD, chunk))

    def backward(self, chunk: int) -> None:
        """B, both halves at once."""
        self.order.append(self._whole(chunk))

    def input(self, chunk: int) -> None:
        """I; its W is deferred."""
        made = self._take(ActionKind.INPUT, chunk)
        self.order.append(made)
        self._owed.append(Action(ActionKind.WEIGHT, made.slot, made.microbatch))

    def weight(self, chunk: int | None = None) -> None:
        """The W deferred longest, overall or for one chunk; nothing if none is deferred."""
        owed = (made for made in self._owed if chunk is None or made.slot == self._slots[chunk])
        if (found := next(owed, None)) is not None:
            self._owed.remove(found)
            self.order.append(found)

    def overlap(self, forward: int, backward: int) -> None:
        """F of one chunk with B of the other."""
        self.order.append(Overlap(self._take(ActionKind.FORWARD, forward), self._whole(backward)))

    def pay(self, *chunks: int) -> None:
        """Every deferred W, chunk by chunk."""
        for chunk in chunks:
            mine = [made for made in self._owed if made.slot == self._slots[chunk]]
            self.order += mine
            for made in mine:
                self._owed.remove(made)

    def _take(self, kind: ActionKind, chunk: int) -> Action:
        microbatch = self._next[kind, chunk]
        self._next[kind, chunk] += 1
        return Action(kind, self._slots[chunk], microbatch)

    def _whole(self, chunk: int) -> Action:
        made = self._take(ActionKind.INPUT, chunk)
        return Action(ActionKind.BACKWARD, made.slot, made.microbatch)
