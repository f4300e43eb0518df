"""`build_inventory`: the parameter ledger of a whole model."""

from collections import Counter
from functools import lru_cache
from typing import Any, NoReturn

from megaplan.families.registry import FAMILIES, families_of
from megaplan.families.residual import CENTERED, ResidualPath, norm_tensors, tensors_of
from megaplan.inventory.adapters import adapted_block
from megaplan.inventory.embedding import final_norm_block, head_layer_tensors, vocabulary_block
from megaplan.inventory.features import mtp_block, relation_bias_block, side_block
from megaplan.inventory.tensors import Block, Init, Inventory, Outside, make_block
from megaplan.inventory.towers import STATED, counted_block, stated_blocks
from megaplan.spec.lora import Lora
from megaplan.spec.models import Model, Spec
from megaplan.spec.pattern import parse_pattern


def build_inventory(spec: Spec) -> Inventory:
    """Every parameter tensor of the spec's model, unsharded.

    Args:
        spec: A spec that `megaplan.spec.rules.check_rules` accepts.

    Returns:
        The inventory, one object for equal models; equal layers share one `Block` object.

    Raises:
        MegaplanError: The pattern does not parse.
        ValueError: A letter or feature lacks its section (an unchecked spec).
    """
    mesh = spec.mesh
    return inventory_of(spec.model, vocab_parallel=mesh.vocab_parallel, split_towers=mesh.towers == "split", lora=spec.lora)


@lru_cache(maxsize=32)
def inventory_of(model: Model, *, vocab_parallel: bool, split_towers: bool = False, lora: Lora | None = None) -> Inventory:
    """Every parameter tensor of a model.

    Args:
        model: The model.
        vocab_parallel: True if TP shards embedding and head along the vocabulary.
        split_towers: True if TP shards a stated encoder's heads and widths.
        lora: Adapters.
    """
    if lora is not None:
        return _adapted(inventory_of(model, vocab_parallel=vocab_parallel, split_towers=split_towers), lora)
    letters = parse_pattern(model.pattern, model.num_layers).layers
    plain, others = model.residual_path, model.own_paths
    made: dict[tuple[str, Any, ResidualPath], Block] = {}
    layers, places = [], Counter[str]()
    for index, letter in enumerate(letters):
        family = FAMILIES[letter]
        section = family.section_of(model)
        make = letter, family.variant(section, index, places[letter]), model.path_of(index) if index in others else plain
        places[letter] += 1
        block = made.get(make)
        if block is None:
            tensors = tensors_of(make[2], family.tensors(section, model.hidden_size, make[1]), model.hidden_size)
            block = made[make] = make_block(letter, tensors, make[1], make[2].depth)
        layers.append(block)
    outside = _outside_blocks(model, vocab_parallel=vocab_parallel, split_towers=split_towers)
    if model.zero_centered_norm:
        centered = {id(block): _centered(block) for block in made.values()}
        layers = [centered[id(block)] for block in layers]
        outside = tuple([(name, block if block.family in STATED else _centered(block)) for name, block in outside])
    read = [block.elements for _, block in outside if block.family not in (Outside.TOWERS, *STATED)]
    total = sum([block.elements for block in layers]) + sum(read)
    features, mtp = model.features, model.features.mtp
    counts = {letter: letters.count(letter) + (mtp.depth * mtp.letters.count(letter) if mtp is not None else 0) for letter in FAMILIES}
    idle = sum(counts[family.letter] * family.idle_parameters(section, model.hidden_size) for family, section in families_of(model))
    normed = mtp is not None and mtp.normed_input
    return Inventory(tuple(layers), outside, model.tie_embeddings, total - idle, features.sides_ahead, normed_ahead=normed)


def _adapted(base: Inventory, lora: Lora) -> Inventory:
    """A model's inventory with frozen tensors and adapters; equal layers still share a block."""
    made = {id(block): adapted_block(lora, block, layer=True) for block in base.layers}
    layers = tuple([made[id(block)] for block in base.layers])
    outside = tuple([(name, adapted_block(lora, block, layer=False)) for name, block in base.outside])
    added = sum([block.elements for block in layers]) - sum([block.elements for block in base.layers])
    return Inventory(layers, outside, base.tied, base.active_parameters + added, base.ahead, normed_ahead=base.normed_ahead)


def _centered(block: Block) -> Block:
    """A block whose norms around 1 start with weights of 0."""
    tensors = []
    for tensor in block.tensors:
        of_final = block.family == Outside.FINAL_NORM
        name = tensor.name.rpartition(".")[0].rpartition(".")[2]
        tensors.append(tensor._replace(init=Init.ZEROS) if tensor.init == Init.ONES and (of_final or name in CENTERED) else tensor)
    return make_block(block.family, tuple(tensors), block.variant, block.reads)


def _outside_blocks(model: Model, *, vocab_parallel: bool, split_towers: bool) -> tuple[tuple[str, Block], ...]:
    hidden, vocab, features = model.hidden_size, model.vocab_size, model.features
    embedding = vocabulary_block(Outside.EMBEDDING, vocab, hidden, vocab_parallel=vocab_parallel, positions=model.learned_positions)
    if model.embedding_norm and (normed := norm_tensors(model.norm, hidden)):
        embedding = make_block(Outside.EMBEDDING, (*embedding.tensors, *normed))
    towers = model.towers
    blocks = [*(() if towers is None else stated_blocks(towers, split=split_towers)), ("embedding", embedding)]
    blocks += [(name, side_block(features, name, hidden)) for name in features.sides]
    if towers is not None and towers.counted:
        blocks.append(("towers", counted_block(towers)))
    if features.relation_bias is not None:
        heads = (model.attention or _missing("attention")).num_heads
        blocks.append(("relation_bias", relation_bias_block(features.relation_bias, heads)))
    layer = () if model.head_layer is None else head_layer_tensors(model.head_layer, hidden, model.norm, vocab)
    blocks.append(("final_norm", final_norm_block(model, layer)))
    if not model.tie_embeddings:
        blocks.append(("head", vocabulary_block(Outside.HEAD, vocab, hidden, vocab_parallel=vocab_parallel, bias=model.head_bias)))
    if features.mtp is not None:
        depth = mtp_block(model)
        blocks += [(f"mtp.{index}", depth) for index in range(features.mtp.depth)]
    return tuple(blocks)


def _missing(name: str) -> NoReturn:
    raise ValueError(f"the model needs a section model.{name} and has none; check_rules reports this")
