"""What both ends of the stack keep: token embedding, final norm, head and loss.

Token ids and labels are inputs of the step, priced whole in `buffers.py`. Without `vocab_parallel` the head is replicated: under SP each TP
rank computes the logits of its own tokens. With it, every rank computes its slice of the vocabulary for all tokens.
"""

from __future__ import annotations

from functools import cache

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.dims import Dims
from megaplan.hosts.megarun.parts import Part, Shapes, residual, storages
from megaplan.hosts.megarun.program import Op, Projection, Replay, norm, partial_gradient, project, replay

JOINED = {"own": 1, "chosen": 1, "sums": 2, "terms": 2}
"""fp32 numbers a row that join the slices of a cut vocabulary: a slice's log-sum-exp, its label's logit, the sums over slices, the loss."""


def embedding_part(dims: Dims, *, vocab_parallel: bool) -> Part:
    """Token ids to the residual stream."""
    sharded = vocab_parallel and dims.tp > 1
    tensors = storages(dims.dtype, Column.ACTIVATIONS, {"out": dims.residual})
    tensors |= storages(dims.dtype, Column.COMMUNICATION, {"partial": dims.gathered})
    tensors |= storages(DType.INT64, Column.ACTIVATIONS, {"rows": (dims.batch, dims.tokens)})
    return Part(_embedding_replay(sharded), residual(tensors))


@cache
def _embedding_replay(sharded: bool) -> Replay:
    if not sharded:
        return replay((Op("embedding", ("x",), ("out",), params=("weight",), grads=()),))
    lookup = Op("embedding", ("x",), ("rows", "partial"), params=("weight",), grads=(), fetches=("rows",))
    return replay((lookup, Op("reduce_scatter", ("partial",), ("out",))))


def final_norm_part(dims: Dims) -> Part:
    """The norm before the head."""
    tensors = storages(dims.dtype, Column.ACTIVATIONS, {"out": dims.residual})
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2]})
    return Part(_final_norm_replay(), residual(tensors))


@cache
def _final_norm_replay() -> Replay:
    return replay((norm("norm", "x", "out", "rstd", "weight"),))


def head_part(dims: Dims, vocab_size: int, *, vocab_parallel: bool, pipelined: bool) -> Part:
    """Head and loss: `x` is the normed residual stream, which the head keeps; `out` is the summed loss.

    A pipeline stage holds its output, the logits, until the microbatch's backward has ended.
    """
    sharded = vocab_parallel and dims.tp > 1
    tensors = head_storages(dims, vocab_size, vocab_parallel=vocab_parallel)
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"x": dims.residual})
    return Part(_head_replay(sharded, pipelined), tensors)


def head_ops(sharded: bool, reads: str = "x", param: str = "weight", prefix: str = "", made: str = "out") -> tuple[Op, ...]:
    """Logits and their cross entropy."""
    logits, lse = f"{prefix}logits", f"{prefix}loss_lse"
    joined = tuple(f"{prefix}loss_{name}" for name in JOINED) if sharded else ()
    return (
        *project(reads, f"{prefix}gathered", Projection(f"{prefix}head", logits, param), sharded=sharded),
        Op(f"{prefix}cross_entropy", (logits,), (made, lse, *joined), keeps=(logits, lse), grads=(logits,)),
    )


def head_storages(dims: Dims, vocab_size: int, *, vocab_parallel: bool, prefix: str = "", made: str = "out") -> Shapes:
    """Storages of `head_ops`."""
    sharded = vocab_parallel and dims.tp > 1
    positions = dims.tokens if sharded else dims.residual_tokens
    rows, vocab, gathered = dims.batch * positions, vocab_size // dims.tp if sharded else vocab_size, f"{prefix}gathered"
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {f"{prefix}logits": (rows, vocab)}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {f"{prefix}loss_lse": (rows,), made: ()}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {f"{prefix}loss_{name}": (count, rows) for name, count in JOINED.items()}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys((gathered, partial_gradient(gathered)), dims.gathered)),
    }


@cache
def _head_replay(sharded: bool, pipelined: bool) -> Replay:
    return replay(head_ops(sharded), starts=True, pinned="logits" if pipelined else None)
