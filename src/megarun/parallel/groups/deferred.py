"""Weight-gradient products that the backward of a linear may leave to a store, for schedules that split the backward.

The op that multiplies by a weight calls `leave_pending`; the pipeline stage that runs the first half of a split backward gives the store
(`megarun.parallel.apply.weight_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class ProductStore(Protocol):
    """Keeps products for later."""

    def add(
        self, weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor], fetch: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Leave out the products of one input, see `leave_pending`."""
        ...


_stores: list[ProductStore] = []
"""The store of the backward that runs now, if it is the first half of a split one; autograd's device threads see it too."""


@contextmanager
def deferring_to(store: ProductStore) -> Iterator[None]:
    """Leave the products of the backward that runs meanwhile to `store`."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


def product(rows: Tensor, gradient: Tensor) -> Tensor:
    """gradientᵀ · rows over all dims but the last: [..., in] and [..., out] -> [out, in]."""
    return gradient.flatten(0, -2).mT @ rows.flatten(0, -2)


def leave_pending(
    weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor], fetch: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Leave products pending if the backward that runs is the first half of a split one.

    Args:
        weights: Gathered parameters themselves, [out, in] each.
        rows: What is kept of the input that they share.
        gradients: Of their outputs, [..., out] each.
        fetch: Makes the input, [..., in], from `rows`; None where that is the input.

    Returns:
        Whether they were left out; if not, the caller computes them.
    """
    if _stores:
        _stores[-1].add(weights, rows, gradients, fetch)
    return bool(_stores)
