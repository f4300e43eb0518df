"""The peak of a step whose schedule splits backwards: I, and W when the rank would wait.

Between the two a microbatch keeps what W needs (`megaplan.hosts.megarun.halves`). A chunk's gradients come in two parts: what I makes, from
its first I, and those of its linears, from its first W. On the last rank of a V the two middle stages hand a gradient to each other, which
lies in no receive buffer: it is alive from the I of the upper to the end of the I of the lower, and longer where W needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from megaplan.blocks.ops import OUTPUT
from megaplan.budget.chunk import Chunk
from megaplan.budget.occupancy import BACKWARDED, FORWARDED, REDUCED, REFORWARDED, UNTOUCHED, ChunkState
from megaplan.budget.reduction import reduce_peak
from megaplan.budget.step import StepPeak
from megaplan.budget.unit import Peak
from megaplan.budget.values import ACTIVATIONS, COMMUNICATION, GRADIENTS, NO_BYTES
from megaplan.columns import Column
from megaplan.hosts.megarun.allocator import slack_bytes
from megaplan.hosts.megarun.halves import HalvedBytes, weigh_halves
from megaplan.schedule.actions import Kind, Step, computations

FORWARD, BACKWARD, INPUT, WEIGHT = Kind


class Found(NamedTuple):
    """The largest moment of an action: its bytes, where it lies, and its cells."""

    total: int
    where: str
    cells: dict[Column, int]


class HalvedChunk:
    """A chunk with what its halves keep and need.

    Attributes:
        whole: The chunk.
        inputs: The chunk with I in place of its backward, and the gradients that I makes.
        pending_bytes: What a microbatch keeps between I and W.
        late_bytes: Gradients that W makes, whole, in `precision.grads`.
        slack_bytes: What the allocator's rounding adds to what is pending.
    """

    def __init__(self, chunk: Chunk, *, arrives_locally: bool) -> None:
        """Sum once.

        Args:
            chunk: The chunk.
            arrives_locally: Whether the gradient of its output comes from a stage on the same rank, not through a receive buffer.
        """
        self.whole = chunk
        in_place = chunk.policy.in_place
        self._halves: list[HalvedBytes | None] = [
            weigh_halves(unit.block, in_place=in_place) if unit.layer else None for unit in chunk.units
        ]
        sizes = [0 if half is None else half.pending_bytes for half in self._halves]
        last = self._halves[-1]
        self._received, self._arrives_locally = last.arrived_bytes if last is not None and chunk.output_bytes else 0, arrives_locally
        self.pending_bytes = sum(sizes) - (0 if arrives_locally else self._received)
        self._below = [0, *accumulate(sizes)]
        self._late = [self._unsharded(index) for index in range(len(sizes))]
        self.late_bytes = sum(self._late)
        kept = [half.inputs.part.tensors[name][0] for half in self._halves if half is not None for name in half.pending.tensors]
        self.slack_bytes = slack_bytes(kept)
        self.inputs = self._inputs(sum(sizes) - self._received)

    def gradient_bytes(self, state: ChunkState, weighed: bool) -> int:
        """Accumulated gradients; `weighed`: whether a W, or a whole backward, has run."""
        if state is REDUCED:
            return self.whole.shard_bytes
        if state <= FORWARDED:
            return 0
        everything = self.whole.unsharded_bytes
        return everything if weighed else everything - self.late_bytes

    def input_peak(self, state: ChunkState, weighed: bool) -> Found:
        """The largest moment of I; what waits for W in the units above the running one is in no column but its own."""
        peak = self.inputs.backward_peak(state)
        found = _found(self.inputs, peak, self.late_bytes if weighed else 0)
        waiting = self._pending_of(self._halves[peak.unit + 1 if peak.moment is not None else peak.unit :])
        cells = found.cells
        for column in (column for column in waiting if column is not ACTIVATIONS):
            cells[column] += waiting[column]
            cells[ACTIVATIONS] -= waiting[column] if peak.moment is not None else 0
        if peak.moment is not None:
            return found
        cells[ACTIVATIONS] += waiting[ACTIVATIONS] - self._received
        return found._replace(total=found.total + sum(waiting.values()) - self._received)

    def forward_peak(self, state: ChunkState, weighed: bool) -> Found:
        """The largest moment of a forward."""
        return _found(self.whole, self.whole.forward_peak(state), self.gradient_bytes(state, weighed) - self.whole.held(state)[0])

    def weight_peak(self, weighed: bool) -> Found:
        """The largest moment of W; `weighed`: whether another one has run, so that it adds to gradients that are there."""
        chunk, last = self.whole, len(self.whole.units) - 1
        everything = self.gradient_bytes(BACKWARDED, weighed=True)
        best, done = Found(-1, "", {}), 0  # gradients that this W has made, if it is the first
        for index in range(last, -1, -1):
            half = self._halves[index]
            if half is None:
                continue
            for moment, size in half.weights:
                new = sum([chunk.units[index].block.gradients[name] for name in moment.params])
                kept = new * self._late[index] // half.late_bytes
                gradients = everything if weighed else everything - self.late_bytes + done + (0 if chunk.policy.in_place else kept)
                received = self._received if index == last and OUTPUT in moment.gradients and not self._arrives_locally else 0
                total = self._below[index] + size - received + gradients
                if total > best.total:
                    cells = self.pending_cells(1, index)
                    half.inputs.add_to(cells, moment, moment.params)
                    cells[ACTIVATIONS] -= received
                    cells[GRADIENTS] += gradients
                    best = Found(total, f"W of {chunk.names[index]}", cells)
                done += kept
        return best

    def pending_cells(self, count: int, stop: int | None = None) -> dict[Column, int]:
        """What `count` microbatches keep between I and W, of the units below `stop` or of all."""
        cells = {column: size * count for column, size in self._pending_of(self._halves[:stop]).items()}
        if stop is None and not self._arrives_locally:
            cells[ACTIVATIONS] -= self._received * count
        return cells

    def _pending_of(self, halves: Sequence[HalvedBytes | None]) -> dict[Column, int]:
        cells = NO_BYTES.copy()
        for half in halves:
            if half is not None:
                half.inputs.add_to(cells, half.pending, ())
        return cells

    def _unsharded(self, index: int) -> int:
        """A unit's late gradients as they accumulate."""
        half, storage = self._halves[index], self.whole.units[index].storage
        if half is None or storage is None or not half.late_bytes:
            return 0
        return half.late_bytes * storage.both.unsharded_bytes // storage.both.made_bytes

    def _inputs(self, pending: int) -> Chunk:
        """`pending`: of all units, without what lies in a receive buffer or was handed over."""
        chunk = copy(self.whole)
        units = []
        for unit, half, late in zip(chunk.units, self._halves, self._late, strict=True):
            if half is None:
                units.append(unit)
                continue
            block, kept_input = half.inputs, unit.input_bytes
            backward, again = block.backward_bytes + kept_input, block.again_bytes + kept_input
            unsharded = unit.unsharded_bytes - late
            units.append(unit._replace(block=block, unsharded_bytes=unsharded, backward_bytes=backward, again_bytes=again))
            chunk.unsharded_bytes -= late
        chunk.units = tuple(units)
        chunk.waiting = [pending - below for below in self._below[:-1]]
        above = [pending - (below if index + 1 < len(units) else pending) for index, below in enumerate(self._below[1:])]
        chunk.carried = [carried + kept for carried, kept in zip(chunk.carried, above, strict=True)]
        return chunk


