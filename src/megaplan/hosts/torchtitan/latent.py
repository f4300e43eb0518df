"""Latent attention of a transformer block, as torchtitan's DeepSeek-V3 runs it.

Queries and keys are concatenations of a part without position and a rotated part, each a copy. Values are a view of the up-projection's
output, so attention saves all of it.

Source: torchtitan/models/deepseek_v3/model.py at b5bcd76c.
"""

from megaplan.blocks.ops import INPUT, Dims, Op, add, linear, norm
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.families.attention.composition import head_widths
from megaplan.families.attention.section import LatentAttention


def latent_ops(middle: str, *, low_rank: bool, compiled: bool) -> tuple[Op, ...]:
    """Operations from the block's norm to the stream between its halves."""
    between = [() if compiled else (f"{name}_wide", f"{name}_turned") for name in ("q_rope", "k_rope")]
    ops = [norm("attention.norm", INPUT, "normed", "rstd", "attention.norm.weight")]
    if low_rank:
        ops += [
            linear("attention.q_down", "normed", "q_latent", "attention.q_down.weight"),
            norm("attention.norm q", "q_latent", "q_latent_normed", "q_latent_rstd", "attention.q_latent_norm.weight"),
            linear("attention.q_up", "q_latent_normed", "q_flat", "attention.q_up.weight"),
        ]
    else:
        ops.append(linear("attention.q_proj", "normed", "q_flat", "attention.q_proj.weight"))
    inputs = ("q", "k", "kv_up")
    return (
        *ops,
        linear("attention.kv_down", "normed", "kv_latent", "attention.kv_down.weight"),
        Op("attention.rope q", ("q_flat",), ("q", *between[0]), fetches=between[0]),
        Op("attention.rope k", ("kv_latent",), ("k_rope", *between[1]), fetches=between[1]),
        norm("attention.norm kv", "kv_latent", "kv_latent_normed", "kv_latent_rstd", "attention.kv_latent_norm.weight"),
        linear("attention.kv_up", "kv_latent_normed", "kv_up", "attention.kv_up.weight"),
        Op("attention.rope keys", ("kv_up", "k_rope"), ("k",)),
        Op("attention.core", inputs, ("heads", "lse"), keeps=(*inputs, "heads", "lse"), grads=inputs),
        linear("attention.o_proj", "heads", "o", "attention.o_proj.weight"),
        add("attention.residual", (INPUT, "o"), middle),
    )


def latent_shapes(dims: Dims, attention: LatentAttention) -> Shapes:
    """Storages of the attention's half of a block, without the common ones."""
    heads, rope, wide, own = attention.num_heads, attention.qk_rope_head_dim, dims.wide, dims.residual[:2]
    key, value = head_widths(attention)
    low, latent = attention.q_lora_rank or 0, attention.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {name: wide(heads, key) for name in ("q", "q_flat", "k")}
    shapes |= {"heads": wide(heads, value), "kv_up": wide(heads, attention.qk_nope_head_dim + value), "k_rope": (*own, rope)}
    shapes |= {"kv_latent": (*own, latent + rope), "kv_latent_normed": (*own, latent)}
    shapes |= dict.fromkeys(("q_latent", "q_latent_normed"), (*own, low))
    statistics: dict[str, tuple[int, ...]] = dict.fromkeys(("rstd", "q_latent_rstd", "kv_latent_rstd"), own)
    statistics |= dict.fromkeys(("q_rope_wide", "q_rope_turned"), wide(heads, rope)) | {"lse": (dims.batch, heads, dims.tokens)}
    statistics |= dict.fromkeys(("k_rope_wide", "k_rope_turned"), (*own, rope))
    return {**storages(dims.dtype, Column.ACTIVATIONS, shapes), **storages(dims.stat_dtype, Column.ACTIVATIONS, statistics)}
