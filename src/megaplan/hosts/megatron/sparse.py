"""Latent attention to the keys that an indexer chooses, as Megatron-Core runs it with cuDNN's kernels.

The projections of keys and values from the latent are absorbed: queries are as wide as the latent and its rotary part, all heads have one
key, and values are made from the latent that attention returns. Loss and gradients of the indexer are computed in the forward.

Source: `megatron/core/transformer/experimental_attention_variant`: `absorbed_mla.py`, `dsa.py` and `dsa_cudnn_kernels.py` at d98e8a64.
"""

from collections.abc import Iterator
from functools import cache

from megaplan.blocks.ops import Op
from megaplan.families.attention.section import Indexer, LatentAttention
from megaplan.hosts.megarun.program import Replay
from megaplan.hosts.megatron.programs import Sized, from_norm, projection
from megaplan.hosts.megatron.setting import Names, Setting, of_bytes, operator_replay, recomputed_modules
from megaplan.hosts.values import Limit
from megaplan.spec.models import Spec

SCORE_BYTES, SCRATCH_BYTES, ROWS = 2**30, 2**31, 512
"""Largest bytes of scores that are computed at once, largest scratch of the choice, and the multiple to which the rows of both are
rounded.
"""
KERNEL_LATENT, HALF_HEADS = 512, 64
"""Width of the values, and smallest number of heads, that FlashMLA's sparse kernels support."""
ATTENTION_MODULES = frozenset({"core_attn", "mla_up_proj", "layernorm", "attn_norm", "qkv_linear", "attn_proj"})
"""Modules of recompute and offloading that have tensors of attention."""
CHOICE_MATRICES = 6
"""Matrices of fp32 or int32 by query and chosen key in the loss: scores, their logarithms, both distributions, the clipped one, indices."""


def indexer_of(spec: Spec) -> Indexer | None:
    """The indexer of a model's attention."""
    attention = spec.model.attention
    return attention.indexer if isinstance(attention, LatentAttention) else None


def sparse_shapes(at: Setting) -> Sized:
    """Storages of attention to chosen keys; a layer that uses another layer's choice computes none, and keeps a copy."""
    attention, dims = at.spec.model.attention, at.dims
    indexer = indexer_of(at.spec)
    if indexer is None or not isinstance(attention, LatentAttention):
        raise ValueError("attention has no indexer")
    heads, latent = attention.num_heads // dims.tp, attention.kv_lora_rank
    width, keys = latent + attention.qk_rope_head_dim, (dims.batch, dims.tokens * dims.cp)
    kept = at.narrow({
        "kv_latent": (at.stream_tokens, width),
        "q": dims.wide(heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim),
        "query": dims.wide(heads, width),
        "key": (*keys, width),
        "latent": dims.wide(heads, latent),
        "context": dims.wide(heads, attention.v_head_dim),
    })  # fmt: skip
    if attention.q_lora_rank is not None:
        kept |= at.narrow(dict.fromkeys(("q_latent", "q_latent.norm"), (at.stream_tokens, attention.q_lora_rank)))
    kept |= {**of_bytes({"choice": 4 * at.tokens * (indexer.top_k + 1)}), **at.wide({"lse": dims.wide(heads)})}
    held = at.narrow({"absorbed": dims.wide(heads, latent), "key.own": dims.wide(width) if dims.cp > 1 else (0,)})
    held |= at.wide({"key.accumulated": (*keys, width)})
    held |= of_bytes({"proj.copies": 0, "qkv.copies": 0})
    if at.shares:
        return kept, held
    queries, queried = (indexer.num_heads, indexer.head_dim), attention.q_lora_rank or dims.hidden
    kept |= at.narrow({"indexer.key": dims.wide(indexer.head_dim)})
    gradients = at.tokens * indexer.num_heads * (indexer.head_dim + 1) + dims.batch * keys[1] * indexer.head_dim
    kept |= {**of_bytes({"indexer.gradients": 2 * gradients}), **at.wide({"indexer.stats": dims.wide(2)})}
    if dims.tp > 1:  # every tensor rank chooses for all tokens
        kept |= at.narrow({"indexer.input": dims.wide(dims.hidden + queried)})
    rows, scratch = (_rows(at.tokens, keys[1], most, each) for most, each in ((SCORE_BYTES, 4), (SCRATCH_BYTES, 8)))
    held |= at.narrow({"indexer.queries": dims.wide(*queries), "indexer.keys": (*keys, indexer.head_dim)})
    held |= of_bytes({
        "indexer.scores": dims.batch * keys[1] * (4 * rows + 8 * min(rows, scratch)),
        "indexer.loss": 4 * CHOICE_MATRICES * at.tokens * indexer.top_k,
    })  # fmt: skip
    return kept, held


