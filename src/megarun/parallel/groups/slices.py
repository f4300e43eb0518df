"""Expert tensor parallelism: rows that the ranks of an ETP group gather, and their sums over the slices of an expert.

Ranks have different numbers of rows. Each broadcasts its own into the others' buffer. For the sum each rank sends the others their rows,
and adds received rows in the order of the ranks, in fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarun.parallel.groups.tensor import TensorParallel


def gathered_rows(slices: TensorParallel, counts: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of all ranks of the group, by rank: [counts[index], ...] each -> [Σ counts, ...]."""
    if slices.degree == 1:
        return rows
    results: tuple[Tensor, ...] = _GatherSlices.apply(slices, counts, *rows)  # type: ignore[no-untyped-call]
    return results


def summed_rows(slices: TensorParallel, counts: Sequence[int], rows: Tensor) -> Tensor:
    """The sum over the group of this rank's rows: [Σ counts, ...] -> [counts[index], ...]."""
    if slices.degree == 1:
        return rows
    result: Tensor = _SumSlices.apply(slices, counts, rows)  # type: ignore[no-untyped-call]
    return result


def sliced_bias(slices: TensorParallel, bias: Tensor | None) -> Tensor | None:
    """A bias of the sum over all slices, which only the first slice adds; every slice has all rows, so each computes its full gradient."""
    if slices.degree == 1 or bias is None:
        return bias
    result: Tensor = _FirstSlice.apply(slices.index == 0, bias)  # type: ignore[no-untyped-call]
    return result


class _GatherSlices(torch.autograd.Function):
    """A gather of rows whose gradients are summed; saves nothing."""

    @staticmethod
    def forward(ctx: Any, slices: TensorParallel, counts: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        """[counts[index], ...] each -> [Σ counts, ...]."""
        ctx.slices, ctx.counts = slices, counts
        return tuple(_gathered(slices, counts, own) for own in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of own rows; rows received for one sum are freed before the next."""
        own = [_own_rows(ctx.slices, ctx.counts, gradient) for gradient in gradients]
        for sums, gradient in zip(own, gradients, strict=True):
            _sum_into(sums, ctx.slices, ctx.counts, gradient)
        return None, None, *own


class _SumSlices(torch.autograd.Function):
    """A sum of rows whose gradients are gathered; saves nothing."""

    @staticmethod
    def forward(ctx: Any, slices: TensorParallel, counts: Sequence[int], rows: Tensor) -> Tensor:
        """[Σ counts, ...] -> [counts[index], ...]."""
        ctx.slices, ctx.counts = slices, counts
        own = _own_rows(slices, counts, rows)
        _sum_into(own, slices, counts, rows)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        """Gradients of all rows."""
        return None, None, _gathered(ctx.slices, ctx.counts, gradient)


class _FirstSlice(torch.autograd.Function):
    """A bias on the first slice, zeros on the others; the gradient is the bias's on every slice."""

    @staticmethod
    def forward(ctx: Any, is_first: bool, bias: Tensor) -> Tensor:  # noqa: ARG004  nothing is saved
        """The same shape."""
        return bias.clone() if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        """The gradient as it is."""
        return None, gradient


def _own_rows(slices: TensorParallel, counts: Sequence[int], rows: Tensor) -> Tensor:
    return rows.new_empty((counts[slices.index], *rows.shape[1:]))


def _gathered(slices: TensorParallel, counts: Sequence[int], own: Tensor) -> Tensor:
    whole = own.new_empty((sum(counts), *own.shape[1:]))
    parts: tuple[Tensor, ...] = torch.split(whole, list(counts))
    parts[slices.index].copy_(own)
    works: list[dist.Work] = [
        dist.broadcast(part, group=slices.group, group_src=rank, async_op=True) for rank, part in enumerate(parts) if part.shape[0] > 0
    ]
    for work in works:
        work.wait()
    return whole


def _sum_into(own: Tensor, slices: TensorParallel, counts: Sequence[int], rows: Tensor) -> None:
    arrived = own.new_empty((slices.degree, *own.shape))
    each = [own.shape[0]] * slices.degree
    dist.all_to_all_single(arrived.flatten(0, 1), rows.contiguous(), each, list(counts), group=slices.group)
    torch.sum(arrived, 0, out=own)
