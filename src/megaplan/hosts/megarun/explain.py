"""The blocks of a pipeline rank, and the tensors of their ledgers, for `estimate --explain`."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from megaplan.columns import Column
from megaplan.hosts.megarun.ledger import block_ledger, block_variants, taken_values
from megaplan.hosts.values import BlockLedger, Explained, LedgerTensor
from megaplan.inventory.tensors import Block, Inventory
from megaplan.layout.ranks import Layout, Slot
from megaplan.spec.local import multiplies, packed_gather
from megaplan.spec.low_precision import keeps_plain
from megaplan.spec.models import Spec

HEADS = ("tensor", "shape", "dtype", "bytes", "column")


def explain(spec: Spec, inventory: Inventory, layout: Layout, pp_rank: int) -> Explained:
    """The blocks of a pipeline rank of the layout."""
    return explained(spec, inventory, layout.of_rank(pp_rank), block_variants(spec, inventory), block_ledger)


def explained(
    spec: Spec,
    inventory: Inventory,
    slots: Iterable[Slot],
    variants: Mapping[str, Hashable],
    ledger_of: Callable[[Spec, str, Block, int], BlockLedger],
) -> Explained:
    """Blocks of some slots, including copies that only share a storage. `variants` has each block's variant by name."""
    found: dict[Hashable, tuple[int, list[str]]] = {}
    for slot in slots:
        for name in slot.blocks:
            taken = taken_values(spec, int(name.removeprefix("layers.")), slot.start) if name.startswith("layers.") else ()
            found.setdefault((variants[name], taken), (slot.start, []))[1].append(name)
    held, kept = [], []
    for start, (name, *others) in found.values():
        block = inventory.block(name)
        title = f"{name}{f' and {len(others)} more like it' if others else ''}, {block.family}"
        tensors = sorted(ledger_of(spec, name, block, start).saved, key=lambda tensor: (-tensor.bytes, tensor.name))
        held.append((title, block))
        kept.append((title, sum(tensor.bytes for tensor in tensors), list(map(_cells, tensors))))
    return Explained(held, HEADS, kept)


def gather_texts(spec: Spec, inventory: Inventory) -> list[str]:
    """Weights that the recipe packs for their gather, and weights of its products that are gathered unpacked, with the reason."""
    packs, recipe = packed_gather(spec), spec.precision.recipe
    if packs is None or recipe is None:
        return []
    packed, whole = Counter[str](), Counter[tuple[str, str]]()
    for index, block in enumerate(inventory.layers):
        if block.family not in packs.families:
            continue
        covered = packs.covers(f"layers.{index}", block.family)
        for tensor in block.tensors:
            shape, name = tensor.local_shape(spec.mesh.tp, spec.mesh.ep, spec.mesh.etp), f"{block.family} {tensor.name}"
            if not multiplies(tensor.name, shape):
                continue
            dtype = spec.precision.of(block.family)
            if not covered:
                whole[name, f"in {dtype}, in layers of precision.recipe.first_last_bf16"] += 1
            elif packs.shard_bytes(block.family, tensor.name, shape) is None:
                whole[name, f"in {dtype}, {packs.why_whole(shape)}"] += 1
            else:
                packed[name] += 1
    lines = [f"packed: {_counted(packed)}"] if packed else ["packed: none"]
    for reason in dict.fromkeys(reason for _, reason in whole):
        lines.append(f"{reason}: {_counted({name: n for (name, why), n in whole.items() if why == reason})}")
    return lines


def plain_texts(spec: Spec, inventory: Inventory) -> list[str]:
    """Layers with a letter of the recipe whose products stay plain because of their own dtype."""
    recipe, precision = spec.precision.recipe, spec.precision
    if recipe is None:
        return []
    letters = sorted({block.family for block in inventory.layers if recipe.families is None or block.family in recipe.families})
    return [
        f"{letter}: products in {precision.of(letter)}, as without a recipe"
        for letter in letters
        if keeps_plain(precision.of(letter), precision.params)
    ]


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count}×)" for name, count in names.items())


def _cells(tensor: LedgerTensor) -> tuple[str, ...]:
    column, shape = "" if tensor.column is Column.ACTIVATIONS else str(tensor.column), ", ".join(map(str, tensor.shape))
    return tensor.name, f"[{shape}]", str(tensor.dtype), f"{tensor.bytes:,}", column
