"""`MegatronJob`: what decides the bytes of one Megatron-Core run, under Megatron's own names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Literal

from megaplan.low_precision import Recipe

AttentionBackend = Literal["unfused", "flash", "fused"]
Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
CrossEntropy = Literal["unfused", "native", "te", "te_fp32"]

EMBEDDING, LOSS, MTP = "e", "l", "m"
SIXTEEN_BIT = {"a": "*", "d": "-", "s": "M", "g": "G", "x": "E"}
"""Letters of operators whose linears keep 16 bits in a run with low precision, and the operators that they are."""
IN_SIXTEEN_BIT = {letter: own for own, letter in SIXTEEN_BIT.items()}


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Multi-head latent attention: ranks of the two latents and widths of one head; `normed`: a norm stands over each latent."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    normed: bool = True


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Routed and shared experts of an `E` operator, and how tokens reach them.

    Attributes:
        routing_skew: Rows that reach this rank's experts over the even share; 1.0 is balanced.
        capacity_factor: Most rows of an expert over the even share; None for dropless.
        combine_kept: Adding the experts' rows back to tokens keeps them: it does by torch's `index_add`, Megatron's deterministic way
            without a fused permutation, and does not by `scatter_add`.
        probability_bytes: Of a routing probability: the router's type, or the stream's where none is given.
        permute_fusion: Transformer Engine's kernel sorts rows to experts and back.
        latent: Width of the experts' rows where that is not the stream's.
        rank_capacity: Rows over the even share that a rank's buffers have; None for as many as come.
        stash: Rows over the even share that the buffer of what experts keep has; None where each layer keeps its own.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    dispatcher: Dispatcher
    grouped_gemm: bool
    overlap: bool
    routing_skew: float = 1.0
    capacity_factor: float | None = None
    combine_kept: bool = False
    probability_bytes: int = 2
    permute_fusion: bool = False
    latent: int | None = None
    rank_capacity: float | None = None
    stash: float | None = None

    @property
    def kept_share(self) -> float:
        """Rows over the even share that this rank's experts keep for backward."""
        return self.rows_share if self.stash is None else self.stash

    @property
    def rows_share(self) -> float:
        """Rows over the even share that this rank's experts compute."""
        if self.rank_capacity is not None:
            return self.rank_capacity
        return self.routing_skew if self.capacity_factor is None else min(self.routing_skew, self.capacity_factor)


