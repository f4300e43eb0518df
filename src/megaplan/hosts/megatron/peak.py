"""A rank's bytes after a step and at its peak: storage, fixed buffers, activations in flight, and phases."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megaplan.hosts.megatron.job import LOSS, MTP, MegatronJob, count
from megaplan.hosts.megatron.saved import chunk, handle_bytes, offloaded_here_bytes, operator, operators, routed_rows, scores_elements
from megaplan.hosts.megatron.storage import Parameters, gathered_bytes, gradient_copies_bytes, parameters, storage_bytes
from megaplan.hosts.megatron.working import backward_excess, forward_excess, graph_bytes

MIB = 2**20
LAYER_FORWARD, LAYER_BACKWARD = "layer forward", "layer backward"
FIRST_LAYER = "first-layer backward"
"""The phase of Megatron-FSDP alone."""
BACKWARD = frozenset({"LM-head backward", LAYER_BACKWARD, FIRST_LAYER})
"""Phases in which the previous microbatch's graph is gone."""


class MegatronMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        static: What stays for the whole run, by part.
        leftover: What the last step leaves besides, and the next replaces.
        gradient_copies: Of the optimizer's step, dropped before the next forward.
        activations: Kept by the microbatches in flight.
        phases: What each phase adds to both, by its name.
        gathered: What of each phase is parameters and gradients that Megatron-FSDP has whole.
        received: What of each phase is the previous microbatch's, named by the pipeline's schedule.
    """

    static: dict[str, int]
    leftover: int
    gradient_copies: int
    activations: int
    phases: dict[str, int]
    gathered: dict[str, int]
    received: dict[str, int]

    @property
    def after_step(self) -> int:
        """Allocated after the optimizer's step."""
        return sum(self.static.values()) + self.leftover + self.gradient_copies

    @property
    def peak(self) -> int:
        """The largest phase of a step, its end included."""
        return max(sum(self.static.values()) + self.activations + max(self.phases.values()), self.after_step)

    @property
    def peak_phase(self) -> str:
        """The largest phase of forward and backward."""
        return max(self.phases, key=lambda name: self.phases[name])


