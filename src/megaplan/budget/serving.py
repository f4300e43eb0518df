"""Serving: the KV cache by the map of attention layers and the recurrent-state pool, of the whole model and by rank (R-48)."""

from __future__ import annotations

from collections import Counter

from megaplan.budget.values import ServingBudget, ServingStage, device_budget
from megaplan.families.family import ServingState
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory, Outside, Owner
from megaplan.spec.device import device_of
from megaplan.spec.models import Serving, Spec

AT_THE_END = (Outside.FINAL_NORM, Outside.HEAD)


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
    whole = _stage(spec, inventory, (0, len(inventory.layers)), (1, 1, 1))
    degrees = serving_degrees(spec)
    spans = spans_of(len(inventory.layers), degrees[1])
    stages = tuple(_stage(spec, inventory, span, degrees) for span in spans) if max(degrees) > 1 else ()
    blocks = -(-serving.context_length // serving.block_size) if serving.cache == "paged" else 0
    usable = device_budget(device_of(spec.device), 1).usable_bytes
    _, _, kv_cache, states, parameters = whole
    return ServingBudget(kv_cache, states, parameters, usable, blocks, degrees, stages)


def serving_degrees(spec: Spec) -> tuple[int, int, int]:
    """Ranks of a tensor group, stages, and ranks of the experts of a spec with the section."""
    serving, mesh = spec.serving, spec.mesh
    assert serving is not None
    return serving.tp or mesh.tp, serving.pp or mesh.pp, serving.ep or mesh.ep


def spans_of(num_layers: int, stages: int) -> list[tuple[int, int]]:
    """First layer and end of each stage: equal numbers of layers; of what is left, one each for the stages before the last.

    Source: vllm/distributed/utils.py (`get_pp_indices`).
    """
    stages = min(stages, num_layers)
    each, left = divmod(num_layers, stages)
    sizes = [each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


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


def shared_tokens(serving: Serving, window: int | None) -> int:
    """Tokens in one layer's cache that all sequences share: whole blocks of the prefix, as far as the window reaches back to them."""
    left = serving.context_length - min(window or serving.context_length, serving.context_length)
    return max(serving.shared_prefix // serving.block_size - -(-left // serving.block_size), 0) * serving.block_size


def served_by(spec: Spec, block: Block) -> ServingState:
    """State of one layer for each sequence."""
    family = FAMILIES[block.family]
    return family.serving(family.section_of(spec.model), spec.model.hidden_size, block.variant, spec.precision.params)


def _stage(spec: Spec, inventory: Inventory, span: tuple[int, int], degrees: tuple[int, int, int]) -> ServingStage:
    """One rank of a stage.

    Every rank holds latents whole; of key-value heads it holds its own, at least one. A tensor group divides recurrent states. With fewer
    ranks of experts than of the tensor group, those ranks share each expert's width.
    """
    serving, (first, end), (tp, pp, _) = spec.serving, span, degrees
    assert serving is not None
    kv_cache = states = elements = 0
    counts = Counter(id(block) for block in inventory.layers[first:end])
    for block in {id(block): block for block in inventory.layers[first:end]}.values():
        layer, count = served_by(spec, block), counts[id(block)]
        shared = shared_tokens(serving, layer.window)
        tokens = shared + serving.batch_size * (cached_tokens(serving, layer.window) - shared)
        kv_cache += count * tokens * serving.kv_dtype.bytes * (layer.cache_width // min(tp, layer.cache_parts))
        states += count * serving.batch_size * -(-layer.state_bytes // tp)
        elements += count * local_elements(block, degrees, min(tp, layer.cache_parts), layer.cached_by)
    last = end == len(inventory.layers)
    for name, block in inventory.outside:
        at_the_end = name in AT_THE_END or name.startswith(Outside.MTP)
        copied = inventory.tied and name == Outside.EMBEDDING and pp > 1  # the last stage's head
        if last if at_the_end else first == 0 or (copied and last):
            elements += local_elements(block, degrees)
    return ServingStage(first, end, kv_cache, states, elements * spec.precision.params.bytes)


def local_elements(block: Block, degrees: tuple[int, int, int], heads: int = 1, cached_by: frozenset[str] = frozenset()) -> int:
    """Elements of a rank's part of a block."""
    tp, _, ep = degrees
    total = 0
    for tensor in block.tensors:
        cut = heads if tensor.name in cached_by and tensor.owner is Owner.TENSOR_PARALLEL else tp
        total += tensor.local_elements(cut, ep, 1) if tensor.owner is not Owner.EXPERT_PARALLEL else -(-tensor.elements // max(tp, ep))
    return total
