"""Serving: the KV cache by the map of attention layers and the recurrent-state pool, for the whole model and by rank (R-48), and times.

Decoding reads every parameter that a batch uses, and the cache of every sequence, once a step; matrix products take less time than these
reads unless the batch is large. Prefill is limited by matrix products. Layers of a tensor group reduce their outputs twice.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from megaplan.budget.values import ServingBudget, ServingStage, device_budget
from megaplan.cost.model import model_costs
from megaplan.cost.rates import Rates, rates_of
from megaplan.cost.transfers import RankGroup, sum_ns
from megaplan.dtypes import DType
from megaplan.families.family import ServingState
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory, Outside, Owner
from megaplan.spec.host import device_of, fabric_size
from megaplan.spec.layout import Mesh
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
    """First layer and end of each stage: stages have equal numbers of layers.

    The remaining layers go to the stages before the last, one each.

    Source: vllm/distributed/utils.py (`get_pp_indices`).
    """
    stages = min(stages, num_layers)
    each, left = divmod(num_layers, stages)
    sizes = [each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


def cached_tokens(serving: Serving, window: int | None) -> int:
    """Tokens of one sequence in one layer's cache.

    Contiguous: the context, or the window if that is smaller. Paged: whole blocks; a window that ends inside a block also begins inside
    one, so it can touch one block more than its length needs.
    """
    context = serving.context_length
    if serving.cache == "contiguous":
        return min(context, window or context)
    blocks = -(-context // serving.block_size)
    if window is not None:
        blocks = min(blocks, -(-(window - 1) // serving.block_size) + 1)
    return blocks * serving.block_size


def shared_tokens(serving: Serving, window: int | None) -> int:
    """Tokens in one layer's cache that all sequences share: whole blocks of the prefix within the window."""
    left = serving.context_length - min(window or serving.context_length, serving.context_length)
    return max(serving.shared_prefix // serving.block_size - -(-left // serving.block_size), 0) * serving.block_size


def served_by(spec: Spec, block: Block) -> ServingState:
    """State of one layer for each sequence."""
    family = FAMILIES[block.family]
    return family.serving(family.section_of(spec.model), spec.model.hidden_size, block.variant, spec.precision.params)


def _stage(spec: Spec, inventory: Inventory, span: tuple[int, int], degrees: tuple[int, int, int]) -> ServingStage:
    """One rank of a stage.

    Every rank holds all latents; of the key-value heads it holds its share, at least one. A tensor group divides recurrent states. If the
    tensor group has more ranks than the expert degree, the additional ranks shard each expert's width. Engines quantise the linears of
    layers; embedding, head and last norm keep 16 bits.
    """
    serving, (first, end), (tp, pp, _) = spec.serving, span, degrees
    assert serving is not None
    kv_cache = states = parameters = 0
    dtype = spec.precision.params
    counts = Counter(id(block) for block in inventory.layers[first:end])
    for block in {id(block): block for block in inventory.layers[first:end]}.values():
        layer, count = served_by(spec, block), counts[id(block)]
        shared = shared_tokens(serving, layer.window)
        tokens = shared + serving.batch_size * (cached_tokens(serving, layer.window) - shared)
        kv_cache += count * tokens * serving.kv_dtype.bytes * (layer.cache_width // min(tp, layer.cache_parts))
        states += count * serving.batch_size * -(-layer.state_bytes // tp)
        parameters += count * dtype.bytes * local_elements(block, degrees, min(tp, layer.cache_parts), layer.cached_by)
    last = end == len(inventory.layers)
    for name, block in inventory.outside:
        at_the_end = name in AT_THE_END or name.startswith(Outside.MTP)
        copied = inventory.tied and name == Outside.EMBEDDING and pp > 1  # the last stage's head
        if last if at_the_end else first == 0 or (copied and last):
            parameters += local_elements(block, degrees) * (dtype.bytes if name.startswith(Outside.MTP) else outside_bytes(dtype))
    return ServingStage(first, end, kv_cache, states, parameters)


def outside_bytes(dtype: DType) -> int:
    """Bytes of an element outside the layers of an engine whose parameters have this dtype."""
    return max(dtype.bytes, ACTIVATION_BYTES)


def local_elements(block: Block, degrees: tuple[int, int, int], heads: int = 1, cached_by: frozenset[str] = frozenset()) -> int:
    """Elements of a rank's part of a block."""
    tp, _, ep = degrees
    total = 0
    for tensor in block.tensors:
        cut = heads if tensor.name in cached_by and tensor.owner is Owner.TENSOR_PARALLEL else tp
        total += tensor.local_elements(cut, ep, 1) if tensor.owner is not Owner.EXPERT_PARALLEL else -(-tensor.elements // max(tp, ep))
    return total


NS = 1e-9
KERNELS_OF_LAYER = 6
"""Number of kernels of a layer of the pattern in an engine: norm, projections, rotation and cache, attention or activation, and the sum."""
ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """Equal layers with a cache.

    Attributes:
        count: Layers.
        token_bytes: Bytes of a token in one layer's cache, on one rank.
        window: Largest number of tokens that a layer reads; None for all.
    """

    count: int
    token_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Served:
    """A model in an engine, as one rank of a tensor group runs it; the stages of a pipeline are summed.

    Attributes:
        rates: Rates of the device.
        dtype: Dtype of the parameters.
        degrees: Ranks of a tensor group, stages, and ranks of the experts.
        read_bytes: Parameters that every step reads: all except embedding and routed experts.
        expert_bytes: Routed experts.
        experts: Routed experts of a layer, and the number that a token uses; (1, 1) without experts.
        flops: FLOPs of a token outside attention's scores.
        cached: Layers with a cache.
        state_bytes: Recurrent states of one sequence.
        num_layers: Layers of the pattern.
        hidden_size: Width of the residual stream.
        alone: The spec of a single tensor group, if the group extends beyond its NVLink domain; else None.
        host_ns: Time of the host in a step that no kernel hides.
        eager_ns: Time of the host to launch a layer of the pattern outside graphs, while the device works; 0 in captured graphs.
    """

    rates: Rates
    dtype: DType
    degrees: tuple[int, int, int]
    read_bytes: int
    expert_bytes: int
    experts: tuple[int, int]
    flops: int
    cached: tuple[CachedLayers, ...]
    state_bytes: int
    num_layers: int
    hidden_size: int
    alone: Spec | None
    host_ns: int = 0
    eager_ns: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the caches of all layers without a window, on one rank."""
        return sum(layers.count * layers.token_bytes for layers in self.cached)

    def decode_seconds(self, batch: float, context: float) -> float:
        """Seconds of a step in which each of `batch` sequences generates one token, at a mean context of `context` tokens."""
        pp = self.degrees[1]
        batch /= pp  # each stage works on a different batch
        touched, top_k = self.experts
        sharing = max(1, self.degrees[2] // self.degrees[0])  # tensor groups whose tokens reach this rank's experts
        share = 1 - (1 - 1 / touched) ** (batch * sharing * top_k)
        read = self.read_bytes + self.expert_bytes * share
        products = max(self.rates.memory_ns(ceil(read)), self.rates.compute_ns(ceil(self.flops * batch), "D", self.dtype))
        cache = sum(each.count * each.token_bytes * min(context, each.window or context) for each in self.cached)
        moved = self.rates.memory_ns(ceil(batch * (cache + 2 * self.state_bytes)))
        launches = KERNELS_OF_LAYER * self.num_layers * self.rates.launch_ns
        device = products + moved + launches + self._reductions_ns(batch)
        return (max(device, self.eager_ns * self.num_layers) + self.host_ns) * NS

    def prefill_seconds(self, tokens: float, flops: int) -> float:
        """Seconds to read `tokens` tokens of prompts; `flops` are the whole model's FLOPs per token, attention included."""
        tp, pp, _ = self.degrees
        compute = self.rates.compute_ns(ceil(flops * tokens / (tp * pp)), "D", self.dtype)
        return (compute + self._reductions_ns(tokens / pp)) * NS

    def _reductions_ns(self, tokens: float) -> float:
        """Sums over the tensor group, one in each layer of the pattern."""
        tp, payload = self.degrees[0], tokens * self.hidden_size * ACTIVATION_BYTES
        if tp == 1:
            return 0.0
        if self.alone is not None:
            return self.num_layers * sum_ns(self.rates, self.alone, RankGroup(tp, 1), ceil(payload))
        return self.num_layers * (self.rates.node_ns(ceil(2 * (tp - 1) / tp * payload)) + self.rates.latency_ns)


class ServingTimes(NamedTuple):
    """Times of one replica of a served model, all of whose stages are busy.

    Attributes:
        decode_ns: Nanoseconds of a step in which each sequence makes one token at the end of its context.
        prefill_ns: Nanoseconds to read one prompt of the whole context.
        batch_size: Sequences of the copy.
        num_devices: Devices of the copy.
        low: Lower end of the 80 % interval, as a factor of a time.
        high: Upper end.
    """

    decode_ns: int
    prefill_ns: int
    batch_size: int
    num_devices: int
    low: float
    high: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the copy makes in a second of decoding."""
        return self.batch_size / (self.decode_ns * NS)

    def as_document(self) -> dict[str, Any]:
        """The JSON object."""
        return {**self._asdict(), "tokens_per_second": self.tokens_per_second}


def served(spec: Spec, inventory: Inventory, degrees: tuple[int, int, int], dtype: DType, kv_dtype: DType) -> Served:
    """The spec's model in an engine.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        degrees: Ranks of a tensor group, stages, and ranks of the experts.
        dtype: Dtype of the parameters.
        kv_dtype: Dtype of the cache.

    Raises:
        MegaplanError: MP504, the device is unknown.
    """
    tp, _, ep = degrees
    read = experts = states = 0
    cached: dict[tuple[int, int | None], int] = {}
    for block in inventory.layers:
        layer = served_by(spec, block)
        elements = local_elements(block, degrees, min(tp, layer.cache_parts), layer.cached_by)
        routed = sum(-(-tensor.elements // max(tp, ep)) for tensor in block.tensors if tensor.owner is Owner.EXPERT_PARALLEL)
        read, experts = read + elements - routed, experts + routed
        states += -(-layer.state_bytes // tp)
        if layer.cache_width:
            key = kv_dtype.bytes * (layer.cache_width // min(tp, layer.cache_parts)), layer.window
            cached[key] = cached.get(key, 0) + 1
    head = Outside.EMBEDDING if inventory.tied else Outside.HEAD
    head_elements = local_elements(dict(inventory.outside)[head], degrees)
    moe = spec.model.moe
    chosen = (moe.num_experts, moe.top_k) if moe is not None and experts else (1, 1)
    active = read + head_elements + experts * max(tp, ep) // tp * chosen[1] // chosen[0]
    return Served(
        rates=rates_of(spec),
        dtype=dtype.of_products,
        degrees=degrees,
        read_bytes=read * dtype.bytes + head_elements * outside_bytes(dtype),
        expert_bytes=experts * dtype.bytes,
        experts=chosen,
        flops=2 * active,
        cached=tuple(CachedLayers(count, size, window) for (size, window), count in cached.items()),
        state_bytes=states,
        num_layers=len(inventory.layers),
        hidden_size=spec.model.hidden_size,
        alone=spec.model_copy(update={"mesh": Mesh(tp=tp)}) if tp > fabric_size(spec.device) else None,
    )


def forward_flops(spec: Spec, inventory: Inventory, seq_length: int) -> int:
    """FLOPs of a token's forward through the layers, in a sequence of this length."""
    batch = spec.batch.model_copy(update={"seq_length": max(seq_length, 1), "micro_batch_size": 1})
    costs = model_costs(spec.model_copy(update={"batch": batch}), inventory)
    return sum(layer.forward_flops for layer in costs.layers)
