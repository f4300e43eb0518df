"""Values that layers of a chunk pass on to later layers (`megaplan.blocks.payload`): what the stage holds of them, and of their gradients.

A value lives from its own layer, or from the receive buffer of which it is a view, to the last layer of the stage that reads it. Where its
own layer does not keep it, the stage holds it until the first reader keeps it, or until it is packed for the next stage. In backward the
gradients of a value are one sum, from its last reader to its own layer. The next stage's part of it is a view of a receive buffer, to which
autograd adds nothing in place: the last reader's gradient and the new sum exist together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from megaplan.blocks.payload import Boundary, Part, Payload
from megaplan.hosts.megarun.parts import Arriving


class HandedValue(NamedTuple):
    """A value in a chunk, by the places of units.

    Attributes:
        part: The value with its size.
        source: Unit that passes it on; −1 if it arrives with the stream.
        readers: Units that read it, rising.
        packed: True if the next stage receives it.
        dropped: True if its own layer does not keep it.
    """

    part: Part
    source: int
    readers: tuple[int, ...]
    packed: bool
    dropped: bool

    @property
    def waits(self) -> bool:
        """True if its own layer's operations begin with a gradient of it; a layer's input has its own anyway."""
        return self.source >= 0 and self.value.has_gradient and self.value.kept != "input"

    @property
    def value(self) -> Payload:
        """The value itself."""
        if self.part.value is None:
            raise ValueError("the stream is no value")
        return self.part.value

    @property
    def last_reader(self) -> int:
        """The last unit that reads it; −1 for none."""
        return self.readers[-1] if self.readers else -1

    def held_from(self, num_units: int) -> tuple[int, int]:
        """First and last unit whose forward begins while the stage holds it; the last is before the first for none."""
        until = self.readers[0] if self.readers else num_units - 1
        return (self.source + 1, until) if self.dropped and self.source >= 0 else (0, -1)

    @property
    def summed_over(self) -> tuple[int, int]:
        """First and last unit whose backward begins while the sum of its gradients exists outside the unit, in the same way."""
        return (max(0, self.source + self.waits), self.last_reader - 1) if self.value.has_gradient else (0, -1)

    @property
    def first_added(self) -> int:
        """The unit whose gradient is the first that is added to the part from the next stage; −1 for none."""
        if not self.packed or not self.value.has_gradient:
            return -1
        return self.last_reader if self.readers or self.waits else self.source


class Handed(NamedTuple):
    """The values of a chunk.

    Attributes:
        received: The boundary to the stage before.
        sent: The boundary to the next stage.
        values: The values.
    """

    received: Boundary
    sent: Boundary
    values: tuple[HandedValue, ...] = ()

    def arriving(self, index: int, *, output: bool) -> Arriving:
        """Gradients that are there when a unit's backward begins."""
        waiting = [each for each in self.values if each.source == index and each.waits and (each.readers or each.packed)]
        received = any(not each.readers for each in waiting)
        return Arriving(output, tuple([each.value.name for each in waiting]), received)

    def held_bytes(self, num_units: int) -> list[tuple[int, int]]:
        """Bytes that the stage holds as each unit's forward begins, and while it runs: without those that it takes."""
        spans = [(*each.held_from(num_units), each.part.own_bytes) for each in self.values]
        taken = [(stop, stop, -size) for each, (_, stop, size) in zip(self.values, spans, strict=True) if each.readers]
        begins = _sums(num_units, spans)
        return list(zip(begins, map(add, begins, _sums(num_units, taken)), strict=True))

    def summed_bytes(self, num_units: int) -> list[int]:
        """Bytes of sums of gradients that exist as each unit's backward begins."""
        return _sums(num_units, [(*each.summed_over, each.part.own_bytes) for each in self.values])

    def first_added_bytes(self, num_units: int) -> list[int]:
        """Bytes of sums that each unit's gradients begin with those of the next stage."""
        return _sums(num_units, [(each.first_added, each.first_added, each.part.own_bytes) for each in self.values])

    def received_bytes(self, num_units: int) -> list[int]:
        """Bytes of gradients in the receive buffer that each unit's own operations count."""
        own = [each for each in self.values if each.waits and each.packed and not each.readers]
        return _sums(num_units, [(each.source, each.source, each.part.own_bytes) for each in own])


def _sums(num_units: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """Sums by unit of sizes, each from a first to a last unit; those before the first unit are left out."""
    steps = [0] * (num_units + 1)
    for first, last, size in spans:
        if 0 <= first <= last:
            steps[first] += size
            steps[last + 1] -= size
    return list(accumulate(steps[:-1]))


def handed_values(
    parts: Sequence[tuple[Part, bool]], places: dict[int, int], span: tuple[int, int], *, ends: bool
) -> tuple[HandedValue, ...]:
    """The values that layers of a chunk pass on or read.

    Args:
        parts: The model's values with their sizes, each with True if its own layer does not keep it.
        places: Places of units by layer; of the last norm by the number of layers, if it is in the chunk.
        span: Layers of the chunk.
        ends: True if the chunk ends the model.
    """
    found = []
    for part, dropped in parts:
        value = part.value
        if value is None or value.source >= span[1] or value.readers[-1] < span[0]:
            continue
        readers = tuple([place for layer, place in places.items() if layer in value.readers])
        packed = not ends and value.crosses(span[1])
        if readers or packed:
            found.append(HandedValue(part, places.get(value.source, -1), readers, packed, dropped))
    return tuple(found)
