"""Sections of the model, one class for each kind of block or feature."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from megaplan.blocks.payload import Payload
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.attention_residuals import AttentionResiduals
from megaplan.families.dense.section import Mlp
from megaplan.families.layer_embeddings import LayerEmbeddings
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention, LightningAttention, MatrixLstm
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.families.recurrent.section import MatrixRecurrence
from megaplan.families.registry import families_of
from megaplan.families.residual import NormPlacement, ResidualPath, StreamNorm
from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.families.streams import Streams
from megaplan.scalars import LayerCount, NaturalInt, OptionsSection, PositiveFloat, PositiveInt, Section, StrictBool, Text
from megaplan.spec.towers import Towers


class Ngram(Section):
    """Hashed n-gram embeddings, concatenated and projected to hidden.

    Attributes:
        num_tables: Number of tables.
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
        num_categories: Number of categories.
        bottleneck: Width of a category's row before its projection to hidden.
    """

    num_categories: PositiveInt
    bottleneck: PositiveInt


class RelationBias(Section):
    """One table num_relations × num_heads: a row for each class of keys, added to attention scores and shared by all A layers.

    Attributes:
        num_relations: Classes of keys, as in the token file.
    """

    num_relations: PositiveInt


class MultiTokenPrediction(OptionsSection):
    """Extra prediction modules on the last stage: an A block, an MLP or experts, or other blocks, with one projection and norms each.

    Attributes:
        depth: Number of modules; each predicts one token further ahead.
        pattern: Letters of a module's blocks, D for its own MLP; null for A, then D or, with `experts`, E.
        ffn_hidden_size: Width of a module's MLP; the width of experts is in model.moe.
        activation: Activation of that MLP.
        bias: Bias on every projection of that MLP.
        experts: Experts as in model.moe replace the MLP.
        side_embeddings: Modules add the model's side embeddings to the token embedding that they read, as the first stage does.
        normed_input: True if modules read hidden states after, instead of before, the final norm of the model or of the previous module.
        loss_weight: Weight of the mean of the modules' losses, added to the model's own loss.
    """

    options: ClassVar[frozenset[str]] = frozenset({"activation", "bias", "experts", "pattern", "side_embeddings", "normed_input"})

    depth: Annotated[int, Field(gt=0, le=64, strict=True)]
    pattern: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    ffn_hidden_size: PositiveInt
    activation: Literal["swiglu", "relu2", "gelu"] = "relu2"
    bias: StrictBool = False
    experts: StrictBool = False
    side_embeddings: StrictBool = False
    normed_input: StrictBool = False
    loss_weight: PositiveFloat = 0.3

    @property
    def letters(self) -> str:
        """Letters of a module's blocks, one per block."""
        return self.pattern if self.pattern is not None else "AE" if self.experts else "AD"


SIDES = ("ngram", "structure", "platform", "layer_embeddings")
"""Embeddings in addition to the token embedding."""


class NormGate(Section):
    """Gates of norms before blocks: the norm's result times the sigmoid of two low-rank products of it, with silu between.

    Attributes:
        rank: Width between the two products.
        layers: Layers whose norm has a gate: 0-based global indices, rising.
    """

    rank: PositiveInt
    layers: tuple[NaturalInt, ...]


class HeadLayer(Section):
    """A layer between the last norm and the head: a square product, its activation and a norm.

    Attributes:
        activation: Activation.
        bias: Bias on the product.
        logits_bias: Bias on the logits, for a tied head; an untied head has `head_bias`.
    """

    activation: Literal["gelu", "silu", "relu"] = "gelu"
    bias: StrictBool = False
    logits_bias: StrictBool = False


