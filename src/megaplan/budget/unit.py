"""A block as a step of a chunk, a point of one microbatch on it, and the values that blocks pass to later ones.

A value (`megaplan.blocks.payload`) lives from its own layer, or from the receive buffer of which it is a view, to the last layer of the
stage that reads it. If its own layer does not keep it, the stage holds it until the first reader keeps it, or until it is packed for the
next stage. In backward the gradients of a value are added to one sum, from its last reader to its own layer. The next stage's part of the
sum is a view of a receive buffer, to which autograd does not add in place: the last reader's gradient and the new sum exist at the same
time.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from megaplan.blocks.ops import GIVEN, SHARED
from megaplan.blocks.payload import Payload
from megaplan.budget.values import ACTIVATIONS
from megaplan.columns import Column
from megaplan.families.attention_residuals import CAST_INPUT
from megaplan.hosts.megarun.halves import HalvedBytes
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.hosts.megarun.parts import Arriving, BlockBytes
from megaplan.hosts.megarun.sizes import NOTHING, GroupBytes
from megaplan.hosts.megarun.storage import BlockStorage
from megaplan.spec.local import Part
from megaplan.tuples import new


class SplitUnit(NamedTuple):
    """A layer under a split backward.

    Attributes:
        halves: Sums of both halves.
        input_half: The layer with its input half instead of its backward, and the gradients that this half makes.
        late_bytes: Whole gradients that the weight half makes, in `precision.grads`.
    """

    halves: HalvedBytes
    input_half: "Unit"
    late_bytes: int


class Unit(NamedTuple):
    """A block as one step of a chunk; equal layers share one.

    Attributes:
        block: Sums of its ledger.
        storage: FSDP2's storage of its parameters; None if another unit or a copy on the slot (a tied head) has them.
        layer: True if it is a layer or a prediction depth, with its own groups; all other blocks are in the slot's group.
        input_bytes: Input of the block, if it keeps it and the chunk owns it.
        kept_bytes: Bytes that it keeps in all columns, its input included.
        forward_bytes: Allocated bytes at the peak of its forward, its input included; the same for the next two.
        backward_bytes: Allocated bytes at the peak of its backward.
        accumulating_bytes: Allocated bytes at the peak of a backward that adds gradients in place.
        opens: Group that begins with this layer: gathered before its forward, reduced and freed after its backward; empty for other layers
            of a group and for units of the slot's group, like the next two.
        closes: Group that ends with this layer: freed after its forward, gathered before its backward.
        bank: The group of a layer's experts.
        unsharded_bytes: Whole gradients of a layer; 0 for a unit of the slot's group.
        slack_bytes: Bytes that the allocator's rounding adds to the kept tensors.
        elsewhere: Kept bytes in columns other than activations.
        has_experts: True if it is a layer with experts, which have their own group.
        passing_bytes: Input of the block, if the chunk owns it and the block does not keep it: it is allocated until the block's forward
            has ended.
        last_own: The layer's tensor that FSDP2 lists after its children's tensors; "" if there is none.
        shared: Parameters of other blocks whose gradients the first prediction depth passes on.
        split: The two halves of a layer with a split backward.
        given_bytes: Gradients that it makes for values of earlier blocks, without its input's.
        segments: Segments of the tape (`megaplan.budget.tape`), by action and settings.
        followers: Further layers of the group that it opens, in order.
    """

    block: BlockBytes
    storage: BlockStorage | None
    layer: bool
    input_bytes: int
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    accumulating_bytes: int
    opens: GroupBytes
    closes: GroupBytes
    bank: GroupBytes
    unsharded_bytes: int
    slack_bytes: int
    elsewhere: tuple[tuple[Column, int], ...]
    has_experts: bool
    passing_bytes: int
    last_own: str
    shared: tuple[str, ...]
    split: SplitUnit | None
    given_bytes: int
    segments: dict[Hashable, Any]
    followers: "tuple[Unit, ...]"

    @property
    def waits(self) -> bool:
        """True for a layer in a group of several, whose gradients are taken after the first one's backward."""
        return self.joins or self.opens is not self.closes

    @property
    def joins(self) -> bool:
        """True for a layer in the group of an earlier layer."""
        return self.layer and self.opens is NOTHING


def adds_nothing(unit: Unit) -> bool:
    """True if a unit shares its norm, so that its output gradient is also its input gradient."""
    return SHARED in unit.block.part.tensors and CAST_INPUT not in unit.block.part.tensors


NO_GROUPS = (NOTHING, NOTHING, 0)


def make_unit(
    block: BlockBytes,
    storage: BlockStorage | None,
    layer: bool,
    owned_input_bytes: int,
    last_own: str = "",
    has_experts: bool = False,
    shared: tuple[str, ...] = (),
) -> Unit:
    """A unit; `owned_input_bytes` is its input, if the chunk owns that."""
    dense, bank, unsharded = (storage.dense, storage.experts, storage.both.unsharded_bytes) if layer and storage is not None else NO_GROUPS
    kept_input, tensors = owned_input_bytes if block.keeps_input else 0, block.part.tensors
    passing = 0 if block.part.replay.counts_input else owned_input_bytes - kept_input
    return new(
        Unit,
        (
            block,
            storage,
            layer,
            kept_input,
            block.saved_bytes + kept_input,
            block.forward_bytes + kept_input + passing,
            block.backward_bytes + kept_input,
            block.accumulating_bytes + kept_input,
            dense,
            dense,
            bank,
            unsharded,
            block.saved_slack_bytes,
            tuple([item for item in block.saved.items() if item[0] is not ACTIVATIONS]),
            has_experts,
            passing,
            last_own,
            shared,
            None,
            sum([tensors[name][0] for name in block.part.replay.backward[-1].gradients if name.startswith(GIVEN)]),
            {},
            (),
        ),
    )


