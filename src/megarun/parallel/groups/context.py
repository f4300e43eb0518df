"""Context parallelism: every sequence is sharded over the ranks of a group, two pieces per rank.

A sequence of T positions is 2 · cp equal pieces, and rank i of cp has the concatenated pieces i and 2 · cp − 1 − i: an early piece, which
attends to few keys, and a late one, which attends to many, so causal attention is balanced over the ranks. All families use the same
slicing (docs/decisions/0003), so the residual stream is never moved between blocks.

- Norms, projections, MLPs, experts, embedding, head and loss are per token and need nothing.
- Rotary angles and document starts are for the rank's local positions.
- Attention gathers keys and values of all ranks, and again in backward; only the rank's local part is saved.

Parameters are replicated over the group: their gradients are summed over it once per step. Expert banks are sharded over it
(R-31), and FSDP2 sums their gradients.

Source: zig-zag pieces as in arXiv:2407.21783, section 3.3.2, which gathers keys and values too.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megakernels import attention, attention_pieces, attention_pieces_backward
from megarun.parallel.groups.continued import Continued
from megarun.parallel.groups.mesh import RankMesh


class KeyScores(Protocol):
    """Bias that attention adds to scores by the class of the key (`megarun.model.relation.Relations`)."""

    @property
    def classes(self) -> Tensor:
        """int32 [B, T], of all positions of the sequence, in its order."""
        ...

    def table(self) -> Tensor:
        """[classes, heads]."""
        ...


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The CP group of a rank.

    Attributes:
        degree: Number of ranks in the group.
        index: Rank within the group.
        group: Process group; None if the degree is one.
        gathers_latents: True if latent attention gathers latents (`mesh.context_exchange`).
        continued: Earlier positions of a block whose text grows; None in training.
    """

    degree: int
    index: int
    group: dist.ProcessGroup | None
    gathers_latents: bool = False
    continued: Continued | None = None

    @property
    def pieces(self) -> tuple[int, ...]:
        """Numbers of this rank's pieces, in local order."""
        return _pieces(self.index, self.degree)

    @property
    def all_pieces(self) -> tuple[int, ...]:
        """Numbers of the pieces of all ranks, rank by rank: the order of gathered tensors."""
        return tuple(piece for index in range(self.degree) for piece in _pieces(index, self.degree))

    def positions(self, seq_length: int) -> Tensor:
        """Positions in the sequence of this rank's tokens, int64 [T / cp]."""
        return own_positions(self.index, self.degree, seq_length)

    def own_starts(self, starts: Tensor) -> Tensor:
        """Document starts of local tokens.

        Args:
            starts: int32 [B, T], first position of each position's document.

        Returns:
            int32 [B, T / cp], contiguous, each relative to the first position of its piece: negative if the document starts before the
            piece. All operations on pieces use this convention.
        """
        if self.degree == 1:
            return starts
        own = self.positions(starts.shape[1]).to(starts.device)
        length = starts.shape[1] // (2 * self.degree)
        return (starts[:, own] - own // length * length).to(torch.int32)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        starts: Tensor | None,
        sinks: Tensor | None = None,
        relations: KeyScores | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """`megakernels.attention` over the whole sequence, for local queries and local keys [B, T / cp, ...]."""
        if self.continued is not None:
            return self.continued.attention(q, k, v, scale, window, sinks, cap)
        classes, table = (None, None) if relations is None else (relations.classes, relations.table())
        if self.degree == 1:
            return attention(q, k, v, scale, window, starts, sinks, classes, table, cap)
        out: Tensor = _GatheredAttention.apply(self, q, k, v, (scale, window, cap), starts, sinks, classes, table)  # type: ignore[no-untyped-call]
        return out

    def gather(self, own: Tensor) -> Tensor:
        """Local tokens [B, T / cp, ...] -> all, in the order of `all_pieces`; one collective per sequence, without an extra copy."""
        whole = own.new_empty((own.shape[0], own.shape[1] * self.degree, *own.shape[2:]))
        pairs = zip(whole.unbind(), own.contiguous().unbind(), strict=True)
        _wait([self._members._allgather_base(row, part) for row, part in pairs])
        return whole

    def reduce(self, partial: Tensor) -> Tensor:
        """Partial results of all tokens, ordered as gathered, -> their sum for local tokens [B, T / cp, ...]."""
        own = partial.new_empty((partial.shape[0], partial.shape[1] // self.degree, *partial.shape[2:]))
        pairs = zip(own.unbind(), partial.unbind(), strict=True)
        _wait([self._members._reduce_scatter_base(part, row) for part, row in pairs])
        return own

    def start_sum(self, value: Tensor) -> dist.Work:
        """Start to sum `value` in place over the group."""
        work: dist.Work = dist.all_reduce(value, group=self._members, async_op=True)
        return work

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed in place over the group."""
        if self.degree > 1:
            dist.all_reduce(value, group=self._members)
        return value

    @property
    def _members(self) -> Any:
        if self.group is None:
            raise RuntimeError("a CP group of one rank has no process group")
        return self.group


WHOLE = ContextParallel(1, 0, None)
"""No context parallelism."""


def context_parallel(mesh: RankMesh, *, gathers_latents: bool = False) -> ContextParallel:
    """This rank's CP group."""
    degree = mesh.size("cp")
    return ContextParallel(degree, mesh.coordinate["cp"], mesh.axes["cp"].get_group(), gathers_latents) if degree > 1 else WHOLE


def own_positions(index: int, degree: int, seq_length: int) -> Tensor:
    """Positions of rank `index` of `degree` in a sequence, int64 [T / degree]; all of them, in order, on a degree of one."""
    if degree == 1:
        return torch.arange(seq_length)
    length = seq_length // (2 * degree)
    return torch.cat([torch.arange(piece * length, (piece + 1) * length) for piece in _pieces(index, degree)])


def _pieces(index: int, degree: int) -> tuple[int, ...]:
    return (0,) if degree == 1 else (index, 2 * degree - 1 - index)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class _GatheredAttention(torch.autograd.Function):
    """Attention of local queries to the keys of all ranks; it saves the same tensors as the op on full sequences, for local tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: tuple[float, int | None, float | None],
        starts: Tensor | None,
        sinks: Tensor | None,
        classes: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        """[B, T / cp, Hq, D], [B, T / cp, Hkv, D], [B, T / cp, Hkv, Dv] -> [B, T / cp, Hq, Dv]."""
        scale, window, cap = numbers
        given = scale, window, cp.pieces, cp.all_pieces, sinks, classes, table, cap
        out, lse = attention_pieces(q, cp.gather(k), cp.gather(v), starts, *given)
        ctx.save_for_backward(q, k, v, starts, sinks, classes, table, out, lse)
        ctx.cp, ctx.numbers = cp, numbers
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local queries, keys and values, and the parts of the sinks' and the table's that local queries make."""
        q, k, v, starts, sinks, classes, table, out, lse = ctx.saved_tensors
        cp, (scale, window, cap) = ctx.cp, ctx.numbers
        keys, values = cp.gather(k), cp.gather(v)
        pieces = cp.pieces, cp.all_pieces
        given = q, keys, values, starts, out, lse, scale, window, *pieces, sinks, classes, table, cap
        grad_q, *partial = attention_pieces_backward(gradient, *given)
        del keys, values, given  # free before the gradients of local keys and values are allocated
        grad_table = None if table is None else partial.pop()
        grad_sinks = None if sinks is None else partial.pop()
        grad_v = cp.reduce(partial.pop())
        grad_k = cp.reduce(partial.pop())
        return None, grad_q, grad_k, grad_v, None, None, grad_sinks, None, grad_table
