"""Lower bound of the step time from the counted work of every rank and the schedule."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megaplan.cost.model import model_costs
from megaplan.cost.rates import SECOND_NS
from megaplan.cost.transfers import boundary_times
from megaplan.schedules import SlotTimes, actions, replay
from megarun.job.job import Job
from rooflines.price import Prices
from rooflines.work import Event, Transfer, Work


@dataclass(slots=True)
class Row:
    """Totals of an operation in one part of the model, over all ranks of one pipeline and a whole step.

    Attributes:
        op: Name in `torch.ops`.
        family: Part of the model.
        inside: `triton`, `library`, `torch`, `network` for a collective, or "" for none.
        num_bytes: HBM bytes; for a collective its payload.
        flops: FLOPs.
        launches: Number of launches.
        seconds: Time on the device.
        launching: Part of `seconds` due to launch time.
        syncs: Number of host synchronisations.
        ideal_bytes: The field `Work.ideal_bytes`.
        overlapped: Time of overlapped collectives, not part of `seconds`.
    """

    op: str
    family: str
    inside: str = ""
    num_bytes: float = 0
    flops: float = 0
    launches: float = 0
    seconds: float = 0
    launching: float = 0
    syncs: float = 0
    ideal_bytes: float = 0
    overlapped: float = 0

    def add(self, done: Work | Transfer, prices: Prices, times: float) -> None:
        """Add work that ran `times` times."""
        if isinstance(done, Transfer):
            self.inside, seconds = "network", prices.transfer(done)
            self.num_bytes += times * done.payload_bytes
            if done.overlapped:
                self.overlapped += times * seconds
            else:
                self.seconds += times * seconds
            return
        self.inside = done.inside
        self.num_bytes += times * done.num_bytes
        self.flops += times * done.flops
        self.launches += times * done.launches
        self.seconds += times * prices.work(done)
        self.launching += times * prices.launching(done)
        self.syncs += times * done.syncs
        self.ideal_bytes += times * done.ideal_bytes


Key = tuple[str, str, str]
"""Phase, part of the model and operation."""


@dataclass(slots=True)
class RankWork:
    """Work of one rank in a step.

    Attributes:
        repeated: Time of one microbatch on each slot, by (slot, letter).
        rows: Totals of a step.
        in_microbatch: Launches of forward and backward of one microbatch on this rank.
    """

    repeated: dict[tuple[int, str], float] = field(default_factory=dict)
    rows: dict[Key, Row] = field(default_factory=dict)
    in_microbatch: int = 0

    @property
    def seconds(self) -> float:
        """Time of all operations and blocking collectives."""
        return sum(row.seconds for row in self.rows.values())

    @property
    def overlapped(self) -> float:
        """Time of overlapped collectives."""
        return sum(row.overlapped for row in self.rows.values())


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bound of the step time.

    Attributes:
        seconds: Lower bound.
        busy: Work of the critical rank.
        bubble: Pipeline bubble of this rank.
        exposed: Time of its overlapped collectives in excess of its work.
        rank: Pipeline rank.
    """

    seconds: float
    busy: float
    bubble: float
    exposed: float
    rank: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """Result for one job.

    Attributes:
        name: Name of the spec.
        floor: Lower bound of the step time.
        mfu: Upper bound of the model FLOPs utilisation.
        rows: Totals of each operation over all ranks of one pipeline, slowest first.
        launches: Launches of forward and backward of one microbatch through the whole model.
        syncs: Host synchronisations per step, maximum over ranks.
    """

    name: str
    floor: Floor
    mfu: float
    rows: tuple[Row, ...]
    launches: int
    syncs: int


def roofline(job: Job, events: Mapping[int, Sequence[Event]]) -> Roofline:
    """Extrapolate the counts of a few microbatches to a whole step.

    Args:
        job: Job with all its microbatches.
        events: Result of `rooflines.runs.count_ranks`.
    """
    spec, prices = job.spec, Prices(job.spec)
    ranks = {rank: _rank_work(prices, found, spec.schedule.microbatches_per_update) for rank, found in events.items()}
    floor = _floor(job, prices, ranks)
    peak = prices.rates.device.peak_flops[spec.precision.params].value * spec.mesh.world_size
    flops = model_costs(spec, job.inventory).model_flops * job.global_batch_tokens
    return Roofline(
        spec.name,
        floor,
        flops / (floor.seconds * peak),
        _joined(ranks.values()),
        sum(rank.in_microbatch for rank in ranks.values()),
        round(max(sum(row.syncs for row in rank.rows.values()) for rank in ranks.values())),
    )


