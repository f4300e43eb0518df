"""`build_inventory`: the parameter ledger of a whole model."""

from __future__ import annotations

from typing import NoReturn

from megaplan.inventory.attention import attention_tensors
from megaplan.inventory.embedding import final_norm_block, vocabulary_block
from megaplan.inventory.features import category_block, mtp_block, ngram_block, relation_bias_block
from megaplan.inventory.mamba import mamba_tensors
from megaplan.inventory.mlp import mlp_tensors
from megaplan.inventory.moe import moe_tensors, parameters_per_expert
from megaplan.inventory.recurrent import recurrent_tensors
from megaplan.inventory.tensors import Block, Family, Inventory, make_block
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Model, Spec
from megaplan.spec.pattern import parse_pattern

LAYER_FAMILIES = {family.value: family for family in (Family.A, Family.M, Family.E, Family.R, Family.D)}


def build_inventory(spec: Spec) -> Inventory:
    """Every parameter tensor of the spec's model, unsharded.

    Args:
        spec: A spec that `megaplan.spec.rules.check_rules` accepts.

    Returns:
        The inventory; layers of the same make share one `Block` object.

    Raises:
        MegaplanError: The pattern does not parse.
        ValueError: A letter or feature lacks its section (a spec that was not checked).
    """
    model = spec.model
    letters = parse_pattern(model.pattern, model.num_layers).layers
    indexed = _indexed_layers(model.attention)
    full = frozenset(model.attention.full_layers) if model.attention is not None else frozenset()
    made: dict[str | tuple[bool, bool], Block] = {}
    layers = []
    for index, letter in enumerate(letters):
        make = letter if letter != "A" else (index in indexed, index in full)
        block = made.get(make)
        if block is None:
            block = made[make] = _layer_block(model, letter, with_indexer=index in indexed, full=index in full)
        layers.append(block)
    outside = _outside_blocks(model, vocab_parallel=spec.mesh.vocab_parallel)
    total = sum([block.elements for block in layers]) + sum([block.elements for _, block in outside])
    idle = letters.count("E") * _idle_expert_parameters(model)
    return Inventory(tuple(layers), outside, tied=model.tie_embeddings, active_parameters=total - idle)


def _layer_block(model: Model, letter: str, *, with_indexer: bool, full: bool) -> Block:
    hidden = model.hidden_size
    match letter:
        case "A":
            tensors = attention_tensors(model.attention or _missing("attention"), hidden, with_indexer=with_indexer)
        case "M":
            tensors = mamba_tensors(model.mamba or _missing("mamba"), hidden)
        case "E":
            tensors = moe_tensors(model.moe or _missing("moe"), hidden)
        case "R":
            tensors = recurrent_tensors(model.recurrent or _missing("recurrent"), hidden)
        case _:
            tensors = mlp_tensors(model.mlp or _missing("mlp"), hidden)
    return make_block(LAYER_FAMILIES[letter], tensors, full=full)


def _outside_blocks(model: Model, *, vocab_parallel: bool) -> tuple[tuple[str, Block], ...]:
    hidden, vocab, features = model.hidden_size, model.vocab_size, model.features
    blocks = [("embedding", vocabulary_block(Family.EMBEDDING, vocab, hidden, vocab_parallel=vocab_parallel))]
    if features.ngram is not None:
        blocks.append(("ngram", ngram_block(features.ngram, hidden)))
    if features.structure is not None:
        blocks.append(("structure", category_block(Family.STRUCTURE, features.structure, hidden)))
    if features.platform is not None:
        blocks.append(("platform", category_block(Family.PLATFORM, features.platform, hidden)))
    if features.relation_bias is not None:
        heads = (model.attention or _missing("attention")).num_heads
        blocks.append(("relation_bias", relation_bias_block(features.relation_bias, heads)))
    blocks.append(("final_norm", final_norm_block(hidden)))
    if not model.tie_embeddings:
        blocks.append(("head", vocabulary_block(Family.HEAD, vocab, hidden, vocab_parallel=vocab_parallel)))
    if features.mtp is not None:
        depth = mtp_block(features.mtp, model.attention or _missing("attention"), hidden)
        blocks += [(f"mtp.{index}", depth) for index in range(features.mtp.depth)]
    return tuple(blocks)


def _indexed_layers(attention: GroupedQueryAttention | LatentAttention | None) -> frozenset[int]:
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        return frozenset(attention.indexer.layers)
    return frozenset()


def _idle_expert_parameters(model: Model) -> int:
    """Parameters of the routed experts of one E block that a token does not choose."""
    moe = model.moe
    return 0 if moe is None else (moe.num_experts - moe.top_k) * parameters_per_expert(moe, model.hidden_size)


def _missing(name: str) -> NoReturn:
    raise ValueError(f"the model needs a section model.{name} and has none; check_rules reports this")
