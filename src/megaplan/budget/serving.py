"""Serving: the KV cache by the map of attention layers and the recurrent-state pool, for one process on one device (R-48)."""

from __future__ import annotations

from megaplan.budget.reserve import device_budget
from megaplan.budget.values import ServingBudget
from megaplan.dtypes import DType
from megaplan.inventory.mamba import num_mamba_heads
from megaplan.inventory.tensors import Block, Family, Inventory
from megaplan.spec.device import device_of
from megaplan.spec.models import LatentAttention, Mamba2, Serving, Spec

STATE_DTYPE = DType.FP32
"""Dtype of recurrent states: they accumulate over the whole context."""


def serving_budget(spec: Spec, inventory: Inventory) -> ServingBudget | None:
    """What serving would hold, or None if the spec has no `serving`.

    Args:
        spec: A checked spec.
        inventory: Its parameter tensors.

    Raises:
        MegaplanError: MP504 if the device is unknown.
    """
    serving = spec.serving
    if serving is None:
        return None
    compute = spec.precision.params
    kv_cache = sum(kv_cache_bytes(spec, serving, block) for block in inventory.layers if block.family is Family.A)
    states = sum(state_bytes(spec, block.family) for block in inventory.layers) * serving.batch_size
    blocks = -(-serving.context_length // serving.block_size) if serving.cache == "paged" else 0
    usable = device_budget(device_of(spec.device)).usable_bytes
    return ServingBudget(kv_cache, states, inventory.parameters * compute.bytes, usable, blocks)


def cached_tokens(serving: Serving, window: int | None) -> int:
    """Tokens one sequence holds in one layer's cache.

    Contiguous: the context, or the window if that is smaller. Paged: whole blocks; a window that ends inside a block begins inside
    another, so it can touch one block more than its own length fills.
    """
    context = serving.context_length
    if serving.cache == "contiguous":
        return min(context, window or context)
    blocks = -(-context // serving.block_size)
    if window is not None:
        blocks = min(blocks, -(-(window - 1) // serving.block_size) + 1)
    return blocks * serving.block_size


def kv_cache_bytes(spec: Spec, serving: Serving, block: Block) -> int:
    """Cache of one attention layer, all sequences.

    GQA keeps keys and values of every kv head, MLA one latent and one rotary key for all heads (arXiv:2405.04434, section 2.1.2); an
    indexer adds its one key.
    """
    attention = spec.model.attention
    if attention is None:
        return 0
    if isinstance(attention, LatentAttention):
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        if attention.indexer is not None and any(tensor.name.startswith("indexer.") for tensor in block.tensors):
            width += attention.indexer.head_dim
    else:
        width = 2 * attention.num_kv_heads * attention.head_dim
    window = None if block.full else attention.window_size
    return serving.batch_size * cached_tokens(serving, window) * width * serving.kv_dtype.bytes


def state_bytes(spec: Spec, family: Family) -> int:
    """State of one layer for one sequence, whatever the context: 0 for layers that keep none.

    M (Mamba-2): the last kernel − 1 inputs of the convolution and the state H · P · S. Mamba-3 has no convolution; its trapezoidal rule
    keeps the step before (x, and B of every rank) and its angles add up. R: the convolutions' last inputs and the state H · K · V.
    """
    model, compute = spec.model, spec.precision.params.bytes
    if family is Family.M and model.mamba is not None:
        mamba, heads = model.mamba, num_mamba_heads(model.mamba, model.hidden_size)
        state = heads * mamba.head_dim * mamba.state_dim * STATE_DTYPE.bytes
        inner, group = heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        if isinstance(mamba, Mamba2):
            return state + (inner + 2 * group) * (mamba.conv_kernel - 1) * compute
        return state + (inner + group * mamba.mimo_rank) * compute + heads * mamba.num_angles * STATE_DTYPE.bytes
    if family is Family.R and model.recurrent is not None:
        recurrent = model.recurrent
        values = recurrent.num_heads * recurrent.value_dim
        convolved = (2 * recurrent.key_dim + values) * (recurrent.conv_kernel - 1)
        return values * recurrent.key_dim * STATE_DTYPE.bytes + convolved * compute
    return 0
