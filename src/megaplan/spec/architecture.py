"""The model's sections: one class a kind of block or feature."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaplan.spec.scalars import (
    Activation,
    FactorFromOne,
    LayerCount,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    StrictBool,
    Text,
)


class Indexer(Section):
    """Sparse-attention indexer of MLA (DeepSeek-V3.2, arXiv:2512.02556).

    Attributes:
        num_heads: Heads of the indexer.
        head_dim: Width of one of them; its first qk_rope_head_dim dims are rotated.
        layers: Layers that have the indexer: 0-based global indices of A layers, rising.
        top_k: Keys that a token attends to in such a layer.
        loss_coefficient: Of each indexer's own loss, the mean over tokens and heads of the divergence from attention.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    layers: tuple[NaturalInt, ...]
    top_k: PositiveInt = 2048
    loss_coefficient: PositiveFloat = 1.0


class GroupedQueryAttention(Section):
    """MHA, GQA and MQA: `num_kv_heads` equal to, below, or 1 of `num_heads`.

    Attributes:
        kind: gqa.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; a divisor of num_heads.
        head_dim: Width of a head, independent of hidden_size / num_heads.
        qk_norm: RMSNorm over each query and key head.
        bias: Bias on the query, key and value projections.
        window_size: Positions that a token sees, itself included; null for all before it.
        full_layers: A layers without the window: 0-based global indices, rising.
        rope_theta: Base of the rotary angles.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
    """

    kind: Literal["gqa"]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: StrictBool = False
    bias: StrictBool = False
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    rope_theta: PositiveFloat = 10_000.0
    nope_layers: tuple[NaturalInt, ...] = ()

    def window(self, layer: int) -> int | None:
        """The window of a layer, by its global index; what lies past the layers has it too."""
        return None if layer in self.full_layers else self.window_size


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        kind: mla.
        num_heads: Attention heads.
        q_lora_rank: Width of the query latent; null projects queries directly.
        kv_lora_rank: Width of the key-value latent.
        qk_nope_head_dim: Width of a query and key head without rotary embedding.
        qk_rope_head_dim: Width of the rotated part, shared by all heads on the key side.
        v_head_dim: Width of a value head.
        rope_theta: Base of the rotary angles.
        window_size: Positions that a token sees, itself included; null for all before it.
        full_layers: A layers without the window: 0-based global indices, rising.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
        indexer: Sparse-attention indexer; null for none.
    """

    kind: Literal["mla"]
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    nope_layers: tuple[NaturalInt, ...] = ()
    indexer: Indexer | None = None

    def window(self, layer: int) -> int | None:
        """The window of a layer, by its global index; what lies past the layers has it too."""
        return None if layer in self.full_layers else self.window_size


class Mamba2(Section):
    """Mamba-2 (arXiv:2405.21060).

    Attributes:
        kind: mamba2.
        expand: Inner width over hidden_size, where num_heads is not given.
        head_dim: Width of a head.
        num_heads: Heads; null for expand · hidden_size / head_dim.
        state_dim: Width of a head's state.
        num_groups: Groups that share B and C; a divisor of the heads.
        conv_kernel: Taps of the causal convolution.
        conv_bias: Bias of the convolution.
        time_step_min: Smallest step of the scan; a smaller one is taken as this.
        time_step_max: Largest step of the scan; null for none.
        chunk_size: Positions between two kept states of the scan.
    """

    kind: Literal["mamba2"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    num_heads: PositiveInt | None = None
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = 4
    conv_bias: StrictBool = True
    time_step_min: NonNegativeFloat = 0.0
    time_step_max: PositiveFloat | None = None
    chunk_size: PositiveInt = 256


class Mamba3(Section):
    """Mamba-3 (arXiv:2603.15569), single-input or MIMO.

    Attributes:
        kind: mamba3.
        expand: Inner width over hidden_size.
        head_dim: Width of a head.
        state_dim: Width of a head's state.
        num_groups: Groups that share B and C; a divisor of the heads.
        mimo_rank: Inputs and outputs of a head's state; 1 for the single-input form.
        num_angles: Rotary angles of the state, each of two of its dims; 0 for none.
        rate_activation: How the rate of decay follows from its projection: softplus, or heavy_tail, 1 + x above 0 and 1 / (1 - x) below.
        chunk_size: Positions that the scan computes at once; null for 64 / mimo_rank.
        save_every: Positions between two kept states of the scan.
    """

    kind: Literal["mamba3"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    mimo_rank: PositiveInt = 1
    num_angles: NaturalInt = 0
    rate_activation: Literal["softplus", "heavy_tail"] = "softplus"
    chunk_size: PositiveInt | None = None
    save_every: PositiveInt = 256

    @property
    def chunk_positions(self) -> int:
        """Positions that the scan computes at once: 64 rows, of mimo_rank a position, unless stated.

        Source: the advice on `chunk_size` in state-spaces/mamba, `mamba_ssm/modules/mamba3.py`.
        """
        return max(1, 64 // self.mimo_rank) if self.chunk_size is None else self.chunk_size


class MixtureOfExperts(Section):
    """Token-choice top-k experts with an optional shared expert.

    Attributes:
        num_experts: Routed experts of a layer.
        top_k: Experts that each token chooses.
        ffn_hidden_size: Width of a routed expert.
        shared_ffn_hidden_size: Width of the shared expert; 0 for none.
        activation: swiglu (three matrices), relu2 or gelu (two).
        normalize_top_k: The chosen experts' weights sum to 1.
        capacity_factor: Rows kept an expert over the even share; null for dropless.
        routing_skew: Rows of the busiest expert over the even share, for the budget; 1.0 is balanced.
        balance_loss_coefficient: Of each E layer's load-balancing loss, balanced over each sequence; 0 for none.
        z_loss_coefficient: Of each E layer's router z-loss, the mean over tokens; 0 for none.
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    shared_ffn_hidden_size: NaturalInt = 0
    activation: Activation = "swiglu"
    normalize_top_k: StrictBool = True
    capacity_factor: PositiveFloat | None = None
    routing_skew: FactorFromOne = 1.0
    balance_loss_coefficient: NonNegativeFloat = 0.0
    z_loss_coefficient: NonNegativeFloat = 0.0

    @property
    def has_router_losses(self) -> bool:
        """Whether its routers have losses of their own."""
        return self.balance_loss_coefficient + self.z_loss_coefficient > 0


