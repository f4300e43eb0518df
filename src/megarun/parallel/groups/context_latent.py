"""Latent attention under context parallelism: the group gathers latents, and each rank expands them to the keys and values of some heads.

The keys and values of all heads are many times wider than their latent, so that gathering them costs more bytes than anything else of a
long sequence. Here a rank gathers latents and rotary keys, and attends with one group of heads after another (`head_groups`), whose keys
and values it makes, uses and frees. Backward does the same again. The saved set has latents of the rank's own tokens in place of keys and
values. In exchange every rank runs the up-projection for all tokens.

Source: arXiv:2405.04434, section 2.1.2 (keys and values are functions of the latent).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernels import attention_pieces, attention_pieces_backward, mla_kv, mla_kv_backward
from megaplan.families.attention.latents import head_groups
from megarun.parallel.groups.context import ContextParallel, KeyScores
from megarun.parallel.groups.tensor import TensorParallel


class LatentCore(NamedTuple):
    """Settings of attention from latents.

    Attributes:
        tp: TP group, over which latents are gathered first.
        cp: CP group of more than one rank.
        nope_dim: Width of a key without rotary embedding.
        scale: Factor of the scores.
        window: Positions that a query sees; None for all before it.
    """

    tp: TensorParallel
    cp: ContextParallel
    nope_dim: int
    scale: float
    window: int | None

    def attend(
        self,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        weight: Tensor,
        starts: Tensor | None = None,
        relations: KeyScores | None = None,
    ) -> Tensor:
        """Causal attention of local queries to the whole sequence.

        Args:
            q: [B, T / cp, H, n + r], rotated.
            latent: [B, t, R], the rank's own tokens, normed.
            k_rope: [B, T / cp, r], rotated.
            weight: [H · (n + v), R], the up-projection of this rank's heads.
            starts: int32 [B, T / cp] from `ContextParallel.own_starts`, or None.
            relations: Bias of the scores, or None.

        Returns:
            [B, T / cp, H, v].
        """
        classes, table = (None, None) if relations is None else (relations.classes, relations.table())
        out: Tensor = _LatentAttention.apply(self, q, latent, k_rope, weight, starts, classes, table)  # type: ignore[no-untyped-call]
        return out

    def heads_of(self, num_heads: int) -> Iterator[slice]:
        """Groups of heads, one after another."""
        size = num_heads // head_groups(num_heads, self.cp.degree)
        return (slice(first, first + size) for first in range(0, num_heads, size))

    def gathered(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] and rotary keys [B, T, r] of the whole sequence, in the order of `ContextParallel.all_pieces`."""
        own = latent if self.tp.degree == 1 else self.tp.start_gather(latent).wait()
        return self.cp.gather(own), self.cp.gather(k_rope)

    def reduced(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums for the rank's own tokens of the gradients of gathered latents."""
        own = self.cp.reduce(partial.to(dtype))
        return own if self.tp.degree == 1 else self.tp.start_reduce(own).wait()

    def expanded(self, latents: Tensor, keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, T, heads, n + r] and values [B, T, heads, v] of the heads whose up-projection `rows` are."""
        kv = torch.nn.functional.linear(latents, rows.flatten(0, 1))
        return mla_kv(torch.unflatten(kv, -1, rows.shape[:2]), keys, *_identity(keys), self.nope_dim)


def _identity(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary table of keys that are rotated already: angle 0, one fp32 value each, expanded."""
    shape = keys.shape[1], keys.shape[2] // 2
    made = keys.new_ones((1, 1), dtype=torch.float32), keys.new_zeros((1, 1), dtype=torch.float32)
    return made[0].expand(shape), made[1].expand(shape)


class _LatentAttention(torch.autograd.Function):
    """Attention of local queries to keys and values that are expanded by groups of heads, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        core: LatentCore,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        weight: Tensor,
        starts: Tensor | None,
        classes: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        """See `LatentCore.attend`."""
        batch, positions, num_heads, _ = q.shape
        rows = torch.unflatten(weight, 0, (num_heads, -1))
        out = q.new_empty((batch, positions, num_heads, rows.shape[1] - core.nope_dim))
        lse = q.new_empty((batch, num_heads, positions), dtype=torch.float32)
        latents, keys = core.gathered(latent, k_rope)
        pieces = core.cp.pieces, core.cp.all_pieces
        for heads in core.heads_of(num_heads):
            bias = None if table is None else table[:, heads].contiguous()
            k, v = core.expanded(latents, keys, rows[heads])
            out[:, :, heads], lse[:, heads] = attention_pieces(
                q[:, :, heads], k, v, starts, core.scale, core.window, *pieces, None, classes, bias
            )
            del k, v
        ctx.save_for_backward(q, latent, k_rope, weight, starts, classes, table, out, lse)
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, of the own tokens' latents and rotary keys, of the weight, and of the relations' table."""
        q, latent, k_rope, weight, starts, classes, table, out, lse = ctx.saved_tensors
        core, num_heads = ctx.core, q.shape[2]
        rows = torch.unflatten(weight, 0, (num_heads, -1))
        grad_q, grad_table = torch.empty_like(q), None if table is None else torch.empty_like(table)
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[4] else None
        latents, keys = core.gathered(latent, k_rope)
        pieces = core.cp.pieces, core.cp.all_pieces
        sums = [each.new_zeros(each.shape, dtype=torch.float32) for each in (latents, keys)]
        for heads in core.heads_of(num_heads):
            bias = None if table is None else table[:, heads].contiguous()
            made, sums_of_made = out[:, :, heads].contiguous(), lse[:, heads].contiguous()
            k, v = core.expanded(latents, keys, rows[heads])
            given = gradient[:, :, heads], q[:, :, heads], k, v, starts, made, sums_of_made, core.scale, core.window
            found = [*attention_pieces_backward(*given, *pieces, None, classes, bias)]
            del given, k, v, made, sums_of_made  # free before further gradients are allocated
            if grad_table is not None:
                grad_table[:, heads] = found.pop()
            grad_v, grad_k = found.pop(), found.pop()
            grad_q[:, :, heads] = found.pop()
            grad_kv, grad_keys = mla_kv_backward(grad_k, grad_v, *_identity(keys), core.nope_dim)
            del grad_k, grad_v
            sums[1] += grad_keys
            grad_kv = grad_kv.flatten(0, 1).flatten(1)
            if grad_rows is not None:
                torch.mm(grad_kv.mT, latents.flatten(0, 1), out=grad_rows[heads].flatten(0, 1))
            sums[0] += (grad_kv @ rows[heads].flatten(0, 1)).view(latents.shape)
            del grad_kv, grad_keys
        del latents, keys
        grad_rope = core.cp.reduce(sums.pop().to(k_rope.dtype))
        grad_latent = core.reduced(sums.pop(), latent.dtype)
        return None, grad_q, grad_latent, grad_rope, None if grad_rows is None else grad_rows.flatten(0, 1), None, None, grad_table
