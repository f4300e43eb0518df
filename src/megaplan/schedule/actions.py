"""The unit of a schedule: one computation of one microbatch on one slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action computes. Letters are those of torch's schedule files (`0F3`, `1B2`).

    A schedule that splits the backward writes `INPUT` (gradients of the stage's input) and `WEIGHT` (of its parameters) in place of
    `BACKWARD`.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation.

    Attributes:
        kind: Forward or backward.
        slot: Global slot index, in model order (torch: `stage_index`).
        microbatch: 0-based.
    """

    kind: Kind
    slot: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.slot}{self.kind}{self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""One action order for each pp rank: what the rank computes, in this order, without waits."""