class MatrixRecurrence(Section):
    """M²RNN (arXiv:2603.14360): a non-linear recurrence over a matrix state per head.

    Attributes:
        kind: m2rnn.
        num_heads: Heads.
        key_dim: Rows of a head's state; queries and keys are shared by all heads.
        value_dim: Columns of a head's state.
        conv_kernel: Taps of the causal convolution.
        save_every: Positions between two kept states.
    """

    kind: Literal["m2rnn"]
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    save_every: PositiveInt = 64


class Mlp(Section):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        activation: swiglu (three matrices), relu2 or gelu (two).
    """

    ffn_hidden_size: PositiveInt
    activation: Activation = "swiglu"


class Ngram(Section):
    """Hashed n-gram embeddings, concatenated and projected to hidden.

    Attributes:
        num_tables: Tables.
        num_rows: Rows of all tables together.
        dim: Width of a row.
        max_order: Tokens of the longest n-gram; table j has order 2 + j mod (max_order - 1).
    """

    num_tables: PositiveInt
    num_rows: PositiveInt
    dim: PositiveInt
    max_order: Annotated[int, Field(ge=2, le=16, strict=True)] = 3


class CategoryEmbedding(Section):
    """A side embedding of category ids through a bottleneck (structure, platform).

    Attributes:
        num_categories: Categories.
        bottleneck: Width of a category's row before its projection to hidden.
    """

    num_categories: PositiveInt
    bottleneck: PositiveInt


class RelationBias(Section):
    """One table num_relations × num_heads added to attention scores, shared by all A layers.

    Attributes:
        num_relations: Relations between two positions.
    """

    num_relations: PositiveInt


class MultiTokenPrediction(Section):
    """Extra prediction modules on the last stage: an A block, an ungated MLP, a projection and norms each.

    Attributes:
        depth: Modules, each predicting one token further.
        ffn_hidden_size: Width of a module's MLP.
        loss_weight: Of the mean of the modules' losses beside the model's own.
    """

    depth: Annotated[int, Field(gt=0, le=64, strict=True)]
    ffn_hidden_size: PositiveInt
    loss_weight: PositiveFloat = 0.3


class Features(Section):
    """Optional features; null means absent.

    Attributes:
        ngram: Hashed n-gram embeddings on the first stage.
        structure: Embedding of structure categories on the first stage.
        platform: Embedding of platform categories on the first stage.
        relation_bias: Bias on attention scores, on every stage that attends.
        mtp: Multi-token prediction on the last stage.
    """

    ngram: Ngram | None = None
    structure: CategoryEmbedding | None = None
    platform: CategoryEmbedding | None = None
    relation_bias: RelationBias | None = None
    mtp: MultiTokenPrediction | None = None


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
Mamba = Annotated[Mamba2 | Mamba3, Field(discriminator="kind")]


class Model(Section):
    """The architecture. A section whose letter never appears, and a letter without its section, are errors.

    Attributes:
        pattern: One letter a layer: A attention, M Mamba, E experts, R recurrent, D dense. Cycled to num_layers; with '|' a manual split.
        num_layers: Letters in the whole model.
        hidden_size: Width of the residual stream.
        vocab_size: Tokens of the vocabulary.
        tie_embeddings: The head reuses the token embedding.
        norm_eps: Epsilon of every RMSNorm.
        attention: Dimensions of A blocks.
        mamba: Dimensions of M blocks.
        moe: Dimensions of E blocks.
        recurrent: Dimensions of R blocks.
        mlp: Dimensions of D blocks.
        features: Optional features.
    """

    pattern: Text
    num_layers: LayerCount
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    tie_embeddings: StrictBool = False
    norm_eps: PositiveFloat = 1e-5
    attention: Attention | None = None
    mamba: Mamba | None = None
    moe: MixtureOfExperts | None = None
    recurrent: MatrixRecurrence | None = None
    mlp: Mlp | None = None
    features: Features = Features()
