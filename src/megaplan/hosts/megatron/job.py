"""`MegatronJob`: what decides the bytes of one Megatron-Core run, under Megatron's own names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionBackend = Literal["unfused", "flash", "fused"]
Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
CrossEntropy = Literal["unfused", "native", "te", "te_fp32"]

EMBEDDING, LOSS, MTP = "e", "l", "m"


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

    @property
    def rows_share(self) -> float:
        """Rows over the even share that this rank's experts compute."""
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
class MegatronJob:
    """One run. Degrees are Megatron's; `chunks` are the operators of the priced rank's model chunks, in the order of its virtual stages.

    Attributes:
        chunks: Letters of Megatron's hybrid pattern; `e`, `l` and `m` stand for embedding, loss and one multi-token prediction module.
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
    fp8: bool
    fp8_params: bool
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

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on a context rank: T."""
        return self.seq_length * self.micro_batch_size // self.cp

    def recomputed(self, own: str) -> tuple[tuple[str, ...], str]:
        """Of a chunk's operators the groups that full recompute makes again, and those that stay."""
        size, layer = self.recompute_num_layers, 1 if self.hybrid else 2
        whole, step = (own[:size], layer) if self.recompute_block else (own if size else "", size or 1)
        return tuple(whole[start : start + step] for start in range(0, len(whole), step)), own[len(whole) :]

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on one rank, after sequence parallelism: S."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens
