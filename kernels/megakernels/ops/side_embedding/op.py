"""Side embeddings of tokens: hashed n-grams, categories. Saved: `gated_add` side and gates; `ngram_rows` nothing."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import join, only_needed, require
from megakernels._common.device import module_for
from megakernels.ops.side_embedding import reference

__all__ = ["gated_add", "ngram_rows"]


def ngram_rows(tokens: Tensor, before: Tensor, num_tables: int, num_rows: int) -> Tensor:
    """Rows of hashed tables for the n-grams that end at each token; table j hashes 2 + j mod (N − 1) tokens. No gradient.

    Args:
        tokens: int64 [B, t].
        before: int64 [B, N − 1, t], N ≥ 2 the longest n-gram: the tokens 1, 2, … positions before each one, −1 for none.
        num_tables: J.
        num_rows: total rows of all tables, at least J.

    Returns:
        int64 [B, t, J], each below num_rows.

    Triton:
        One kernel.

    Raises:
        ValueError: shapes or numbers do not fit.
    """
    integers = tokens.dtype == before.dtype == torch.int64 and tokens.dim() == 2 and before.dim() == 3
    fits = integers and before.shape[1] >= 1 and (before.shape[0], before.shape[2]) == tuple(tokens.shape)
    require(fits, "ngram_rows", "tokens must be int64 [B, t], before [B, N − 1, t]", tokens=tokens.shape, before=before.shape)
    require(1 <= num_tables <= num_rows, "ngram_rows", "1 ≤ num_tables ≤ num_rows", num_tables=num_tables, num_rows=num_rows)
    rows: Tensor = _ngram_rows(tokens, before, num_tables, num_rows)
    return rows


def gated_add(x: Tensor, side: Tensor, gates: Tensor) -> Tensor:
    """Add side, gated: x + gates[1] · tanh(gates[0]) · side.

    Args:
        x: any shape.
        side: the same shape.
        gates: [2].

    Returns:
        The same shape, contiguous, in x's dtype.

    Triton:
        One kernel forward; two backward, of which the second adds up the sums of the first's programs.

    Raises:
        ValueError: shapes do not fit.
    """
    fits = x.shape == side.shape and tuple(gates.shape) == (2,)
    require(fits, "gated_add", "x and side must have one shape, gates two numbers", x=x.shape, side=side.shape, gates=gates.shape)
    y: Tensor = _gated_add(x, side, gates)
    return y


@custom_op("megakernels::ngram_rows", mutates_args=())
def _ngram_rows(tokens: Tensor, before: Tensor, num_tables: int, num_rows: int) -> Tensor:
    result: Tensor = module_for(tokens, reference, dtypes=(torch.int64,)).ngram_rows(tokens, before, num_tables, num_rows)
    return result


@_ngram_rows.register_fake
def _(tokens: Tensor, _before: Tensor, num_tables: int, _num_rows: int) -> Tensor:
    return tokens.new_empty((*tokens.shape, num_tables))


@custom_op("megakernels::gated_add", mutates_args=())
def _gated_add(x: Tensor, side: Tensor, gates: Tensor) -> Tensor:
    result: Tensor = module_for(x, reference).gated_add_forward(x, side, gates)
    return result


@custom_op("megakernels::gated_add_backward", mutates_args=())
def _gated_add_backward(grad_y: Tensor, side: Tensor, gates: Tensor, needs: list[bool]) -> list[Tensor]:
    return only_needed(module_for(grad_y, reference).gated_add_backward(grad_y, side, gates, needs))


@_gated_add.register_fake
def _(x: Tensor, _side: Tensor, _gates: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_gated_add_backward.register_fake
def _(grad_y: Tensor, side: Tensor, gates: Tensor, needs: list[bool]) -> list[Tensor]:
    likes = (grad_y, side, gates)
    return [like.new_empty(like.shape) for like, need in zip(likes, needs, strict=True) if need]


join(_gated_add, _gated_add_backward, outputs=("y",), gradients=("x", "side", "gates"))