class Features(OptionsSection):
    """Optional features; null means absent.

    The side embeddings are those of n-grams and categories. They are on the first stage; with `mtp.side_embeddings` the last of several
    stages has a copy.

    Attributes:
        ngram: Hashed n-gram embeddings on the first stage.
        structure: Embedding of structure categories on the first stage.
        platform: Embedding of platform categories on the first stage.
        layer_embeddings: Embeddings that single layers add after their results.
        relation_bias: Bias on attention scores, on every stage that attends.
        mtp: Multi-token prediction on the last stage.
    """

    options: ClassVar[frozenset[str]] = frozenset({"layer_embeddings"})

    ngram: Ngram | None = None
    structure: CategoryEmbedding | None = None
    platform: CategoryEmbedding | None = None
    layer_embeddings: LayerEmbeddings | None = None
    relation_bias: RelationBias | None = None
    mtp: MultiTokenPrediction | None = None

    @property
    def sides(self) -> tuple[str, ...]:
        """Configured side embeddings, in the order in which they are added."""
        return tuple([name for name in SIDES if getattr(self, name) is not None])

    @property
    def sides_ahead(self) -> tuple[str, ...]:
        """Side embeddings that prediction modules add too."""
        return self.sides if self.mtp is not None and self.mtp.side_embeddings else ()


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
Mamba = Annotated[Mamba1 | Mamba2 | Mamba3, Field(discriminator="kind")]
LinearAttention = Annotated[GatedDeltaNet | KimiDeltaAttention | LightningAttention | MatrixLstm, Field(discriminator="kind")]


