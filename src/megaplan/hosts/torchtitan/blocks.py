"""Transformer blocks: an A layer and the following D or E layer, which torchtitan shards, checkpoints and compiles together."""

from functools import lru_cache

from megaplan.inventory.tensors import Block, Inventory, ParamTensor, make_block
from megaplan.layout.ranks import Slot

ATTENTION, MLP = "attention.", "mlp."
"""Prefixes of the names of each half's tensors and storages."""
PAIR = "AD"
"""The letters of a block, and the family of a joined block, with an MLP or experts."""
PAIRS = PAIR, "AE"
SIZE = len(PAIR)


@lru_cache(maxsize=64)
def transformer_blocks(inventory: Inventory) -> Inventory:
    """The same tensors with pairs of layers joined; equal pairs are one object.

    Args:
        inventory: Inventory of a spec of pairs: an A layer, and a D or E layer.
    """
    made: dict[tuple[int, int], Block] = {}
    layers = []
    for attention, mlp in zip(inventory.layers[::SIZE], inventory.layers[1::SIZE], strict=True):
        key = id(attention), id(mlp)
        if key not in made:
            made[key] = make_block(PAIR, (*_named(ATTENTION, attention), *_named(MLP, mlp)), attention.variant)
        layers.append(made[key])
    return Inventory(tuple(layers), inventory.outside, inventory.tied, inventory.active_parameters)


def in_blocks(slot: Slot) -> Slot:
    """A slot of letters as a slot of transformer blocks."""
    start, stop = slot.start // SIZE, slot.stop // SIZE
    first = next((place for place, name in enumerate(slot.blocks) if name.startswith("layers.")), 0)
    others = [name for name in slot.blocks if not name.startswith("layers.")]
    layers = [f"layers.{index}" for index in range(start, stop)]
    return slot._replace(start=start, stop=stop, blocks=(*others[:first], *layers, *others[first:]))


def _named(prefix: str, block: Block) -> tuple[ParamTensor, ...]:
    """A half's tensors; its expert bank is not reduced at a separate point, as megarun's is."""
    return tuple(tensor._replace(name=prefix + tensor.name.replace("experts.", "routed_experts.")) for tensor in block.tensors)