def memory(job: MegatronJob, held: Parameters | None = None) -> MegatronMemory:
    """The bytes of a run's rank; `held` are its parameters, if they are known."""
    found = parameters(job) if held is None else held
    virtual = len(job.chunks)
    mask = job.micro_batch_size * (job.seq_length // job.cp) * job.seq_length if job.attention_mask and _at_an_end(job) else 0
    boundary = _boundary_bytes(job)
    static = {**storage_bytes(job, found), **fixed_bytes(job, found.shapes)}
    leftover = 0
    if job.pp > 1:
        leftover = boundary * (2 if virtual == 1 else (job.pp - 1) * (virtual - 1)) + (0 if job.hybrid else mask)
    leftover += sum(_dispatcher_bytes(job) * count(letters, "E") for letters in job.chunks)
    leftover += _dispatcher_bytes(job) * count(job.mtp_operators, "E") * _modules(job)
    activations = in_flight(job) + offloaded_here_bytes(job) + _deferred_bytes(job) + mask * (2 if job.pp > 1 and not job.hybrid else 1)
    phases, whole = _phases(job), gathered_bytes(job, found)
    gathered = {name: whole.first_layer_backward if name == FIRST_LAYER else whole.loss for name in phases}
    phases = {name: size + gathered[name] for name, size in phases.items()}
    received = {name: received_bytes(job, backward=name in BACKWARD) for name in phases}
    phases = {name: size + received[name] for name, size in phases.items()}
    return MegatronMemory(static, leftover, gradient_copies_bytes(job, found), activations, phases, gathered, received)


def _deferred_bytes(job: MegatronJob) -> int:
    """Logits' gradients and the head's inputs of the microbatches whose weight gradient waits for the end of the step."""
    if not job.deferred_head or LOSS not in job.chunks[-1]:
        return 0
    waiting = min(job.deferred_head, job.num_microbatches)
    return waiting * 2 * (job.tokens * job.vocab_size // job.tp + job.stream_tokens * job.hidden_size)


def _rank(job: MegatronJob) -> int:
    return job.pp - 1 if job.pp_rank is None else job.pp_rank


def _at_an_end(job: MegatronJob) -> bool:
    """Whether the rank is the first or the last of its pipeline: those alone load batches."""
    return _rank(job) in (0, job.pp - 1)


def _modules(job: MegatronJob) -> int:
    depth = sum(letters.count(MTP) for letters in job.chunks)
    return min(depth, 1) if job.mtp_repeated else depth


def _boundary_bytes(job: MegatronJob) -> int:
    """What one stage sends to the next of a microbatch."""
    return 2 * job.stream_tokens * job.hidden_size


def received_bytes(job: MegatronJob, *, backward: bool) -> int:
    """What the pipeline's schedule names of the previous microbatch while the rank is at its fullest.

    Of that microbatch it names the gradient it sent to the stage before, until its next backward; until its next forward has ended, also
    the one it received from the stage after, or on the last stage the loss, whose graph ends in the microbatch's input.

    Source: `input_tensor_grad`, `output_tensor_grad` and `output_tensor` of `forward_backward_pipelining_without_interleaving`.
    """
    rank = _rank(job)
    if job.pp == 1 or job.num_microbatches <= job.pp - rank:
        return 0
    sent = _boundary_bytes(job) if rank else 0
    return sent + (0 if backward else _boundary_bytes(job))


def _dispatcher_bytes(job: MegatronJob) -> int:
    """What the dispatcher of one layer's experts holds on to until the next microbatch.

    All-gather: its rows' places and probabilities, and its map. All-to-all: probabilities and map of its tokens, and where their rows went.
    HybridEP: probabilities in fp32 and map, the rows' probabilities, and through their place in the graph the maps of the dispatch. What
    DeepEP's holds on to is left out.

    Source: the attributes of the dispatchers in `megatron/core/transformer/moe/token_dispatcher.py`.
    """
    dims = job.moe
    if dims is None:
        return 0
    scores = job.stream_tokens * dims.num_experts
    if dims.dispatcher == "allgather":
        map_bytes = job.stream_tokens * job.tp * job.ep * (dims.num_experts // job.ep)
        return routed_rows(job, dims) * (8 + dims.probability_bytes) + map_bytes
    if dims.dispatcher == "alltoall":
        places = 4 * (2 * scores + job.stream_tokens) if dims.permute_fusion else 8 * job.stream_tokens * dims.top_k
        return scores * (1 + dims.probability_bytes) + places
    if dims.dispatcher == "hybridep":
        return scores * (1 + 4) + 4 * routed_rows(job, dims) + handle_bytes(job, dims)
    return 0


def in_flight(job: MegatronJob) -> int:
    """Bytes that the rank's microbatches keep at its fullest moment."""
    return sum(count * chunk(job, letters) for count, letters in zip(in_flight_counts(job), job.chunks, strict=True))


def in_flight_counts(job: MegatronJob) -> tuple[int, ...]:
    """Microbatches of each chunk at the rank's fullest moment; on the rank of the loss, the fullest of its last chunk's.

    Under 1F1B rank r holds min(microbatches, pp − r). Under interleaving its forwards visit the chunks in rounds of a group, and the
    backwards follow (VP − 1) · group + 2 · (pp − 1 − r) forwards behind; after that the counts of the chunks recur with each round.
    """
    virtual, rank = len(job.chunks), _rank(job)
    if virtual == 1:
        return (min(job.num_microbatches, job.pp - rank),)
    sizes = tuple([chunk(job, letters) for letters in job.chunks])
    return fullest_counts(sizes, job.pp - 1 - rank, min(job.inflight_group, job.num_microbatches), job.num_microbatches)


@lru_cache(maxsize=65536)
def fullest_counts(sizes: tuple[int, ...], behind: int, group: int, num_microbatches: int) -> tuple[int, ...]:
    """Microbatches of each chunk at a rank's fullest moment under interleaving.

    Args:
        sizes: Bytes that one microbatch keeps on each chunk. Of other sizes the moment is one of the rank's, not the fullest.
        behind: Pipeline ranks after this one.
        group: Microbatches that a chunk takes in turn.
        num_microbatches: Of a step.
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


def fixed_bytes(job: MegatronJob, shapes: set[tuple[int, int]]) -> dict[str, int]:
    """Workspaces and buffers that stay for the whole run, by part."""
    parts = {"cuBLAS workspaces": 2 * job.cublas_bytes}
    if not job.local or job.moe is not None:  # a router multiplies by Transformer Engine whichever made the layers
        parts["Transformer Engine workspace"] = job.workspace_bytes
    tokens, hidden = job.stream_tokens, job.hidden_size
    gathered = 2 * job.tokens * hidden if job.sequence_parallel and job.tp > 1 else 0
    if job.moe is not None:
        if job.moe.grouped_gemm:
            parts["grouped GEMM workspaces"] = 4 * job.workspace_bytes
        if job.moe.overlap:
            parts["expert overlap workspace"] = 32 * MIB
        if job.moe.dispatcher == "allgather":
            gathered = max(gathered, 2 * tokens * job.tp * job.ep * hidden)
    parts["all-gather buffer"] = gathered
    parts["CUDA graphs"] = graph_bytes(job)
    if job.local:  # its attention multiplies queries and keys into the same buffer, which grows to the larger of its uses
        parts["attention buffer"] = max(2 * scores_elements(job) - gathered, 0)
    if job.tp_comm_overlap:
        parts["TP overlap workspaces"] = 3 * 32 * MIB
    if job.wgrad_fusion:
        parts["dummy weight gradients"] = sum(2 * rows * columns for rows, columns in shapes)
    if job.latent is not None:
        attention = sum(count(letters, "*") for letters in job.chunks) + sum(letters.count(MTP) for letters in job.chunks)
        parts["rotary cache"] = 12 * job.seq_length * job.latent.qk_pos_emb_head_dim * attention
    elif job.rotary_dim:  # each model chunk's own angles, in fp32
        parts["rotary cache"] = 4 * job.seq_length // job.cp * job.rotary_dim * len(job.chunks)
    return parts


def _phases(job: MegatronJob) -> dict[str, int]:
    chunks = [letters for letters in job.chunks if LOSS in letters] or job.chunks
    phases: dict[str, int] = {}
    if LOSS in chunks[0]:
        logits = job.tokens * job.vocab_size // job.tp
        saved = (
            2 if job.cross_entropy == "te" else 4
        )  # of a prediction, what its own loss keeps: the gradient in place of logits, or fp32 terms
        kept = saved * logits * chunks[0].count(MTP)
        phases["loss"] = kept + {"unfused": 6, "native": 10, "te": 2, "te_fp32": 6}[job.cross_entropy] * logits
        weight_gradient = 0 if job.wgrad_fusion else 2 * job.vocab_size // job.tp * job.hidden_size
        shard = 2 * job.stream_tokens * job.hidden_size if job.sequence_parallel else 0
        phases["LM-head backward"] = kept + 2 * logits + weight_gradient + 2 * job.tokens * job.hidden_size + shard
    if any(map(operators, chunks)):
        if job.recompute_num_layers:
            phases[LAYER_BACKWARD] = max(_group_bytes(job, letters) for letters in chunks)
        else:
            phases[LAYER_FORWARD] = max(forward_excess(job, letters) for letters in chunks)
            phases[LAYER_BACKWARD] = max(backward_excess(job, letters) for letters in chunks)
        if job.fsdp:  # most gradients wait to be reduced while of what was kept only the first layer's is left
            first = operators(job.chunks[0])[:2]
            phases[FIRST_LAYER] = chunk(job, first) + backward_excess(job, first) - in_flight(job)
    # a stage without layers and head: the embedding's backward adds to the gradient that storage counts, and makes nothing else
    return phases or {LAYER_BACKWARD: 0}


def _group_bytes(job: MegatronJob, letters: str) -> int:
    """What full recompute makes again of one group of operators, and holds while it does and while its backward runs.

    Under the block method the layers behind have had their backward then; while they have theirs, they hold what they would without it.
    """
    groups, rest = job.recomputed(operators(letters))
    plain = replace(job, recompute_num_layers=0)
    behind = sum(sum(operator(job, letter).values()) for letter in rest)
    again = [chunk(plain, group) + max(forward_excess(plain, group), backward_excess(plain, group)) - behind for group in groups]
    return max([*again, *([max(forward_excess(plain, rest), backward_excess(plain, rest))] if rest else [])])
