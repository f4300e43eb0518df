"""Work of A blocks: projections, the attention core, the indexer."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.blocks.costs import FP32_BYTES, activation, detached_linear_op, linear_op, norm, residual_op, rope
from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.families.attention.section import GroupedQueryAttention, Indexer, LatentAttention
from megaplan.families.attention.tensors import PLAIN, AttentionVariant
from megaplan.families.family import Exchanges

PART = "A"


def visible_pairs(seq_length: int, window_size: int | None) -> int:
    """(query, key) pairs of one causal sequence: position i sees min(i + 1, window) keys.

    Source: counting; T(T+1)/2 without a window.
    """
    window = seq_length if window_size is None else min(window_size, seq_length)
    return window * (window + 1) // 2 + (seq_length - window) * window


class QueryTiles(NamedTuple):
    """Blocks of a sequence's queries, each with the keys that any of them sees.

    Attributes:
        blocks: How many.
        keys: Of all blocks.
        pairs: Queries of each block times its keys.
    """

    blocks: int
    keys: int
    pairs: int


def query_tiles(seq_length: int, window_size: int | None, rows: int) -> QueryTiles:
    """Those of `rows` queries, the last of what is left: from the first key in the window of its first query to its last query.

    Of one row they are the visible pairs.
    """
    count, window = -(-seq_length // rows), seq_length if window_size is None else min(window_size, seq_length)
    last = seq_length - (count - 1) * rows
    hidden = min(count, -(-(window - 1) // rows))  # blocks whose window begins before the sequence
    begins = rows * (hidden + count - 1) * (count - hidden) // 2 - (window - 1) * (count - hidden)
    keys = rows * (count - 1) * count // 2 + seq_length - begins
    of_last = seq_length - max(0, seq_length - last - window + 1)
    return QueryTiles(count, keys, rows * keys - (rows - last) * of_last)


def rank_pairs(load: Workload, window_size: int | None, most_keys: int | None = None) -> int:
    """Those of the queries of one rank and one head; of a query's visible keys it may choose `most_keys`."""
    window = min(most_keys or load.seq_length, window_size or load.seq_length)
    return load.num_tokens * visible_pairs(load.seq_length, window) // load.seq_length


def attention_core(
    load: Workload, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, window_size: int | None = None
) -> Work:
    """softmax(q kᵀ) v over the visible pairs only.

    Forward: q kᵀ and p v, 2·D + 2·Dv FLOPs a pair and head. Backward: dv, dp (Dv each), dq, dk (D each), and q kᵀ once more, since the
    T × T scores are not kept. No parameters, hence no W.

    Source: FlashAttention-2, arXiv:2307.08691, section 3.1 (two products forward, five backward).
    """
    pairs = visible_pairs(load.seq_length, window_size) * num_heads
    forward = load.per_token(2 * pairs * (head_dim + value_dim))
    scores = load.per_token(2 * pairs * head_dim)
    query, out = num_heads * head_dim, num_heads * value_dim
    key_value = num_kv_heads * (head_dim + value_dim)
    return Work(
        forward,
        2 * forward + scores,
        0,
        scores,
        moved_forward=(query + key_value + out) * load.itemsize + FP32_BYTES * num_heads,
        moved_input=(2 * query + 2 * key_value + 2 * out) * load.itemsize + FP32_BYTES * num_heads,
    )


def attention_work(
    load: Workload, attention: GroupedQueryAttention | LatentAttention, hidden_size: int, variant: AttentionVariant = PLAIN
) -> Ops:
    """One A block, pre-norm and residual included; `tp` shards its heads.

    Relation bias and NoPE change neither FLOPs nor, to first order, bytes: they are not counted.

    Source: arXiv:2305.13245, section 2.2 (GQA); arXiv:2405.04434, equations 9 to 19 (MLA).
    """
    first, window = residual_op(load, PART, hidden_size), None if variant.full else attention.window_size
    if isinstance(attention, GroupedQueryAttention):
        return (first, *_grouped_query(load, attention, hidden_size, window))
    indexer = attention.indexer if variant.indexed else None
    chooses = attention.indexer is not None and (variant.indexed or variant.shares)
    most_keys = attention.indexer.top_k if attention.indexer is not None and chooses else load.seq_length
    ops = (first, *_latent(load, attention, hidden_size, most_keys, window))
    if indexer is not None:
        ops += _indexer(load, indexer, attention.q_lora_rank or hidden_size, hidden_size, window)
    if variant.shares:
        ops += (Op("masked", "attention", Work(), counts=("attention",), window=window),)  # keys that are not chosen: no work of the model
    return ops


def attention_exchanges(attention: GroupedQueryAttention | LatentAttention, hidden_size: int) -> Exchanges:
    """MLA gathers its narrow latents over the tensor group; keys and values are gathered over the context group."""
    if isinstance(attention, GroupedQueryAttention):
        return Exchanges(context_width=2 * attention.num_kv_heads * attention.head_dim)
    gathered = (attention.q_lora_rank or hidden_size) + attention.kv_lora_rank + attention.qk_rope_head_dim
    widths = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
    return Exchanges(gathered_width=gathered, context_width=attention.num_heads * widths)


