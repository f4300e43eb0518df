"""A chunk whose schedule splits backwards: I, which makes the gradient of the chunk's input, and W, which makes the weight gradients.

Between the two a microbatch keeps the tensors that W needs (`megaplan.hosts.megarun.halves`). A chunk's gradients have two parts: the
gradients that I makes, from its first I, and linear layers' gradients, from its first W. On the last rank of a V, the later middle stage
passes a gradient to the earlier one without a receive buffer. It is allocated from the I of the later stage to the end of the I of the
earlier stage, and longer if W needs it. The earlier stage's output has no receive buffer either: if a linear of the later stage reads it
(no norm before the block), it is kept for W after that I.

A layer that shares its norm adds nothing to the gradient of the stream: its output gradient is the previous layer's, one storage, which is
counted once while it waits for the W of either layer.
"""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from megaplan.blocks.ops import INPUT as INPUT_NAME
from megaplan.blocks.ops import OUTPUT
from megaplan.blocks.payload import UNPACK
from megaplan.budget.actions import accumulating_backward_peak
from megaplan.budget.chunk import Chunk, ChunkPolicy
from megaplan.budget.stored import SlotStorage
from megaplan.budget.unit import Handed, Peak, SplitUnit, Unit, adds_nothing
from megaplan.budget.values import ACTIVATIONS, GRADIENTS, NO_BYTES
from megaplan.columns import Column
from megaplan.hosts.allocator import slack_bytes
from megaplan.hosts.megarun.halves import weigh_halves
from megaplan.schedules.actions import ActionKind
from megaplan.schedules.states import BACKWARDED, INPUT, WEIGHT, ChunkState


class SplitBackwardChunk(Chunk):
    """A slot's units with the sums of both halves of their backwards; MTP depths, embedding and head are not split.

    Attributes:
        input_half: The chunk with I instead of its backward, and the gradients that I makes.
    """

    def __init__(
        self,
        stored: SlotStorage,
        units: Sequence[Unit],
        policy: ChunkPolicy,
        handed: Handed,
        *,
        sends_locally: bool,
        receives_locally: bool = False,
    ) -> None:
        """Computes the sums.

        Args:
            stored: The same as for `Chunk`, like the next two.
            units: The blocks of its names; layers with their halves.
            policy: Settings of the host.
            handed: See `Chunk`.
            sends_locally: True if the next stage is on the same rank, so that the gradient of its output is in no receive buffer.
            receives_locally: True if the stage before is on the same rank, so that its input is in no receive buffer.
        """
        super().__init__(stored, units, policy, handed)
        self._halves = [unit.split for unit in self.units]
        self._last = len(units) - 1 - self.packs
        self._left = left_to_weights(units, self.received_from if self.output_bytes else len(units))
        self._received = max(self._left.own[self._left.end : self._last + 1], default=0)
        self._in_receive_buffer = 0 if sends_locally else self._received
        self._waiting_below = [0, *accumulate(self._left.sizes)]
        everything = self._waiting_below[-1]
        self.late_bytes = sum([half.late_bytes for half in self._halves if half is not None])
        # a view keeps the whole tensor that a neighbouring stage on the same rank has sent
        self._viewed = self.output_bytes - self._received if self.packs and sends_locally and self._received else 0
        self.waiting_bytes = everything - self._in_receive_buffer + self._viewed
        halves = [half.halves for half in self._halves if half is not None]
        kept = [half.inputs.part.tensors[name][0] for half in halves for name in half.pending.tensors]
        self.waiting_slack_bytes = slack_bytes(kept) - slack_bytes([size for size in self._left.twice if size])
        self.input_half = self._make_input_half()
        self._first = int(self.names[0] == UNPACK)
        first = self.units[self._first]
        self._owning = weigh_halves(first.block) if receives_locally and first.split is not None else None
        if self._owning is not None and INPUT_NAME in self._owning.pending.storages:
            self.kept_input_bytes = self.input_bytes

    def input_peak(self, state: ChunkState, *, weight_grads: bool) -> Peak:
        """The largest point of I; tensors that wait for W in the units above the running one are among its activations."""
        peak = accumulating_backward_peak(self.input_half, state)
        late = self.late_bytes if weight_grads else 0
        return peak._replace(total=peak.total + late, gradients=peak.gradients + late)

    def weight_peak(self, *, weight_grads: bool, owns_input: bool = False) -> Peak:
        """The largest point of W.

        Args:
            weight_grads: True if a W has run before, so that this one adds to existing gradients.
            owns_input: True if only W holds an input that the previous stage on the same rank has sent.
        """
        last, there = len(self.units) - 1, self.held(BACKWARDED, weight_grads=weight_grads)[0]
        best = self.idle_peak("W", there, 0)
        done = 0  # gradients that this W has made, if it is the first W
        for index in range(last, -1, -1):
            half = self._halves[index]
            if half is None:
                continue
            before, gradients_of = self._waiting_below[index], self.units[index].block.gradients
            owning = self._owning if owns_input and index == self._first else None
            for point, size in (owning or half.halves).weights:
                made = sum([gradients_of[name] for name in point.new_params])
                kept = made * half.late_bytes // half.halves.late_bytes
                gradients = there if weight_grads else there + done + (0 if self.units[index].block.in_place else kept)
                holds = OUTPUT in point.gradients
                views = self._left.end <= index <= self._last and (holds or self._left.counted_below[index])
                received = (self._in_receive_buffer - self._viewed) * views + self._left.twice[index] * holds
                total = before + size - received + gradients
                if total > best.total:
                    where = f"W of {self.names[index]}"
                    best = Peak(total, where, index, point, point.params, gradients, 0, -received)
                done += kept
        return best

    def action_cells(self, kind: ActionKind, peak: Peak, others: int = 0) -> dict[Column, int]:
        """The parts of the peak of an action by column, and the bytes that `others` microbatches in flight keep."""
        if kind is WEIGHT:
            half, cells = self._halves[peak.unit], self._kept(others, 0, self.output_bytes * others)
            for column, size in self._waiting(0, peak.unit).items():
                cells[column] += size
            if half is not None and peak.live is not None:
                half.halves.inputs.add_to(cells, peak.live, peak.params)
            cells[ACTIVATIONS] += peak.activations
            cells[GRADIENTS] += peak.gradients
            return cells
        if kind is not INPUT:
            return self.peak_cells(peak, others)
        cells = self.input_half.peak_cells(peak, others)
        for column, size in self._waiting(peak.unit + (peak.live is not None), len(self.units)).items():
            if column is not ACTIVATIONS:
                cells[column] += size
                cells[ACTIVATIONS] -= size
        return cells

    def waiting_cells(self, count: int) -> dict[Column, int]:
        """Bytes that `count` microbatches keep between I and W."""
        cells = {column: size * count for column, size in self._waiting(0, len(self.units)).items()}
        cells[ACTIVATIONS] -= (self._in_receive_buffer - self._viewed) * count
        return cells

    def _waiting(self, start: int, stop: int) -> dict[Column, int]:
        """Bytes that one microbatch keeps for W in some units, with the gradient of the chunk's output."""
        cells = NO_BYTES.copy()
        for half in self._halves[start:stop]:
            if half is not None:
                half.halves.inputs.add_to(cells, half.halves.pending, ())
        cells[ACTIVATIONS] -= sum(self._left.twice[start:stop])
        return cells

    def _make_input_half(self) -> Chunk:
        chunk, left = copy(self), self._left
        below = [0, *accumulate(left.not_buffered)]
        chunk.units = tuple([unit if half is None else half.input_half for unit, half in zip(self.units, self._halves, strict=True)])
        chunk.unsharded_bytes = self.unsharded_bytes - self.late_bytes
        chunk.waiting_from = [below[-1] - size for size in below[:-1]]
        above = [below[-1] - size for size in below[1:]]
        for index, held in enumerate(holding_above(self.units)[: left.end]):  # held by a unit above, whose bytes include it
            if held and not left.own[index] and not left.counted_below[index]:
                above[index] -= self.units[index].block.output_bytes
        chunk.backward_extra = [carried + kept for carried, kept in zip(self.backward_extra, above, strict=True)]
        return chunk


