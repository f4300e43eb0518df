"""The section `model.towers`: encoders of a multimodal model on its first stage."""

from itertools import pairwise
from math import isqrt
from typing import Annotated, ClassVar

from pydantic import Field

from megaplan.families.residual import NormKind
from megaplan.scalars import Activation, LayerCount, NaturalInt, OptionsSection, PositiveInt, Section, StrictBool


class Encoder(OptionsSection):
    """A stack over the patches of an image: attention to all of them, then an MLP, in every layer (ViT, arXiv:2010.11929).

    Attributes:
        num_layers: Layers, of one attention block and one MLP each.
        hidden_size: Width of the encoder's residual stream.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values; null for num_heads.
        head_dim: Width of a head.
        ffn_hidden_size: Inner width of the MLP.
        activation: swiglu or geglu (three matrices), relu2 or gelu (two).
        norm: The norm before each block and around the stack.
        bias: Bias on the query, key and value projections.
        output_bias: Bias on the output projection of attention.
        mlp_bias: Bias on the projections of the MLP.
        qk_norm: RMSNorm over each query and key head.
        rotary: Queries and keys have rotary embedding.
        grid: Rows and columns of patches, for rotary embedding: a row rotates half of a head's pairs, a column the rest; or null.
        window_patches: Patches of an attention window; null for the whole image.
        full_layers: Layers of the encoder without the window, rising.
        patch_values: Values of a patch, which one linear projects: channels · frames · height · width.
        patch_bias: Bias on that linear.
        patches: Patches of an image.
        positions: Rows of a learned embedding of positions, of which `patches` are added; null for none.
        first_norm: A norm before the first layer.
        last_norm: A norm after the last layer.
    """

    options: ClassVar[frozenset[str]] = frozenset({"num_kv_heads", "grid", "window_patches", "full_layers", "first_norm"})

    num_layers: LayerCount
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt
    ffn_hidden_size: PositiveInt
    activation: Activation = "gelu"
    norm: NormKind = "layernorm"
    bias: StrictBool = True
    output_bias: StrictBool = True
    mlp_bias: StrictBool = True
    qk_norm: StrictBool = False
    rotary: StrictBool = False
    grid: tuple[PositiveInt, PositiveInt] | None = None
    window_patches: PositiveInt | None = None
    full_layers: tuple[NaturalInt, ...] = ()
    patch_values: PositiveInt
    patch_bias: StrictBool = True
    patches: PositiveInt
    positions: PositiveInt | None = None
    first_norm: StrictBool = False
    last_norm: StrictBool = True

    def window(self, layer: int) -> int | None:
        """Patches to which a layer's queries attend; None for all of the image."""
        return None if layer in self.full_layers else self.window_patches

    def tiles(self, patches_per_token: int) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the grid's tiles with consecutive patches: a window, and within it the patches of a token.

        They are squares, or runs in a row if the number of their patches is not a square.
        """
        found = []
        for patches in (self.window_patches or self.patches, patches_per_token):
            side = isqrt(patches)
            found.append((side, side) if side**2 == patches else (1, patches))
        return tuple(found[self.window_patches is None :])


class Projection(OptionsSection):
    """Linears from the encoder's stream into the stream of text, with gelu between them.

    Attributes:
        widths: Width of the first linear's input, then of each linear's output; the last is the model's hidden_size.
        bias: Bias on every linear.
        pooled_patches: Patches whose features are averaged.
        joined_patches: Patches, after that, whose features are one row.
        norm: Norm of the features; null for none.
        norms_joined: The norm is over a joined row, not over a patch's features.
    """

    options: ClassVar[frozenset[str]] = frozenset({"pooled_patches", "joined_patches", "norms_joined"})

    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=2, max_length=8)]
    bias: StrictBool = True
    pooled_patches: PositiveInt = 1
    joined_patches: PositiveInt = 1
    norm: NormKind | None = None
    norms_joined: StrictBool = False

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token of the stream of text."""
        return self.pooled_patches * self.joined_patches


def grid_fault(encoder: Encoder, projection: Projection) -> str:
    """The reason that rotary embedding cannot use the grid of an encoder's patches; "" if there is none."""
    if encoder.grid is None:
        return ""
    rows, columns = encoder.grid
    if not encoder.rotary:
        return "rotary is false: nothing reads it"
    if rows * columns != encoder.patches:
        return f"these are {rows * columns:,} patches, and patches = {encoder.patches:,}"
    if encoder.head_dim % 4:
        return f"head_dim = {encoder.head_dim}: rows rotate one half of its pairs, and columns the other half"
    outward = (*reversed(encoder.tiles(projection.patches_per_token)), encoder.grid)
    parted = ((each, outer) for each, outer in pairwise(outward) if outer[0] % each[0] or outer[1] % each[1])
    return ", ".join(f"tiles of {each[0]} by {each[1]} patches do not fill {outer[0]} by {outer[1]}" for each, outer in parted)


class Tower(Section):
    """A part of a multimodal model that a spec counts and does not price.

    Attributes:
        parameters: Number of its parameters.
        trained: The part has gradients and moments of AdamW; else it is frozen.
    """

    parameters: PositiveInt
    trained: StrictBool = False


class VisionTower(OptionsSection):
    """An encoder of images, stated or counted.

    Attributes:
        parameters: Number of its parameters; with `encoder`, of the other parts, which are counted but not priced.
        trained: The part has gradients and optimizer state; else it is frozen.
        encoder: The stack, which is priced with `projector.projection`; null for a part that is counted.
    """

    options: ClassVar[frozenset[str]] = frozenset({"parameters", "encoder"})

    parameters: PositiveInt | None = None
    trained: StrictBool = False
    encoder: Encoder | None = None


class Projector(OptionsSection):
    """Matrices between encoders and the stream of text, stated or counted.

    Attributes:
        parameters: Number of its parameters; with `projection`, of the other parts, which are counted but not priced.
        trained: The part has gradients and optimizer state; else it is frozen.
        projection: The linears, which are priced with `vision.encoder`; null for a part that is counted.
    """

    options: ClassVar[frozenset[str]] = frozenset({"parameters", "projection"})

    parameters: PositiveInt | None = None
    trained: StrictBool = False
    projection: Projection | None = None


class Towers(Section):
    """Encoders of a multimodal model, on the first stage.

    Of a counted part, shards are counted, and activations, gathered copies and FLOPs are not. A stated encoder and its projection
    belong to the group of the stage's own parameters; they are replicated on the ranks of a context group, and of a tensor group unless
    `mesh.towers` is split.

    Attributes:
        vision: Encoder of images and videos.
        audio: Encoder of sound.
        projector: Matrices between encoders and the stream of text.
    """

    vision: VisionTower | None = None
    audio: Tower | None = None
    projector: Projector | None = None

    @property
    def given(self) -> dict[str, Tower | VisionTower | Projector]:
        """The parts that the model has, by name."""
        parts = {"vision": self.vision, "audio": self.audio, "projector": self.projector}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def stated(self) -> tuple[Encoder, Projection] | None:
        """The encoder and its projection; None if one of them is only counted."""
        encoder = None if self.vision is None else self.vision.encoder
        projection = None if self.projector is None else self.projector.projection
        return None if encoder is None or projection is None else (encoder, projection)

    @property
    def counted(self) -> dict[str, int]:
        """Parameters that are counted but not priced, by part."""
        return {name: part.parameters for name, part in self.given.items() if part.parameters is not None}

    def trains(self, part: str) -> bool:
        """True if a part has gradients of its parameters."""
        return part in self.given and self.given[part].trained
