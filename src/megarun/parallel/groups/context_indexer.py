"""Indexed attention under context parallelism: local queries select from the keys of all ranks.

Keys, values and the indexer's keys are gathered, and again in backward; the saved tensors are those of a single rank, for local tokens. A
query selects from all earlier positions, in the order of the sequence, so the selection equals that of one rank. A selection that other
layers share is that of the local queries among the keys of the whole sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernels import (
    chosen_attention,
    chosen_attention_pieces,
    chosen_attention_pieces_backward,
    index_keys,
    index_keys_backward,
    indexed_attention,
    indexed_attention_choice,
    indexed_attention_pieces,
    indexed_attention_pieces_backward,
    indexed_attention_pieces_choice,
)
from megakernels.ops.indexed_attention.pieces import IndexedSettings
from megarun.parallel.groups.context import ContextParallel


class IndexerSettings(NamedTuple):
    """Settings of a layer's key selection, as in `indexed_attention`."""

    scale: float
    top_k: int
    loss_factor: float
    eps: float
    window: int | None


def context_indexed_attention(
    cp: ContextParallel, choice: IndexerSettings, starts: Tensor | None, sinks: Tensor | None, *tensors: Tensor
) -> tuple[Tensor]:
    """`megakernels.indexed_attention` over the whole sequence, for local tokens.

    Args:
        cp: CP group.
        choice: Settings of the layer.
        starts: int32 [B, T / cp] from `ContextParallel.own_starts`, or None.
        sinks: [H] or None.
        *tensors: q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos and sin of local tokens.

    Returns:
        [B, T / cp, H, V] alone.
    """
    if cp.degree == 1:
        return (indexed_attention(*tensors, **choice._asdict(), starts=starts, sinks=sinks),)
    return (_GatheredChoice.apply(cp, choice, starts, False, sinks, *tensors),)  # type: ignore[no-untyped-call]


def context_indexed_attention_choice(
    cp: ContextParallel, choice: IndexerSettings, starts: Tensor | None, sinks: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of `context_indexed_attention` and the keys that local queries chose: int32 [B, T / cp, words of T]."""
    if cp.degree == 1:
        return indexed_attention_choice(*tensors, **choice._asdict(), starts=starts, sinks=sinks)
    made: tuple[Tensor, Tensor] = _GatheredChoice.apply(cp, choice, starts, True, sinks, *tensors)  # type: ignore[no-untyped-call]
    return made


def context_chosen_attention(
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Tensor,
    scale: float,
    window: int | None,
    starts: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """`megakernels.chosen_attention` over the whole sequence, for local queries, keys and values, and their choice."""
    if cp.degree == 1:
        return chosen_attention(q, k, v, choice, scale, window, starts, sinks)
    out: Tensor = _GatheredChosen.apply(cp, q, k, v, choice, starts, sinks, (scale, window))  # type: ignore[no-untyped-call]
    return out


class _GatheredChoice(torch.autograd.Function):
    """Attention of local queries to selected keys of all ranks; it saves the same tensors as the op on full sequences, for local tokens."""

    @staticmethod
    def forward(
        ctx: Any, cp: ContextParallel, choice: IndexerSettings, starts: Tensor | None, sends: bool, sinks: Tensor | None, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin = tensors
        settings = IndexedSettings(choice.scale, choice.top_k, choice.loss_factor, choice.window, cp.pieces, cp.all_pieces)
        attend = indexed_attention_pieces_choice if sends else indexed_attention_pieces
        made = attend(
            q,
            cp.gather(k),
            cp.gather(v),
            index_q,
            cp.gather(index_keys(index_k, k_scale, k_bias, cos, sin, choice.eps)),
            index_weights,
            cos,
            sin,
            starts,
            settings,
            sinks=sinks,
        )
        ctx.save_for_backward(*tensors, starts, sinks, *made[:4])
        ctx.cp, ctx.settings, ctx.eps = cp, settings, choice.eps
        if not sends:
            return made[0]
        ctx.mark_non_differentiable(made[4])
        ctx.set_materialize_grads(False)  # otherwise autograd would allocate a gradient for the choice
        return made[0], made[4]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """Gradients of sinks, local queries, keys, values and indexer outputs, and of the norm of the indexer's keys."""
        q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin, starts, sinks, *made = ctx.saved_tensors
        cp: ContextParallel = ctx.cp
        gathered = [cp.gather(k), cp.gather(v), cp.gather(index_keys(index_k, k_scale, k_bias, cos, sin, ctx.eps))]
        grad_q, grad_index_q, grad_weights, *partial = indexed_attention_pieces_backward(
            gradient, q, gathered[0], gathered[1], index_q, gathered[2], index_weights, cos, sin, starts, made, ctx.settings, sinks
        )
        gathered.clear()  # free before the gradients of local keys are allocated
        grad_sinks = None if sinks is None else partial.pop()
        grad_index_k, grad_scale, grad_bias = index_keys_backward(cp.reduce(partial.pop()), index_k, k_scale, cos, sin, ctx.eps)
        grad_v = cp.reduce(partial.pop())
        grad_k = cp.reduce(partial.pop())
        of_index = grad_index_q, grad_index_k, grad_weights, grad_scale, grad_bias
        return None, None, None, None, grad_sinks, grad_q, grad_k, grad_v, *of_index, None, None


class _GatheredChosen(torch.autograd.Function):
    """Attention of local queries to keys of all ranks that another layer selected; saved as by the op, for local tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        choice: Tensor,
        starts: Tensor | None,
        sinks: Tensor | None,
        numbers: tuple[float, int | None],
    ) -> Tensor:
        out, lse = chosen_attention_pieces(q, cp.gather(k), cp.gather(v), choice, starts, *numbers, cp.pieces, cp.all_pieces, sinks)
        ctx.save_for_backward(q, k, v, choice, starts, sinks, out, lse)
        ctx.cp, ctx.numbers = cp, numbers
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local queries, keys and values, and of sinks."""
        q, k, v, choice, starts, sinks, out, lse = ctx.saved_tensors
        cp: ContextParallel = ctx.cp
        scale, window = ctx.numbers
        keys, values = cp.gather(k), cp.gather(v)
        grad_q, *partial = chosen_attention_pieces_backward(
            gradient, q, keys, values, choice, starts, out, lse, scale, window, cp.pieces, cp.all_pieces, sinks
        )
        del keys, values  # free before the gradients of local keys are allocated
        grad_sinks = None if sinks is None else partial.pop()
        grad_v = cp.reduce(partial.pop())
        grad_k = cp.reduce(partial.pop())
        return None, grad_q, grad_k, grad_v, None, None, grad_sinks, None
