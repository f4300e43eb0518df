"""A blocks: grouped-query and multi-head latent attention, with a sparse-attention indexer."""

from megaplan.dtypes import DType
from megaplan.families.attention.composition import attention_exchanges, attention_work
from megaplan.families.attention.formulas import FORMULAS
from megaplan.families.attention.program import attention_program, attention_selective
from megaplan.families.attention.rules import attention_rules
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.attention.tensors import attention_tensors
from megaplan.families.attention.variants import AttentionVariant, attention_payload, attention_place, variant_of
from megaplan.families.family import Family, ServingState

KEYS_AND_VALUES = frozenset(f"{name}_proj.{kind}" for name in "kv" for kind in ("weight", "bias"))


def _sharded(attention: GroupedQueryAttention | LatentAttention, _hidden_size: int) -> dict[str, int]:
    counts = {"attention.num_heads": attention.num_heads}
    if isinstance(attention, GroupedQueryAttention):
        counts["attention.num_kv_heads"] = attention.num_kv_heads
        for place, own in enumerate(attention.layer_heads):
            given = {"num_heads": own.num_heads, "num_kv_heads": own.num_kv_heads}
            counts |= {f"attention.layer_heads[{place}].{name}": count for name, count in given.items() if count is not None}
    else:
        given = {f"attention.layer_latents[{place}].num_heads": own.num_heads for place, own in enumerate(attention.layer_latents)}
        counts |= {name: count for name, count in given.items() if count is not None}
    return counts


def _served(
    attention: GroupedQueryAttention | LatentAttention, _hidden_size: int, variant: AttentionVariant, _dtype: DType
) -> ServingState:
    """GQA caches keys and values of every kv head, MLA one latent and one rotary key for all heads; an indexer adds one key.

    A layer that reads the keys of another caches nothing, and one that shares a choice of keys nothing more: a new token's choice is made
    and read within a step.

    Source: arXiv:2405.04434, section 2.1.2.
    """
    attention = variant.section(attention)
    if isinstance(attention, LatentAttention):
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        if attention.indexer is not None and variant.indexed:
            width += attention.indexer.head_dim
        return ServingState(width, variant.window)
    width = 0 if variant.keys == "given" else attention.num_kv_heads * (attention.head_dim + attention.value_width)
    if variant.blocks and attention.block_indexer is not None:
        width += attention.block_indexer.head_dim
    return ServingState(width, variant.window, cache_parts=attention.num_kv_heads, cached_by=KEYS_AND_VALUES)


ATTENTION = Family(
    letter="A",
    title="attention",
    section="attention",
    tensors=attention_tensors,
    program=attention_program,
    work=attention_work,
    formulas=FORMULAS,
    selective=attention_selective,
    variant=variant_of,
    operations=attention_place,
    payload=attention_payload,
    rules=attention_rules,
    sharded=_sharded,
    exchanges=attention_exchanges,
    serving=_served,
    rotary=lambda attention: attention.rotary_width,
)
