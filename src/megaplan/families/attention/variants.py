"""Properties of a layer of attention, by its index, that decide its tensors and work or its operations; and the values it passes on."""

from functools import lru_cache, partial
from typing import Literal, NamedTuple

from megakernels.ops.indexed_attention.facts import num_words
from megaplan.blocks.ops import CHOICE, Dims
from megaplan.blocks.payload import Payload
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention, place_of

KeyRole = Literal["own", "source", "given"]


class AttentionVariant(NamedTuple):
    """Properties of a layer, by its index, that decide its tensors and work.

    Attributes:
        indexed: True if the layer has the section's indexer of keys (MLA only).
        window: Positions that a token sees; None for all before it.
        shares: True if the layer attends to the choice of an earlier layer's indexer.
        heads: Place of its heads in `layer_heads` or `layer_latents`; None for the section's own.
        causal: True if a token attends to no later ones.
        blocks: True if the layer has the section's indexer of blocks of keys (GQA only).
        compressor: Place of its compressor in `compressors`; None for none.
        keys: Use of keys and values: by this layer alone (own), also by later layers (source), or from an earlier layer (given).
    """

    indexed: bool = False
    window: int | None = None
    shares: bool = False
    heads: int | None = None
    causal: bool = True
    blocks: bool = False
    compressor: int | None = None
    keys: KeyRole = "own"

    @property
    def chooses(self) -> bool:
        """True if the layer attends to chosen keys, by its own indexer or an earlier layer's."""
        return self.indexed or self.shares

    def section(self, attention: GroupedQueryAttention | LatentAttention) -> GroupedQueryAttention | LatentAttention:
        """The section with the layer's own heads."""
        return attention.with_heads(self.heads)


PLAIN = AttentionVariant()


def variant_of(attention: GroupedQueryAttention | LatentAttention, layer: int, _place: int) -> AttentionVariant:
    """The variant of layer `layer` (global index)."""
    window, indexer = attention.window(layer), attention.indexer if isinstance(attention, LatentAttention) else None
    place = attention.heads_of(layer)
    if isinstance(attention, GroupedQueryAttention):
        blocks = attention.block_indexer is not None and layer in attention.block_indexer.layers
        return AttentionVariant(
            window=window, heads=place, blocks=blocks, compressor=place_of(attention.compressors, layer), keys=_key_role(attention, layer)
        )
    if indexer is None:
        return AttentionVariant(window=window, heads=place)
    return AttentionVariant(layer in indexer.layers, window, layer in indexer.shared_layers, place)


def _key_role(attention: GroupedQueryAttention, layer: int) -> KeyRole:
    if any(layer in shared.layers for shared in attention.shared_keys):
        return "given"
    return "source" if any(layer == shared.source for shared in attention.shared_keys) else "own"


Role = Literal["alone", "source", "reader"]
"""Role of a layer in a choice of keys."""


class AttentionPlace(NamedTuple):
    """Properties of a layer, by its index, that decide only its operations.

    Attributes:
        rotates: True if queries and keys have rotary embedding.
        role: Role in a choice of keys that several layers share.
    """

    rotates: bool = True
    role: Role = "alone"


def attention_place(attention: GroupedQueryAttention | LatentAttention, layer: int) -> AttentionPlace:
    """The place of layer `layer` (global index)."""
    rotates, indexer = layer not in attention.nope_layers, attention.indexer if isinstance(attention, LatentAttention) else None
    return AttentionPlace(rotates, "alone" if indexer is None else _roles(indexer.groups).get(layer, "alone"))


@lru_cache(maxsize=64)
def _roles(groups: tuple[tuple[int, ...], ...]) -> dict[int, Role]:
    found: dict[int, Role] = {}
    for source, *readers in groups:
        found |= {source: "source", **dict.fromkeys(readers, "reader")}
    return found


def attention_payload(attention: GroupedQueryAttention | LatentAttention) -> tuple[Payload, ...]:
    """Keys and values that later layers read, or the choices of an indexer, one bit for each query and key."""
    if isinstance(attention, LatentAttention):
        groups = () if attention.indexer is None else attention.indexer.groups
        return tuple(
            [
                Payload(CHOICE, "choice of keys", group[0], group[1:], choice_shape, "no", DType.INT32, has_gradient=False)
                for group in groups
            ]
        )
    found: list[Payload] = []
    for shared in [each for each in attention.shared_keys if each.layers]:
        own = attention.with_heads(attention.heads_of(shared.source))
        for name, title, width in (("k", "keys", own.head_dim), ("v", "values", own.value_width)):
            found.append(Payload(name, title, shared.source, shared.layers, partial(_heads_shape, own.num_kv_heads, width), letter="A"))
    return tuple(found)


def choice_shape(dims: Dims) -> tuple[int, ...]:
    """int32 words of the bits of a context rank's queries, for the keys of the whole sequence; the same on each rank of a tensor group."""
    return dims.wide(num_words(dims.tokens * dims.cp))


def _heads_shape(heads: int, width: int, dims: Dims) -> tuple[int, ...]:
    """A tensor rank's heads of the tokens of a context rank."""
    return dims.wide(max(1, heads // dims.tp), width)
