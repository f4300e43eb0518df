"""Time of one microbatch on one rank: forward (F), gradients of the inputs (I) and of the weights (W), in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of one layer, or of one end of the model, for one microbatch on one rank.

    Attributes:
        forward_ns: F.
        input_ns: I: everything that a split backward computes before it sends its gradient on, recompute included.
        weight_ns: W: the weight gradients that a split backward leaves for later, those of linears.
    """

    forward_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0

    @property
    def backward_ns(self) -> int:
        """A whole backward, B = I + W."""
        return self.input_ns + self.weight_ns

    @property
    def total_ns(self) -> int:
        """F + I + W."""
        return self.forward_ns + self.input_ns + self.weight_ns

    def __add__(self, other: LayerTime) -> LayerTime:
        return LayerTime(self.forward_ns + other.forward_ns, self.input_ns + other.input_ns, self.weight_ns + other.weight_ns)


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Times of a whole model.

    Attributes:
        layers: One per layer, in model order.
        first: Added to the first slot: token and side embeddings.
        last: Added to the last slot: final norm, head and loss, and every MTP depth.
        boundary_ns: One microbatch's residual stream, sent from one pipeline rank to the next over the slowest of these links; 0 at pp 1.
    """

    layers: tuple[LayerTime, ...]
    first: LayerTime
    last: LayerTime
    boundary_ns: int = 0

    def of_slots(self, spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
        """Time of each slot, the ends included; `spans` are half-open and in model order."""
        times = [sum(self.layers[start:stop], start=LayerTime()) for start, stop in spans]
        times[0] += self.first
        times[-1] += self.last
        return tuple(times)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What a costs file holds.

    Attributes:
        times: Of each layer and of both ends.
        static_bytes: Of each layer, what stays on its rank for the whole step; None where the file leaves it to the budget.
        activation_bytes: Of each layer, what one microbatch in flight keeps; None where the file leaves it to the budget.
    """

    times: ModelTimes
    static_bytes: tuple[int | None, ...]
    activation_bytes: tuple[int | None, ...]