@dataclass(frozen=True, slots=True)
class MambaDims:
    """Mamba-2 of an `M` operator."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_kernel: int = 4

    @property
    def inner(self) -> int:
        """num_heads · head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DeltaDims:
    """Gated delta net of a `G` operator."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class LowPrecisionRun:
    """How the linears of a run multiply in 8 or 4 bits.

    Attributes:
        recipe: Scales, on the device's generation.
        param_gather: Weights are stored so; else a copy of each 16-bit weight is kept over the microbatches of a step.
        head: The output projection too.
        amax_history: Steps whose maxima delayed scaling remembers.
    """

    recipe: Recipe
    param_gather: bool = False
    head: bool = False
    amax_history: int = 1024

    @property
    def keeps_original(self) -> bool:
        """Whether a linear whose input another operation keeps in 16 bits saves that instead of a copy: not under delayed scaling."""
        return self.recipe.name != "fp8_delayed"


@dataclass(frozen=True, slots=True)
class MegatronJob:
    """One run. Degrees are Megatron's; `chunks` are the operators of the priced rank's model chunks, in the order of its virtual stages.

    Attributes:
        chunks: Letters of Megatron's hybrid pattern; `e`, `l` and `m` stand for embedding, loss and one multi-token prediction module, and
            those of `SIXTEEN_BIT` for operators without low precision.
        mtp_operators: Operators of one prediction module.
        inflight_group: Microbatches a virtual stage takes in turn.
        data_parallel: Ranks over which dense optimizer state is sharded, contexts included.
        expert_data_parallel: Ranks over which experts' optimizer state is sharded.
        persistent_grad_shard: The optimizer makes fp32 copies of 16-bit gradients, which stay until the next step sets gradients to zero.
        workspace_bytes: Of Transformer Engine's cuBLAS: 32 MiB from Hopper on, 4 MiB before.
        pp_rank: The priced pipeline rank; None for the last.
        data_index: Its place among the ranks that share dense state; None for the last.
        expert_index: Its place among those that share experts' state; None for the last.
        cublas_bytes: Of one of torch's two cuBLAS handles.
        master_bytes: Of an element's master copy.
        moment_bytes: Of an element's moment.
        qk_norm: Norms over query and key heads.
        qkv_bias: Bias of the query, key and value projection where other linears have none.
        recompute_num_layers: Operators of a group under full recompute, or recomputed ones of a chunk under `recompute_block`; 0 for none.
        recompute_block: Full recompute is of the first operators of a chunk, each layer alone; else of all, in groups.
        local: Megatron-Core's own modules and attention in place of Transformer Engine's.
        rotary_dim: Rotated dimensions of a head; 0 without rotary positions. Latent attention's are its own.
        fsdp: Megatron-FSDP shards parameters and gradients as well as optimizer state over data ranks.
        low: How linears multiply in 8 or 4 bits; None for 16.
        delta: Gated delta net of `G` operators.
        output_gate: A gate of the heads' outputs, from the projection of queries.
        shared_gate: A gate of the shared expert's output.
        sinks: A learned score a head in the denominator of its softmax.
        graphs: Letters of operators that run from CUDA graphs, whose scratch is in a pool of their own.
        offloaded: Modules whose inputs are on the host between forward and backward.
        delayed_wgrad: Of a layer's weight gradients, after its input gradients.
        offloaded_operators: Of a chunk, from the first on, whose kept tensors are all on the host.
        fsdp_unit: Elements that Megatron-FSDP gathers and reduces at once.
        fsdp_double_buffer: Megatron-FSDP has two buffers of a layer that stay, and gathers no further ahead.
        deferred_head: Microbatches whose head weight gradients wait for the end of the step; 0 for none.
    """

    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    chunks: tuple[str, ...]
    mtp_operators: str
    mtp_repeated: bool
    tied: bool
    gated: bool
    bias: bool
    rms_norm: bool
    hybrid: bool
    learned_positions: int
    hidden_dropout: bool
    attention_dropout: bool
    latent: LatentDims | None
    moe: MoeDims | None
    mamba: MambaDims | None
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    data_parallel: int
    expert_data_parallel: int
    inflight_group: int
    sequence_parallel: bool
    distributed_optimizer: bool
    optimizer: Literal["adam", "muon"]
    gradient_bytes: int
    persistent_grad_shard: bool
    attention_backend: AttentionBackend
    cross_entropy: CrossEntropy
    wgrad_fusion: bool
    attention_mask: bool
    recompute: frozenset[str]
    tp_comm_overlap: bool
    workspace_bytes: int
    bias_activation_fusion: bool
    pp_rank: int | None = None
    data_index: int | None = None
    expert_index: int | None = None
    cublas_bytes: int = 32 * 2**20
    master_bytes: int = 4
    moment_bytes: int = 4
    qk_norm: bool = False
    qkv_bias: bool = False
    recompute_num_layers: int = 0
    recompute_block: bool = False
    local: bool = False
    rotary_dim: int = 0
    fsdp: bool = False
    low: LowPrecisionRun | None = None
    delta: DeltaDims | None = None
    output_gate: bool = False
    shared_gate: bool = False
    sinks: bool = False
    graphs: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    delayed_wgrad: bool = False
    deferred_head: int = 0
    offloaded_operators: int = 0
    fsdp_unit: int = 1_000_000_000
    fsdp_double_buffer: bool = False
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)
    _of_operators: MegatronJob | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Of all fields, worked out once: what operators need is remembered by run."""
        known = self._hash
        if known is None:
            known = hash(_COMPARED(self))
            object.__setattr__(self, "_hash", known)
        return known

    @property
    def of_operators(self) -> MegatronJob:
        """The run as each of its operators sees it: one object for all pipeline and data ranks, whatever their chunks."""
        known = self._of_operators
        if known is None:
            known = _same(replace(self, chunks=(), pp_rank=None, data_index=None, expert_index=None))
            object.__setattr__(self, "_of_operators", known)
        return known

    def of_rank(
        self, chunks: tuple[str, ...], pp_rank: int | None, data_index: int | None = None, expert_index: int | None = None
    ) -> MegatronJob:
        """The run of another rank; its operators are the same."""
        found: MegatronJob = object.__new__(MegatronJob)  # `replace` goes through 80 arguments, and a search makes millions
        for put, value in zip(_PUTS, _COMPARED(self), strict=True):
            put(found, value)
        for name, value in (("chunks", chunks), ("pp_rank", pp_rank), ("data_index", data_index), ("expert_index", expert_index)):
            object.__setattr__(found, name, value)
        object.__setattr__(found, "_hash", None)
        object.__setattr__(found, "_of_operators", self.of_operators)
        return found

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on a context rank: T."""
        return self.seq_length * self.micro_batch_size // self.cp

    def recomputed(self, own: str) -> tuple[tuple[str, ...], str]:
        """Of a chunk's operators the groups that full recompute makes again, and those that stay."""
        size, layer = self.recompute_num_layers, 1 if self.hybrid else 2
        whole, step = (own[:size], layer) if self.recompute_block else (own if size else "", size or 1)
        return tuple(whole[start : start + step] for start in range(0, len(whole), step)), own[len(whole) :]

    def of(self, letter: str) -> tuple[MegatronJob, str]:
        """An operator's plain letter, and the run as the operator sees it: without low precision where its letter is of 16 bits."""
        plain = SIXTEEN_BIT.get(letter)
        return (self, letter) if plain is None else (replace(self, low=None), plain)

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on one rank, after sequence parallelism: S."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


COMPARED = tuple(name for name, found in MegatronJob.__dataclass_fields__.items() if found.compare)
_COMPARED = attrgetter(*COMPARED)
_PUTS = tuple(vars(MegatronJob)[name].__set__ for name in COMPARED)


@lru_cache(maxsize=4096)
def _same(job: MegatronJob) -> MegatronJob:
    """The first of equal runs."""
    return job


def count(letters: str, operator: str) -> int:
    """How many operators of a kind there are, with low precision or without."""
    return letters.count(operator) + letters.count(IN_SIXTEEN_BIT[operator])
