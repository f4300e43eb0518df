"""Work of A blocks: projections, the attention core, the indexer."""

from __future__ import annotations

from megaplan.cost.ops import FP32_BYTES, linear, norm, residual_norm, rope
from megaplan.cost.work import Work, Workload
from megaplan.spec.models import GroupedQueryAttention, Indexer, LatentAttention


def visible_pairs(seq_length: int, window_size: int | None) -> int:
    """(query, key) pairs of one causal sequence: position i sees min(i + 1, window) keys.

    Source: counting; T(T+1)/2 without a window.
    """
    window = seq_length if window_size is None else min(window_size, seq_length)
    return window * (window + 1) // 2 + (seq_length - window) * window


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
    moved = (query + key_value + out) + (2 * query + 2 * key_value + 2 * out)
    return Work(forward, 2 * forward + scores, 0, scores, moved * load.itemsize + 2 * FP32_BYTES * num_heads)


def attention_block(
    load: Workload, attention: GroupedQueryAttention | LatentAttention, hidden_size: int, *, with_indexer: bool = False
) -> Work:
    """One A block, pre-norm and residual included.

    Relation bias and NoPE change neither FLOPs nor, to first order, bytes: they are not counted.

    Source: arXiv:2305.13245, section 2.2 (GQA); arXiv:2405.04434, equations 9 to 19 (MLA).
    """
    if isinstance(attention, GroupedQueryAttention):
        return residual_norm(load, hidden_size) + _grouped_query(load, attention, hidden_size)
    work = residual_norm(load, hidden_size) + _latent(load, attention, hidden_size)
    if with_indexer and attention.indexer is not None:
        work += _indexer(load, attention.indexer, attention.q_lora_rank or hidden_size, hidden_size, attention.window_size)
    return work


def _grouped_query(load: Workload, attention: GroupedQueryAttention, hidden_size: int) -> Work:
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    work = linear(load, hidden_size, query) + linear(load, hidden_size, key) * 2 + rope(load, query + key)
    if attention.qk_norm:
        work += norm(load, attention.head_dim) * (attention.num_heads + attention.num_kv_heads)
    core = attention_core(
        load,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.head_dim,
        window_size=attention.window_size,
    )
    return work + core + linear(load, query, hidden_size)


def _latent(load: Workload, attention: LatentAttention, hidden_size: int) -> Work:
    heads, nope, rotated = attention.num_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    value, latent = attention.v_head_dim, attention.kv_lora_rank
    query = heads * (nope + rotated)
    if attention.q_lora_rank is None:
        work = linear(load, hidden_size, query)
    else:
        rank = attention.q_lora_rank
        work = linear(load, hidden_size, rank) + norm(load, rank) + linear(load, rank, query)
    work += rope(load, query)
    work += linear(load, hidden_size, latent + rotated) + norm(load, latent) + linear(load, latent, heads * (nope + value))
    # The up-projected k_nope | v and the one rotated key are rewritten as per-head k and v; backward takes the same way back.
    expand = heads * (nope + value) + rotated + heads * (nope + rotated + value)
    core = attention_core(
        load, num_heads=heads, num_kv_heads=heads, head_dim=nope + rotated, value_dim=value, window_size=attention.window_size
    )
    return work + Work(moved=2 * expand * load.itemsize) + core + linear(load, heads * value, hidden_size)


def _indexer(load: Workload, indexer: Indexer, query_width: int, hidden_size: int, window_size: int | None) -> Work:
    """Scores of every visible pair: 2·dim FLOPs a head, and 2 for the weighted sum over heads; neither is kept.

    The attention core stays dense here: the spec says which layers have an indexer, not how many keys it keeps.

    Source: DeepSeek-V3.2, arXiv:2512.02556, equation 1.
    """
    heads, dim = indexer.num_heads, indexer.head_dim
    scores = load.per_token(2 * visible_pairs(load.seq_length, window_size) * heads * (dim + 1))
    moved = 3 * (heads * dim + dim + heads) * load.itemsize
    projections = linear(load, query_width, heads * dim) + linear(load, hidden_size, dim) + linear(load, hidden_size, heads)
    return projections + norm(load, dim) + Work(scores, 3 * scores, 0, scores, moved)
