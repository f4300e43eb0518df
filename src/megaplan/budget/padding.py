"""Cost of the padding of shards, and the nearest shard degree that avoids it.

FSDP2 cuts a tensor into chunks of whole rows and pads the last ones: n shards of ceil(rows / n) rows hold up to n − 1 additional rows, on
each rank that gathers them. With fewer rows than shards the gathered copy grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megaplan.budget.build import build_budget
from megaplan.budget.values import Budget, RankBudget
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.megarun.dims import local_shape
from megaplan.inventory.tensors import Inventory, Owner
from megaplan.layout.runs import runs_label, runs_of
from megaplan.layout.values import Layout
from megaplan.spec.models import Mesh, Spec
from megaplan.spec.rules import check_rules
from megaplan.units import format_bytes

SHARE = 100
"""Reciprocal of the share of the peak above which padding is reported."""
MOST_BUDGETS = 8
"""Number of degrees that are evaluated in the search for one without padding."""
MOST_NAMED = 3


class Padded(NamedTuple):
    """Tensors of one name whose rows do not divide by the ranks that share them.

    Attributes:
        name: Name relative to their blocks.
        rows: Rows of each, as a rank stores it.
        gathered_rows: Rows of all its shards.
        num_tensors: Number of blocks of the worst rank that have it.
        nbytes: Bytes of all of them, gathered, beyond their rows.
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
    if not spec.host.kind.trained or spec.has_whole_state or not any(_uneven(spec.mesh, inventory)):
        return []
    budget = budget or build_budget(spec, inventory, layout)
    worst, cost = budget.worst, _cost(spec, inventory, layout, budget)
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


def _cost(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget) -> int:
    """The worst rank's peak minus its peak without padding."""
    from megaplan.budget.megarun import megarun_budget  # noqa: PLC0415  (another host has no such padding)

    return budget.worst.peak_bytes - megarun_budget(spec, inventory, layout, padded=False).worst.peak_bytes


def _uneven(mesh: Mesh, inventory: Inventory) -> Iterator[str]:
    for block in {id(block): block for _, block in inventory.blocks()}.values():
        for tensor in block.tensors:
            rows = tensor.stored_shape(local_shape(tensor, mesh.tp, mesh.ep, mesh.etp))[0]
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
                rows, *columns = tensor.stored_shape(local_shape(tensor, mesh.tp, mesh.ep, mesh.etp))
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

    Degrees that keep the number of devices, with more replicas, come first; then any between half and twice as many shards. They are
    evaluated in the order of their additional gathered rows.
    """
    mesh = spec.mesh
    shards, replicas = mesh.dp_shard, mesh.dp_replicate
    total = shards * replicas
    same_devices = [(degree, total // degree) for degree in range(2, total + 1) if total % degree == 0 and degree != shards]
    others = [(degree, replicas) for degree in range(max(2, shards // 2), 2 * shards + 1) if total % degree]
    budgets = 0
    for degree, copies in (
        *sorted(same_devices, key=lambda pair: abs(pair[0] - shards)),
        *sorted(others, key=lambda pair: abs(pair[0] - shards)),
    ):
        changed = spec.model_copy(update={"mesh": mesh.model_copy(update={"dp_shard": degree, "dp_replicate": copies})})
        if any(item.severity is Severity.ERROR for item in check_rules(changed)):
            continue
        expected = cost * sum(each.nbytes for each in _padded(changed, inventory, layout, worst)) // max(1, padding)
        if expected * SHARE > worst.peak_bytes:
            continue
        try:
            budget = build_budget(changed, inventory, layout)
        except MegaplanError:
            continue
        left = _cost(changed, inventory, layout, budget)
        peak = budget.worst.peak_bytes
        if left * SHARE <= peak <= worst.peak_bytes:
            also = f" --set mesh.dp_replicate={copies}" if copies != replicas else ""
            return f"--set mesh.dp_shard={degree}{also}   # peak {format_bytes(peak)}, {format_bytes(max(0, left))} of it padding"
        budgets += 1
        if budgets == MOST_BUDGETS:
            return None
    return None
