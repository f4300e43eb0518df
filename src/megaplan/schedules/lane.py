"""The order of a rank in a V-shaped schedule while it is written: two chunks, and the next microbatch of each kind of computation."""

from collections import Counter, deque

from megaplan.schedules.actions import Action, ActionKind, Overlap, ScheduleStep


class OrderWriter:
    """Writes an order by chunk and kind; it counts the microbatches, and omits actions of microbatches beyond their number.

    Attributes:
        order: Actions written so far.
    """

    def __init__(self, rank: int, pp: int, num_microbatches: int) -> None:
        self.order: list[ScheduleStep] = []
        self._slots, self._num_microbatches = (rank, 2 * pp - 1 - rank), num_microbatches
        self._next: Counter[tuple[ActionKind, int]] = Counter()
        self._owed: deque[tuple[int, Action]] = deque()

    def done(self, kind: ActionKind, chunk: int) -> int:
        """Number of actions of a kind that were written for a chunk; an unsplit backward counts as both halves."""
        return self._next[kind, chunk]

    def forward(self, chunk: int) -> None:
        """F."""
        self._write(self._take(ActionKind.FORWARD, chunk))

    def backward(self, chunk: int) -> None:
        """B, both halves at once."""
        self._write(self._whole(chunk))

    def input(self, chunk: int) -> None:
        """I; its W is deferred."""
        made = self._take(ActionKind.INPUT, chunk)
        if self._write(made):
            self._owed.append((chunk, Action(ActionKind.WEIGHT, made.slot, made.microbatch)))

    def weight(self, chunk: int | None = None) -> None:
        """The W deferred longest, overall or for one chunk; None if no W is deferred."""
        for index, (of_chunk, owed) in enumerate(self._owed):
            if chunk is None or of_chunk == chunk:
                del self._owed[index]
                self.order.append(owed)
                return

    def overlap(self, forward: int, backward: int) -> None:
        """F of one chunk with B of the other."""
        self.order.append(Overlap(self._take(ActionKind.FORWARD, forward), self._whole(backward)))

    def pay(self, *chunks: int) -> None:
        """Every deferred W, chunk by chunk."""
        for chunk in chunks:
            self.order += [owed for of_chunk, owed in self._owed if of_chunk == chunk]
        self._owed = deque(each for each in self._owed if each[0] not in chunks)

    def _write(self, made: Action) -> bool:
        """True if the action's microbatch exists."""
        there = made.microbatch < self._num_microbatches
        if there:
            self.order.append(made)
        return there

    def _take(self, kind: ActionKind, chunk: int) -> Action:
        microbatch = self._next[kind, chunk]
        self._next[kind, chunk] += 1
        return Action(kind, self._slots[chunk], microbatch)

    def _whole(self, chunk: int) -> Action:
        made = self._take(ActionKind.INPUT, chunk)
        return Action(ActionKind.BACKWARD, made.slot, made.microbatch)
