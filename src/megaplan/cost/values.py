"""Times of layers, of the ends of a model, and of slots; the contents of a costs file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megaplan.schedules import Course, Leg, Legs, SlotTimes
from megaplan.schedules.turns import exchanged, joined

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of one layer, or of one end of the model, for one microbatch on one rank.

    Attributes:
        forward_ns: F.
        input_ns: I: the part of a split backward before it sends its gradient, recompute included.
        weight_ns: W: the deferred weight gradients of linears in a split backward.
        forward_launches: Kernels that the host launches in F; 0 where launches are not counted.
        backward_launches: The same of I and W.
        forward_legs: Exchanges of rows in F, at which the microbatches of a pair take turns; empty if they do not.
        backward_legs: The same in a backward that is not split.
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
        """F, I and W without the exchanges that the other microbatch of a pair may hide."""
        return self.total_ns - self.forward_exchange_ns - self.input_exchange_ns

    @property
    def forward_exchange_ns(self) -> int:
        """Exchanges of F that the other microbatch may hide."""
        return exchanged(self.forward_legs) if self.forward_legs else 0

    @property
    def input_exchange_ns(self) -> int:
        """Exchanges of I that the other microbatch may hide."""
        return exchanged(self.backward_legs) if self.backward_legs else 0

    @property
    def forward_compute_ns(self) -> int:
        """F without exchanges."""
        return self.forward_ns - self.forward_exchange_ns

    @property
    def input_compute_ns(self) -> int:
        """I without exchanges."""
        return self.input_ns - self.input_exchange_ns

    def __add__(self, other: "LayerTime") -> "LayerTime":
        """The sum of both; `other` comes after this one in the model."""
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
        boundaries_ns: One microbatch's stream, sent from one pipeline rank to the next over the slowest of these links, with the values
            that the boundary before each layer from the second on carries; one number if all are equal, 0 at pp 1.
        issue_ns: Host time of a launch; 0 where launches are not counted.
    """

    layers: tuple[LayerTime, ...]
    first: LayerTime
    last: LayerTime
    boundaries_ns: tuple[int, ...] = (0,)
    issue_ns: int = 0

    @property
    def boundary_ns(self) -> int:
        """Time of the narrowest boundary."""
        return min(self.boundaries_ns)

    def widest_ns(self, cuts: Iterable[int]) -> int:
        """Time of the widest of these boundaries; schedules use it for all."""
        times = self.boundaries_ns
        return times[0] if len(times) == 1 else max([times[cut - 1] for cut in cuts])

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


def of_own_slots(times: Sequence[ModelTimes], spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
    """Time of each slot by the times of its own device; one model's times for each slot."""
    return tuple(of_slots[slot] for slot, of_slots in enumerate(once_a_device(times, lambda each: each.of_slots(spans))))


def once_a_device(times: Sequence[ModelTimes], make: Callable[[ModelTimes], Made]) -> list[Made]:
    """The results of a function for the times of each slot.

    It is called once per device, because slots on the same device share their times.
    """
    made = {key: make(each) for key, each in {id(each): each for each in times}.items()}
    return [made[id(each)] for each in times]


def fastest(times: Sequence[ModelTimes]) -> ModelTimes:
    """The shortest time of every part of the model over the slots."""
    if len(set(map(id, times))) == 1:
        return times[0]
    layers = tuple(map(_least, zip(*(each.layers for each in times), strict=True)))
    return ModelTimes(layers, _least([each.first for each in times]), _least([each.last for each in times]), times[0].boundaries_ns)


def _least(times: Sequence[LayerTime]) -> LayerTime:
    forward, inputs = (min([getattr(each, f"{part}_exchange_ns") for each in times]) for part in ("forward", "input"))
    return LayerTime(
        min(each.forward_compute_ns for each in times) + forward,
        min(each.input_compute_ns for each in times) + inputs,
        min(each.weight_ns for each in times),
        forward_legs=(Leg(0, forward),) if forward else (),
        backward_legs=(Leg(0, inputs),) if inputs else (),
    )


def replayed(times: Sequence[ModelTimes], spans: Sequence[tuple[int, int]], copies: int = 1) -> SlotTimes:
    """F, I and W of the slots of all copies of a model for a replay, and the legs of their pairs if these take turns."""
    slots = of_own_slots(times, spans)
    forward, inputs, weight = (tuple([getattr(each, part) for each in slots]) for part in ("forward_ns", "input_ns", "weight_ns"))
    courses: tuple[tuple[Course, Course], ...] = ()
    if any(slot.forward_legs for slot in slots):
        courses = tuple([_courses(slot, each.issue_ns) for slot, each in zip(slots, times, strict=True)])
    return SlotTimes(forward * copies, inputs * copies, weight * copies, courses=courses * copies)


def _courses(slot: LayerTime, issue_ns: int) -> tuple[Course, Course]:
    """A forward and a backward of a slot, without the time for which the device waits for the host."""
    forward, backward = slot.forward_ns, slot.backward_ns
    return (
        Course(slot.forward_legs, forward, min(forward, slot.forward_launches * issue_ns)),
        Course(slot.backward_legs, backward, min(backward, slot.backward_launches * issue_ns)),
    )


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
        first: Memory of the part that `times.first` times.
        last: Memory of the part that `times.last` times.
    """

    times: ModelTimes
    digest: str
    static_bytes: tuple[int | None, ...]
    activation_bytes: tuple[int | None, ...]
    first: StoredBytes = StoredBytes()
    last: StoredBytes = StoredBytes()
