"""Values that layers of attention pass on to later ones: keys and values, or a choice of keys."""

from __future__ import annotations

from functools import partial

from megakernels.ops.indexed_attention.facts import num_words
from megaplan.blocks.ops import CHOICE, Dims
from megaplan.blocks.payload import Payload
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention


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
