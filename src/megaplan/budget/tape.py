"""The tape of a chunk's actions: the bytes that each block allocates above its initial level, and the bytes that it leaves.

An action of a chunk (`megaplan.budget.actions`) is a sequence of segments, one or two for each block. A segment depends on its block and on
a few settings of the action alone, so equal layers share it. Segments compose: the peak of two segments is the maximum of the first one's
peak and of the second one's peak plus the bytes that the first leaves. Only the largest point of a segment is kept, with its parts by
column.

All-gathers. A layer's forward begins with copies out of its all-gather's output; the previous all-gather's output is freed when they are
done. A backward prefetches the previous layer. Several layers may form one group: it is gathered before the first layer's forward and
before the last layer's backward, and reduced after the first layer's backward; until then gradients stay in autograd's dtype. Experts are a
separate group, gathered for their operation. In a backward FSDP2 processes the experts' gradients as soon as they exist: without a pipeline
it reduces them; with one it casts them one by one, unless they accumulate in the dtype in which autograd makes them.

Reductions. A group's gradients are copied into the reduce-scatter's input and freed; its output becomes the gradient shards, or is added to
them. With replicas the output is all-reduced and kept until the backward has ended.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather_copy_out`, `foreach_reduce`), _fsdp_param.py
(`to_accumulated_grad_if_needed`), _fsdp_param_group.py (`post_backward`, `AllReduceState`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from megaplan.blocks.ops import Flow, Op, in_bank, runs_bank
from megaplan.budget.unit import Unit
from megaplan.families.attention_residuals import ATTEND, CAST_OUT
from megaplan.families.streams import EXPAND
from megaplan.hosts.megarun.live_sets import LiveSet, largest_points
from megaplan.hosts.megarun.program import Replay
from megaplan.hosts.megarun.sizes import NOTHING, GroupBytes
from megaplan.tuples import new


class Point(NamedTuple):
    """A point of a block's part of an action.

    Attributes:
        size: Bytes above the level of the tape: the sum of the live set and all fields below.
        where: Description with a place for the block's name.
        live: Live set of the block; None between blocks.
        params: Parameter gradients of that block.
        gradients: Other gradients.
        communication: Gathered parameters and buffers.
        activations: Other activations.
    """

    size: int
    where: str
    live: LiveSet | None
    params: tuple[str, ...]
    gradients: int
    communication: int
    activations: int


class Segment(NamedTuple):
    """The largest point of a part of a block's action, and the gradients that the part leaves."""

    point: Point
    left: int


class Ahead(NamedTuple):
    """All-gathers that begin ahead of a layer's backward.

    Attributes:
        flat_bytes: Outputs.
        cast_bytes: Most bytes of outputs and an input, if inputs are casts of shards; else 0.
        pending_bytes: Outputs that exist before the backward, the layer's own bank included.
        explicit: True if the layer begins them all, banks included; else a bank begins the gather of the previous layer.
    """

    flat_bytes: int = 0
    cast_bytes: int = 0
    pending_bytes: int = 0
    explicit: bool = False


NOTHING_AHEAD = Ahead()
CRITERION = "cross_entropy"
"""The operation that runs after the stage, on its logits."""


def point_of(
    unit: Unit, where: str, live: LiveSet, params: tuple[str, ...] = (), size: int = -1, g: int = 0, c: int = 0, a: int = 0
) -> Point:
    """A point with the given gradients, communication and activations; `size` is the bytes of the live set, if known."""
    size, a = unit.block.point_bytes(live, params) if size < 0 else size, unit.input_bytes + a
    return new(Point, (size + g + c + a, where, live, params, g, c, a))


def between(where: str, g: int, c: int, a: int = 0) -> Point:
    """A point between blocks, of gradients, communication and activations."""
    return new(Point, (g + c + a, where, None, (), g, c, a))


CAST, VALUE_SUMS = between("cast of {}", 0, 0), between("sums of earlier values' gradients after {}", 0, 0)
BUCKET = between("bucket of {}", 0, 0)
"""Names of points after a block's backward: the cast of its first gradients, the sum of earlier values' gradients, and the cast for the
sum over copies of the parameters.
"""
GATHERS_AHEAD = between("gathers of later groups before {}", 0, 0)
"""The point before a stage's first block, at which the stage has begun the gathers of its first groups; all its bytes belong to the
level.
"""


