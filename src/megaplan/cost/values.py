"""Times of layers, of the ends of a model, and of slots; the contents of a costs file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaplan.schedules import Legs
from megaplan.schedules.turns import exchanged, joined


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of one layer, or of one end of the model, for one microbatch on one rank.

    Attributes:
        forward_ns: F.
        input_ns: I: everything that a split backward computes before it sends its gradient on, recompute included.
        weight_ns: W: the weight gradients that a split backward leaves for later, those of linears.
        forward_launches: Kernels that the host launches in F; 0 where launches are not counted.
        backward_launches: The same of I and W.
        forward_legs: Exchanges of rows in F, at which the microbatches of a pair take turns; empty if they do not.
        backward_legs: The same in a whole backward.
    """

    forward_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0
    forward_launches: int = 0
    backward_launches: int = 0
    forward_legs: Legs = ()
    backward_legs: Legs = ()

    @property
    def backward_ns(self) -> int:
        """A whole backward, B = I + W."""
        return self.input_ns + self.weight_ns

    @property
    def total_ns(self) -> int:
        """F + I + W."""
        return self.forward_ns + self.input_ns + self.weight_ns

    @property
    def compute_ns(self) -> int:
        """All without the exchanges that the other microbatch of a pair may hide."""
        return self.total_ns - self.forward_exchange_ns - self.input_exchange_ns

    @property
    def forward_exchange_ns(self) -> int:
        """Those of F."""
        return exchanged(self.forward_legs)

    @property
    def input_exchange_ns(self) -> int:
        """Those of I."""
        return exchanged(self.backward_legs)

    @property
    def forward_compute_ns(self) -> int:
        """F without them."""
        return self.forward_ns - self.forward_exchange_ns

    @property
    def input_compute_ns(self) -> int:
        """I without them."""
        return self.input_ns - self.input_exchange_ns

    def __add__(self, other: LayerTime) -> LayerTime:
        """Both, the other behind this one in the model."""
        return LayerTime(
            self.forward_ns + other.forward_ns,
            self.input_ns + other.input_ns,
            self.weight_ns + other.weight_ns,
            self.forward_launches + other.forward_launches,
            self.backward_launches + other.backward_launches,
            joined(self.forward_legs, self.forward_ns, other.forward_legs) if other.forward_legs else self.forward_legs,
            joined(other.backward_legs, other.backward_ns, self.backward_legs) if self.backward_legs else other.backward_legs,
        )


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Times of a whole model.

    Attributes:
        layers: One per layer, in model order.
        first: Added to the first slot: token and side embeddings, a stated encoder with its projection.
        last: Added to the last slot: final norm, head and loss, and every MTP depth.
        boundary_ns: One microbatch's residual stream, sent from one pipeline rank to the next over the slowest of these links; 0 at pp 1.
        issue_ns: Host time of a launch; 0 where launches are not counted.
    """

    layers: tuple[LayerTime, ...]
    first: LayerTime
    last: LayerTime
    boundary_ns: int = 0
    issue_ns: int = 0

    @property
    def in_turns(self) -> bool:
        """True if the microbatches of a pair take turns."""
        return any(layer.forward_legs for layer in self.layers)

    def of_slots(self, spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
        """Time of each slot, the ends included; `spans` are half-open and in model order."""
        times = [sum(self.layers[start:stop], start=LayerTime()) for start, stop in spans]
        times[0] = self.first + times[0]
        times[-1] += self.last
        return tuple(times)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Memory of one layer or end on its rank.

    Attributes:
        static_bytes: Bytes that stay for the whole step; None if a costs file leaves it to the budget.
        activation_bytes: Bytes that one microbatch in flight keeps; None if a costs file leaves it to the budget.
    """

    static_bytes: int | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Contents of a costs file.

    Attributes:
        times: Times of each layer and of both ends.
        digest: `sha256:` and the hex digest of the file's values; spaces and the order of keys do not count.
        static_bytes: Bytes of each layer, as `StoredBytes.static_bytes`.
        activation_bytes: Bytes of each layer, as `StoredBytes.activation_bytes`.
        first: Memory of what `times.first` stands for.
        last: Memory of what `times.last` stands for.
    """

    times: ModelTimes
    digest: str
    static_bytes: tuple[int | None, ...]
    activation_bytes: tuple[int | None, ...]
    first: StoredBytes = StoredBytes()
    last: StoredBytes = StoredBytes()