class Model(OptionsSection):
    """The architecture. A section whose letter never appears, and a letter without its section, are errors.

    Attributes:
        pattern: A attention, M Mamba, E experts, R recurrent, D dense, G linear attention, C convolution. Cycled; '|' is a manual split.
        num_layers: Letters in the whole model.
        hidden_size: Width of the residual stream.
        vocab_size: Tokens of the vocabulary.
        tie_embeddings: The head reuses the token embedding.
        head_bias: Bias on the head.
        head_layer: A layer between the last norm and the head; null for none.
        learned_positions: Rows of a learned embedding of positions, added to the token embedding; null for none.
        embedding_norm: A norm on the embedding's output, after its factor and positions.
        norm: The norm of every block and before the head: rmsnorm or rmsnorm_no_scale, layernorm with a bias, or layernorm_no_bias.
        norm_placement: Before each block (pre), on its output before the residual addition (post), or both.
        parallel_layers: Layers that read the normed input of the layer before them: 0-based global indices, rising.
        added_norm_layers: Layers with an additional norm on their output, in a model with norms before each block: global indices,
            ascending.
        post_norm_layers: Layers whose only norm is on their output, in a model with norms before each block: global indices, ascending.
        unnormed_layers: Layers without a norm, in a model with norms before each block: global indices, rising.
        norm_gate: Gates of the norms before blocks; null for none.
        stream_scale: A learned factor of each channel of the stream before a block adds to it.
        streams: Hyper-connections, several streams of the residual path; null for one stream, to which blocks add.
        attention_residuals: Blocks read weighted sums of earlier results, in place of the residual stream; null for the stream.
        norm_eps: Epsilon of every norm.
        zero_centered_norm: RMSNorms of the residual stream and of query and key heads scale by 1 + weight, and weights start at 0.
        embedding_multiplier: Factor of the token embedding at the start of the stack; a tied head does not have it.
        logits_multiplier: Factor of the logits.
        logits_cap: Logits l become c · tanh(l / c), after their factor; null for none.
        attention: Dimensions of A blocks.
        mamba: Dimensions of M blocks.
        moe: Dimensions of E blocks.
        recurrent: Dimensions of R blocks.
        mlp: Dimensions of D blocks.
        linear_attention: Dimensions of G blocks.
        short_convolution: Dimensions of C blocks.
        features: Optional features.
        towers: Encoders of a multimodal model; null for none.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"head_bias", "learned_positions", "norm", "norm_placement", "parallel_layers", "post_norm_layers"}
        | {"zero_centered_norm", "embedding_multiplier", "logits_multiplier", "logits_cap", "towers"}
        | {"added_norm_layers", "streams", "norm_gate", "stream_scale", "embedding_norm", "head_layer", "unnormed_layers"}
        | {"attention_residuals"}
    )

    pattern: Text
    num_layers: LayerCount
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    tie_embeddings: StrictBool = False
    head_bias: StrictBool = False
    head_layer: HeadLayer | None = None
    learned_positions: PositiveInt | None = None
    embedding_norm: StrictBool = False
    norm: StreamNorm = "rmsnorm"
    norm_placement: NormPlacement = "pre"
    parallel_layers: tuple[NaturalInt, ...] = ()
    post_norm_layers: tuple[NaturalInt, ...] = ()
    added_norm_layers: tuple[NaturalInt, ...] = ()
    unnormed_layers: tuple[NaturalInt, ...] = ()
    norm_gate: NormGate | None = None
    stream_scale: StrictBool = False
    streams: Streams | None = None
    attention_residuals: AttentionResiduals | None = None
    norm_eps: PositiveFloat = 1e-5
    zero_centered_norm: StrictBool = False
    embedding_multiplier: PositiveFloat = 1.0
    logits_multiplier: PositiveFloat = 1.0
    logits_cap: PositiveFloat | None = None
    attention: Attention | None = None
    mamba: Mamba | None = None
    moe: MixtureOfExperts | None = None
    recurrent: MatrixRecurrence | None = None
    mlp: Mlp | None = None
    linear_attention: LinearAttention | None = None
    short_convolution: ShortConvolution | None = None
    features: Features = Features.plain()
    towers: Towers | None = None

    def joins_loss(self, *, kernels: bool) -> bool:
        """True if head and loss are one operation: with kernels, which cap no logits."""
        return kernels and self.logits_cap is None

    @property
    def residual_path(self) -> ResidualPath:
        """Residual path of the blocks."""
        path = ResidualPath(self.norm, self.norm_placement, streams=self.streams, scales_stream=self.stream_scale)
        return path._replace(plain_is_none=True) if self.unnormed_layers else path

    @property
    def num_streams(self) -> int:
        """Streams of the residual path."""
        return 1 if self.streams is None else self.streams.count

    @property
    def payload(self) -> tuple[Payload, ...]:
        """Values that layers pass on to later layers in addition to the stream, by the layers that do."""
        found = [value for family, section in families_of(self) if family.payload is not None for value in family.payload(section)]
        found += () if self.attention_residuals is None else self.attention_residuals.payload(self.num_layers)
        return tuple(sorted(found, key=lambda value: (value.source, value.name)))

    def path_of(self, layer: int) -> ResidualPath:
        """Residual path of one layer; `layer` is its global index."""
        path = self.residual_path._replace(shares_input=layer in self.parallel_layers)
        if self.attention_residuals is not None:
            path = path._replace(depth=self.attention_residuals.reads(layer))
        if self.norm_gate is not None and layer in self.norm_gate.layers:
            path = path._replace(gate_rank=self.norm_gate.rank)
        embedding = self.features.layer_embeddings
        if embedding is not None and layer in embedding.layers:
            path = path._replace(embedding_dim=embedding.dim)
        if layer in self.unnormed_layers:
            return path._replace(placement="none")
        if layer in self.added_norm_layers:
            return path._replace(placement="both")
        return path._replace(placement="post") if layer in self.post_norm_layers else path

    @property
    def own_paths(self) -> frozenset[int]:
        """Layers whose residual path may be another than the model's."""
        if self.attention_residuals is not None:
            return frozenset(range(self.num_layers))
        gated = () if self.norm_gate is None else self.norm_gate.layers
        embedded = () if self.features.layer_embeddings is None else self.features.layer_embeddings.layers
        return frozenset((*embedded, *self.parallel_layers, *self.post_norm_layers, *self.added_norm_layers, *self.unnormed_layers, *gated))

    def sharing(self, layer: int) -> tuple[int, ...]:
        """Later layers that read the same norm as this layer, by global index."""
        shared = self.parallel_layers
        return tuple(each for each in shared if each > layer and all(between in shared for between in range(layer + 1, each)))

    def norm_readers(self, layer: int) -> tuple[int, ...]:
        """Layers that read the norm that a layer reads, the one that it belongs to first."""
        while layer in self.parallel_layers:
            layer -= 1
        return layer, *self.sharing(layer)

    @model_serializer(mode="wrap")
    def _given_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes sections of later families only if given, so that adding a family changes no plan's digest."""
        fields, written = type(self).model_fields, handler(self)
        later = {key for key, value in written.items() if value is None and key not in _ALWAYS}
        later |= {key for key in self.options if getattr(self, key) == fields[key].default}
        return {key: value for key, value in written.items() if key not in later}


_ALWAYS = frozenset({"attention", "mamba", "moe", "recurrent", "mlp"})