def largest(points: Sequence[Point]) -> Point:
    """The first of the largest points."""
    return max(points, key=_size)


def _size(point: Point) -> int:
    return point.size


def backward_point(unit: Unit, name: str, ahead: Ahead, *, accumulates: bool, fetches: bool, takes: bool) -> Point:
    """The largest point of a block's backward, up to the experts' operation if FSDP2 takes their gradients.

    Args:
        unit: The block.
        name: Name of the event.
        ahead: The all-gather of the layer before, in flight while it runs.
        accumulates: True if gradients are added in place to an earlier microbatch's.
        fetches: True if layers are gathered again for it.
        takes: True if FSDP2 takes the gradients of experts inside the layer's backward.
    """
    block, where = unit.block, "backward of {}"
    live, size = (block.accumulating, block.accumulating_bytes) if accumulates else (block.backward, block.backward_bytes)
    split = unit.has_experts and (fetches or takes)
    if not split and not (fetches and name == "head"):
        found = [point_of(unit, where, live, live.new_params if accumulates else live.params, size, 0, ahead.flat_bytes if fetches else 0)]
    elif not split:  # the last layer is fetched only when the loss has run backward
        found = [
            point_of(unit, where, each, _params(each, accumulates), c=0 if each.op == CRITERION else ahead.flat_bytes)
            for each in block.part.replay.backward
        ]
    else:  # experts are being gathered until their operation; after it, the previous layer is
        early, late = 0, ahead.flat_bytes
        if fetches:
            experts = unit.bank
            early = experts.flat_bytes + experts.part_bytes - experts.gathered_bytes + (late if ahead.explicit else 0)
        before, behind = expert_phases(block.part.replay, takes=takes)
        found = [point_of(unit, where, each, _params(each, accumulates), c=early) for each in before]
        found += [point_of(unit, where, each, _params(each, accumulates), c=late) for each in behind]
    if fetches:
        for live, gathered in backward_gathers(unit, name, ahead):
            found.append(point_of(unit, "gathering of {}", live, () if accumulates else live.params, c=gathered))
    return largest(found)


def _params(live: LiveSet, accumulates: bool) -> tuple[str, ...]:
    return live.new_params if accumulates else live.params


def backward_gathers(unit: Unit, name: str, ahead: Ahead) -> Iterator[tuple[LiveSet, int]]:
    """Points at which a block's backward copies out of all-gathers or casts shards for them, and the buffers in addition to its layer.

    The first gather is that of the layer, or of the group that it closes; the second is that of its experts. Each point includes the output
    from which parameters are copied and the kept parts that they replace. After either, the gather of the previous layer begins, with the
    cast of its shard. For the last layer, the gather follows the loss.
    """
    run = unit.block.part.replay
    points = run.backward
    if not unit.layer or unit.storage is None:
        if name == "head" and ahead.cast_bytes:
            yield from [(point.before(), ahead.cast_bytes) for point in points if point.op != CRITERION][:1]
        return
    dense, experts = unit.closes, unit.bank
    first, before_first = _first(run, makes=name.startswith("mtp."))
    held = experts.part_bytes - experts.gathered_bytes
    if dense is not NOTHING:
        yield first, dense.flat_bytes + dense.casting_bytes + dense.part_bytes + held + ahead.pending_bytes
        begun = ahead.cast_bytes if ahead.explicit or not experts.gathered_bytes else experts.sent_again_bytes
        if begun or experts.gathered_bytes:
            yield before_first, held + experts.flat_bytes + begun
    if not experts.gathered_bytes:
        return
    copied = experts.flat_bytes + experts.casting_bytes + experts.part_bytes + (ahead.flat_bytes if ahead.explicit else 0)
    for point in points:
        if runs_bank(point.op):
            yield point.before(), copied if ahead.explicit else max(copied, ahead.cast_bytes)


def _first(run: Replay, *, makes: bool) -> tuple[LiveSet, LiveSet]:
    """The first point of a backward, with the results of its operation and without them; `makes` is true if an operation runs before it."""
    first, before = run.backward[0], run.backward[0].before()
    if makes or _begins_with_work(run.program.graph.ops):
        kept = dict(run.saved)
        first = before = before.without(each for each in before.storages if each not in kept)
    return first, before


