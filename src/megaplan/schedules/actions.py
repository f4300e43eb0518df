"""The unit of a schedule: one computation of one microbatch on one slot, or a forward and a backward that run together."""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """Kind of computation of an action. Letters as in torch's schedule files (`0F3`, `1B2`).

    A schedule that splits the backward writes `INPUT` (gradients of the stage's input) and `WEIGHT` (of its parameters) instead of
    `BACKWARD`. `REDUCE`, the reduction of a chunk's gradients, follows its last backward and is in no order.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    REDUCE = "REDUCE_GRAD"


ACTION_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "input gradients",
    ActionKind.WEIGHT: "weight gradients",
}
"""Names of the actions of an order, as pictures and traces show them."""


class Action(NamedTuple):
    """One computation.

    Attributes:
        kind: Forward, backward, or one half of a backward.
        slot: Global slot index, in model order (torch: `stage_index`).
        microbatch: 0-based.
    """

    kind: ActionKind
    slot: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.slot}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> "tuple[Action, ...]":
        """The action itself: it has one part."""
        return (self,)


class Overlap(NamedTuple):
    """A forward of one chunk and an unsplit backward of another that run together, so that each hides the other's communication (DualPipe).

    Attributes:
        forward: Forward of the first chunk.
        backward: Backward of the second chunk.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward, then the backward."""
        return self.forward, self.backward


ScheduleStep = Action | Overlap
Orders = tuple[tuple[ScheduleStep, ...], ...]
"""One action order per pp rank: the rank's computations in sequence, without waits."""


def computations(order: tuple[ScheduleStep, ...]) -> Iterator[Action]:
    """Every single computation of an order; an overlap's forward comes before its backward."""
    for step in order:
        yield from step.parts


MAX_REPLAYED = 120_000
"""Limit of actions of all ranks, by `num_actions`, that one answer replays: about a second with the search for cuts."""


def num_actions(pp: int, vpp: int, num_microbatches: int) -> int:
    """Upper bound on the actions of any schedule with these degrees: F, I and W of every microbatch on every slot."""
    return 3 * pp * vpp * num_microbatches