class _Moment(NamedTuple):
    """A rank while an action runs, or a reduction (no kind), with the microbatches and gradients of each chunk."""

    kind: Kind | None
    chunk: int
    full: tuple[int, ...]
    pending: tuple[int, ...]
    handed: int
    states: tuple[ChunkState, ...]
    weighed: tuple[bool, ...]


def split_step_peak(
    chunks: Sequence[Chunk], order: tuple[Step, ...], chunk_of: Sequence[int], num_microbatches: int, *, turns: bool
) -> StepPeak:
    """The largest moment of a rank's step, on top of its persistent state.

    Args:
        chunks: Of the rank.
        order: Its actions, of all schedule steps until gradients are reduced; more than three have no other moments.
        chunk_of: Chunk of every slot.
        num_microbatches: Of the order.
        turns: Whether its second chunk follows its first in the model, as on the last rank of a V.
    """
    rank = _Rank([HalvedChunk(chunk, arrives_locally=turns and index == 0) for index, chunk in enumerate(chunks)])
    moments = dict.fromkeys(_moments(order, chunk_of, len(chunks), num_microbatches, turns))
    best = max(moments, key=rank.total)
    return StepPeak(rank.total(best), f"{rank.running(best).where}, {_in_flight(best)}", rank.cells(best), rank.slack_bytes(best))


