"""The section `model.attention`: dimensions of A blocks, and the properties of a layer by its index."""

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal

from megaplan.families.attention.keys import BlockIndexer, Compressor, SharedKeys
from megaplan.families.attention.scaling import RopeScaling
from megaplan.scalars import NaturalInt, OptionsSection, PositiveFloat, PositiveInt, Section, StrictBool


class LayerWindow(Section):
    """A window of some layers.

    Attributes:
        size: Positions that a token sees, itself included.
        layers: A layers with it: 0-based global indices, rising.
    """

    size: PositiveInt
    layers: tuple[NaturalInt, ...]


def _window(layer: int, size: int | None, full: tuple[int, ...], windows: tuple[LayerWindow, ...]) -> int | None:
    own = next((window.size for window in windows if layer in window.layers), None)
    return None if own is None and layer in full else own or size


class Indexer(OptionsSection):
    """Sparse-attention indexer of MLA (DeepSeek-V3.2, arXiv:2512.02556).

    Attributes:
        num_heads: Heads of the indexer.
        head_dim: Width of one of them; its first qk_rope_head_dim dims are rotated.
        layers: Layers that have the indexer: 0-based global indices of A layers, rising.
        shared_layers: Layers that attend to the choice of the last layer with an indexer (arXiv:2603.12201): global indices, rising.
        top_k: Keys that a token attends to in a layer with an indexer.
        loss_coefficient: Coefficient of each indexer's own loss, the mean over tokens and heads of the divergence from attention.
    """

    options: ClassVar[frozenset[str]] = frozenset({"shared_layers"})

    num_heads: PositiveInt
    head_dim: PositiveInt
    layers: tuple[NaturalInt, ...]
    shared_layers: tuple[NaturalInt, ...] = ()
    top_k: PositiveInt = 2048
    loss_coefficient: PositiveFloat = 1.0

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Each layer that shares its choice, followed by the layers that read it. Shared layers without an earlier indexer are omitted."""
        return _groups(self.layers, self.shared_layers)


@lru_cache(maxsize=64)
def _groups(layers: tuple[int, ...], shared: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for layer in shared:
        source = max((each for each in layers if each < layer), default=None)
        if source is not None:
            found.setdefault(source, [source]).append(layer)
    return tuple(tuple(group) for group in found.values())


class LayerHeads(Section):
    """Heads of some layers; a key that is null is as in the section.

    Attributes:
        layers: A layers with these heads: 0-based global indices, rising.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; a divisor of num_heads.
        head_dim: Width of a head of queries and keys.
        value_head_dim: Width of a head of values.
        sinks: A learned score per head in the denominator of its softmax.
        values_from_keys: Values are the output of the keys' projection.
    """

    layers: tuple[NaturalInt, ...]
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    value_head_dim: PositiveInt | None = None
    sinks: StrictBool | None = None
    values_from_keys: StrictBool | None = None


class GroupedQueryAttention(OptionsSection):
    """MHA, GQA and MQA: `num_kv_heads` is equal to, less than, or 1 of `num_heads`.

    Attributes:
        kind: gqa.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; a divisor of num_heads.
        head_dim: Width of a head, independent of hidden_size / num_heads.
        qk_norm: RMSNorm over each query and key head.
        qk_norm_width: Width of one of these norms: head, or all_heads of a token together.
        qk_norm_scale: The norms of queries and keys have a scale.
        output_norm: RMSNorm over all heads' outputs of a token, before the gate and the output projection.
        bias: Bias on the query, key and value projections.
        output_bias: Bias on the output projection.
        value_head_dim: Width of a head of values; null for head_dim.
        value_norm: RMSNorm without a weight over each head of values.
        values_from_keys: Values are the output of the keys' projection before the norm; needs qk_norm over heads and value_norm.
        layer_heads: Other heads of some layers.
        query_rank: Width of a latent with a norm, from which queries are made; null for none.
        query_norm_scale: The norm over query heads has a scale, if that over key heads has one.
        values_are_keys: Values are the normed and rotated keys.
        output_groups: Groups of heads whose outputs are projected to output_rank each, before the output projection; 0 for none.
        output_rank: Width of a group's output.
        compressors: Keys that are made of several positions, of some layers.
        block_indexer: An indexer that chooses blocks of keys; null for none.
        shared_keys: Layers that read the keys and values of an earlier layer.
        gate: The output of the heads is multiplied by the sigmoid of a projection as wide as the heads' output.
        gate_width: Values of the gate: one per channel, or one per head.
        gate_bias: A learned number per head that is added to the gate before its sigmoid.
        key_bias: Each key adds a number to its scores, which a projection of all values makes, with a learned factor a head.
        sinks: A learned score per head in the denominator of its softmax.
        window_size: Positions that a token attends to, itself included; null for all earlier ones.
        full_layers: A layers without the window: 0-based global indices, rising.
        windows: Windows of layers with another one than window_size.
        rope_theta: Base of the rotary angles.
        rope_scaling: Scaling of rotary frequencies for a longer context; null for none.
        softmax_scale: Factor of the scores; null for 1 / sqrt(width of a query head).
        score_cap: Scaled scores s become c · tanh(s / c) (Gemma 2); null for none.
        output_multiplier: Factor of the block's output, before it is added to the stream.
        window_rope_theta: Base of the angles of layers with a window, whose frequencies are not scaled; null for rope_theta.
        rotary_dim: Width of a head's rotated part; null for the whole head.
        window_rotary_dim: Width of the rotated part in layers with a window, which window_rope_theta needs; null for rotary_dim.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"qk_norm_width", "output_bias", "gate", "sinks", "rotary_dim", "rope_scaling", "softmax_scale"}
        | {"window_rope_theta", "output_multiplier", "score_cap", "windows", "value_head_dim", "layer_heads", "gate_width"}
        | {"window_rotary_dim", "value_norm", "values_from_keys", "gate_bias", "key_bias", "qk_norm_scale", "output_norm"}
        | {"shared_keys", "block_indexer"}
        | {"query_rank", "query_norm_scale", "values_are_keys", "output_groups", "output_rank", "compressors"}
    )

    kind: Literal["gqa"]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: StrictBool = False
    qk_norm_width: Literal["head", "all_heads"] = "head"
    qk_norm_scale: StrictBool = True
    output_norm: StrictBool = False
    bias: StrictBool = False
    output_bias: StrictBool = False
    value_head_dim: PositiveInt | None = None
    value_norm: StrictBool = False
    values_from_keys: StrictBool = False
    layer_heads: tuple[LayerHeads, ...] = ()
    shared_keys: tuple[SharedKeys, ...] = ()
    block_indexer: BlockIndexer | None = None
    query_rank: PositiveInt | None = None
    query_norm_scale: StrictBool = True
    values_are_keys: StrictBool = False
    output_groups: NaturalInt = 0
    output_rank: NaturalInt = 0
    compressors: tuple[Compressor, ...] = ()
    gate: StrictBool = False
    gate_width: Literal["channel", "head"] = "channel"
    gate_bias: StrictBool = False
    key_bias: StrictBool = False
    sinks: StrictBool = False
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    windows: tuple[LayerWindow, ...] = ()
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    softmax_scale: PositiveFloat | None = None
    score_cap: PositiveFloat | None = None
    output_multiplier: PositiveFloat = 1.0
    window_rope_theta: PositiveFloat | None = None
    rotary_dim: PositiveInt | None = None
    window_rotary_dim: PositiveInt | None = None
    nope_layers: tuple[NaturalInt, ...] = ()

    @property
    def value_width(self) -> int:
        """Width of a head of values."""
        return self.value_head_dim or self.head_dim

    @property
    def gate_values(self) -> int:
        """Values of the gate for each head."""
        return 1 if self.gate_width == "head" else self.value_width

    def heads_of(self, layer: int) -> int | None:
        """Place in `layer_heads` of a layer, by its global index; None for the section's own heads."""
        return place_of(self.layer_heads, layer)

    def with_heads(self, place: int | None) -> "GroupedQueryAttention":
        """The section with the heads at a place of `layer_heads`."""
        return self if place is None else _with_heads(self, place)

    @property
    def score_factor(self) -> float:
        """Factor of the products of queries and keys before the softmax."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def rotary_width(self) -> int:
        """Width of rotary embedding."""
        return self.rotary_dim or self.head_dim

    def rotated(self, window: int | None) -> int:
        """Width of the rotated part of a head in a layer with this window."""
        return self.rotary_width if window is None or self.window_rotary_dim is None else self.window_rotary_dim

    def window(self, layer: int) -> int | None:
        """Window of a layer, by its global index; layers beyond the model's last one have it too."""
        return _window(layer, self.window_size, self.full_layers, self.windows)