def _begins_with_work(ops: Sequence[Op]) -> bool:
    """True if the first operation of the backward allocates a result.

    The backward of a block with several streams begins with their sum, that of a block with another dtype with a cast, and that of a block
    whose result is not added to a stream with the operation that made the result. The backward of every other block begins with the
    addition, which allocates nothing.
    """
    return ops[-1].name in (CAST_OUT, EXPAND) or (ops[0].name == ATTEND and ops[-1].flow is not Flow.ADD)


@cache
def expert_phases(run: Replay, *, takes: bool) -> tuple[tuple[LiveSet, ...], tuple[LiveSet, ...]]:
    """Candidates for the largest point of a backward: those before the experts' operation, and those from it on.

    If FSDP2 takes the experts' gradients, the second part has only the point of the operation itself.
    """
    index = experts_index(run)
    before = run.backward[:index] or (run.backward[index].before(),)
    return largest_points(before, attrgetter("params")) if takes else before, run.backward[index : index + 1 if takes else None]


@cache
def after_experts(run: Replay) -> tuple[LiveSet, tuple[LiveSet, ...]]:
    """The live set just after the experts' operation, and the later ones that can be the largest, without the experts' gradients."""
    after = run.backward[experts_index(run) + 1 :]
    return after[0].before(), largest_points(after, _without_experts)


def experts_index(run: Replay) -> int:
    """Index of the experts' operation among the points of a backward."""
    return next(index for index, point in enumerate(run.backward) if runs_bank(point.op))


def _without_experts(point: LiveSet) -> tuple[str, ...]:
    return tuple([name for name in point.params if not in_bank(name)])


def _new_without_experts(point: LiveSet) -> tuple[str, ...]:
    return tuple([name for name in point.new_params if not in_bank(name)])


def casting_experts(unit: Unit, *, first: bool, casts: bool, accumulates: bool, together: bool, frees: bool) -> Point:
    """The largest point of a layer's backward while its experts' gradients are cast, and after that.

    The gradients of the first microbatch are cast for accumulation, either one after another, each freed after its cast, or all together;
    the casts are kept. Later gradients are freed after they have been added.

    Args:
        unit: A layer with experts.
        first: True in the first backward.
        casts: True if its gradients are cast.
        accumulates: True if gradients are added in place to an earlier microbatch's.
        together: True if all casts are made in one launch.
        frees: True if the experts' gathered parameters are freed then.
    """
    casts_made, later = after_experts_points(
        unit, after_experts(unit.block.part.replay)[1], first=first, casts=casts, accumulates=accumulates, together=together, frees=frees
    )
    return largest([*later, *casts_made])


def after_experts_points(
    unit: Unit, lives: Sequence[LiveSet], *, first: bool, casts: bool, accumulates: bool, together: bool, frees: bool
) -> tuple[list[Point], list[Point]]:
    """The point of the casts, if any, and the points of these later live sets; arguments as for `casting_experts`."""
    experts = unit.bank
    taken, _ = after_experts(unit.block.part.replay)
    cast, freed = experts.unsharded_bytes if first else 0, experts.gathered_bytes if frees else 0
    params = _new_without_experts if accumulates else _without_experts
    made_casts = []
    if casts:
        made = {parameter: size for parameter, size in unit.block.gradients.items() if in_bank(parameter)}
        most = experts.made_bytes + cast if together else cast_bytes([(made, experts)])
        made_casts.append(point_of(unit, "cast of {}.experts", taken, _without_experts(taken), g=most, c=-freed))
    return made_casts, [point_of(unit, "backward of {}", live, params(live), g=cast, c=-freed) for live in lives]


def reducing_experts(unit: Unit, prefetched: int, *, later: bool, replicated: bool) -> Segment:
    """The largest point of a layer's backward during and after the reduction of its experts' gradients, and the bytes that it leaves.

    Args:
        unit: A layer with experts.
        prefetched: The all-gather output of the layer before.
        later: True if a microbatch was reduced before.
        replicated: True if shards have replicas.
    """
    experts = unit.bank
    taken, last = after_experts(unit.block.part.replay)
    left = reduction_leaves(experts, later=later, replicated=replicated)
    found = [
        point_of(unit, "reduction of {}.experts", taken, _without_experts(taken), g=g, c=buffers + prefetched - experts.gathered_bytes)
        for g, buffers in reduction(experts, experts.made_bytes, experts.last_made_bytes)
    ]
    gathered = prefetched - experts.gathered_bytes + experts.reduce_bytes
    found += [point_of(unit, "backward of {}", live, _without_experts(live), g=left, c=gathered) for live in last]
    return new(Segment, (largest(found), left))


