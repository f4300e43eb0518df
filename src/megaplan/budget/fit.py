"""Cost of the padding of shards, and the nearest shard degree that avoids it.

FSDP2 cuts a tensor into chunks of whole rows and pads the last ones: n shards of ceil(rows / n) rows hold up to n − 1 additional rows, on
each rank that gathers them. With fewer rows than shards the gathered copy grows with the number of ranks.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Literal, NamedTuple

from megaplan.budget.peaks import StagePeaks, build_budget
from megaplan.budget.values import Budget, RankBudget, spec_device
from megaplan.columns import Column
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory, Owner
from megaplan.layout.ranks import Layout, runs_label, runs_of
from megaplan.spec.models import Mesh, Spec
from megaplan.spec.pools import parts_of
from megaplan.spec.rules import check_rules
from megaplan.units import format_bytes

BALANCED = 1.0
GROWS = "expandable_segments"
Reason = Literal["moe.routing_skew", "largest possible"]


class RoutingRange(NamedTuple):
    """Effect of uneven routing: rows can move only between expert ranks.

    Attributes:
        balanced: Every expert rank receives its even share.
        skewed: The busiest expert rank receives `skew` times that.
        skew: `moe.routing_skew` if the spec states one above 1, of several the largest; else the largest possible, `largest_skew`.
        reason: Source of the skew.
    """

    balanced: Budget
    skewed: Budget
    skew: float
    reason: Reason

    def allocated_bytes(self, rank: RankBudget) -> tuple[int, int]:
        """Allocated bytes of torch's allocator at the peak of these ranks: with balanced routing, and with skewed routing."""
        first = rank.ranks[0]
        return self.balanced.of_rank(first).allocated_bytes, self.skewed.of_rank(first).allocated_bytes


def routing_range(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget) -> RoutingRange | None:
    """Peaks under even and under the most uneven routing; None if no row can move: without experts, at ep 1, or with a capacity.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        budget: Budget of the spec as written: one of the two ends.
    """
    moe = spec.model.moe
    if moe is None or moe.capacity is not None or spec.mesh.ep == 1:
        return None

    def at(skew: float) -> Budget:
        if skew == moe.routing_skew:
            return budget
        model = spec.model.model_copy(update={"moe": moe.model_copy(update={"routing_skew": skew})})
        other = spec.model_copy(update={"model": model})
        return build_budget(other, inventory if len(moe.skews) == 1 else build_inventory(other), layout)

    if moe.largest_skew > BALANCED:
        return RoutingRange(at(BALANCED), budget, moe.largest_skew, "moe.routing_skew")
    most = largest_skew(spec.mesh.ep, moe.num_choices, moe.top_k)
    return RoutingRange(budget, at(most), most, "largest possible")


def largest_skew(ep: int, num_experts: int, top_k: int) -> float:
    """The largest number of rows of one expert rank relative to its even share.

    Every token then chooses as many of its experts as allowed, each once.
    """
    return min(float(ep), num_experts / top_k)


Verdict = Literal["fits", "fits narrowly", "does not fit"]


class NarrowFit(NamedTuple):
    """Ranks that fit by the estimate but would not with the reserved memory of measured runs.

    Attributes:
        worst: The ranks that would be over by most.
        percent: Percent of a peak by which runs of the host have reserved more, at most.
    """

    worst: RankBudget
    percent: float

    @property
    def most_bytes(self) -> int:
        """The peak of these ranks if torch reserves `percent` more than the estimate."""
        return int(self.worst.peak_bytes * (1 + self.percent / 100))


def narrow_fit(budget: Budget, spec: Spec) -> NarrowFit | None:
    """The ranks of a budget that fit narrowly.

    None if the budget does not fit, or also fits with the largest reserved memory of measured runs of its host.
    """
    over = [rank for rank in budget.ranks if rank.fits and is_narrow(rank.peak_bytes, rank.headroom_bytes, spec)]
    if not over or not budget.fits:
        return None
    share = spec.host.kind.more_reserved(spec.host)
    return NarrowFit(max(over, key=lambda rank: rank.peak_bytes / rank.usable_bytes), 100 * share)


def is_narrow(peak_bytes: int, headroom_bytes: int, spec: Spec) -> bool:
    """True if a peak would not fit with the largest reserved memory above it in measured runs of the host (decision 39)."""
    return peak_bytes * spec.host.kind.more_reserved(spec.host) > headroom_bytes


