"""The budget of a job that the toy host runs."""

from megaplan.budget.values import NO_BYTES, Budget, KeptBytes, RankBudget, StageBudget, checked, device_budget
from megaplan.columns import Column, Phase
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, rank_coordinate
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec


def toy_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column."""
    device, per_stage = device_budget(device_of(spec.device), spec.mesh.world_size), spec.mesh.world_size // layout.pp
    elements = {name: block.elements for name, block in inventory.blocks()}
    held = [sum(elements[name] for name in slot.blocks) for slot in layout.slots]
    ranks = []
    for pp_rank, slots in enumerate(layout.by_rank()):
        own, parameters = range(pp_rank * per_stage, (pp_rank + 1) * per_stage), sum(held[slot.index] for slot in slots)
        cells = {phase: NO_BYTES | {Column.REPLICATED_PARAMS: 4 * parameters * spec.host.copies} for phase in Phase}
        place = rank_coordinate(spec.mesh, own[0]), parameters, checked(cells), dict.fromkeys(Phase, "always"), device.usable_bytes
        ranks.append(RankBudget(tuple(own), *place))
    stages = tuple(StageBudget(slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, held[slot.index]) for slot in layout.slots)
    ordered = tuple(sorted(ranks, key=lambda rank: (-rank.peak_bytes, rank.ranks)))
    return Budget(device, stages, ordered, inventory.parameters, inventory.active_parameters)


def toy_kept_bytes(_spec: Spec, _inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Nothing."""
    return (KeptBytes(0),) * len(layout.slots)
