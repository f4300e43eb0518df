"""Work outside the stack: token and side embeddings, head with loss, multi-token prediction."""

from __future__ import annotations

from megaplan.cost.attention import attention_block
from megaplan.cost.ops import cross_entropy, gather, linear, mlp, norm, residual_norm
from megaplan.cost.work import Work, Workload
from megaplan.spec.models import Features, GroupedQueryAttention, LatentAttention


def side_embeddings(load: Workload, features: Features, hidden_size: int, grad_bytes: int) -> Work:
    """Rows of the n-gram, structure and platform tables, and their projections to hidden.

    Source: counting: one linear of the concatenated rows each.
    """
    work = Work()
    if features.ngram is not None:
        width = features.ngram.num_tables * features.ngram.dim
        work += gather(load, width, grad_bytes) + linear(load, width, hidden_size)
    for category in (features.structure, features.platform):
        if category is not None:
            work += gather(load, category.bottleneck, grad_bytes) + linear(load, category.bottleneck, hidden_size)
    return work


def head(load: Workload, hidden_size: int, vocab_size: int) -> Work:
    """Final norm, logits and cross-entropy: 2·h·V FLOPs forward, 6·h·V in all.

    Source: counting multiply-adds.
    """
    return residual_norm(load, hidden_size) + linear(load, hidden_size, vocab_size) + cross_entropy(load, vocab_size)


def mtp_depth(
    load: Workload,
    attention: GroupedQueryAttention | LatentAttention,
    *,
    hidden_size: int,
    ffn_hidden_size: int,
    vocab_size: int,
    grad_bytes: int,
) -> Work:
    """One MTP depth: embedding lookup, two norms, projection of [hidden; embedding], an A block, an ungated MLP, and one more head.

    Source: DeepSeek-V3, arXiv:2412.19437, equations 21 to 23.
    """
    entry = gather(load, hidden_size, grad_bytes) + norm(load, hidden_size) * 2 + linear(load, 2 * hidden_size, hidden_size)
    block = attention_block(load, attention, hidden_size) + residual_norm(load, hidden_size)
    return entry + block + mlp(load, hidden_size, ffn_hidden_size, "relu2") + head(load, hidden_size, vocab_size)