DOES_NOT_FIT = "MP501"
HEADROOM_PERCENT = 20
"""A headroom below this share of usable memory gives a warning. Source: arXiv:2411.06465: of 454 runs, none estimated below 80% ran out."""
MAX_MICRO_BATCH = 1 << 40
"""Upper bound of the doubling in the search; no device can hold a micro-batch of that size."""


class Cut(NamedTuple):
    """A column that alone could bring a rank under its limit, and the required reduction."""

    column: Column
    column_bytes: int
    excess_bytes: int


def largest_micro_batch(spec: Spec, inventory: Inventory, layout: Layout) -> int | None:
    """The largest `batch.micro_batch_size` that fits every rank, found by evaluation; None if not even 1 does.

    Everything else is unchanged, the number of microbatches included.
    """

    def fits(size: int) -> bool:
        changed = spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro_batch_size": size})})
        return all(
            max(StagePeaks(part.spec, inventory).of(layout, part.ranks)) <= spec_device(part.spec, spec.mesh.world_size).usable_bytes
            for part in parts_of(changed)
        )

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= MAX_MICRO_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cuts(rank: RankBudget) -> tuple[Cut, ...]:
    """The columns with at least the rank's excess, largest first; the largest one if none has that much. Empty if it fits."""
    if rank.fits:
        return ()
    excess = -rank.headroom_bytes
    columns = sorted(rank.columns.items(), key=lambda item: -item[1])
    return tuple(Cut(column, size, excess) for column, size in columns if size >= excess) or (Cut(*columns[0], excess),)


def low_headroom(worst: RankBudget, spec: Spec) -> list[Diagnostic]:
    """MP502 if a rank fits with little headroom; expandable segments reduce fragmentation."""
    if worst.headroom_bytes * 100 >= worst.usable_bytes * HEADROOM_PERCENT:
        return []
    column, size = max(worst.columns.items(), key=lambda item: item[1])
    percent = 100 * worst.headroom_bytes // worst.usable_bytes
    headroom, usable = format_bytes(worst.headroom_bytes), format_bytes(worst.usable_bytes)
    detail = (
        f"headroom {headroom} of {usable} usable is {percent}%, below {HEADROOM_PERCENT}%\nlargest column: {column} = {format_bytes(size)}"
    )
    grow = () if spec.host.expands_segments or GROWS not in spec.host.kind.keys else (f"{GROWS}: true",)
    return [diagnostic("MP502", detail, Location(), grow, Severity.WARNING)]


SHARE = 100
"""Reciprocal of the share of the peak above which padding is reported."""
MOST_DEGREES, MOST_BUDGETS = 512, 8
"""The search for a degree without padding considers the first number of degrees, the nearest first, and evaluates the second number."""
MOST_NAMED = 3


class Padded(NamedTuple):
    """Tensors of one name whose rows do not divide by the ranks that share them.

    Attributes:
        name: Name relative to their blocks.
        rows: Rows of each, as a rank stores it.
        gathered_rows: Rows of all its shards.
        num_tensors: Number of blocks of the worst rank that have it.
        nbytes: Bytes of their padding when gathered.
    """

    name: str
    rows: int
    gathered_rows: int
    num_tensors: int
    nbytes: int


def padding_diagnostics(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget | None = None) -> list[Diagnostic]:
    """MP505, a note, if padding costs more than 1% of the peak; else nothing.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        budget: Budget of the spec, if known.
    """
    if not spec.host.kind.trained or spec.pools or spec.has_whole_state or not any(_uneven(spec.mesh, inventory)):
        return []
    budget = budget or build_budget(spec, inventory, layout)
    worst = budget.worst
    cost = worst.peak_bytes - _peak(spec, inventory, layout, padded=False)
    if cost * SHARE <= worst.peak_bytes:
        return []
    found = _padded(spec, inventory, layout, worst)
    detail = [
        f"{runs_label(runs_of(worst.ranks))}: {format_bytes(cost)} of the peak of {format_bytes(worst.peak_bytes)}, "
        f"{100 * cost / worst.peak_bytes:.1f}%",
        *(_line(each, spec) for each in found[:MOST_NAMED]),
    ]
    hint = _nearest(spec, inventory, layout, worst, cost, sum(each.nbytes for each in found))
    hints = () if hint is None else (hint,)
    return [diagnostic("MP505", "\n".join(detail), Location(key="mesh.dp_shard"), hints, Severity.NOTE)]