def _rank_work(prices: Prices, events: Sequence[Event], num_microbatches: int) -> RankWork:
    found = RankWork()
    counted: dict[tuple[int, str], set[int]] = defaultdict(set)
    for event in events:
        if event.action is not None:
            counted[event.action.slot, event.action.letter].add(event.action.microbatch)
    typical = {key: sorted(numbers)[len(numbers) // 2] for key, numbers in counted.items()}
    share = _share_of_letters(counted)
    for event in events:
        _row(found, event).add(event.done, prices, 1)
        action = event.action
        if action is None or typical[action.slot, action.letter] != action.microbatch:
            continue
        # the microbatches that were not run are identical to this one
        key = action.slot, action.letter
        _row(found, event).add(event.done, prices, share[key] * num_microbatches - len(counted[key]))
        seconds = _seconds(prices, event.done)
        found.repeated[key] = found.repeated.get(key, 0.0) + seconds
        found.in_microbatch += round(share[key] * event.done.launches) if isinstance(event.done, Work) else 0
    return found


def _share_of_letters(counted: Mapping[tuple[int, str], set[int]]) -> dict[tuple[int, str], float]:
    """Fraction of a slot's microbatches with each kind of action: a schedule may split only some backwards."""
    forwards = {slot: len(numbers) for (slot, letter), numbers in counted.items() if letter == "F"}
    return {(slot, letter): len(numbers) / forwards.get(slot, len(numbers)) for (slot, letter), numbers in counted.items()}


def _row(found: RankWork, event: Event) -> Row:
    return found.rows.setdefault((event.phase, event.family, event.done.op), Row(event.done.op, event.family))


def _seconds(prices: Prices, done: Work | Transfer) -> float:
    if isinstance(done, Transfer):
        return 0.0 if done.overlapped else prices.transfer(done)
    return prices.work(done)


def _floor(job: Job, prices: Prices, ranks: Mapping[int, RankWork]) -> Floor:
    """Replay the schedule with counted times; add work outside microbatches and exposed collectives."""
    spec = job.spec
    bubbles = dict.fromkeys(ranks, 0.0)
    if spec.mesh.pp > 1:
        schedule = spec.schedule
        orders = actions(schedule.kind, spec.mesh.pp, spec.mesh.vpp, schedule.num_microbatches)
        times = _slot_times({key: value for rank in ranks.values() for key, value in rank.repeated.items()}, len(job.layout.slots))
        p2p = max(boundary_times(prices.rates, spec))
        timeline = replay(orders, times, p2p=p2p)
        bubbles = {rank: timeline.bubbles[rank] * schedule.steps_per_update / SECOND_NS for rank in ranks}
    exposed = {rank: max(0.0, work.overlapped - work.seconds) for rank, work in ranks.items()}
    longest = max(ranks, key=lambda rank: ranks[rank].seconds + bubbles[rank] + exposed[rank])
    parts = ranks[longest].seconds, bubbles[longest], exposed[longest]
    return Floor(sum(parts), *parts, longest)


def _slot_times(seconds: Mapping[tuple[int, str], float], num_slots: int) -> SlotTimes:
    """Times per slot in whole nanoseconds; without a split backward, I is the whole backward."""

    def of(slot: int, *letters: str) -> int:
        return next((round(seconds[slot, letter] * SECOND_NS) for letter in letters if (slot, letter) in seconds), 0)

    slots = range(num_slots)
    return SlotTimes(tuple(of(s, "F") for s in slots), tuple(of(s, "I", "B") for s in slots), tuple(of(s, "W") for s in slots))


def _joined(ranks: Iterable[RankWork]) -> tuple[Row, ...]:
    """Sum of the rows of all ranks by operation and part of the model."""
    found: dict[tuple[str, str], Row] = {}
    for rank in ranks:
        for row in rank.rows.values():
            total = found.setdefault((row.family, row.op), Row(row.op, row.family, row.inside))
            for name in ("num_bytes", "flops", "launches", "seconds", "launching", "syncs", "ideal_bytes", "overlapped"):
                setattr(total, name, getattr(total, name) + getattr(row, name))
    return tuple(sorted(found.values(), key=lambda row: -(row.seconds + row.overlapped)))
