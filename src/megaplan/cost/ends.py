"""Work outside the stack: token and side embeddings, head with loss, multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterable

from megakernels.facts import Work
from megakernels.ops.cross_entropy.facts import RECOMPUTED_LOGITS, Loss, cross_entropy
from megakernels.ops.library import gather
from megakernels.ops.rms_norm.facts import FINAL_NORM
from megaplan.blocks.costs import linear_work, norm_work, residual_work
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.spec.depths import DepthBlock
from megaplan.spec.models import Features

PART = "head"


def embedding(load: Workload, hidden_size: int, grad_bytes: int, *, vocab_parallel: bool = False) -> Works:
    """The token embedding: a lookup; with `vocab_parallel` every rank looks up all tokens, and reduces.

    Source: counting operands.
    """
    return (OpWork("embedding", PART, gather(hidden_size, load.itemsize, grad_bytes), own_tokens=not vocab_parallel),)


def side_embeddings(load: Workload, features: Features, hidden_size: int, grad_bytes: int) -> Works:
    """Rows of the n-gram, structure and platform tables, and their projections to hidden, of the rank's own tokens.

    Source: counting: one linear of the concatenated rows each.
    """
    widths = {}
    if features.ngram is not None:
        widths["ngram"] = features.ngram.num_tables * features.ngram.dim
    for name, category in (("structure", features.structure), ("platform", features.platform)):
        if category is not None:
            widths[name] = category.bottleneck
    ops: Works = ()
    for name, width in widths.items():
        ops += (OpWork(f"{name} rows", PART, gather(width, load.itemsize, grad_bytes), own_tokens=True),)
        ops += (linear_work(load, f"{name}.proj", PART, width, hidden_size, own_tokens=True),)
    return ops


def head(load: Workload, hidden_size: int, vocab_size: int, *, vocab_parallel: bool = False) -> Works:
    """Final norm, logits and cross-entropy: 2·h·V FLOPs forward, 6·h·V in all; `vocab_parallel` shards them, else tokens are.

    Where head and loss are one operation its backward makes the logits again: 2·h·V more, which utilisation does not count.

    Source: counting multiply-adds.
    """
    vocab, own_tokens = vocab_size // load.tp if vocab_parallel else vocab_size, not vocab_parallel
    logits = linear_work(load, "head", PART, hidden_size, vocab, own_tokens=own_tokens)
    again = Work(input_grad=logits.work.forward, recomputed=logits.work.forward, moved_input=logits.work.moved_forward)
    loss = Loss(vocab_size, hidden_size, load.num_tokens // load.tp, load.joins_loss)
    return (
        residual_work(load, PART, hidden_size)._replace(name="final_norm", facts=FINAL_NORM),
        logits,
        OpWork("cross_entropy", PART, cross_entropy(vocab, load.itemsize), loss, own_tokens=own_tokens),
        *((OpWork("logits again", PART, again, RECOMPUTED_LOGITS, own_tokens=own_tokens),) if load.joins_loss else ()),
    )


def mtp_depth(
    load: Workload,
    blocks: Iterable[DepthBlock],
    *,
    hidden_size: int,
    vocab_size: int,
    grad_bytes: int,
    vocab_parallel: bool = False,
    sides: Works = (),
) -> Works:
    """One MTP depth: embedding lookup, two norms, projection of [hidden; embedding], its blocks, and one more head.

    `sides` are side embeddings that it adds to the token embedding.

    Source: DeepSeek-V3, arXiv:2412.19437, equations 21 to 23.
    """
    return (
        *embedding(load, hidden_size, grad_bytes, vocab_parallel=vocab_parallel),
        *sides,
        norm_work(load, "hidden_norm, embedding_norm", PART, hidden_size, times=2, own_tokens=True),
        linear_work(load, "proj", PART, 2 * hidden_size, hidden_size, own_tokens=True),
        *(op for block in blocks for op in block.family.work(load, block.section, hidden_size, block.variant)),
        *head(load, hidden_size, vocab_size, vocab_parallel=vocab_parallel),
    )
