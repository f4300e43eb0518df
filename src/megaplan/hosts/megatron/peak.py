"""A rank's bytes after a step and at its peak: storage, fixed buffers, activations in flight, and phases."""

from functools import lru_cache
from typing import NamedTuple

from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.hosts.megatron.chunks import backward_excess, chunk, forward_excess, graph_bytes, recomputed_groups
from megaplan.hosts.megatron.experts import dispatcher, dispatcher_bytes
from megaplan.hosts.megatron.pattern import LOSS, MTP, count, operators
from megaplan.hosts.megatron.programs import num_scores
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage
from megaplan.hosts.megatron.state import is_single
from megaplan.hosts.megatron.storage import (
    gathered_bytes,
    gradient_copies_bytes,
    is_fsdp,
    offloaded_state_bytes,
    parameters,
    storage_bytes,
    unscaled_bytes,
)
from megaplan.hosts.megatron.tensors import Parameters
from megaplan.hosts.megatron.workspaces import engine_bytes
from megaplan.hosts.values import HostBytes
from megaplan.spec.host import device_of

MIB = 2**20
LAYER_FORWARD, LAYER_BACKWARD = "layer forward", "layer backward"
FIRST_LAYER = "first-layer backward"
"""A phase that only Megatron-FSDP has."""
BACKWARD = frozenset({"LM-head backward", LAYER_BACKWARD, FIRST_LAYER})
"""Phases in which the previous microbatch's graph is freed."""


class GraphPools(NamedTuple):
    """Bytes that graphs keep reserved in addition to allocated bytes.

    A graph's tensors are in a separate pool, which is not used for other tensors between replays: all tensors of a full step, or the saved
    tensors of graphed layers. Steps before the capture had their tensors in the default pool; without expandable segments at most those
    bytes stay reserved, since the optimizer's first step allocates its states in segments that activations have freed.

    Source: `megatron/core/full_cuda_graph.py`, `megatron/core/transformer/cuda_graphs.py`; NVIDIA-NeMo/Megatron-Bridge, issue 4587.

    Attributes:
        inside: During forward and backward, an upper bound: bytes of the steps before the capture of a full step.
        outside: During the optimizer's step: the same bytes and the pools of the graphs.
        twice: During forward and backward: saved tensors of graphed layers that the default pool also keeps from the steps before the
            capture. As an upper bound, the default pool includes the percentage by which reserved exceeds allocated memory.
    """

    inside: int
    outside: int
    twice: int = 0


class MegatronMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        static: Bytes that stay for the whole run, by part.
        leftover: Further bytes that one step leaves and the next step replaces.
        gradient_copies: Copies of gradients that the optimizer's step makes, freed before the next forward.
        unscaled: Copies of states that the optimizer's step makes and frees.
        activations: Bytes that the microbatches in flight keep.
        phases: Bytes that each phase adds to `static` and `activations`, by name.
        gathered: The part of each phase that consists of parameters and gradients that Megatron-FSDP has gathered.
        received: The part of each phase that belongs to the previous microbatch and is referenced by variables of the pipeline's schedule.
        pools: Bytes that graphs keep reserved.
    """

    static: dict[str, int]
    leftover: int
    gradient_copies: int
    unscaled: int
    activations: int
    phases: dict[str, int]
    gathered: dict[str, int]
    received: dict[str, int]
    pools: GraphPools

    @property
    def after_step(self) -> int:
        """Allocated bytes after the optimizer's step."""
        return sum(self.static.values()) + self.leftover + self.gradient_copies

    @property
    def peak(self) -> int:
        """The largest phase of a step, its end included."""
        return max(self._inside, self.after_step + self.unscaled)

    def reserved(self, percent: int) -> int:
        """The peak of a step including the pools of graphs and `percent` of the allocated bytes."""
        inside = self._inside + overhead_bytes(self._inside, self.pools.inside, percent, self.pools.twice)
        stepped = self.after_step + self.unscaled
        return max(inside, stepped + overhead_bytes(stepped, self.pools.outside, percent))

    @property
    def _inside(self) -> int:
        return sum(self.static.values()) + self.activations + max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The largest phase of forward and backward."""
        return max(self.phases, key=lambda name: self.phases[name])


def overhead_bytes(allocated: int, pool: int, percent: int, twice: int = 0) -> int:
    """Reserved minus allocated bytes: a pool of graphs and a percentage of all, or at least the bytes that graphs of layers duplicate."""
    return max(pool + (allocated + pool) * percent // 100, twice)


def memory(stage: MegatronStage, held: Parameters | None = None) -> MegatronMemory:
    """The bytes of a rank; `held` are its parameters, if they are known."""
    run, found = stage.run, parameters(stage) if held is None else held
    spec, dims, virtual = stage.spec, run.at.dims, len(stage.chunks)
    keeps_two = spec.mesh.pp > 1 and spec.host.model == "gpt"
    mask = dims.batch * dims.tokens * spec.batch.seq_length if spec.host.attention_mask and _at_an_end(stage) else 0
    static = {**storage_bytes(stage, found), **fixed_bytes(run, stage.chunks, found.shapes)}
    leftover = 0
    if spec.mesh.pp > 1:
        leftover = run.boundary_bytes * (2 if virtual == 1 else (spec.mesh.pp - 1) * (virtual - 1)) + mask * keeps_two
    leftover += sum(map(dispatcher_bytes, run.expert_settings(stage.letters + run.ahead * _modules(stage))))
    activations = in_flight(stage) + offloaded_here_bytes(stage) + _deferred_bytes(stage) + mask * (2 if keeps_two else 1)
    phases, whole = _phases(stage), gathered_bytes(stage, found)
    gathered = {name: whole.first_layer_backward if name == FIRST_LAYER else whole.loss for name in phases}
    phases = {name: size + gathered[name] for name, size in phases.items()}
    received = {name: received_bytes(stage, backward=name in BACKWARD) for name in phases}
    phases = {name: size + received[name] for name, size in phases.items()}
    step = gradient_copies_bytes(stage, found), unscaled_bytes(stage, found)
    pools = _pools(stage, activations + max(phases.values()))
    return MegatronMemory(static, leftover, *step, activations, phases, gathered, received, pools)


def _pools(stage: MegatronStage, largest: int) -> GraphPools:
    """The pools of a rank's graphs; `largest` is a step's peak without the bytes that stay."""
    run, host = stage.run, stage.spec.host
    if host.cuda_graphs == "iteration":
        before = 0 if host.expands_segments else largest
        return GraphPools(before, before + largest)
    if not run.graphed:
        return GraphPools(0, 0)
    kept = 0
    for number, letters in zip(in_flight_counts(stage), stage.chunks, strict=True):
        kept += number * sum([run.operator(letter).kept for letter in operators(letters) if run.is_graphed(letter)])
    return GraphPools(0, kept, 0 if host.expands_segments else kept)


def _deferred_bytes(stage: MegatronStage) -> int:
    """Logits' gradients and the head's inputs of the microbatches whose weight gradient waits for the end of the step."""
    waiting = min(stage.spec.host.deferred_head_microbatches or 0, _num_microbatches(stage))
    return waiting * (stage.run.at.element_bytes * _logits(stage.run) + stage.run.boundary_bytes) if LOSS in stage.chunks[-1] else 0


def _logits(run: MegatronRun) -> int:
    """Elements of a microbatch's logits on a rank."""
    return run.at.tokens * run.spec.model.vocab_size // run.at.dims.tp


def _num_microbatches(stage: MegatronStage) -> int:
    return stage.spec.schedule.microbatches_per_update


def _at_an_end(stage: MegatronStage) -> bool:
    """True if the rank is the first or the last of its pipeline, which load batches."""
    return stage.pp_rank in (0, stage.spec.mesh.pp - 1)


def _modules(stage: MegatronStage) -> int:
    depth = stage.letters.count(MTP)
    return min(depth, 1) if stage.spec.host.mtp_repeated else depth


def received_bytes(stage: MegatronStage, *, backward: bool) -> int:
    """Bytes of the previous microbatch to which the pipeline's schedule still holds references at the rank's peak.

    Until its next backward the schedule references the gradient that it sent to the previous stage. Until the end of its next forward it
    also references the gradient that it received from the next stage, or on the last stage the loss, whose graph leads to the microbatch's
    input.

    Source: `input_tensor_grad`, `output_tensor_grad` and `output_tensor` of `forward_backward_pipelining_without_interleaving`.
    """
    pp, rank = stage.spec.mesh.pp, stage.pp_rank
    if pp == 1 or _num_microbatches(stage) <= pp - rank:
        return 0
    return stage.run.boundary_bytes * (bool(rank) + (not backward))


def offloaded_here_bytes(stage: MegatronStage) -> int:
    """Bytes of offloaded modules' inputs that are on the device.

    They are the last input of each module, which backward reads next, and one in transit.

    Source: `_offload_margin` and `last_group_with_same_name` of `megatron/core/pipeline_parallel/fine_grained_activation_offload.py`.
    """
    inputs = [stage.run.operator(letter).offloaded for letter in set(operators(stage.letters))]
    return sum(inputs) + max(inputs, default=0)


