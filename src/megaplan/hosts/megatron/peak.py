"""A rank's bytes after a step and at its peak: storage, fixed buffers, activations in flight, and phases."""

from __future__ import annotations

from dataclasses import dataclass

from megaplan.hosts.megatron.job import LOSS, MTP, MegatronJob
from megaplan.hosts.megatron.saved import chunk, operator, scores_elements
from megaplan.hosts.megatron.storage import parameters, storage_bytes

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MegatronMemory:
    """Bytes of one rank.

    Attributes:
        static: What stays between steps, by part.
        activations: Kept by the microbatches in flight.
        phases: What each phase adds to both, by its name.
    """

    static: dict[str, int]
    leftover: int
    activations: int
    phases: dict[str, int]

    @property
    def after_step(self) -> int:
        """Allocated after the optimizer's step."""
        return sum(self.static.values()) + self.leftover

    @property
    def peak(self) -> int:
        """The largest phase."""
        return sum(self.static.values()) + self.activations + max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: self.phases[name])


def memory(job: MegatronJob) -> MegatronMemory:
    """The bytes of a run's last rank."""
    found = parameters(job)
    mask = job.micro_batch_size * (job.seq_length // job.cp) * job.seq_length if job.attention_mask else 0
    boundary = 2 * job.stream_tokens * job.hidden_size
    static = {**storage_bytes(job, found), **_fixed(job, found.shapes)}
    virtual = len(job.chunks)
    leftover = 0
    if job.pp > 1:
        leftover = boundary * (2 if virtual == 1 else (job.pp - 1) * (virtual - 1)) + (0 if job.hybrid else mask)
    activations = in_flight(job) + mask * (2 if job.pp > 1 and not job.hybrid else 1)
    return MegatronMemory(static, leftover, activations, _phases(job))


def in_flight(job: MegatronJob) -> int:
    """Bytes kept at the last rank's fullest moment: one microbatch under 1F1B, group · (VP − 1) chunks and one under interleaving."""
    sizes = [chunk(job, letters) for letters in job.chunks]
    return min(job.inflight_group, job.num_microbatches) * sum(sizes[:-1]) + sizes[-1]


def _fixed(job: MegatronJob, shapes: set[tuple[int, int]]) -> dict[str, int]:
    parts = {"cuBLAS workspaces": 2 * 32 * MIB, "Transformer Engine workspace": job.workspace_bytes}
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
    if job.tp_comm_overlap:
        parts["TP overlap workspaces"] = 3 * 32 * MIB
    if job.wgrad_fusion:
        parts["dummy weight gradients"] = sum(2 * rows * columns for rows, columns in shapes)
    if job.latent is not None:
        attention = sum(letters.count("*") for letters in job.chunks) + sum(letters.count(MTP) for letters in job.chunks)
        parts["rotary cache"] = 12 * job.seq_length * job.latent.qk_pos_emb_head_dim * attention
    return parts


def _phases(job: MegatronJob) -> dict[str, int]:
    last = job.chunks[-1]
    logits = job.tokens * job.vocab_size // job.tp
    recomputed = max(
        (sum(operator(job, one, recompute=False).values()) - sum(operator(job, one).values()) for one in set(last) & set("*-ME")),
        default=0,
    )
    block = [one for one in last if one in "*-ME"]
    phases: dict[str, int] = {}
    if LOSS in last:
        depth = last.count(MTP)
        kept = 4 * logits * depth
        phases["loss"] = kept + {"unfused": 6, "native": 10, "te": 2}[job.cross_entropy] * logits
        phases["LM-head backward"] = kept + 2 * logits + 2 * job.vocab_size // job.tp * job.hidden_size + 2 * job.tokens * job.hidden_size
    if block:
        gradients = 2 * job.tokens * job.hidden_size
        if job.attention_backend == "unfused" and "*" in block:
            gradients += 4 * scores_elements(job)
        phases["last-layer backward"] = gradients + recomputed
    return phases
