"""`megaplan.schedule`: a pipeline schedule alone, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.results import Picture, Result, Row
from megaplan.schedules import InFlight, Orders, Placement, SlotTimes, Timeline, actions, in_flight, num_copies, placement, replay
from megaplan.schedules.registry import SCHEDULES, schedule_problems

FORMAT = "megaplan.schedule/1"


@dataclass(frozen=True, repr=False)
class Schedule(Result):
    """A pipeline schedule on given degrees.

    Attributes:
        kind: Name of the schedule, as in `schedule.kind` of a spec.
        pp: Pipeline ranks.
        vpp: Slots of each rank.
        num_microbatches: Microbatches of one step.
        orders: Actions of each pp rank, in order; `str(action)` is torch's notation (`0F3`).
        in_flight: Non-dominated vectors of microbatches in flight by chunk, for each pp rank.
        timeline: Every action with start and end, in the units of the times given.
    """

    kind: str
    pp: int
    vpp: int
    num_microbatches: int
    orders: Orders
    in_flight: tuple[tuple[InFlight, ...], ...]
    timeline: Timeline

    def _summary(self) -> Sequence[str]:
        slots = f"pp {self.pp} x vpp {self.vpp}, {self.num_microbatches:,} microbatches"
        idle = " to ".join(f"{each:,}" for each in dict.fromkeys((min(self.bubbles), max(self.bubbles))))
        waits = f"{idle} units idle, at most {max(self.peak_in_flight):,} microbatches in flight"
        return (f"{self.kind}: {slots}", f"{self.makespan:,} units per step", waits)

    def _rows(self) -> Sequence[Row]:
        inside = self.timeline.bubbles_inside
        return [
            {"pp_rank": rank, "peak_in_flight": peak, "bubble": self.bubbles[rank], "bubble_inside": inside[rank]}
            for rank, peak in enumerate(self.peak_in_flight)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan schedule --json` prints; actions are written as torch writes them (`0F3`, `(0F3;3B1)OVERLAP_F_B`)."""
        step = self.timeline
        of_ranks = zip(self.orders, self.peak_in_flight, self.in_flight, step.bubbles, step.bubbles_inside, strict=True)
        return {
            "format": FORMAT,
            "ranks": [
                {
                    "rank": rank,
                    "actions": list(map(str, order)),
                    "peak_inflight": peak,
                    "inflight_vectors": [{"full": list(vector.full), "pending_weight": list(vector.pending_weight)} for vector in held],
                    "bubble": bubble,
                    "bubble_inside": inside,
                }
                for rank, (order, peak, held, bubble, inside) in enumerate(of_ranks)
            ],
            "makespan": self.makespan,
        }

    def plot(self) -> Picture:
        """The timeline of a step.

        Raises:
            MegaplanError: MP481, the step has more actions than a picture can show.
        """
        from megaplan.plan.timeline_svg import schedule_svg  # noqa: PLC0415

        return Picture(schedule_svg(self.kind, self.pp, self.vpp, self.num_microbatches, self.timeline))

    @property
    def placement(self) -> Placement:
        """Assignment of slots to ranks: single, loop, v or mirror."""
        return placement(self.kind)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks: the parts of each copy of the model."""
        return self.pp * self.vpp * num_copies(self.placement)

    @property
    def makespan(self) -> int:
        """Time from the start of the first action to the end of the last."""
        return self.timeline.makespan

    @property
    def bubbles(self) -> tuple[int, ...]:
        """Time that each pp rank waits until all have ended."""
        return self.timeline.bubbles

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches in flight on each pp rank, over all its chunks, from the start of F to the end of B or W."""
        return tuple(max(sum(vector.full) + sum(vector.pending_weight) for vector in held) for held in self.in_flight)


def default_vpp(kind: str) -> int:
    """Default slots of each rank: the fewest that the schedule supports; 1 for an unknown schedule."""
    return SCHEDULES[kind].least_vpp if kind in SCHEDULES else 1


def schedule(
    kind: str,
    *,
    pp: int,
    num_microbatches: int,
    vpp: int | None = None,
    forward: int = 1,
    input: int = 1,
    weight: int = 1,
    p2p: int = 0,
    hidden: int = 0,
) -> Schedule:
    """Order the computations of each pipeline rank; report each rank's microbatches in flight and waiting time.

    Args:
        kind: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev, dualpipe or paired_1f1b.
        pp: Pipeline ranks, at least 1.
        num_microbatches: Microbatches of one step, at least 1. Time and memory grow with pp · vpp · num_microbatches.
        vpp: Slots of each rank; by default the fewest that the schedule supports.
        forward: Time of F, of one microbatch on one slot, in any integer unit.
        input: Time of I, the input half of a backward.
        weight: Time of W, its weight half.
        p2p: Time of one transfer between two ranks.
        hidden: Percent of the shorter part that an overlap of F and B hides, 0 to 100.

    Raises:
        MegaplanError: No such schedule (MP310), or it cannot run on these degrees (MP311 … MP313).
        ValueError: A degree below 1, a negative time, or a percentage out of range.

    Examples:
        >>> import megaplan
        >>> found = megaplan.schedule("1f1b", pp=2, num_microbatches=3)
        >>> [" ".join(map(str, order)) for order in found.orders]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
        >>> found.peak_in_flight, found.makespan, found.bubbles
        ((2, 1), 12, (3, 3))
    """
    slots = default_vpp(kind) if vpp is None else vpp
    for name, value, least in (("pp", pp, 1), ("vpp", slots, 1), ("num_microbatches", num_microbatches, 1), ("p2p", p2p, 0)):
        if value < least:
            raise ValueError(f"{name} = {value} is below {least}")
    if min(forward, input, weight) < 0 or not 0 <= hidden <= 100:
        raise ValueError(f"forward = {forward}, input = {input}, weight = {weight}: at least 0; hidden = {hidden}: 0 to 100 percent")
    if problems := schedule_problems(kind, pp, slots, num_microbatches):
        raise MegaplanError([problem.diagnostic() for problem in problems])
    orders = actions(kind, pp, slots, num_microbatches)
    copies = num_copies(placement(kind))
    times = SlotTimes.equal(pp * slots * copies, forward, input, weight)
    step = replay(orders, SlotTimes(times.forward, times.input, times.weight, hidden), p2p=p2p, copies=copies)
    return Schedule(kind, pp, slots, num_microbatches, orders, in_flight(kind, pp, slots, num_microbatches), step)
