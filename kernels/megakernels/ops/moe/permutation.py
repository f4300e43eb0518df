"""Sorting (token, slot) pairs and received rows by expert, and moving rows between the orders."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import join, require
from megakernels._common.device import module_for
from megakernels.ops.moe import reference
from megakernels.ops.moe.facts import WHOLE


def dispatch_plan(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the (token, slot) pairs by expert, stably.

    Args:
        indices: int32 [N, k], each in [0, num_experts).
        num_experts: E.

    Returns:
        rows int32 [N·k], the flat index token·k + slot of each row, and counts int32 [E]; neither has a gradient.

    Triton:
        Two kernels, a counting sort.

    Raises:
        ValueError: indices are not int32 [N, k].
    """
    fits = indices.dim() == 2 and indices.dtype == torch.int32
    require(fits, "dispatch_plan", "indices must be int32 [N,k]", indices=indices.shape, dtype=indices.dtype)
    made: tuple[Tensor, Tensor] = _dispatch_plan(indices, num_experts)
    return made


def arrival_plan(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sorts rows received from several ranks by expert, stably: `dispatch` and `combine` with top_k 1 convert between the orders.

    Args:
        counts: int32 [R, E], rows that rank r sent to local expert e. They are received in that order: all of rank 0, by expert, then all
            of rank 1.
        num_rows: M, the sum of the counts, known on the host.

    Returns:
        rows int32 [M], the received index of each sorted row, and totals int32 [E]; neither has a gradient.

    Triton:
        Two kernels, a counting sort.

    Raises:
        ValueError: counts are not int32 [R, E].
    """
    fits = counts.dim() == 2 and counts.dtype == torch.int32
    require(fits, "arrival_plan", "counts must be int32 [R,E]", counts=counts.shape, dtype=counts.dtype)
    made: tuple[Tensor, Tensor] = _arrival_plan(counts, num_rows)
    return made


def capacity_plan(
    indices: Tensor, weights: Tensor, num_experts: int, capacity: int, *, by_score: bool, num_null: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of padded buffers, `capacity` for each expert: the (token, slot) pairs that it keeps, and empty ones after them.

    An expert keeps the pairs of the first tokens or, by score, those with the largest weights, of equal ones the first tokens'.

    Args:
        indices: int32 [N, k], each in [0, num_experts + num_null).
        weights: fp32 [N, k].
        num_experts: E.
        capacity: C.
        by_score: True if the smallest weights are dropped, false if the last tokens are.
        num_null: Choices after the experts, which have no buffer.

    Returns:
        places int32 [E·C], the flat index token·k + slot of each row and -1 for an empty one, and the counts of chosen pairs, dropped ones
        included, int32 [E + num_null]; neither has a gradient.

    Raises:
        ValueError: indices are not int32 [N, k], or weights not of that shape.

    Source: arXiv:2101.03961, section 2.2 (capacity; position), arXiv:2202.09368, section 3.2 (an expert's largest scores).
    """
    fits = indices.dim() == 2 and indices.dtype == torch.int32 and weights.shape == indices.shape
    require(fits, "capacity_plan", "indices must be int32 [N,k], weights [N,k]", indices=indices.shape, dtype=indices.dtype)
    made: tuple[Tensor, Tensor] = _capacity_plan(indices, weights.detach(), num_experts, capacity, by_score, num_null)
    return made


def dispatch(x: Tensor, rows: Tensor, top_k: int, *, partial: bool = False) -> Tensor:
    """Copies each token to the rows of its experts: row i is x[rows[i] // k].

    Args:
        x: [N, h].
        rows: int32 [N·k], a permutation.
        top_k: k.
        partial: True if rows are int32 [M], distinct indices below N·k, or -1 for a row of zeros.

    Returns:
        [N·k, h], or [M, h], contiguous, in x's dtype.

    Triton:
        Both ways one kernel, after one that inverts the permutation.

    Raises:
        ValueError: rows are not N·k.
    """
    fits = x.dim() == 2 and rows.dim() == 1 and (partial or rows.shape[0] == x.shape[0] * top_k)
    require(fits, "dispatch", "x must be [N,h], rows [N·k]", x=x.shape, rows=rows.shape, k=top_k)
    y: Tensor = _dispatch(x, rows, top_k, x.shape[0] if partial else WHOLE)
    return y


def combine(x: Tensor, rows: Tensor, top_k: int, num_tokens: int | None = None) -> Tensor:
    """Sums each token's k rows, in slot order and in fp32: the transpose of `dispatch`.

    Args:
        x: [N·k, h].
        rows: int32 [N·k], a permutation.
        top_k: k.
        num_tokens: N where rows are `partial`, as in `dispatch`; a pair without a row adds nothing.

    Returns:
        [N, h], contiguous, in x's dtype.

    Triton:
        As `dispatch`.

    Raises:
        ValueError: rows are not N·k.
    """
    fits = x.dim() == 2 and rows.shape == x.shape[:1] and (num_tokens is not None or rows.shape[0] % top_k == 0)
    require(fits, "combine", "x must be [N·k,h], rows [N·k]", x=x.shape, rows=rows.shape, k=top_k)
    y: Tensor = _combine(x, rows, top_k, WHOLE if num_tokens is None else num_tokens)
    return y


@custom_op("megakernels::dispatch_plan", mutates_args=())
def _dispatch_plan(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = module_for(indices, reference, "kernel_plan").sort_by_expert(indices.flatten(), num_experts)
    return result


@_dispatch_plan.register_fake
def _(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return indices.new_empty((indices.shape[0] * indices.shape[1],)), indices.new_empty((num_experts,))


@custom_op("megakernels::arrival_plan", mutates_args=())
def _arrival_plan(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    owners = reference.owners(counts, num_rows)
    result: tuple[Tensor, Tensor] = module_for(counts, reference, "kernel_plan").sort_by_expert(owners, counts.shape[1])
    return result


@_arrival_plan.register_fake
def _(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return counts.new_empty((num_rows,)), counts.new_empty((counts.shape[1],))


@custom_op("megakernels::capacity_plan", mutates_args=())
def _capacity_plan(
    indices: Tensor, weights: Tensor, num_experts: int, capacity: int, by_score: bool, num_null: int
) -> tuple[Tensor, Tensor]:
    return reference.places_of(indices.flatten(), weights.flatten() if by_score else None, num_experts, capacity, num_null)


@_capacity_plan.register_fake
def _(indices: Tensor, weights: Tensor, num_experts: int, capacity: int, by_score: bool, num_null: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return indices.new_empty((num_experts * capacity,)), indices.new_empty((num_experts + num_null,))


@custom_op("megakernels::dispatch", mutates_args=())
def _dispatch(x: Tensor, rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    return _gather_rows(x, rows, top_k, num_tokens)


@custom_op("megakernels::dispatch_backward", mutates_args=())
def _dispatch_backward(grad_y: Tensor, rows: Tensor, top_k: int, num_tokens: int, needs: list[bool]) -> list[Tensor]:
    return [_sum_rows(grad_y, rows, top_k, num_tokens)] if needs[0] else []


@custom_op("megakernels::combine", mutates_args=())
def _combine(x: Tensor, rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    return _sum_rows(x, rows, top_k, num_tokens)


@custom_op("megakernels::combine_backward", mutates_args=())
def _combine_backward(grad_y: Tensor, rows: Tensor, top_k: int, num_tokens: int, needs: list[bool]) -> list[Tensor]:
    return [_gather_rows(grad_y, rows, top_k, num_tokens)] if needs[0] else []


def _gather_rows(x: Tensor, rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    result: Tensor = module_for(x, reference, "kernel_plan").gather_rows(x, rows, top_k, num_tokens)
    return result


def _sum_rows(x: Tensor, rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    result: Tensor = module_for(x, reference, "kernel_plan").sum_rows(x, rows, top_k, num_tokens)
    return result


def _fake_gather(x: Tensor, rows: Tensor, _top_k: int, _num_tokens: int) -> Tensor:
    return x.new_empty((rows.shape[0], x.shape[1]))


def _fake_sum(x: Tensor, _rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    return x.new_empty((x.shape[0] // top_k if num_tokens == WHOLE else num_tokens, x.shape[1]))


def _listed(fake: Any) -> Any:
    return lambda grad_y, rows, top_k, num_tokens, needs: [fake(grad_y, rows, top_k, num_tokens)] if needs[0] else []


_dispatch.register_fake(_fake_gather)
_dispatch_backward.register_fake(_listed(_fake_sum))
_combine.register_fake(_fake_sum)
_combine_backward.register_fake(_listed(_fake_gather))
join(_dispatch, _dispatch_backward, outputs=("y",), gradients=("x",))
join(_combine, _combine_backward, outputs=("y",), gradients=("x",))
