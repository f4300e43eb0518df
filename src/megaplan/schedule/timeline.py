"""As-soon-as-possible replay of action orders: the step's length and what each rank waits.

Transfers take no time: the stagger of the schedule is what is shown. Times are integers in any one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaplan.schedule.actions import Action, Kind, Orders


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its half-open interval of time."""

    action: Action
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed step.

    Attributes:
        ranks: For each pp rank its actions with their times, in order.
        makespan: End of the last action of any rank, from 0.
        busy: For each pp rank the time it computes.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    makespan: int
    busy: tuple[int, ...]

    @property
    def bubbles(self) -> tuple[int, ...]:
        """Idle time of each rank in a step that ends with a global synchronisation (a gradient norm): makespan − busy."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubbles_inside(self) -> tuple[int, ...]:
        """Idle time of each rank between its own first start and its own last stop."""
        return tuple(rank[-1].stop - rank[0].start - busy for rank, busy in zip(self.ranks, self.busy, strict=True))


def replay(orders: Orders, forward: Sequence[int], backward: Sequence[int]) -> Timeline:
    """Start every action as soon as its rank is free and its input has arrived.

    A forward waits for the same microbatch on the slot before; a backward for the slot after, and on the last slot for its own forward.

    Args:
        orders: Action order of each pp rank, of forwards and whole backwards.
        forward: Time of one forward of each slot.
        backward: Time of one backward of each slot.

    Raises:
        ValueError: If the orders wait for each other forever, or an action waits for one that never runs; the message names them.
    """
    last = len(forward) - 1
    durations = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    done: dict[tuple[Kind, int, int], int] = {}
    timed: list[list[Timed]] = [[] for _ in orders]
    free = [0] * len(orders)
    waiting: dict[tuple[Kind, int, int], int] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        for action in orders[rank][len(timed[rank]) :]:
            needed = _input_of(action, last)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            start = max(free[rank], done[needed] if needed is not None else 0)
            stop = free[rank] = start + durations[action.kind][action.slot]
            timed[rank].append(Timed(action, start, stop))
            made = (action.kind, action.slot, action.microbatch)
            done[made] = stop
            if made in waiting:
                ready.append(waiting.pop(made))
    stuck = [order[len(run)] for order, run in zip(orders, timed, strict=True) if len(run) < len(order)]
    if stuck:
        raise ValueError(f"the schedule cannot go on: {', '.join(map(str, stuck))} wait for actions that never run")
    busy = tuple(sum(item.stop - item.start for item in run) for run in timed)
    return Timeline(tuple(tuple(run) for run in timed), max(free, default=0), busy)


def _input_of(action: Action, last: int) -> tuple[Kind, int, int] | None:
    if action.kind is Kind.FORWARD:
        return (Kind.FORWARD, action.slot - 1, action.microbatch) if action.slot > 0 else None
    if action.kind is Kind.BACKWARD:
        if action.slot == last:
            return Kind.FORWARD, action.slot, action.microbatch
        return Kind.BACKWARD, action.slot + 1, action.microbatch
    raise ValueError(f"{action}: a split backward has its own replay")
