"""The blocks of a pipeline rank, and the tensors of their ledgers, for `estimate --explain`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

from megaplan.columns import Column
from megaplan.hosts.megarun.ledger import block_ledger, block_variants
from megaplan.hosts.values import BlockLedger, Explained, LedgerTensor
from megaplan.inventory.tensors import Block, Inventory
from megaplan.layout.ranks import Layout, Slot
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
    ledger_of: Callable[[Spec, str, Block], BlockLedger],
) -> Explained:
    """Blocks of some slots, including copies that only share a storage. `variants` has each block's variant by name."""
    found: dict[Hashable, list[str]] = {}
    for name in (name for slot in slots for name in slot.blocks):
        found.setdefault(variants[name], []).append(name)
    held, kept = [], []
    for name, *others in found.values():
        block = inventory.block(name)
        title = f"{name}{f' and {len(others)} more like it' if others else ''}, {block.family}"
        tensors = sorted(ledger_of(spec, name, block).saved, key=lambda tensor: (-tensor.bytes, tensor.name))
        held.append((title, block))
        kept.append((title, sum(tensor.bytes for tensor in tensors), list(map(_cells, tensors))))
    return Explained(held, HEADS, kept)


def _cells(tensor: LedgerTensor) -> tuple[str, ...]:
    column, shape = "" if tensor.column is Column.ACTIVATIONS else str(tensor.column), ", ".join(map(str, tensor.shape))
    return tensor.name, f"[{shape}]", str(tensor.dtype), f"{tensor.bytes:,}", column