def _rows(tokens: int, keys: int, most: int, each: int) -> int:
    """Rows of a matrix by query and key that are computed at once, of `each` bytes per element."""
    rows = max(1, most // (each * keys))
    return min(tokens, rows // ROWS * ROWS if rows >= ROWS else rows)


@cache
def sparse_replay(names: Names, away: Names) -> Replay:
    """Attention to chosen keys."""

    def present(*wanted: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if name in names)

    latents = present("q_latent", "q_latent.norm", "kv_latent")
    own = "indexer.gradients" in names
    index = present("indexer.input", "indexer.key", "indexer.stats")
    inputs, inside = ("indexer.queries", "indexer.keys"), ("indexer.scores", "indexer.loss")
    core = ("latent", "choice", "lse", *present("indexer.gradients"))
    ops = [
        from_norm("qkv", latents),
        Op("absorb", latents, ("q", "absorbed", "query", "key.own", "key"), keeps=("q", *latents), grads=latents),
        Op(
            "core",
            ("query", "key", *(inputs if own else ())),
            (*core, *(inside if own else ())),
            keeps=("query", "key", *core),
            grads=("query", "key"),
            fetches=("key.accumulated",),
        ),
        Op("values", ("latent",), ("context",), keeps=("latent",)),
        projection(),
    ]
    if own:
        ops.insert(2, Op("indexer", ("norm.output", *latents), (*index, *inputs), keeps=("norm.output", *index), grads=()))
    return operator_replay(names, away, tuple(ops), held=frozenset({"norm.output"}))


def choosing_period(indexer: Indexer, letters: str) -> tuple[int, int] | None:
    """Period and offset by which Megatron-Core selects the layers that choose keys: the first ones, then every n-th; None if it cannot.

    Args:
        indexer: The model's indexer.
        letters: One per layer.
    """
    places = [place for place, letter in enumerate(letters) if letter == "A"]
    shares = [place in indexer.shared_layers for place in places]
    if any(place not in indexer.layers and not shared for place, shared in zip(places, shares, strict=True)):
        return None
    if True not in shares:
        return 1, 0
    offset = shares.index(True)
    period = shares.index(False, offset) - offset + 1 if False in shares[offset:] else len(places) - offset + 1
    rule = [max(number - offset, 0) % period != 0 for number in range(1, len(places) + 1)]
    return (period, offset) if rule == shares else None


def sparse_limits(spec: Spec, letters: str) -> Iterator[Limit]:
    """The settings that Megatron-Core's sparse attention does not support, or with which it is not priced."""
    indexer, attention, host = indexer_of(spec), spec.model.attention, spec.host
    if indexer is None or not isinstance(attention, LatentAttention):
        return
    key, heads = "model.attention.indexer", attention.num_heads // spec.mesh.tp
    modules = sorted(recomputed_modules(spec) & ATTENTION_MODULES | frozenset(host.offload_modules) & ATTENTION_MODULES)
    beyond = {
        f"host.model = {host.model}": host.model != "gpt",
        "its layers and shared_layers, which are not the first attention layers and every n-th one": choosing_period(indexer, letters)
        is None,
        f"kv_lora_rank = {attention.kv_lora_rank}, but the kernels support only 512": attention.kv_lora_rank != KERNEL_LATENT,
        f"{heads} heads on a rank, but the kernels support 64 or a multiple of 128": heads != HALF_HEADS and heads % (2 * HALF_HEADS) > 0,
        "precision.recipe": spec.precision.recipe is not None,
        f"modules {', '.join(modules)} that are recomputed or offloaded": bool(modules),
        "host.sequence_parallel = false under tp": spec.mesh.tp > 1 and not host.sequence_parallel,
    }
    found = [said for said, is_beyond in beyond.items() if is_beyond]
    if found:
        yield Limit(key, f"{key} with {'; '.join(found)}: Megatron's sparse attention is not priced there", "indexer: null")
    mtp = spec.model.features.mtp
    if mtp is not None and "A" in mtp.letters:
        detail = f"{key} with model.features.mtp: the attention of Megatron's prediction module has an indexer, which is counted"
        yield Limit("model.features.mtp", detail, "features: {mtp: null}", tensors=False)