def joined_units(names: Sequence[str], units: Sequence[Unit], groups: Mapping[tuple[str, ...], GroupBytes]) -> list[Unit]:
    """The units of these names, of which some layers have a group together."""
    found, places = list(units), {name: place for place, name in enumerate(names)}
    for members, group in groups.items():
        for place in [places[name] for name in members[::-1]]:
            unit, first, last = found[place], names[place] == members[0], names[place] == members[-1]
            roles: dict[str, Any] = {"opens": group if first else NOTHING, "closes": group if last else NOTHING}
            followers = tuple(found[place + 1 : place + len(members)]) if first else ()
            if unit.split is not None:
                halves = tuple([each.split.input_half for each in followers if each.split is not None])
                half = unit.split.input_half._replace(**roles, segments={}, followers=halves)
                roles["split"] = unit.split._replace(input_half=half)
            found[place] = unit._replace(**roles, segments={}, followers=followers)
    return found


class Peak(NamedTuple):
    """A point of one microbatch on a chunk.

    Attributes:
        total: Allocated bytes without the chunk's other microbatches and the rank's persistent state: the sum of all below and of
            the bytes that the blocks before keep.
        where: Description.
        unit: The running block; −1 before the first.
        live: Live set of the running block; None between blocks.
        params: Parameter gradients of that block.
        gradients: Other gradients: accumulated ones, and the slot's own.
        communication: Gathered parameters and reduce buffers.
        activations: Other activations, the block's input included while that is allocated.
        absent: Workspace of the libraries, which exists from the first product on; not in `total`.
        earlier: The largest total before the slot's own parameters are reduced, in a backward that reduces; 0 otherwise.
        partner: The backward's part of a pair in turns, if this is the forward's part; `total` is the sum of both. Else None.
    """

    total: int
    where: str
    unit: int
    live: LiveSet | None
    params: tuple[str, ...]
    gradients: int
    communication: int
    activations: int
    absent: int = 0
    earlier: int = 0
    partner: "Peak | None" = None


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
        """True if the backward of the layer that makes the value begins with a gradient of the value.

        A layer's input always has a gradient.
        """
        return self.source >= 0 and self.value.has_gradient and self.value.kept != "input"

    @property
    def value(self) -> Payload:
        """The value itself."""
        if self.part.value is None:
            raise ValueError("the stream is not a value")
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
        """First and last unit whose backward begins while the sum of its gradients exists outside the unit.

        The last is before the first for none.
        """
        return (max(0, self.source + self.waits), self.last_reader - 1) if self.value.has_gradient else (0, -1)

    @property
    def first_added(self) -> int:
        """The unit whose gradient is the first that is added to the part from the next stage; −1 for none."""
        if not self.packed or not self.value.has_gradient:
            return -1
        return self.last_reader if self.readers or self.waits else self.source


_NOTHING, _OUTPUT = (Arriving(output, (), False) for output in (False, True))


class Handed(NamedTuple):
    """The values of a chunk.

    Attributes:
        received_bytes: Bytes of a microbatch from the stage before.
        sent_bytes: Bytes of a microbatch for the next stage.
        values: The values.
    """

    received_bytes: int
    sent_bytes: int
    values: tuple[HandedValue, ...] = ()

    def arriving(self, index: int, *, output: bool) -> Arriving:
        """Gradients that exist when a unit's backward begins."""
        if not self.values:
            return _OUTPUT if output else _NOTHING
        waiting = [each for each in self.values if each.source == index and each.waits and (each.readers or each.packed)]
        received = any(not each.readers for each in waiting)
        return Arriving(output, tuple([each.value.name for each in waiting]), received)

    def held_bytes(self, num_units: int) -> list[tuple[int, int]]:
        """Bytes that the stage holds when each unit's forward begins, and while it runs, without the values that the unit keeps itself."""
        if not self.values:
            return [(0, 0)] * num_units
        spans = [(*each.held_from(num_units), each.part.own_bytes) for each in self.values]
        taken = [(stop, stop, -size) for each, (_, stop, size) in zip(self.values, spans, strict=True) if each.readers]
        begins = _sums(num_units, spans)
        return list(zip(begins, map(add, begins, _sums(num_units, taken)), strict=True))

    def summed_bytes(self, num_units: int) -> list[int]:
        """Bytes of sums of gradients that exist as each unit's backward begins."""
        return _sums(num_units, [(*each.summed_over, each.part.own_bytes) for each in self.values])

    def first_added_bytes(self, num_units: int) -> list[int]:
        """Bytes of the new sums that each unit makes when it first adds to gradients from the next stage."""
        return _sums(num_units, [(each.first_added, each.first_added, each.part.own_bytes) for each in self.values])

    def in_buffer_bytes(self, num_units: int) -> list[int]:
        """Bytes of gradients in the receive buffer that each unit's own operations count."""
        own = [each for each in self.values if each.waits and each.packed and not each.readers]
        return _sums(num_units, [(each.source, each.source, each.part.own_bytes) for each in own])


def _sums(num_units: int, spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Sums of sizes by unit, each size valid from a first to a last unit; units before the stage are left out."""
    if not spans:
        return [0] * num_units
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
