"""Indexed attention under context parallelism: local queries select from the keys of all ranks.

Keys, values and the indexer's keys are gathered, and again in backward; the saved set is that of one rank, for local tokens. A query
selects from all earlier positions, in the order of the sequence, so the selection equals that of one rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernels import index_keys, index_keys_backward, indexed_attention, indexed_attention_pieces, indexed_attention_pieces_backward
from megakernels.ops.indexed_attention.pieces import Settings
from megarun.parallel.groups.context import ContextParallel


class Choice(NamedTuple):
    """Settings of a layer's key selection, as in `indexed_attention`."""

    scale: float
    top_k: int
    loss_factor: float
    eps: float
    window: int | None


def context_indexed_attention(cp: ContextParallel, choice: Choice, starts: Tensor | None, *tensors: Tensor) -> Tensor:
    """`megakernels.indexed_attention` over the whole sequence, for local tokens.

    Args:
        cp: CP group.
        choice: Settings of the layer.
        starts: int32 [B, T / cp] from `ContextParallel.own_starts`, or None.
        *tensors: q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos and sin of local tokens.

    Returns:
        [B, T / cp, H, V].
    """
    if cp.degree == 1:
        return indexed_attention(*tensors, **choice._asdict(), starts=starts)
    out: Tensor = _GatheredChoice.apply(cp, choice, starts, *tensors)  # type: ignore[no-untyped-call]
    return out


class _GatheredChoice(torch.autograd.Function):
    """Attention of local queries to selected keys of all ranks; the saved set is that of the op on full sequences, for local tokens."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, choice: Choice, starts: Tensor | None, *tensors: Tensor) -> Tensor:
        q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin = tensors
        settings = Settings(choice.scale, choice.top_k, choice.loss_factor, choice.window, cp.pieces, cp.all_pieces)
        made = indexed_attention_pieces(
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
        )
        ctx.save_for_backward(*tensors, starts, *made)
        ctx.cp, ctx.settings, ctx.eps = cp, settings, choice.eps
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local queries, keys, values and indexer outputs, and of the norm of the indexer's keys."""
        q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin, starts, *made = ctx.saved_tensors
        cp: ContextParallel = ctx.cp
        gathered = [cp.gather(k), cp.gather(v), cp.gather(index_keys(index_k, k_scale, k_bias, cos, sin, ctx.eps))]
        grad_q, grad_index_q, grad_weights, *partial = indexed_attention_pieces_backward(
            gradient, q, gathered[0], gathered[1], index_q, gathered[2], index_weights, cos, sin, starts, made, ctx.settings
        )
        gathered.clear()  # free before the gradients of local keys are allocated
        grad_index_k, grad_scale, grad_bias = index_keys_backward(cp.reduce(partial.pop()), index_k, k_scale, cos, sin, ctx.eps)
        grad_v = cp.reduce(partial.pop())
        grad_k = cp.reduce(partial.pop())
        return None, None, None, grad_q, grad_k, grad_v, grad_index_q, grad_index_k, grad_weights, grad_scale, grad_bias, None, None