class LeftToWeights(NamedTuple):
    """Bytes that the units of a chunk leave to W, by unit.

    Attributes:
        own: The gradient of its output, if it leaves that.
        counted_below: True if an earlier unit has the same gradient and leaves it.
        twice: Bytes of the gradient if the earlier unit counts it.
        sizes: All bytes that it leaves, each storage once.
        not_buffered: The same without tensors in a receive buffer or passed on the same rank.
        end: The first unit whose output's gradient is the chunk's, which has been received.
    """

    own: list[int]
    counted_below: list[bool]
    twice: list[int]
    sizes: list[int]
    not_buffered: list[int]
    end: int


def left_to_weights(units: Sequence[Unit], end: int) -> LeftToWeights:
    """Bytes that units leave to W; `LeftToWeights` states `end`."""
    halves = [None if unit.split is None else unit.split.halves for unit in units]
    own = [0 if half is None else half.arrived_bytes for half in halves]
    below = [False]
    for index in range(1, len(units)):
        below.append(adds_nothing(units[index]) and (own[index - 1] > 0 or below[index - 1]))
    twice = [size * counted for size, counted in zip(own, below, strict=True)]
    sizes = [0 if half is None else half.pending_bytes - again for half, again in zip(halves, twice, strict=True)]
    buffered = [(size - again) * (index >= end) for index, (size, again) in enumerate(zip(own, twice, strict=True))]
    return LeftToWeights(own, below, twice, sizes, list(map(sub, sizes, buffered)), end)


def holding_above(units: Sequence[Unit]) -> list[bool]:
    """True for each unit whose output gradient is the same storage as that of a later unit, and is left to W."""
    found = [False] * len(units)
    for index in range(len(units) - 2, -1, -1):
        behind = units[index + 1]
        waits = behind.split is not None and behind.split.halves.arrived_bytes > 0
        found[index] = adds_nothing(behind) and (waits or found[index + 1])
    return found


def split_unit(unit: Unit, *, owns_input: bool) -> Unit:
    """A layer with the two halves of its backward.

    Args:
        unit: The layer.
        owns_input: True if its input is a storage of its chunk; one that arrived is in a receive buffer, which W does not keep alive.
    """
    halves, storage = weigh_halves(unit.block, owns_input=owns_input), unit.storage
    late = 0
    if storage is not None and halves.late_bytes:
        late = halves.late_bytes * storage.both.unsharded_bytes // storage.both.made_bytes
    block = halves.inputs
    input_half = unit._replace(
        block=block,
        unsharded_bytes=unit.unsharded_bytes - late,
        backward_bytes=block.backward_bytes + unit.input_bytes,
        accumulating_bytes=block.accumulating_bytes + unit.input_bytes,
        segments={},
    )
    return unit._replace(split=SplitUnit(halves, input_half, late))
