"""Latent attention under context parallelism: the group gathers latents, and each rank expands them to the keys and values of some heads.

The keys and values of all heads are many times wider than their latent, so that gathering them costs more bytes than anything else of a
long sequence. Here a rank gathers latents and rotary keys, and attends with one group of heads after another (`head_groups`), whose keys
and values it makes, uses and frees. Backward does the same again. The saved set has latents of the rank's own tokens in place of keys and
values. In exchange every rank runs the up-projection for all tokens.

Source: arXiv:2405.04434, section 2.1.2 (keys and values are functions of the latent).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernels import attention_pieces, attention_pieces_backward, mla_kv, mla_kv_backward
from megaplan.families.attention.latents import head_groups
from megarun.parallel.groups.context import ContextParallel, KeyScores
from megarun.parallel.groups.context_expand import Gradients, Groups, ScaledGradients, UpProjection
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
        up: nn.Linear,
        starts: Tensor | None = None,
        sinks: Tensor | None = None,
        relations: KeyScores | None = None,
    ) -> Tensor:
        """Causal attention of local queries to the whole sequence.

        Args:
            q: [B, T / cp, H, n + r], rotated.
            latent: [B, t, R], the rank's own tokens, normed.
            k_rope: [B, T / cp, r], rotated.
            up: The up-projection of this rank's heads, R to H · (n + v).
            starts: int32 [B, T / cp] from `ContextParallel.own_starts`, or None.
            sinks: [H], a score of each head without a value, or None.
            relations: Bias of the scores, or None.

        Returns:
            [B, T / cp, H, v].
        """
        classes, table = (None, None) if relations is None else (relations.classes, relations.table())
        projection = UpProjection.of(up)
        given = self, projection, q, latent, k_rope, starts, sinks, classes, table, *projection.trained
        out: Tensor = _LatentAttention.apply(*given)  # type: ignore[no-untyped-call]
        return out

    @property
    def groups(self) -> Groups:
        """The groups over which latents are gathered."""
        return Groups(self.tp, self.cp)

    def heads_of(self, num_heads: int, num_rows: int) -> Iterator[tuple[slice, slice]]:
        """Groups of heads, one after another, each with its rows of the up-projection."""
        size, height = num_heads // head_groups(num_heads, self.cp.degree), num_rows // num_heads
        starts = range(0, num_heads, size)
        return ((slice(first, first + size), slice(first * height, (first + size) * height)) for first in starts)

    def gathered(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] and rotary keys [B, T, r] of the whole sequence, in the order of `ContextParallel.all_pieces`."""
        return self.cp.gather(self.groups.gathered(latent)), self.cp.gather(k_rope)

    def split(self, kv: Tensor, heads: slice, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, T, heads, n + r] and values [B, T, heads, v] of an expanded group."""
        return mla_kv(torch.unflatten(kv, -1, (heads.stop - heads.start, -1)), keys, *_identity(keys), self.nope_dim)


def _identity(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary table of keys that are rotated already: angle 0, one fp32 value each, expanded."""
    shape = keys.shape[1], keys.shape[2] // 2
    made = keys.new_ones((1, 1), dtype=torch.float32), keys.new_zeros((1, 1), dtype=torch.float32)
    return made[0].expand(shape), made[1].expand(shape)


def _of_heads(heads: slice, sinks: Tensor | None, table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Sinks and bias of a group of heads."""
    return None if sinks is None else sinks[heads], None if table is None else table[:, heads].contiguous()


class _LatentAttention(torch.autograd.Function):
    """Attention of local queries to keys and values that are expanded by groups of heads, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        core: LatentCore,
        up: UpProjection,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        starts: Tensor | None,
        sinks: Tensor | None,
        classes: Tensor | None,
        table: Tensor | None,
        *_trained: Tensor,
    ) -> Tensor:
        """See `LatentCore.attend`; parameters of the up-projection that may be trained are given for autograd."""
        batch, positions, num_heads, _ = q.shape
        out = q.new_empty((batch, positions, num_heads, up.num_rows // num_heads - core.nope_dim))
        lse = q.new_empty((batch, num_heads, positions), dtype=torch.float32)
        latents, keys = core.gathered(latent, k_rope)
        narrow, pieces = up.narrow(latents), (core.cp.pieces, core.cp.all_pieces)
        for heads, part in core.heads_of(num_heads, up.num_rows):
            sink, bias = _of_heads(heads, sinks, table)
            k, v = core.split(up.expanded(latents, narrow, part), heads, keys)
            out[:, :, heads], lse[:, heads] = attention_pieces(
                q[:, :, heads], k, v, starts, core.scale, core.window, *pieces, sink, classes, bias
            )
            del k, v
        ctx.save_for_backward(q, latent, k_rope, starts, sinks, classes, table, out, lse)
        ctx.core, ctx.up = core, up  # save the parameters themselves, whose storages FSDP2 gathers again
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, of the own tokens' latents and rotary keys, of sinks, of the relations' table and of parameters."""
        q, latent, k_rope, starts, sinks, classes, table, out, lse = ctx.saved_tensors
        core, up, num_heads = ctx.core, ctx.up, q.shape[2]
        grad_q, grad_sinks, grad_table = torch.empty_like(q), *(None if each is None else torch.empty_like(each) for each in (sinks, table))
        latents, keys = core.gathered(latent, k_rope)
        narrow, pieces = up.narrow(latents), (core.cp.pieces, core.cp.all_pieces)
        if up.scaling is None:
            sums: Gradients | ScaledGradients = Gradients(core.groups, up, latents, narrow, trains=any(ctx.needs_input_grad[9:]))
        else:
            sums = ScaledGradients(core.groups, up, latents)
        sum_of_keys = keys.new_zeros(keys.shape, dtype=torch.float32)
        for heads, part in core.heads_of(num_heads, up.num_rows):
            sink, bias = _of_heads(heads, sinks, table)
            made, sums_of_made = out[:, :, heads].contiguous(), lse[:, heads].contiguous()
            k, v = core.split(up.expanded(latents, narrow, part), heads, keys)
            given = gradient[:, :, heads], q[:, :, heads], k, v, starts, made, sums_of_made, core.scale, core.window
            found = [*attention_pieces_backward(*given, *pieces, sink, classes, bias)]
            del given, k, v, made, sums_of_made  # free before further gradients are allocated
            if grad_table is not None:
                grad_table[:, heads] = found.pop()
            if grad_sinks is not None:
                grad_sinks[heads] = found.pop()
            grad_v, grad_k = found.pop(), found.pop()
            grad_q[:, :, heads] = found.pop()
            grad_kv, grad_keys = mla_kv_backward(grad_k, grad_v, *_identity(keys), core.nope_dim)
            del grad_k, grad_v
            sum_of_keys += grad_keys
            sums.take(part, grad_kv.flatten(2))
            del grad_kv, grad_keys
        del latents, keys, narrow
        grad_rope = core.cp.reduce(sum_of_keys.to(k_rope.dtype))
        del sum_of_keys
        grad_latent, of_parameters = sums.finish(latent)
        return None, None, grad_q, grad_latent, grad_rope, None, grad_sinks, None, grad_table, *of_parameters
