"""The largest point of a pair in turns: a forward and a backward of a rank that alternate at the exchanges of rows.

Each action is a sequence of phases, from one exchange to the next. The forward begins. At the end of a phase the other action runs
its next phase, while the first one's tensors stay allocated and its rows are in transit. When one has ended, the other runs to its end. If
both actions belong to one chunk, its gradients and gathered parameters count in the backward's part.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megaplan.budget.actions import Accumulating, accumulating_segment, backward_settings, ends_of_backward, passed_on
from megaplan.budget.chunk import Chunk
from megaplan.budget.forwards import loss_points
from megaplan.budget.tape import CAST, NOTHING_AHEAD, VALUE_SUMS, Point, after_experts_points, experts_index, in_group, point_of
from megaplan.budget.unit import Peak, Unit
from megaplan.families.moe.travel import EXCHANGES
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.schedules.states import ChunkState

Phase = tuple[Peak, Peak]
"""The largest point of a phase, and the bytes held from its end to the next one's start."""
CoursePoint = tuple[Peak, bool]
"""A point, and True if the other action runs next."""


class PairPart(NamedTuple):
    """A chunk of a rank, and its state before a pair."""

    chunk: Chunk
    state: ChunkState


def pair_peak(forward: PairPart, backward: PairPart, *, weight_grads: bool, consumes: bool) -> Peak:
    """The largest point of both; `total` is the sum of both, `partner` the backward's part.

    Args:
        forward: Chunk of the forward.
        backward: Chunk of the backward.
        weight_grads: True if the gradients of the forward's linear layers exist.
        consumes: True if the other chunk made the gradient of the backward's output; the end of the backward then frees it.
    """
    held = (0, 0) if forward.chunk is backward.chunk else _held(*forward, weight_grads=weight_grads)
    phases = (
        _phases(_forward(forward.chunk, *held)),
        _phases(_backward(*backward, consumes=consumes)),
    )
    levels = [phases[0][0][1], _before_backward(*backward)]
    place, turn = [0, 0], 0
    best: tuple[Peak, Peak] | None = None
    while any(place[side] < len(phases[side]) for side in (0, 1)):
        top, after = phases[turn][place[turn]]
        both = (top, levels[1]) if turn == 0 else (levels[0], top)
        if best is None or both[0].total + both[1].total > best[0].total + best[1].total:
            best = both
        levels[turn] = after
        place[turn] += 1
        if place[1 - turn] < len(phases[1 - turn]):
            turn = 1 - turn
    if best is None:
        raise ValueError("a pair has two actions")
    own, other = best
    where = f"{own.where} with {other.where}"
    return own._replace(total=own.total + other.total, where=where, partner=other)


def _phases(moments: Iterable[CoursePoint]) -> list[Phase]:
    """The phases of an action; its last point is the bytes that it leaves."""
    found: list[Phase] = []
    top: Peak | None = None
    for peak, stops in moments:
        top = peak if top is None or peak.total > top.total else top
        if stops:
            found.append((top, peak))
            top = peak  # it continues where it stopped
    return found


def _held(chunk: Chunk, state: ChunkState, *, weight_grads: bool) -> tuple[int, int]:
    return chunk.held(state, weight_grads=weight_grads)[0], chunk.gathered_bytes


def _forward(chunk: Chunk, gradients: int, gathered: int) -> Iterator[CoursePoint]:
    for index, unit in enumerate(chunk.units):
        _, held = chunk.held_values[index]
        if index == chunk.head:
            points: Iterable[tuple[Point, bool]] = [(point, False) for point, _ in loss_points(unit)]
        elif _is_depth(chunk, index):
            lives = unit.block.part.replay.forward
            points = [(point_of(unit, "forward of {}", live, a=unit.passing_bytes), False) for live in lives]
        else:
            lives = unit.block.part.replay.forward
            points = _marked(lives, [point_of(unit, "forward of {}", live, a=unit.passing_bytes) for live in lives])
        for point, stops in points:
            yield chunk.peak(index, point, gradients, gathered, held), stops
    yield _between(chunk, len(chunk.units), gradients, gathered, chunk.output_bytes), True


