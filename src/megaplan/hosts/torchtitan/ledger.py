"""Kept and temporary tensors of a transformer block, and of each end of the model, under torchtitan."""

from math import prod

from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import storages
from megaplan.columns import Column
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.hosts.megarun.embedding import embedding_part, final_norm_part
from megaplan.hosts.megarun.halves import splittable_part
from megaplan.hosts.megarun.parts import BlockBytes, BlockReplay, ledger, weigh
from megaplan.hosts.torchtitan.ends import loss_part
from megaplan.hosts.torchtitan.experts import ExpertKey
from megaplan.hosts.torchtitan.program import BlockKey, block_replay, block_shapes
from megaplan.hosts.values import BlockLedger, BlockVariant
from megaplan.inventory.tensors import Block, Inventory, Outside, Owner, layer_names
from megaplan.scalars import RecomputePolicy
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec


def policy_of(spec: Spec, block: int) -> RecomputePolicy:
    """Checkpoint policy of transformer block number `block`: every host.checkpoint_every-th one, counted from 1, is checkpointed.

    Each pipeline rank counts its own blocks, so that a stage may have one more or less.
    """
    return spec.recompute.default if (block + 1) % spec.host.checkpoint_every == 0 else "none"


def block_key(spec: Spec, block: Block, *, rotates: bool) -> BlockKey:
    """Properties of a spec that decide a transformer block's operations."""
    recipe, mesh, attention, moe = spec.precision.recipe, spec.mesh, spec.model.attention, spec.model.moe
    gathers_low = recipe is not None and recipe.param_gather
    latent, normed, repeats = None, False, False
    if isinstance(attention, LatentAttention):
        latent = attention.q_lora_rank is not None
    elif attention is not None:
        normed, repeats = attention.qk_norm, spec.host.repeat_kv and attention.num_heads > attention.num_kv_heads
    routed = moe is not None and any(tensor.owner is Owner.EXPERT_PARALLEL for tensor in block.tensors)
    experts = ExpertKey(moe.shared_ffn_hidden_size > 0, mesh.ep > 1, spec.host.eager_combine) if moe is not None and routed else None
    sharded, context, compiled = mesh.tp > 1, mesh.cp > 1, spec.host.compile_model
    eight, halves = recipe is not None, spec.host.checkpoints == "halves"
    return BlockKey(normed, rotates, repeats, sharded, context, compiled, eight, not gathers_low, latent, experts, halves)


def sums_in_place(spec: Spec) -> bool:
    """True if later microbatches add gradients in place: FSDP2 sums whole ones in the reduction's dtype."""
    return spec.precision.params.of_products is spec.precision.reduce


def block_variants(spec: Spec, blocks: Inventory) -> dict[str, BlockVariant]:
    """The variant of each transformer block, by its name; `head` is included for a tied head too."""
    made: dict[str, BlockVariant] = {}
    for index, (name, block) in enumerate(zip(layer_names(len(blocks.layers)), blocks.layers, strict=True)):
        made[name] = id(block), _rotates(spec, index), policy_of(spec, index)
    for name, block in blocks.outside:
        made[name] = id(block), None, name
    if blocks.tied:
        made["head"] = id(blocks.block("embedding")), None, "head"
    return made


def block_bytes(spec: Spec, dims: Dims, name: str, block: Block, *, kept_gather_bytes: int = 0) -> BlockBytes:
    """The sums of one block's ledger; gradients are in the gathered parameters' dtype, and the reduction casts them.

    Args:
        spec: A checked spec.
        dims: Local sizes of the spec.
        name: Name of the block among transformer blocks.
        block: The block.
        kept_gather_bytes: Gathered parameters of the last block that stay during the head.
    """
    mesh, size = spec.mesh, spec.precision.params.of_products.bytes
    gradients = {tensor.name: prod(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp)) * size for tensor in block.tensors}
    part = _part(spec, dims, name, block, kept_gather_bytes)
    if spec.schedule.kind in SPLIT_BACKWARD and name.startswith("layers."):
        part = splittable_part(part, dims)
    return weigh(part, gradients, in_place=sums_in_place(spec))


def block_ledger(spec: Spec, name: str, block: Block) -> BlockLedger:
    """Saved and temporary tensors of each transformer block per microbatch, on its rank, by the block's name."""
    shapes = {tensor.name: tensor.local_shape(spec.mesh.tp, spec.mesh.ep, spec.mesh.etp) for tensor in block.tensors}
    gradients = storages(spec.precision.params.of_products, Column.GRADIENTS, shapes)
    return ledger(block_bytes(spec, local_dims(spec), name, block), gradients, in_place=sums_in_place(spec))


def _part(spec: Spec, dims: Dims, name: str, block: Block, kept_gather_bytes: int) -> BlockReplay:
    model, mesh = spec.model, spec.mesh
    if name == "head":
        compiled = spec.host.compile_loss
        return loss_part(dims, model.vocab_size, pipelined=mesh.is_pipelined, compiled=compiled, kept_gather_bytes=kept_gather_bytes)
    if block.family is Outside.EMBEDDING:
        return embedding_part(dims, vocab_parallel=True)
    if block.family is Outside.FINAL_NORM:
        return final_norm_part(dims, model)
    index = int(name.removeprefix("layers."))
    if not isinstance(model.attention, (GroupedQueryAttention, LatentAttention)):
        raise ValueError(f"{name} is no transformer block that torchtitan's ledger has; check_rules reports this")
    key = block_key(spec, block, rotates=_rotates(spec, index))
    return BlockReplay(block_replay(key, policy_of(spec, index)), block_shapes(dims, key, model.attention, model.mlp, model.moe))


def _rotates(spec: Spec, block: int) -> bool:
    attention = spec.model.attention
    return attention is not None and 2 * block not in attention.nope_layers
