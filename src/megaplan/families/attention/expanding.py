"""The core of latent attention that expands gathered latents by groups of heads: its operation and the bytes that it holds.

In 16 bits backward sums the gradients of all tokens' latents. In eight bits it holds the gradients of all heads' keys and values for the
rank's own tokens, and multiplies them when the last group is done (`megarun.parallel.groups.context_expand`).
"""

from functools import cache

from megaplan.blocks.ops import Dims, Op, UpProjection
from megaplan.blocks.storages import INSIDE, INSIDE_BACKWARD, Shapes, storages
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.families.attention.composition import expanding_bytes
from megaplan.families.attention.core import RELATIONS, AttentionKey
from megaplan.families.attention.latents import expanding_product
from megaplan.families.attention.section import LatentAttention
from megaplan.families.attention.variants import AttentionVariant
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX

EXPANDED, EXPANDED_BACKWARD, GATHERED_LATENTS = "expanded", "expanded_backward", "latents_gathered"
QUERY_GRADIENT, UP_GRADIENT, LATENT_SUMS = "q_gradient", "kv_up_gradient", "latents_sums"
NARROW, NARROW_SUMS = "narrow", "narrow_sums"
OWN_GRADIENT, OWN_LATENT, KEY_GRADIENT, LATENT_PARTIAL = "kv_own_gradient", "latents_own", "k_rope_gradient", "latents_partial"
IN_INPUT, IN_WEIGHTS = "kv_up.in_input_gradient", "kv_up.in_weight_gradients"


def expanding_storages(dims: Dims, attention: LatentAttention, variant: AttentionVariant, parameters: DType) -> Shapes:
    """Storages of the core."""
    up, latent, rope, heads = dims.up, attention.kv_lora_rank, attention.qk_rope_head_dim, attention.num_heads // dims.tp
    held, wide = expanding_bytes(dims, attention, variant._replace(heads=None), parameters), (dims.batch, dims.tokens * dims.cp)
    summed = Column.COMMUNICATION if dims.dtype is dims.stat_dtype else Column.ACTIVATIONS  # otherwise the reduction makes a copy
    height = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    trained = 0 if up.scaling or (dims.frozen and not up.rank) else height
    made: dict[str, tuple[int, ...]] = {
        "k_rotated": dims.wide(rope),
        QUERY_GRADIENT: dims.wide(heads, attention.qk_nope_head_dim + rope),
        NARROW: (*wide, up.rank),
    }
    made |= {EXPANDED: (held.forward // dims.dtype.bytes,), EXPANDED_BACKWARD: (held.backward // dims.dtype.bytes,)}
    made |= {OWN_GRADIENT: dims.wide(height), KEY_GRADIENT: dims.wide(rope)} if up.scaling else {}
    gathered: dict[str, tuple[int, ...]] = {GATHERED_LATENTS: (*wide, latent + rope)}
    gathered |= {OWN_LATENT: dims.wide(latent * (dims.tp > 1)), LATENT_PARTIAL: dims.wide(latent)} if up.scaling else {}
    inside = {INSIDE: held.inside.forward, INSIDE_BACKWARD: held.inside.backward}
    if up.scaling:
        product = expanding_product(dims.batch * dims.tokens, latent, height, dims.dtype.bytes, up)
        inside |= {IN_INPUT: product.input_gradient_bytes, IN_WEIGHTS: product.weight_gradient_bytes(given=False)}
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, made),
        **storages(dims.dtype, Column.GRADIENTS, {UP_GRADIENT: (trained, up.rank or latent)}),
        **storages(dims.dtype, Column.COMMUNICATION, gathered),
        **storages(dims.stat_dtype, summed, {LATENT_SUMS: (*wide, rope + latent * (not up.scaling))}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {NARROW_SUMS: (*wide, up.rank)}),
        **{name: (size, Column.WORKSPACE, (size,), DType.FP8, Basis.EXACT) for name, size in inside.items()},
    }


@cache
def expanding_core(key: AttentionKey, k_rope: str, up: UpProjection) -> Op:
    """The core's operation, which reads the rotary keys `k_rope`."""
    read, made = ("q", "latent_normed", k_rope), ("attention", "lse")
    scores = ("sinks",) * key.sinks
    weights = tuple(f"kv_up.{suffix}" for suffix in (A_SUFFIX, B_SUFFIX)) if up.rank else ("kv_up.weight",)
    narrow, sums = ((NARROW,), (NARROW, NARROW_SUMS)) if up.rank else ((), ())
    during = GATHERED_LATENTS, EXPANDED_BACKWARD, INSIDE_BACKWARD, QUERY_GRADIENT, LATENT_SUMS, *((RELATIONS,) * key.relations)
    core = Op("attention", read, (*made, GATHERED_LATENTS, *narrow, EXPANDED, INSIDE), keeps=(*read, *made), params=(*weights, *scores))
    if not up.scaling:
        return core._replace(before=(((*during, *sums, UP_GRADIENT), False),))
    multiplying = QUERY_GRADIENT, KEY_GRADIENT, OWN_GRADIENT, LATENT_PARTIAL, IN_INPUT, *((RELATIONS,) * key.relations)
    return core._replace(
        fetches=(OWN_GRADIENT, OWN_LATENT, IN_WEIGHTS, *((RELATIONS,) * key.relations)),
        before=(((*during, OWN_GRADIENT), False), (multiplying, False)),
    )