def _marked(lives: Sequence[LiveSet], points: Sequence[Point]) -> Iterator[tuple[Point, bool]]:
    """Points of these live sets, and True for the last one of each exchange."""
    for index, (live, point) in enumerate(zip(lives, points, strict=True)):
        follows = index + 1 < len(lives) and lives[index + 1].op == live.op
        yield point, live.op in EXCHANGES and not follows


def _before_backward(chunk: Chunk, state: ChunkState) -> Peak:
    settings = backward_settings(chunk.policy, state, in_place=chunk.policy.in_place)
    gradients = 0 if settings.first else chunk.unsharded_bytes
    return _between(chunk, len(chunk.units), gradients, chunk.gathered_bytes, 0)


def _backward(chunk: Chunk, state: ChunkState, *, consumes: bool) -> Iterator[CoursePoint]:
    cast, summed = (backward_settings(chunk.policy, state, in_place=in_place) for in_place in (False, True))
    settings = summed if chunk.policy.in_place else cast
    gradients, gathered, made, taken = 0 if settings.first else chunk.unsharded_bytes, chunk.gathered_bytes, 0, 0
    lasting = chunk.summed_later if settings.accumulates else chunk.lasting
    for index in range(len(chunk.units) - 1, -1, -1):
        unit, carried = chunk.units[index], chunk.backward_extra[index]
        own = summed if unit.block.in_place else cast
        points, of_cast = accumulating_segment(unit, chunk.names[index], (own, NOTHING_AHEAD), chunk.policy)
        stops = _exchanges(unit) and not _is_depth(chunk, index)
        for point, ends in _exchanging(unit, own, chunk) if stops else ((point, False) for point in points):
            yield chunk.peak(index, point, gradients + made, gathered, carried), ends
        kept = unit.unsharded_bytes if settings.first else 0
        if unit.waits and not unit.block.in_place:
            kept, made, taken = in_group(unit, kept, made, taken)
        if of_cast >= 0:
            activations = passed_on(chunk, index) + chunk.waiting_from[index]
            held = gradients + lasting[index] + chunk.waiting_sums(index) + of_cast
            yield chunk.peak(index, CAST, held, gathered, activations), False
        gradients += lasting[index] + kept
        if sums := chunk.first_sums(index):
            yield chunk.peak(index, VALUE_SUMS, gradients + made, gathered, sums), False
    for end in ends_of_backward(chunk, gradients, gathered, casts=settings.casts):
        yield end, False
    left = chunk.input_bytes - chunk.output_bytes * (2 if consumes else 1)
    yield _between(chunk, 0, chunk.unsharded_bytes, gathered, left), True


def _is_depth(chunk: Chunk, index: int) -> bool:
    """True for a prediction depth, during whose exchanges the other action does not run."""
    return index > chunk.head >= 0


def _exchanges(unit: Unit) -> bool:
    return any(live.op in EXCHANGES for live in unit.block.part.replay.backward)


def _exchanging(unit: Unit, settings: Accumulating, chunk: Chunk) -> Iterator[tuple[Point, bool]]:
    """The points of a block's backward in which rows are exchanged."""
    run = unit.block.part.replay

    def point(live: LiveSet) -> Point:
        return point_of(unit, "backward of {}", live, live.new_params if settings.accumulates else live.params)

    if not (unit.has_experts and settings.takes):
        yield from _marked(run.backward, list(map(point, run.backward)))
        return
    index = experts_index(run)
    yield from _marked(run.backward[: index + 1], list(map(point, run.backward[: index + 1])))
    casts, later = after_experts_points(
        unit,
        run.backward[index + 1 :],
        first=settings.first,
        casts=settings.casts,
        accumulates=settings.accumulates,
        together=chunk.policy.whole,
        frees=False,
    )
    yield from ((each, False) for each in casts)
    yield from _marked(run.backward[index + 1 :], later)


def _between(chunk: Chunk, index: int, gradients: int, gathered: int, activations: int) -> Peak:
    """A point before an action begins or after it has ended: the bytes that units before this index keep, and the rest."""
    total = chunk.before[index] + gradients + gathered + activations
    return Peak(total, "nothing of the other part", index, None, (), gradients, gathered, activations)
