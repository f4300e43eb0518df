"""Sentences that explain the ranks' contents, and the layers that weighted cuts moved."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from megaplan.budget.peaks import build_budget
from megaplan.budget.slots import kept_bytes
from megaplan.budget.values import KeptBytes
from megaplan.inventory.tensors import Inventory
from megaplan.inventory.towers import by_part
from megaplan.layout.build import Spans, build_layout, slot_parameters, spans_of
from megaplan.partition.stack import stack_of
from megaplan.partition.values import StackCosts, amount, equal_cuts
from megaplan.schedules import InFlight, in_flight
from megaplan.spec.models import Spec
from megaplan.units import format_bytes, short_count


def in_flight_lines(spec: Spec, inventory: Inventory, spans: Spans) -> Iterator[str]:
    """One sentence for each pair of neighbouring pp ranks in which the one with fewer parameters has the larger peak and more in flight.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        spans: Cuts of the spec.
    """
    mesh, schedule = spec.mesh, spec.schedule
    if mesh.pp == 1:
        return
    layout = build_layout(spec, inventory, spans)
    kept, per_stage = kept_bytes(spec, inventory, layout), mesh.world_size // mesh.pp
    vectors = in_flight(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    budget = build_budget(spec, inventory, layout)
    slots = [layout.of_rank(rank) for rank in range(mesh.pp)]
    peaks = [budget.of_rank(rank * per_stage).peak_bytes for rank in range(mesh.pp)]
    parameters = [sum(slot_parameters(inventory, slot) for slot in owned) for owned in slots]
    owned_bytes = [[kept[slot.index] for slot in owned] for owned in slots]
    most = [_most(vectors[rank], owned_bytes[rank]) for rank in range(mesh.pp)]
    for one, other in combinations(range(mesh.pp), 2):
        if abs(one - other) > 1:
            continue
        high, low = (one, other) if peaks[one] > peaks[other] else (other, one)
        if parameters[high] >= parameters[low] or most[high][0] <= most[low][0]:
            continue
        yield (
            f"pp rank {high} peaks at {format_bytes(peaks[high])} and pp rank {low} at {format_bytes(peaks[low])}, although rank {low} "
            f"owns more parameters ({short_count(parameters[low])} to {short_count(parameters[high])}): in-flight chunks. "
            f"Rank {high} keeps {_chunks(most[high], owned_bytes[high])}; rank {low} {_chunks(most[low], owned_bytes[low])}."
        )


def moved_lines(spec: Spec, inventory: Inventory, costs: StackCosts, cuts: Sequence[int]) -> Iterator[str]:
    """Sentences about the layers that weighted cuts moved compared with equal cuts, and the reason.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        costs: Costs of layers and ends.
        cuts: The weighted cuts.
    """
    num_layers, num_slots = len(inventory.layers), spec.mesh.pp * spec.mesh.vpp
    equal = equal_cuts(num_layers, num_slots, spec.host.block_layers)
    if num_slots == 1 or tuple(cuts) == equal:
        return
    stack = stack_of(spec, costs)
    before, after = stack.bottleneck(spans_of(equal, num_layers)), stack.bottleneck(spans_of(cuts, num_layers))
    moves = [f"{old} → {new}" for old, new in zip(equal, cuts, strict=True) if old != new]
    what = "rank" if stack.where == "v" else "slot"
    change = f"{100 * (after - before) / (before or 1):+.1f}%"
    yield (
        f"against equal cuts {', '.join(moves)}: the largest {what} costs {amount(after, costs.unit)} instead of "
        f"{amount(before, costs.unit)} ({change})"
    )
    slot_costs = costs.of_slots(spans_of(equal, num_layers))
    spans, equal_spans = spans_of(cuts, num_layers), spans_of(equal, num_layers)
    layout = build_layout(spec, inventory, spans)
    for slot, end in ((0, costs.first), (num_slots - 1, costs.last)):
        now, then = (stop - start for start, stop in (spans[slot], equal_spans[slot]))
        if end * 20 >= slot_costs[slot] and now != then:
            copies = layout.slots[slot].copies
            owns = ", ".join(by_part(name for name in layout.slots[slot].blocks if not name.startswith("layers.") and name not in copies))
            share = 100 * end // (slot_costs[slot] or 1)
            yield f"slot {slot} takes {now} layers instead of {then}: its parts outside the layers ({owns}) were {share}% of its cost"
    means = {letter: _mean(costs, inventory, letter) for letter in sorted({block.family for block in inventory.layers})}
    if len(set(means.values())) > 1:
        yield "mean cost of a layer: " + ", ".join(f"{letter} {amount(mean, costs.unit, named=False)}" for letter, mean in means.items())


def _mean(costs: StackCosts, inventory: Inventory, letter: str) -> int:
    sizes = [cost for cost, block in zip(costs.layers, inventory.layers, strict=True) if block.family == letter]
    return sum(sizes) // len(sizes)


def _most(vectors: Sequence[InFlight], kept: Sequence[KeptBytes]) -> tuple[int, InFlight]:
    """Largest number of bytes that microbatches in flight keep, and their number on each chunk."""
    full, pending = [size.full for size in kept], [size.pending for size in kept]
    return max(((vector.total_bytes(full, pending), vector) for vector in vectors), key=lambda found: found[0])


def _chunks(most: tuple[int, InFlight], kept: Sequence[KeptBytes]) -> str:
    total, counts = most
    parts = [f"{count} × {format_bytes(size.full)} of chunk {chunk}" for chunk, (count, size) in _counted(counts.full, kept)]
    parts += [
        f"{count} × {format_bytes(size.pending)} of chunk {chunk} for W" for chunk, (count, size) in _counted(counts.pending_weight, kept)
    ]
    return f"{' + '.join(parts)} = {format_bytes(total)}"


def _counted(counts: Sequence[int], kept: Sequence[KeptBytes]) -> list[tuple[int, tuple[int, KeptBytes]]]:
    return [(chunk, pair) for chunk, pair in enumerate(zip(counts, kept, strict=True)) if pair[0]]