def casting(unit: Unit, *, together: bool) -> int:
    """Largest bytes of a group's first gradients, and of its first layer's experts, while they are cast after its last backward."""
    dense, experts = unit.opens, unit.bank
    if together:
        made = sum(map(made_bytes, (unit, *unit.followers)))
        cast = made * dense.unsharded_bytes // dense.made_bytes if made else 0  # LoRA's frozen layers make none
        return experts.unsharded_bytes + made + cast
    return experts.unsharded_bytes + cast_bytes([(_listed(member), dense) for member in (unit, *unit.followers)])


def in_group(unit: Unit, kept: int, made: int, taken: int) -> tuple[int, int, int]:
    """Gradients after the backward of a layer of a group.

    FSDP2 takes them after the backward of the group's first layer, instead of summing them in place.

    Args:
        unit: The layer.
        kept: Gradients of the layer in `precision.grads`, if it is the first backward.
        made: Gradients of the group's layers so far, as autograd makes them.
        taken: Received gradients in `precision.grads`, in the same way.

    Returns:
        Bytes that are kept now, and the two arguments without them.
    """
    if not unit.joins:
        return kept + taken, 0, 0
    bank = min(kept, unit.bank.unsharded_bytes)
    return bank, made + made_bytes(unit), taken + kept - bank


def made_bytes(unit: Unit) -> int:
    """Gradients of a layer's backward as autograd makes them, except its experts'."""
    return sum(_listed(unit).values())


def reducing(unit: Unit, *, later: bool, replicated: bool) -> Segment:
    """Largest point of reducing a group's gradients (without experts') after its first layer's backward, and the bytes left."""
    dense = unit.opens
    found = [between("reduction of {}", g, buffers) for g, buffers in reduction(dense, dense.made_bytes, dense.last_made_bytes)]
    return new(Segment, (largest(found), reduction_leaves(dense, later=later, replicated=replicated)))


def reduction(group: GroupBytes, gradient_bytes: int, last_bytes: int) -> tuple[tuple[int, int], ...]:
    """(gradients, buffers) of a group while its gradients are copied, while they are reduced, and while the output is cast, if it is.

    The last gradient is still referenced at that time; the output counts as a gradient, because it becomes one.
    """
    reduced = last_bytes + group.reduced_bytes
    points = (gradient_bytes, group.reduce_bytes), (reduced, group.reduce_bytes + group.divided_bytes)
    return (*points, (reduced + group.recast_bytes, group.reduce_bytes)) if group.recast_bytes else points


def reduction_leaves(group: GroupBytes, *, later: bool, replicated: bool) -> int:
    """Shards that are new, and a reduction's output, if it is not the shards themselves: kept until the backward has ended."""
    return (0 if later else group.shard_bytes) + (group.reduced_bytes if replicated and (later or group.recast_bytes) else 0)


def cast_bytes(blocks: Sequence[tuple[Mapping[str, int], GroupBytes]]) -> int:
    """Peak bytes of gradients while they are cast one after another.

    Args:
        blocks: Bytes by name before the cast, and the group whose sums give the ratio of the dtypes.
    """
    left = sum([sum(gradients.values()) for gradients, _ in blocks])
    most = done = 0
    for gradients, group in blocks:
        for size in gradients.values():
            done += size * group.unsharded_bytes // group.made_bytes
            most, left = max(most, done + left), left - size
    return most


def listed_last(unit: Unit, name: str) -> bool:
    """True if FSDP2 lists a tensor of a block after those of its submodules: a tensor of the block itself has no dot in its name."""
    return name == unit.last_own or "." not in name


def _listed(unit: Unit) -> dict[str, int]:
    """Gradients of a layer's backward, except its experts', in FSDP2's order."""
    made = unit.block.part.replay.backward[-1].params
    shared = frozenset(unit.shared)
    names = [name for name in unit.block.gradients if name in made and name not in shared and not in_bank(name)]
    return {name: unit.block.gradients[name] for name in sorted(names, key=lambda name: listed_last(unit, name))}
