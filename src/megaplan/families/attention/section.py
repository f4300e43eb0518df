"""The section `model.attention`: dimensions of A blocks."""

from __future__ import annotations

from typing import ClassVar, Literal

from megaplan.scalars import NaturalInt, OptionsSection, PositiveFloat, PositiveInt, Section, StrictBool


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


class GroupedQueryAttention(OptionsSection):
    """MHA, GQA and MQA: `num_kv_heads` equal to, below, or 1 of `num_heads`.

    Attributes:
        kind: gqa.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; a divisor of num_heads.
        head_dim: Width of a head, independent of hidden_size / num_heads.
        qk_norm: RMSNorm over each query and key head.
        qk_norm_width: What one of these norms covers: head, or all_heads of a token together.
        bias: Bias on the query, key and value projections.
        output_bias: Bias on the output projection.
        gate: The output of the heads is multiplied by the sigmoid of a projection as wide as the queries.
        sinks: A learned score a head in the denominator of its softmax.
        window_size: Positions that a token sees, itself included; null for all before it.
        full_layers: A layers without the window: 0-based global indices, rising.
        rope_theta: Base of the rotary angles.
        rotary_dim: Width of a head's rotated part; null for the whole head.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
    """

    options: ClassVar[frozenset[str]] = frozenset({"qk_norm_width", "output_bias", "gate", "sinks", "rotary_dim"})

    kind: Literal["gqa"]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: StrictBool = False
    qk_norm_width: Literal["head", "all_heads"] = "head"
    bias: StrictBool = False
    output_bias: StrictBool = False
    gate: StrictBool = False
    sinks: StrictBool = False
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    rope_theta: PositiveFloat = 10_000.0
    rotary_dim: PositiveInt | None = None
    nope_layers: tuple[NaturalInt, ...] = ()

    def window(self, layer: int) -> int | None:
        """The window of a layer, by its global index; what lies past the layers has it too."""
        return None if layer in self.full_layers else self.window_size


class LatentAttention(OptionsSection):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        kind: mla.
        num_heads: Attention heads.
        q_lora_rank: Width of the query latent; null projects queries directly.
        kv_lora_rank: Width of the key-value latent.
        qk_nope_head_dim: Width of a query and key head without rotary embedding.
        qk_rope_head_dim: Width of the rotated part, shared by all heads on the key side.
        v_head_dim: Width of a value head.
        bias: Bias on the down projections and the output projection.
        output_bias: Bias on the output projection alone.
        latent_norm: RMSNorm over each latent.
        rope_theta: Base of the rotary angles.
        window_size: Positions that a token sees, itself included; null for all before it.
        full_layers: A layers without the window: 0-based global indices, rising.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
        indexer: Sparse-attention indexer; null for none.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "output_bias", "latent_norm"})

    kind: Literal["mla"]
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    bias: StrictBool = False
    output_bias: StrictBool = False
    latent_norm: StrictBool = True
    rope_theta: PositiveFloat = 10_000.0
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    nope_layers: tuple[NaturalInt, ...] = ()
    indexer: Indexer | None = None

    def window(self, layer: int) -> int | None:
        """The window of a layer, by its global index; what lies past the layers has it too."""
        return None if layer in self.full_layers else self.window_size
