"""Serving: the KV cache by the map of attention layers and the recurrent-state pool, for one process on one device (R-48)."""

from __future__ import annotations

from megaplan.budget.values import ServingBudget, device_budget
from megaplan.families.family import ServingState
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory
from megaplan.spec.device import device_of
from megaplan.spec.models import Serving, Spec


def serving_budget(spec: Spec, inventory: Inventory) -> ServingBudget | None:
    """Memory of serving, or None if the spec has no `serving`.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.

    Raises:
        MegaplanError: MP504 if the device is unknown.
    """
    serving = spec.serving
    if serving is None:
        return None
    compute = spec.precision.params
    served = [served_by(spec, block) for block in inventory.layers]
    tokens = serving.batch_size * serving.kv_dtype.bytes
    kv_cache = sum(tokens * cached_tokens(serving, layer.window) * layer.cache_width for layer in served)
    states = sum(layer.state_bytes for layer in served) * serving.batch_size
    blocks = -(-serving.context_length // serving.block_size) if serving.cache == "paged" else 0
    usable = device_budget(device_of(spec.device), 1).usable_bytes
    return ServingBudget(kv_cache, states, inventory.parameters * compute.bytes, usable, blocks)


def cached_tokens(serving: Serving, window: int | None) -> int:
    """Tokens of one sequence in one layer's cache.

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


def served_by(spec: Spec, block: Block) -> ServingState:
    """State of one layer for each sequence."""
    family = FAMILIES[block.family]
    return family.serving(family.section_of(spec.model), spec.model.hidden_size, block.variant, spec.precision.params)
