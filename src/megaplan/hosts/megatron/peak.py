"""A rank's bytes after a step and at its peak: storage, fixed buffers, activations in flight, and phases."""

from __future__ import annotations

from dataclasses import dataclass

from megaplan.hosts.megatron.job import LOSS, MTP, MegatronJob
from megaplan.hosts.megatron.saved import chunk, operator, operators, recomputed_bytes, scores_elements
from megaplan.hosts.megatron.storage import gathered_bytes, gradient_copies_bytes, parameters, storage_bytes

MIB = 2**20
FIRST_LAYER = "first-layer backward"
"""The phase of Megatron-FSDP alone."""


@dataclass(frozen=True, slots=True)
class MegatronMemory:
    """Bytes of one rank.

    Attributes:
        static: What stays for the whole run, by part.
        leftover: What the last step leaves besides, and the next replaces.
        gradient_copies: Of the optimizer's step, dropped before the next forward.
        activations: Kept by the microbatches in flight.
        phases: What each phase adds to both, by its name.
        gathered: What of each phase is parameters and gradients that Megatron-FSDP has whole.
    """

    static: dict[str, int]
    leftover: int
    gradient_copies: int
    activations: int
    phases: dict[str, int]
    gathered: dict[str, int]

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


def memory(job: MegatronJob) -> MegatronMemory:
    """The bytes of a run's rank."""
    found = parameters(job)
    mask = job.micro_batch_size * (job.seq_length // job.cp) * job.seq_length if job.attention_mask else 0
    boundary = 2 * job.stream_tokens * job.hidden_size
    static = {**storage_bytes(job, found), **fixed_bytes(job, found.shapes)}
    virtual = len(job.chunks)
    leftover = 0
    if job.pp > 1:
        leftover = boundary * (2 if virtual == 1 else (job.pp - 1) * (virtual - 1)) + (0 if job.hybrid else mask)
    leftover += sum(_dispatcher_bytes(job) * letters.count("E") for letters in job.chunks)
    activations = in_flight(job) + mask * (2 if job.pp > 1 and not job.hybrid else 1)
    phases, whole = _phases(job), gathered_bytes(job, found)
    gathered = {name: whole.first_layer_backward if name == FIRST_LAYER else whole.loss for name in phases}
    phases = {name: size + gathered[name] for name, size in phases.items()}
    return MegatronMemory(static, leftover, gradient_copies_bytes(job, found), activations, phases, gathered)


def _dispatcher_bytes(job: MegatronJob) -> int:
    """What the all-gather dispatcher of one operator holds on to until the next microbatch: its rows' places and probabilities, its map.

    Source: the attributes of `MoEAllGatherTokenDispatcher` in `megatron/core/transformer/moe/token_dispatcher.py`.
    """
    if job.moe is None or job.moe.dispatcher != "allgather":
        return 0
    map_bytes = job.stream_tokens * job.tp * job.ep * (job.moe.num_experts // job.ep)
    return operator(job, "E")["dispatch.rows"] + map_bytes


def in_flight(job: MegatronJob) -> int:
    """Bytes that the rank's microbatches keep at its fullest moment."""
    return sum(count * chunk(job, letters) for count, letters in zip(in_flight_counts(job), job.chunks, strict=True))


def in_flight_counts(job: MegatronJob) -> tuple[int, ...]:
    """Microbatches of each chunk at the rank's fullest moment; on the rank of the loss, the fullest of its last chunk's.

    Under 1F1B rank r holds min(microbatches, pp − r). Under interleaving its forwards visit the chunks in rounds of a group, and the
    backwards follow (VP − 1) · group + 2 · (pp − 1 − r) forwards behind; after that the counts of the chunks recur with each round.
    """
    virtual, rank = len(job.chunks), job.pp - 1 if job.pp_rank is None else job.pp_rank
    if virtual == 1:
        return (min(job.num_microbatches, job.pp - rank),)
    sizes = [chunk(job, letters) for letters in job.chunks]
    group = min(job.inflight_group, job.num_microbatches)
    forwards = job.num_microbatches * virtual
    warmup = min((virtual - 1) * group + 2 * (job.pp - 1 - rank), forwards)
    held, most, fullest = [0] * virtual, -1, (0,) * virtual
    for step in range(min(forwards, warmup + 2 * group * virtual)):
        visited = _visited(step, group, virtual, job.num_microbatches)
        held[visited] += 1
        size = sum(count * each for count, each in zip(held, sizes, strict=True))
        if size > most and (rank < job.pp - 1 or visited == virtual - 1):
            most, fullest = size, tuple(held)
        if step >= warmup:
            held[virtual - 1 - _visited(step - warmup, group, virtual, job.num_microbatches)] -= 1
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
    if job.local:  # its attention multiplies queries and keys into the same buffer, which grows to the larger of its uses
        parts["attention buffer"] = max(2 * scores_elements(job) - gathered, 0)
    if job.tp_comm_overlap:
        parts["TP overlap workspaces"] = 3 * 32 * MIB
    if job.wgrad_fusion and not job.local:
        parts["dummy weight gradients"] = sum(2 * rows * columns for rows, columns in shapes)
    if job.latent is not None:
        attention = sum(letters.count("*") for letters in job.chunks) + sum(letters.count(MTP) for letters in job.chunks)
        parts["rotary cache"] = 12 * job.seq_length * job.latent.qk_pos_emb_head_dim * attention
    return parts


def _phases(job: MegatronJob) -> dict[str, int]:
    last = max(job.chunks, key=lambda letters: (LOSS in letters, recomputed_bytes(job, letters)))
    logits = job.tokens * job.vocab_size // job.tp
    recomputed, block = recomputed_bytes(job, last), operators(last)
    phases: dict[str, int] = {}
    if LOSS in last:
        depth = last.count(MTP)
        kept = 4 * logits * depth
        phases["loss"] = kept + {"unfused": 6, "native": 10, "te": 2, "te_fp32": 6}[job.cross_entropy] * logits
        phases["LM-head backward"] = kept + 2 * logits + 2 * job.vocab_size // job.tp * job.hidden_size + 2 * job.tokens * job.hidden_size
    if block:
        gradients = 2 * job.tokens * job.hidden_size
        if job.attention_backend == "unfused" and "*" in block:
            gradients += 4 * scores_elements(job)
        phases["last-layer backward"] = gradients + recomputed
        if job.fsdp:  # most gradients wait to be reduced while of what was kept only the first layer's is left
            left = sum(sum(operator(job, letter).values()) for letter in operators(job.chunks[0])[:2]) - in_flight(job)
            phases[FIRST_LAYER] = left + phases["last-layer backward"]
    return phases
