"""Saved tensors of head and loss.

Without `vocab_parallel` the head is replicated: under SP each TP rank computes the logits of its own tokens. With it, every rank computes
its slice of the vocabulary for all tokens.

With `host.kernels: triton` head and loss are one operation, whose logits never exist in full: it saves the rows that the head multiplies
and their log-sum-exp, and its scratch is a slice of logits, in backward with a sum in fp32.

With `precision.recipe.head` its products are in the recipe's bits, of rows that it keeps as they are and quantises again in backward.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from megakernels.ops.linear_cross_entropy.facts import ScaledHead, slice_columns
from megaplan.blocks.ops import OUTPUT, Dims, Op, Projection, partial_gradient, project
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.hosts.megarun.scaled import head_products, head_scratch, scaling_of
from megaplan.low_precision import TRAINED, RecipeName
from megaplan.spec.models import Spec

JOINED = {"own": 1, "chosen": 1, "sums": 2, "terms": 2}
"""fp32 numbers per row that join slices of a sharded vocabulary: a slice's log-sum-exp, its label's logit, sums over slices, the loss."""

JOINED_OP = "linear_cross_entropy"
IN_LOSS, BEFORE_LOSS = "inside_forward", "inside_backward"
"""Scratch of head and loss in a recipe's bits."""


class LowHead(NamedTuple):
    """A head in the bits of a recipe.

    Attributes:
        name: The recipe.
        fused: True if Triton kernels make the copies.
    """

    name: RecipeName
    fused: bool


def low_head(spec: Spec) -> LowHead | None:
    """The recipe of a spec's head; None if it multiplies in 16 bits or more."""
    recipe = spec.precision.recipe
    return LowHead(recipe.name, spec.host.uses_triton) if recipe is not None and recipe.head and recipe.name in TRAINED else None


def head_part(
    dims: Dims,
    vocab_size: int,
    *,
    vocab_parallel: bool,
    pipelined: bool,
    joined: bool,
    bias: bool = False,
    capped: bool = False,
    low: LowHead | None = None,
) -> BlockReplay:
    """Head and loss: `x` is the normed residual stream, which the head saves; `out` is the summed loss.

    A pipeline stage holds its output until the microbatch's backward has ended: the logits or, for head and loss joined, the loss.
    """
    sharded = vocab_parallel and dims.tp > 1
    tensors = head_storages(dims, vocab_size, vocab_parallel=vocab_parallel, joined=joined, low=low)
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"x": dims.residual})
    return BlockReplay(_head_replay(sharded, pipelined, joined, bias, capped, low is not None), tensors)


def head_ops(
    sharded: bool,
    joined: bool,
    reads: str = "x",
    param: str = "weight",
    made: str = OUTPUT,
    bias: str | None = None,
    *,
    capped: bool = False,
    low: bool = False,
) -> tuple[Op, ...]:
    """Logits, their cap and their cross entropy, or everything except a cap in one operation; `made` is the summed loss."""
    params = (param,) if bias is None else (param, bias)
    names = tuple(f"loss_{name}" for name in JOINED) if sharded else ()
    if not joined:
        made_logits = "uncapped" if capped else "logits"
        head = project(reads, "gathered", Projection("head", made_logits, param, bias), sharded=sharded)
        head = (head_products(head[0], "gathered" if sharded else None),) if low else head
        cap = (Op("cap", ("uncapped",), ("logits",), keeps=("logits",)),) if capped else ()
        return *head, *cap, Op("cross_entropy", ("logits",), (made, "loss_lse", *names), keeps=("logits", "loss_lse"), grads=("logits",))
    rows, kept = ("gathered" if sharded else reads), (reads, "loss_lse")
    in_forward, inside = (IN_LOSS, [BEFORE_LOSS]) if low else ("slice", ["slice", "sum", "product"])
    if not sharded:
        return (Op(JOINED_OP, (rows,), (made, "loss_lse", in_forward), keeps=kept, params=params, fetches=tuple(inside)),)
    own, total = names[:2], names[2:]
    return (
        Op("gather", (reads,), (rows,), keeps=kept),
        Op(JOINED_OP, (rows,), (*own, in_forward), keeps=kept, params=params, fetches=(rows, *inside)),
        Op("join", own, (made, "loss_lse", *total), grads=()),
    )


def head_storages(
    dims: Dims, vocab_size: int, *, vocab_parallel: bool, joined: bool, made: str = OUTPUT, low: LowHead | None = None
) -> Shapes:
    """Storages of `head_ops`."""
    sharded = vocab_parallel and dims.tp > 1
    positions = dims.tokens if sharded else dims.residual_tokens
    rows, vocab = dims.batch * positions, vocab_size // dims.tp if sharded else vocab_size
    return {
        **({} if low is None else _inside_low(dims, rows, vocab, low)),
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


def _inside_low(dims: Dims, rows: int, vocab: int, low: LowHead) -> Shapes:
    """Scratch of a head in a recipe's bits, alone and with its loss."""
    of_product = head_scratch("head", (rows, dims.hidden, vocab, dims.dtype.bytes), low.name, fused=low.fused)
    sizes = ScaledHead(rows, dims.hidden, vocab, dims.dtype.bytes, scaling_of(low.name), low.fused)
    inside = {IN_LOSS: sizes.forward_bytes, BEFORE_LOSS: sizes.backward_bytes}
    return of_product | {name: (size, Column.WORKSPACE, (size,), DType.FP8, Basis.EXACT) for name, size in inside.items()}


@cache
def _head_replay(sharded: bool, pipelined: bool, joined: bool, bias: bool, capped: bool, low: bool) -> Replay:
    return replay(
        head_ops(sharded, joined, bias="bias" if bias else None, capped=capped, low=low),
        starts=True,
        pinned="logits" if pipelined and not joined else None,
    )