def host_bytes(stage: MegatronStage, found: Parameters) -> HostBytes:
    """Bytes of a rank in the host's memory: the optimizer's, and page-locked activations of the microbatches in flight."""
    state, run, layers = offloaded_state_bytes(stage, found), stage.run, stage.spec.host.offloaded_layers or 0
    pinned = 0
    for number, letters in zip(in_flight_counts(stage), stage.chunks, strict=True):
        own = operators(letters)
        pinned += number * sum(run.operator(letter).offloaded for letter in own)
        pinned += number * sum(run.operator(letter).kept for letter in own[: layers * run.spec.host.block_layers])
    return HostBytes(state.pinned + pinned, state.pageable)


def in_flight(stage: MegatronStage) -> int:
    """Bytes that the rank's microbatches keep at its peak."""
    return sum(number * chunk(stage.run, letters) for number, letters in zip(in_flight_counts(stage), stage.chunks, strict=True))


def in_flight_counts(stage: MegatronStage) -> tuple[int, ...]:
    """Microbatches of each chunk at the rank's peak; on the rank with the loss, at the peak of its last chunk.

    Under 1F1B rank r holds min(microbatches, pp − r). Under interleaving its forwards visit the chunks in rounds of a group, and the first
    backward follows after (VP − 1) · group + 2 · (pp − 1 − r) forwards; from then on the counts of the chunks repeat in each round.
    """
    pp, number = stage.spec.mesh.pp, _num_microbatches(stage)
    if len(stage.chunks) == 1:
        return (min(number, pp - stage.pp_rank),)
    sizes = tuple([chunk(stage.run, letters) for letters in stage.chunks])
    return fullest_counts(sizes, pp - 1 - stage.pp_rank, min(stage.spec.host.microbatch_group_size or pp, number), number)


@lru_cache(maxsize=65536)
def fullest_counts(sizes: tuple[int, ...], behind: int, group: int, num_microbatches: int) -> tuple[int, ...]:
    """Microbatches of each chunk at a rank's peak under interleaving.

    Args:
        sizes: Bytes that one microbatch keeps on each chunk. With other sizes the result is some point of the rank's schedule, not its
            peak.
        behind: Pipeline ranks after this one.
        group: Consecutive microbatches of a chunk.
        num_microbatches: Microbatches of a step.
    """
    virtual = len(sizes)
    forwards = num_microbatches * virtual
    warmup = min((virtual - 1) * group + 2 * behind, forwards)
    held, size, most, fullest = [0] * virtual, 0, -1, (0,) * virtual
    for step in range(min(forwards, warmup + 2 * group * virtual)):
        visited = _visited(step, group, virtual, num_microbatches)
        held[visited] += 1
        size += sizes[visited]
        if size > most and (behind or visited == virtual - 1):
            most, fullest = size, tuple(held)
        if step >= warmup:
            done = virtual - 1 - _visited(step - warmup, group, virtual, num_microbatches)
            held[done] -= 1
            size -= sizes[done]
    return fullest


def _visited(step: int, group: int, virtual: int, num_microbatches: int) -> int:
    """The chunk of a rank's forward number `step`; the last round may have fewer microbatches."""
    start, offset = divmod(step, group * virtual)
    return offset // min(group, num_microbatches - start * group)


