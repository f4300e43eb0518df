"""`build_layout`: slots from cuts, and the blocks of each slot besides its layers."""

from collections.abc import Sequence
from itertools import pairwise

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.families.attention import ATTENTION
from megaplan.inventory.features import SIDE_EMBEDDINGS
from megaplan.inventory.tensors import Inventory, Outside, layer_names
from megaplan.inventory.towers import STATED
from megaplan.layout.ranks import Layout, Slot
from megaplan.schedules.placement import num_copies, slot_owner
from megaplan.schedules.registry import placement
from megaplan.spec.models import Spec
from megaplan.tuples import new

Spans = tuple[tuple[int, int], ...]


def spans_of(cuts: Sequence[int], num_layers: int) -> Spans:
    """The spans between sorted cuts; a cut c separates layers c − 1 and c."""
    edges = (0, *cuts, num_layers)
    return tuple(pairwise(edges))


def cuts_of(spans: Spans) -> tuple[int, ...]:
    """The cuts between spans: one fewer than slots."""
    return tuple(start for start, _ in spans[1:])


def num_filled(spans: Spans) -> int:
    """Number of slots with layers: a host may give some only an end of the model."""
    return sum(start < stop for start, stop in spans)


def span_problems(spans: Spans, num_layers: int, pp: int, vpp: int, *, may_be_empty: bool = False) -> list[Diagnostic]:
    """Reasons that the spans cannot be the slots of a model (MP324 … MP326); empty if they can.

    Args:
        spans: One half-open span of global layer indices for each slot, in model order.
        num_layers: Layers of the model.
        pp: Pipeline degree.
        vpp: Slots per rank.
        may_be_empty: True if a slot may have no layer.
    """
    found = []
    if len(spans) != pp * vpp:
        found.append(("MP324", f"{len(spans)} spans, and mesh.pp · mesh.vpp = {pp} · {vpp} = {pp * vpp} slots"))
    reached = 0
    for slot, (start, stop) in enumerate(spans):
        if stop < start or (stop == start and not may_be_empty):
            found.append(("MP326", f"slot {slot} is empty: [{start}, {stop})"))
        if start != reached:
            what = f"layers [{reached}, {start}) are in no slot" if start > reached else f"layers [{start}, {reached}) are in two slots"
            found.append(("MP325", f"slot {slot} starts at layer {start}, but the slot before it stops at {reached}: {what}"))
        reached = stop
    if reached != num_layers:
        found.append(("MP325", f"the last slot stops at layer {reached}, and model.num_layers = {num_layers}"))
    return [diagnostic(code, detail, Location(key="split.spans")) for code, detail in found]


_INPUT_FAMILIES = (
    Outside.EMBEDDING,
    *(family for family, side in SIDE_EMBEDDINGS.items() if side.home == "first"),
    Outside.TOWERS,
    *STATED,
)


def build_layout(spec: Spec, inventory: Inventory, spans: Spans) -> Layout:
    """Slots with their pp rank, chunk and blocks.

    The first slot holds the embedding, the side embeddings (R-8, R-9) and the towers; the last the final norm, the head and the MTP
    depths (R-8, R-10). A tied head and MTP read the token embedding on the last slot: they share one copy there, unless it is the first
    slot too.
    The relation bias is on every slot with an A block; the first of them owns it (R-12). A second copy of the model has the same slots
    again, whose blocks are all copies.

    Args:
        spec: The spec.
        inventory: Parameter tensors of the spec.
        spans: One half-open layer span for each slot, in model order.

    Returns:
        The layout; a slot's blocks are in execution order.

    Raises:
        MegaplanError: MP324 … MP326 if the spans do not tile the layers or are not pp · vpp.
    """
    mesh, where = spec.mesh, placement(spec.schedule.kind)
    if found := span_problems(spans, len(inventory.layers), mesh.pp, mesh.vpp, may_be_empty=spec.host.kind.empty_slots):
        raise MegaplanError(found)
    relation_slots = _relation_slots(inventory, spans)
    held = [_slot_blocks(inventory, spans, index, relation_slots) for index in range(len(spans))]
    slots = []
    for index in range(num_copies(where) * len(spans)):
        rank, chunk = slot_owner(where, index, mesh.pp)
        blocks, copies = held[index % len(spans)]
        slots.append(new(Slot, (index, rank, chunk, *spans[index % len(spans)], blocks, copies if index < len(spans) else blocks)))
    return Layout(where, tuple(slots), mesh.pp, mesh.vpp)


def slot_parameters(inventory: Inventory, slot: Slot) -> int:
    """Parameters of the whole tensors on a slot, including its copies, before sharding."""
    return sum(inventory.block(name).elements for name in slot.blocks)


def _slot_blocks(
    inventory: Inventory, spans: Spans, index: int, relation_slots: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a slot's blocks, and which of them are copies."""
    start, stop = spans[index]
    is_first, is_last = index == 0, index == len(spans) - 1
    blocks, copies = [], []
    if is_first:
        blocks += [name for name, block in inventory.outside if block.family in _INPUT_FAMILIES]
    if index in relation_slots:
        blocks.append("relation_bias")
        if index != relation_slots[0]:
            copies.append("relation_bias")
    blocks += layer_names(len(inventory.layers))[start:stop]
    if is_last:
        mtp = [name for name, block in inventory.outside if block.family is Outside.MTP]
        blocks += [name for name, block in inventory.outside if block.family in (Outside.FINAL_NORM, Outside.HEAD)]
        if not is_first and (inventory.tied or mtp):
            copies += ["embedding", *inventory.ahead]
            blocks += ["embedding", *inventory.ahead]
        blocks += mtp
    return tuple(blocks), tuple(copies)


def _relation_slots(inventory: Inventory, spans: Spans) -> tuple[int, ...]:
    """Slots that add the relation bias: those with attention."""
    if not any(name == "relation_bias" for name, _ in inventory.outside):
        return ()
    families = [block.family for block in inventory.layers]
    return tuple(index for index, (start, stop) in enumerate(spans) if ATTENTION.letter in families[start:stop])