def _line(padded: Padded, spec: Spec) -> str:
    times = f"{padded.num_tensors} times " if padded.num_tensors > 1 else ""
    shards = spec.mesh.efsdp if padded.name.startswith("experts.") else spec.mesh.dp_shard
    rows = f"{padded.rows:,} rows in {shards:,} shards are {padded.gathered_rows:,} gathered"
    return f"{times}{padded.name}: {rows}, {format_bytes(padded.nbytes)} more"


def _peak(spec: Spec, inventory: Inventory, layout: Layout, *, padded: bool) -> int:
    """The worst rank's peak, with padding or without."""
    from megaplan.budget.megarun import megarun_budget  # noqa: PLC0415  (another host has no such padding)

    return megarun_budget(spec, inventory, layout, padded=padded, listed=False).worst.peak_bytes


def _uneven(mesh: Mesh, inventory: Inventory) -> Iterator[str]:
    for block in {id(block): block for _, block in inventory.blocks()}.values():
        for tensor in block.tensors:
            rows = tensor.stored_shape(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp))[0]
            if rows % (mesh.efsdp if tensor.owner is Owner.EXPERT_PARALLEL else mesh.dp_shard):
                yield tensor.name


def _padded(spec: Spec, inventory: Inventory, layout: Layout, worst: RankBudget) -> list[Padded]:
    """Padded tensors of the worst rank's pipeline rank, most bytes first."""
    mesh, blocks = spec.mesh, dict(inventory.blocks())
    own = {slot.index for slot in layout.by_rank()[worst.coordinate["pp"]]}
    found: dict[tuple[str, int], Padded] = {}
    for slot in layout.slots:
        for name in slot.blocks if slot.index in own else ():
            block = blocks[name]
            itemsize = spec.precision.of(block.family).bytes
            for tensor in block.tensors:
                rows, *columns = tensor.stored_shape(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp))
                degree = mesh.efsdp if tensor.owner is Owner.EXPERT_PARALLEL else mesh.dp_shard
                gathered = -(-rows // degree) * degree
                nbytes = (gathered - rows) * itemsize
                for size in columns:
                    nbytes *= size
                full = tensor.name if name.startswith("layers.") else f"{name}.{tensor.name}"
                before = found.get((full, rows), Padded(full, rows, gathered, 0, 0))
                found[full, rows] = before._replace(num_tensors=before.num_tensors + 1, nbytes=before.nbytes + nbytes)
    return sorted((each for each in found.values() if each.nbytes), key=lambda each: -each.nbytes)


def _nearest(spec: Spec, inventory: Inventory, layout: Layout, worst: RankBudget, cost: int, padding: int) -> str | None:
    """A hint with the nearest degree at which padding costs 1% or less and the peak is no higher; None if none was found.

    Degrees that keep the number of devices, with more replicas, come first; then any degree from half to twice the shards. They are
    evaluated in the order of their additional gathered rows.
    """
    mesh = spec.mesh
    shards, replicas = mesh.dp_shard, mesh.dp_replicate
    total = shards * replicas
    divisors = [degree for degree in range(2, total + 1) if total % degree == 0 and degree != shards]
    same_devices = [(degree, total // degree) for degree in sorted(divisors, key=lambda degree: abs(degree - shards))]
    near = (degree for away in range(1, shards + 1) for degree in (shards - away, shards + away) if degree >= max(2, shards // 2))
    others = ((degree, replicas) for degree in near if total % degree)
    budgets = 0
    for degree, copies in islice(chain(same_devices, others), MOST_DEGREES):
        changed = spec.model_copy(update={"mesh": mesh.model_copy(update={"dp_shard": degree, "dp_replicate": copies})})
        if any(item.severity is Severity.ERROR for item in check_rules(changed)):
            continue
        expected = cost * sum(each.nbytes for each in _padded(changed, inventory, layout, worst)) // max(1, padding)
        if expected * SHARE > worst.peak_bytes:
            continue
        try:
            peak = _peak(changed, inventory, layout, padded=True)
        except MegaplanError:
            continue
        left = peak - _peak(changed, inventory, layout, padded=False)
        if left * SHARE <= peak <= worst.peak_bytes:
            also = f" --set mesh.dp_replicate={copies}" if copies != replicas else ""
            return f"--set mesh.dp_shard={degree}{also}   # peak {format_bytes(peak)}, {format_bytes(max(0, left))} of it due to padding"
        budgets += 1
        if budgets == MOST_BUDGETS:
            return None
    return None
