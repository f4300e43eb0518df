"""Saved tensors of both ends of the stack: token embedding, final norm, head and loss.

Token ids and labels are inputs of the step, priced whole in `buffers.py`. Without `vocab_parallel` the head is replicated: under SP each TP
rank computes the logits of its own tokens. With it, every rank computes its slice of the vocabulary for all tokens.

With `host.kernels: triton` head and loss are one operation, whose logits never exist in full: it saves the rows that the head multiplies
and their log-sum-exp, and its scratch is a slice of logits, in backward with a sum in fp32.
"""

from __future__ import annotations

from functools import cache

from megakernels.ops.linear_cross_entropy.facts import slice_columns
from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import OUTPUT, Op, Projection, partial_gradient, project
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.residual import NormKind, norm_op
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay

JOINED = {"own": 1, "chosen": 1, "sums": 2, "terms": 2}
"""fp32 numbers per row that join slices of a sharded vocabulary: a slice's log-sum-exp, its label's logit, sums over slices, the loss."""

JOINED_OP = "linear_cross_entropy"


def embedding_part(dims: Dims, *, vocab_parallel: bool, positions: bool = False, scaled: bool = False) -> BlockReplay:
    """Token ids to the residual stream; learned positions are rows of a table that are added, and a factor scales the words."""
    sharded = vocab_parallel and dims.tp > 1
    tensors = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("out", "words", "scaled"), dims.residual))
    tensors |= storages(dims.dtype, Column.COMMUNICATION, {"partial": dims.gathered})
    tensors |= storages(DType.INT64, Column.ACTIVATIONS, {"rows": (dims.batch, dims.tokens)})
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"places": dims.residual[1:]})
    return BlockReplay(_embedding_replay(sharded, positions, scaled), residual(tensors))


@cache
def _embedding_replay(sharded: bool, positions: bool, scaled: bool) -> Replay:
    words = "scaled" if positions else OUTPUT
    made = "words" if scaled else words
    ops: tuple[Op, ...] = (Op("embedding", ("x",), (made,), params=("weight",), grads=()),)
    if sharded:
        lookup = Op("embedding", ("x",), ("rows", "partial"), params=("weight",), grads=(), fetches=("rows",))
        ops = lookup, Op("reduce_scatter", ("partial",), (made,))
    if scaled:
        ops += (Op("scale", ("words",), (words,)),)
    if positions:
        ops += (Op("positions", (), ("places",), params=("positions",), grads=()), Op("add", (words, "places"), (OUTPUT,)))
    return replay(ops)


def final_norm_part(dims: Dims, kind: NormKind, *, scaled: bool = False) -> BlockReplay:
    """The norm before the head, and the factor of logits if they have one, because the head is linear."""
    tensors = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("out", "normed"), dims.residual))
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("mean", "rstd"), dims.residual[:2]))
    return BlockReplay(_final_norm_replay(kind, scaled), residual(tensors))


@cache
def _final_norm_replay(kind: NormKind, scaled: bool) -> Replay:
    normed = norm_op("norm", kind, "x", "normed" if scaled else OUTPUT, params=("weight", "bias"))
    return replay((normed, *((Op("scale", ("normed",), (OUTPUT,)),) if scaled else ())))


def head_part(
    dims: Dims, vocab_size: int, *, vocab_parallel: bool, pipelined: bool, joined: bool, bias: bool = False, capped: bool = False
) -> BlockReplay:
    """Head and loss: `x` is the normed residual stream, which the head saves; `out` is the summed loss.

    A pipeline stage holds its output until the microbatch's backward has ended: the logits or, for head and loss joined, the loss.
    """
    sharded = vocab_parallel and dims.tp > 1
    tensors = head_storages(dims, vocab_size, vocab_parallel=vocab_parallel, joined=joined)
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"x": dims.residual})
    return BlockReplay(_head_replay(sharded, pipelined, joined, bias, capped), tensors)


def head_ops(
    sharded: bool,
    joined: bool,
    reads: str = "x",
    param: str = "weight",
    made: str = OUTPUT,
    bias: str | None = None,
    *,
    capped: bool = False,
) -> tuple[Op, ...]:
    """Logits, their cap and their cross entropy, or everything except a cap in one operation; `made` is the summed loss."""
    params = (param,) if bias is None else (param, bias)
    names = tuple(f"loss_{name}" for name in JOINED) if sharded else ()
    if not joined:
        made_logits = "uncapped" if capped else "logits"
        head = project(reads, "gathered", Projection("head", made_logits, param, bias), sharded=sharded)
        cap = (Op("cap", ("uncapped",), ("logits",), keeps=("logits",)),) if capped else ()
        return *head, *cap, Op("cross_entropy", ("logits",), (made, "loss_lse", *names), keeps=("logits", "loss_lse"), grads=("logits",))
    rows, kept, inside = ("gathered" if sharded else reads), (reads, "loss_lse"), ("slice", "sum", "product")
    if not sharded:
        return (Op(JOINED_OP, (rows,), (made, "loss_lse", "slice"), keeps=kept, params=params, fetches=inside),)
    own, total = names[:2], names[2:]
    return (
        Op("gather", (reads,), (rows,), keeps=kept),
        Op(JOINED_OP, (rows,), (*own, "slice"), keeps=kept, params=params, fetches=(rows, *inside)),
        Op("join", own, (made, "loss_lse", *total), grads=()),
    )


def head_storages(dims: Dims, vocab_size: int, *, vocab_parallel: bool, joined: bool, made: str = OUTPUT) -> Shapes:
    """Storages of `head_ops`."""
    sharded = vocab_parallel and dims.tp > 1
    positions = dims.tokens if sharded else dims.residual_tokens
    rows, vocab = dims.batch * positions, vocab_size // dims.tp if sharded else vocab_size
    return {
        **(
            _inside(dims, rows, vocab)
            if joined
            else storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("logits", "uncapped"), (rows, vocab)))
        ),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"loss_lse": (rows,), made: ()}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {f"loss_{name}": (count, rows) for name, count in JOINED.items()}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered")), dims.gathered)),
    }


def _inside(dims: Dims, rows: int, vocab: int) -> Shapes:
    """Scratch of head and loss: a slice of logits; in backward the sum for the rows' gradient, and a slice's part of it.

    The part is a product as wide as the sum, made before the gradient in its own dtype exists: the scratch is its excess over that. If
    the dtype is the sum's, the sum is the gradient, and products are added as they are made.
    """
    words, wide = slice_columns(rows, vocab), dims.stat_dtype
    product = wide.bytes - dims.dtype.bytes
    width = dims.hidden if product else 0
    return {
        **storages(dims.dtype, Column.WORKSPACE, {"slice": (rows, words)}),
        **storages(wide, Column.WORKSPACE, {"sum": (rows, width)}),
        **storages(dims.dtype, Column.WORKSPACE, {"product": (rows, width * product // dims.dtype.bytes)}),
    }


@cache
def _head_replay(sharded: bool, pipelined: bool, joined: bool, bias: bool, capped: bool) -> Replay:
    return replay(
        head_ops(sharded, joined, bias="bias" if bias else None, capped=capped),
        starts=True,
        pinned="logits" if pipelined and not joined else None,
    )