def _moments(order: tuple[Step, ...], chunk_of: Sequence[int], num_chunks: int, num_microbatches: int, turns: bool) -> Iterator[_Moment]:
    full, pending, handed = [0] * num_chunks, [0] * num_chunks, 0
    states, weighed, left = [UNTOUCHED] * num_chunks, [False] * num_chunks, [num_microbatches] * num_chunks

    def moment(kind: Kind | None, chunk: int) -> _Moment:
        return _Moment(kind, chunk, tuple(full), tuple(pending), handed, tuple(states), tuple(weighed))

    for action in computations(order):
        chunk, kind = chunk_of[action.slot], action.kind
        if kind is FORWARD:
            full[chunk] += 1
            yield moment(kind, chunk)
            states[chunk] = FORWARDED if states[chunk] <= FORWARDED else REFORWARDED
            continue
        yield moment(kind, chunk)
        if kind is WEIGHT:
            pending[chunk] -= 1
        else:
            full[chunk] -= 1
            pending[chunk] += kind is INPUT
            handed += turns and (1 if chunk == 1 else -1)
            states[chunk] = BACKWARDED
        if kind is not INPUT:
            weighed[chunk] = True
            left[chunk] -= 1
            if left[chunk] == 0:
                yield moment(None, chunk)
                states[chunk] = REDUCED


class _Rank:
    """Sums of moments; the peaks of each chunk are found once."""

    def __init__(self, chunks: Sequence[HalvedChunk]) -> None:
        self._chunks = chunks
        self._found: dict[tuple[Kind | None, int, ChunkState, bool], Found] = {}

    def total(self, moment: _Moment) -> int:
        """All that is alive."""
        return self.running(moment).total + sum([size for size, _ in self._beside(moment)])

    def cells(self, moment: _Moment) -> dict[Column, int]:
        """The same by column."""
        cells = dict(self.running(moment).cells)
        for size, where in self._beside(moment):
            for column, part in ({where: size} if isinstance(where, Column) else where()).items():
                cells[column] += part
        return cells

    def slack_bytes(self, moment: _Moment) -> int:
        """What the allocator's rounding adds to microbatches."""
        counted = zip(self._chunks, moment.full, moment.pending, strict=True)
        return sum([full * chunk.whole.slack_bytes + pending * chunk.slack_bytes for chunk, full, pending in counted])

    def running(self, moment: _Moment) -> Found:
        """The running action's peak, with its chunk's gradients."""
        kind, index, state, weighed = moment.kind, moment.chunk, moment.states[moment.chunk], moment.weighed[moment.chunk]
        key = kind, index, state, weighed
        if key not in self._found:
            self._found[key] = self._find(self._chunks[index], kind, state, weighed)
        return self._found[key]

    def _find(self, chunk: HalvedChunk, kind: Kind | None, state: ChunkState, weighed: bool) -> Found:
        match kind:
            case Kind.FORWARD:
                return chunk.forward_peak(state, weighed)
            case Kind.INPUT:
                return chunk.input_peak(state, weighed)
            case Kind.WEIGHT:
                return chunk.weight_peak(weighed)
            case Kind.BACKWARD:
                return _found(chunk.whole, chunk.whole.backward_peak(state))
            case _:
                return _found(chunk.whole, reduce_peak(chunk.whole))

    def _beside(self, moment: _Moment) -> Iterator[tuple[int, Column | Callable[[], dict[Column, int]]]]:
        """Bytes of other microbatches, and of the other chunks' gradients and gathered parameters, with their columns."""
        kind = moment.kind
        for index, chunk in enumerate(self._chunks):
            full, pending, whole = moment.full[index], moment.pending[index], chunk.whole
            runs = index == moment.chunk
            if runs:
                full -= kind in (FORWARD, INPUT, BACKWARD)
                pending -= kind is WEIGHT
                yield whole.output_bytes if kind in (INPUT, BACKWARD) else 0, ACTIVATIONS
            else:
                yield chunk.gradient_bytes(moment.states[index], moment.weighed[index]), GRADIENTS
            if not runs or kind is WEIGHT:
                yield whole.held(moment.states[index])[1], COMMUNICATION
            yield full * whole.saved_bytes, partial(whole.saved_cells, full)
            yield pending * chunk.pending_bytes, partial(chunk.pending_cells, pending)
        yield moment.handed * self._chunks[0].whole.policy.boundary_bytes, ACTIVATIONS


def _found(chunk: Chunk, peak: Peak, more_gradients: int = 0) -> Found:
    cells = chunk.peak_cells(peak)
    cells[GRADIENTS] += more_gradients
    return Found(peak.total + more_gradients, peak.where, cells)


def _in_flight(moment: _Moment) -> str:
    full, pending = (", ".join(str(count) for count in counts) for counts in (moment.full, moment.pending))
    by_chunk = " by chunk" if len(moment.full) > 1 else ""
    waiting = f", {pending} waiting for W" if any(moment.pending) else ""
    return f"{full} microbatches in flight{waiting}{by_chunk}"