def _grouped_query(load: Workload, attention: GroupedQueryAttention, hidden_size: int, window: int | None) -> Ops:
    heads, num_kv_heads, width = attention.num_heads // load.tp, attention.num_kv_heads // load.tp, attention.head_dim
    query, key = heads * width, num_kv_heads * width
    gate: Ops = (linear_op(load, "gate_proj", PART, hidden_size, query),) if attention.gate else ()
    gated: Ops = (Op("gate", PART, activation(load, query, "swiglu"), counts=("gate sigmoid", "gate")),) if attention.gate else ()
    norms = _qk_norms(load, attention, heads, num_kv_heads)
    rotated = attention.rotary_dim or width
    core = attention_core(load, num_heads=heads, num_kv_heads=num_kv_heads, head_dim=width, value_dim=width, window_size=window)
    return (
        linear_op(load, "q_proj", PART, hidden_size, query),
        linear_op(load, "k_proj", PART, hidden_size, key),
        linear_op(load, "v_proj", PART, hidden_size, key),
        *gate,
        *norms,
        Op("rope", PART, rope(load, (heads + num_kv_heads) * rotated)),
        Op("attention", "attention", core, window=window),
        *gated,
        linear_op(load, "o_proj", PART, query, hidden_size, closes=True),
    )


def _qk_norms(load: Workload, attention: GroupedQueryAttention, heads: int, num_kv_heads: int) -> Ops:
    if not attention.qk_norm:
        return ()
    if attention.qk_norm_width == "all_heads":
        return (Op("qk_norm", PART, norm(load, heads * attention.head_dim) + norm(load, num_kv_heads * attention.head_dim)),)
    return (Op("qk_norm", PART, norm(load, attention.head_dim) * (heads + num_kv_heads)),)


def _latent(load: Workload, attention: LatentAttention, hidden_size: int, most_keys: int, window: int | None) -> Ops:
    """The down projections are replicated: under sequence parallelism a rank makes the latents of its own tokens.

    A query attends to `most_keys` of the keys that it sees.
    """
    heads, nope, rotated = attention.num_heads // load.tp, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    value, latent = attention.v_head_dim, attention.kv_lora_rank
    query, rank = heads * (nope + rotated), attention.q_lora_rank
    if rank is None:
        queries: Ops = (linear_op(load, "q_proj", PART, hidden_size, query),)
    else:
        queries = (
            linear_op(load, "q_down", PART, hidden_size, rank, own_tokens=True),
            Op("q_latent_norm", PART, norm(load, rank), own_tokens=True),
            linear_op(load, "q_up", PART, rank, query),
        )
    # The up-projected k_nope | v and the one rotated key are rewritten as per-head k and v; backward takes the same way back.
    expand = (heads * (nope + value) + rotated + heads * (nope + rotated + value)) * load.itemsize
    core = attention_core(
        load,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rotated,
        value_dim=value,
        window_size=min(most_keys, window or most_keys),
    )
    return (
        *queries,
        Op("rope", PART, rope(load, query)),
        linear_op(load, "kv_down", PART, hidden_size, latent + rotated, own_tokens=True),
        Op("kv_latent_norm", PART, norm(load, latent), own_tokens=True),
        linear_op(load, "kv_up", PART, latent, heads * (nope + value)),
        Op("mla_kv", PART, Work(moved_forward=expand, moved_input=expand)),
        Op("attention", "attention", core, window=window),
        linear_op(load, "o_proj", PART, heads * value, hidden_size, closes=True),
    )


def _indexer(load: Workload, indexer: Indexer, query_width: int, hidden_size: int, window_size: int | None) -> Ops:
    """Scores of every visible pair: 2·dim FLOPs a head, and 2 for the weighted sum over heads; neither is kept.

    Replicated under TP: a rank projects its own tokens, and makes the scores of all tokens from what it gathers. Norm and scores are a
    part of the operation that attends, and run again with it.
    Backward repeats the scores and takes their gradient, of the chosen pairs alone in principle, through all heads: counted whole. What the
    core computes is the chosen pairs. Its own loss trains the indexer alone: its projections' inputs get no gradient.

    Source: DeepSeek-V3.2, arXiv:2512.02556, equation 1.
    """
    heads, dim = indexer.num_heads, indexer.head_dim
    scores = load.per_token(2 * visible_pairs(load.seq_length, window_size) * heads * (dim + 1))
    moved = (heads * dim + dim + heads) * load.itemsize
    choosing = Work(scores, 3 * scores, 0, scores, moved_forward=moved, moved_input=2 * moved)
    return (
        detached_linear_op(load, "indexer.q_up", PART, query_width, heads * dim, own_tokens=True),
        detached_linear_op(load, "indexer.k_proj", PART, hidden_size, dim, own_tokens=True),
        detached_linear_op(load, "indexer.head_weights", PART, hidden_size, heads, own_tokens=True),
        Op("indexer.k_norm", PART, norm(load, dim), counts=("attention",)),
        Op("indexer", "attention", choosing, counts=("attention",), window=window_size),
    )