def fixed_bytes(run: MegatronRun, chunks: tuple[str, ...], shapes: set[tuple[int, int]]) -> dict[str, int]:
    """Workspaces and buffers that stay for the whole run, by part.

    Args:
        run: The run.
        chunks: Letters of a rank's model chunks.
        shapes: Distinct shapes of its linear weights.
    """
    spec, at, moe, letters = run.spec, run.at, run.spec.model.moe, "".join(chunks)
    host, dims, attention = spec.host, run.at.dims, run.spec.model.attention
    engine, local = engine_bytes(spec.device.name), spec.host.transformer_impl == "local"
    parts = {"cuBLAS workspaces": 2 * _cublas_bytes(run)}
    if not local or moe is not None:  # a router multiplies with Transformer Engine, whichever library made the layers
        parts["Transformer Engine workspace"] = engine
    gathered = at.element_bytes * at.tokens * dims.hidden if host.sequence_parallel and dims.tp > 1 else 0
    if moe is not None:
        if host.moe_grouped_gemm:
            parts["grouped GEMM workspaces"] = 4 * engine
        if host.moe_overlap:
            parts["expert overlap workspace"] = 32 * MIB
        if dispatcher(spec) == "allgather":
            gathered = max(gathered, run.boundary_bytes * dims.tp * dims.ep)
    parts["all-gather buffer"] = gathered
    parts["CUDA graphs"] = graph_bytes(run, chunks)
    if is_single(spec) and count(letters, "*"):
        parts["causal mask"] = spec.batch.seq_length**2
    if local:  # local attention multiplies queries and keys into the same buffer, which grows to the larger of the two uses
        parts["attention buffer"] = max(at.element_bytes * num_scores(at) - gathered, 0)
    if host.tp_comm_overlap:
        parts["TP overlap workspaces"] = 3 * 32 * MIB
    if host.wgrad_fusion:
        parts["dummy weight gradients"] = sum(at.element_bytes * rows * columns for rows, columns in shapes)
    if isinstance(attention, LatentAttention):
        each = 12 if attention.indexer is None else 8  # an indexer has its own angles, but no sines and cosines for fused kernels
        parts["rotary cache"] = each * spec.batch.seq_length * attention.qk_rope_head_dim * (count(letters, "*") + letters.count(MTP))
    elif isinstance(attention, GroupedQueryAttention) and len(attention.nope_layers) < run.letters.count("A"):
        width = attention.rotary_dim or attention.head_dim  # the angles of each model chunk, in fp32
        parts["rotary cache"] = 4 * dims.tokens * width * len(chunks)
    return parts


def _cublas_bytes(run: MegatronRun) -> int:
    """Bytes of one handle's workspace: that of the launch, or torch's default on the device.

    The device's record counts both handles together.
    """
    if run.spec.host.cublas_workspace_kib is not None:
        return run.spec.host.cublas_workspace_kib * 1024
    return device_of(run.spec.device).gemm_workspace.value // 2


def _phases(stage: MegatronStage) -> dict[str, int]:
    run, host = stage.run, stage.spec.host
    chunks = [letters for letters in stage.chunks if LOSS in letters] or stage.chunks
    phases: dict[str, int] = {}
    if LOSS in chunks[0]:
        logits = _logits(run)
        each, hidden = run.at.element_bytes, run.at.dims.hidden
        # fp32 intermediates in addition to 16-bit logits, or in place of fp32 logits; the compiled native loss makes one more
        wide = 4 if each == 4 else each + 4
        # tensors that the loss of a prediction saves: the gradient instead of logits, or fp32 intermediates
        kept = (each if host.cross_entropy == "te" else 4) * logits * chunks[0].count(MTP)
        phases["loss"] = kept + {"unfused": wide, "native": wide + 4, "te": each, "te_fp32": wide}[host.cross_entropy] * logits
        weight_gradient = 0 if host.wgrad_fusion else each * stage.spec.model.vocab_size // run.at.dims.tp * hidden
        shard = run.boundary_bytes if host.sequence_parallel and run.at.dims.tp > 1 else 0
        phases["LM-head backward"] = kept + each * logits + weight_gradient + each * run.at.tokens * hidden + shard
    if any(map(operators, chunks)):
        if host.recompute_num_layers:
            phases[LAYER_BACKWARD] = max(_group_bytes(run, letters) for letters in chunks)
        else:
            phases[LAYER_FORWARD] = max(forward_excess(run, letters) for letters in chunks)
            phases[LAYER_BACKWARD] = max(backward_excess(run, letters) for letters in chunks)
        if is_fsdp(stage):  # most gradients are reduced after all saved tensors except the first layer's have been freed
            first = operators(stage.chunks[0])[: run.spec.host.block_layers]
            phases[FIRST_LAYER] = chunk(run, first) + backward_excess(run, first) - in_flight(stage)
    # a stage without layers and head: the embedding's backward adds to the gradient that `storage` counts, and allocates nothing else
    return phases or {LAYER_BACKWARD: 0}


def _group_bytes(run: MegatronRun, letters: str) -> int:
    """Peak of the largest group of operators under full recompute, while the group is recomputed and while its backward runs.

    Under the block method, the backward of later layers, which are not recomputed, has ended by then; it holds the same bytes as without
    recompute.
    """
    groups, rest = recomputed_groups(run, operators(letters))
    behind = sum(run.operator(letter).kept for letter in rest)
    again = [
        chunk(run, group, recomputes=False) + max(forward_excess(run, group), backward_excess(run, group)) - behind for group in groups
    ]
    return max([*again, *([max(forward_excess(run, rest), backward_excess(run, rest))] if rest else [])], default=0)
