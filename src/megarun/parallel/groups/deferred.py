"""Weight-gradient products that the backward of a linear can defer, for schedules that split the backward.

The op that multiplies by a weight calls `leave_pending`; the pipeline stage that runs the first half of a split backward provides the store
(`megarun.parallel.apply.weight_gradients`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

Fetch = Callable[[Tensor], Tensor]
Products = Callable[[Tensor, Sequence[Tensor]], Iterator[Tensor]]
"""Makes the gradients of weights from the rows that all multiply and the gradients of their outputs."""


def product(rows: Tensor, gradient: Tensor) -> Tensor:
    """gradientᵀ · rows over all dims but the last: [..., in] and [..., out] -> [out, in]."""
    return gradient.flatten(0, -2).mT @ rows.flatten(0, -2)


def products(rows: Tensor, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """`product` of each gradient, when it is asked for."""
    for gradient in gradients:
        yield product(rows, gradient)


class ProductStore(Protocol):
    """Stores deferred products."""

    def add(self, weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor], fetch: Fetch | None, made: Products) -> None:
        """Defer the products of one input, see `leave_pending`."""
        ...


_stores: list[ProductStore] = []
"""The store of the running backward if it is the first half of a split one; also visible to autograd's device threads."""


@contextmanager
def deferring_to(store: ProductStore) -> Iterator[None]:
    """Context in which a backward defers its products to `store`."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


def leave_pending(
    weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor], fetch: Fetch | None = None, made: Products = products
) -> bool:
    """Defer products if the running backward is the first half of a split one.

    Args:
        weights: Gathered parameters, [out, in] each.
        rows: Saved rows of their common input.
        gradients: Gradients of their outputs, [..., out] each.
        fetch: Function that computes the input, [..., in], from `rows`; None if `rows` is the input.
        made: Function that makes the weights' gradients.

    Returns:
        Whether the products were deferred; if not, the caller computes them.
    """
    if _stores:
        _stores[-1].add(weights, rows, gradients, fetch, made)
    return bool(_stores)