def place_of(layers: "Sequence[LayerHeads | LayerLatents | Compressor]", layer: int) -> int | None:
    """Place of the entry that lists a layer, by its global index; None for none."""
    return next((place for place, own in enumerate(layers) if layer in own.layers), None)


def _given(own: "LayerHeads | LayerLatents") -> dict[str, object]:
    """The keys of a section that some layers have their own of."""
    return own.model_dump(exclude={"layers"}, exclude_none=True)


@lru_cache(maxsize=64)
def _with_heads(attention: GroupedQueryAttention, place: int) -> GroupedQueryAttention:
    own = _given(attention.layer_heads[place])
    return attention.model_copy(update=own | {"layer_heads": (), "rotary_dim": attention.rotary_width})


class LayerLatents(Section):
    """Heads and latents of some layers of latent attention; a key that is null is as in the section.

    Attributes:
        layers: A layers with these: 0-based global indices, rising.
        num_heads: Attention heads.
        q_lora_rank: Width of the query latent.
        kv_lora_rank: Width of the key-value latent.
        qk_nope_head_dim: Width of a query and key head without rotary embedding.
        qk_rope_head_dim: Width of the rotated part.
        v_head_dim: Width of a value head.
    """

    layers: tuple[NaturalInt, ...]
    num_heads: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None


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
        gate: The output of the heads is multiplied by the sigmoid of a projection of the block's input.
        gate_width: Values of the gate: one per channel, or one per head.
        gate_source: The block's input, or the query latent: then one product of the normed latent makes queries and gate.
        sinks: A learned score per head in the denominator of its softmax.
        layer_latents: Other heads and latents of some layers.
        rotary_norm: RMSNorm over the rotary key, before it is rotated.
        latent_norm: RMSNorm over each latent.
        latent_norm_eps: Epsilon of these norms and of the indexer's; null for the model's norm_eps.
        rope_theta: Base of the rotary angles.
        rope_scaling: Scaling of rotary frequencies for a longer context; null for none.
        softmax_scale: Factor of the scores; null for 1 / sqrt(width of a query head).
        output_multiplier: Factor of the block's output, before it is added to the stream.
        window_size: Positions that a token attends to, itself included; null for all earlier ones.
        full_layers: A layers without the window: 0-based global indices, rising.
        windows: Windows of layers with another one than window_size.
        nope_layers: A layers without rotary embedding: 0-based global indices, rising.
        indexer: Sparse-attention indexer; null for none.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"bias", "output_bias", "latent_norm", "latent_norm_eps", "rope_scaling", "softmax_scale", "windows"}
        | {"output_multiplier", "gate", "gate_width", "gate_source", "sinks", "layer_latents", "rotary_norm"}
    )

    kind: Literal["mla"]
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    bias: StrictBool = False
    output_bias: StrictBool = False
    gate: StrictBool = False
    gate_width: Literal["channel", "head"] = "channel"
    gate_source: Literal["input", "query"] = "input"
    sinks: StrictBool = False
    layer_latents: tuple[LayerLatents, ...] = ()
    rotary_norm: StrictBool = False
    latent_norm: StrictBool = True
    latent_norm_eps: PositiveFloat | None = None
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    softmax_scale: PositiveFloat | None = None
    output_multiplier: PositiveFloat = 1.0
    window_size: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    windows: tuple[LayerWindow, ...] = ()
    nope_layers: tuple[NaturalInt, ...] = ()
    indexer: Indexer | None = None

    def heads_of(self, layer: int) -> int | None:
        """Place in `layer_latents` of a layer, by its global index; None for the section's own."""
        return place_of(self.layer_latents, layer)

    def with_heads(self, place: int | None) -> "LatentAttention":
        """The section with the heads and latents at a place of `layer_latents`."""
        return self if place is None else _with_latents(self, place)

    @property
    def gate_values(self) -> int:
        """Values of the gate for each head."""
        return 1 if self.gate_width == "head" else self.v_head_dim

    @property
    def score_factor(self) -> float:
        """Factor of the products of queries and keys before the softmax."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def rotary_width(self) -> int:
        """Width of rotary embedding."""
        return self.qk_rope_head_dim

    def window(self, layer: int) -> int | None:
        """Window of a layer, by its global index; layers beyond the model's last one have it too."""
        return _window(layer, self.window_size, self.full_layers, self.windows)


@lru_cache(maxsize=64)
def _with_latents(attention: LatentAttention, place: int) -> LatentAttention:
    return attention.model_copy(update=_given(attention.layer_latents[place]) | {"layer_latents": ()})
