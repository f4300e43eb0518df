"""Changes that a case makes in the runtime: initial values of adapters, and the experts that a router may choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megaplan.inventory.tensors import Init
from megarun.engine import initialise as filling
from megarun.model import moe


@contextmanager
def adapters_started() -> Iterator[None]:
    """Fill B of adapters with numbers too: A has no gradient as long as B is zero."""
    fill = filling.fill

    def started(tensor: Any, name: str, *rest: Any) -> torch.Tensor:
        return fill(tensor._replace(init=Init.CONV) if name.endswith(".lora_b") else tensor, name, *rest)

    with mock.patch.object(filling, "fill", started):
        yield


@contextmanager
def experts_chosen(among: tuple[int, int] | None) -> Iterator[None]:
    """Let every block choose among few experts, half-open: routing that a router finds seldom. None leaves the choice to the router.

    Weights stay the router's. Two slots of a token may meet in one expert, which then has the token twice.
    """
    if among is None:
        yield
        return
    first, stop = among
    route = moe.route

    def route_among(*inputs: Any, **choice: Any) -> tuple[torch.Tensor, ...]:
        weights, indices, probs = route(*inputs, **choice)
        return weights, indices % (stop - first) + first, probs

    moe.route = route_among
    try:
        yield
    finally:
        moe.route = route
