"""A block under a split backward: I, without the weight gradients of its linears, and W, which computes them.

Source: `megarun.parallel.apply.weight_gradients`.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import AGAIN_SUFFIX, INPUT, OUTPUT, Dims
from megaplan.blocks.storages import Shapes, storages
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.hosts.megarun.parts import BlockBytes, BlockReplay, weigh
from megaplan.hosts.megarun.program import Pending, Replay, size_name, with_backward


class Halves(NamedTuple):
    """A program's backward in two halves.

    Attributes:
        inputs: The program with I instead of its backward.
        late: Parameters whose gradients are left to W, in W's order.
        weights: Live sets of W: one for each product, with the pending storages and the gradients that it makes; a gather of an input adds
            one without a gradient. Fused products have one point with their temporary tensors, then one for each gradient (`new_params`)
            when it is taken.
        fetched: Storages that W itself makes.
        for_others: Storages that only other blocks' W needs.
    """

    inputs: Replay
    late: tuple[str, ...]
    weights: tuple[LiveSet, ...]
    fetched: frozenset[str] = frozenset()
    for_others: tuple[str, ...] = ()

    @property
    def pending(self) -> LiveSet:
        """Storages that a microbatch keeps between I and W."""
        if not self.weights:
            return LiveSet("W", self.for_others)
        first, fetched = self.weights[0].before(), self.fetched
        return LiveSet(first.op, (*(name for name in first.storages if name not in fetched), *self.for_others), first.gradients)


@cache
def splittable(run: Replay) -> Replay:
    """The block with linears that a schedule can split, but with an unsplit backward."""
    return with_backward(run, run.program, splittable=True)[0]


@cache
def _made_again(run: Replay) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for point in run.backward for name in point.storages if name.endswith(AGAIN_SUFFIX)]))


def splittable_part(part: BlockReplay, dims: Dims) -> BlockReplay:
    """`splittable` of a part; outputs of recomputed regions are made a second time.

    An output with the width of the stream has all its tokens, before its reduction; any other is as large as the first time.
    """
    run = splittable(part.replay)
    found: Shapes = {}
    for name in _made_again(run):
        _, column, shape, *_ = part.tensors[name.removesuffix(AGAIN_SUFFIX)]
        found |= storages(dims.dtype, column, {name: dims.gathered if shape == dims.residual else shape})
    return BlockReplay(run, part.tensors | found)


@cache
def halves(run: Replay, *, owns_input: bool = True) -> Halves:
    """The halves of a program's backward; W's points have the block's input, if W needs it and `owns_input`."""
    inputs, backward = with_backward(run, run.program, splits=True)
    weights, operations = [], [pending.op for pending in backward.pending]
    for op in dict.fromkeys(operations):
        left, name = backward.pending[operations.index(op) :], f"W of {op.name}"  # weights that read the same input are freed together
        own, further = left[0].kept, [each for pending in left if pending.op is not op for each in pending.kept]
        gradients = tuple(size_name(holder) for holder in dict.fromkeys(pending.gradient for pending in left))
        if op.late_fetches:  # the saved part of the input is allocated while the input is gathered, and is freed after use
            weights.append(LiveSet(name, tuple(dict.fromkeys((*own, *further, *op.late_fetches))), gradients))
            own = (*own[1:], *op.late_fetches)
        storages, params = tuple(dict.fromkeys((*own, *further))), tuple(param for param, _ in op.late)
        if op.late_inside:
            weights.append(LiveSet(name, tuple(dict.fromkeys((*storages, *op.late_inside))), gradients, params))
        for index, param in enumerate(params):
            weights.append(LiveSet(name, storages, gradients, params[index:] if op.late_inside else (param,), (param,)))
    if not owns_input:
        weights = [replace(point, storages=tuple(name for name in point.storages if name != INPUT)) for point in weights]
    late = tuple(pending.param for pending in backward.pending)
    fetched = frozenset(name for op in operations for name in (*op.late_fetches, *op.late_inside))
    return Halves(inputs, late, tuple(weights), fetched, _for_others(run, backward.pending))


def _for_others(run: Replay, pending: list[Pending]) -> tuple[str, ...]:
    graph, own = run.program.graph, {name for each in pending for name in each.kept}
    return tuple(name for name in graph.for_others if name in graph.passed or name not in own)


class HalvedBytes(NamedTuple):
    """The sums of a block's halves.

    Attributes:
        inputs: The block's sums with I instead of its backward.
        late_bytes: Gradients left to W, in the dtype in which autograd makes them.
        pending: Bytes kept between I and W, by column.
        pending_bytes: Sum of `pending`.
        arrived_bytes: Part of that sum: the gradient of the block's own output.
        weights: W's points, with the allocated bytes at each: pending storages, and the new gradient.
    """

    inputs: BlockBytes
    late_bytes: int
    pending: LiveSet
    pending_bytes: int
    arrived_bytes: int
    weights: tuple[tuple[LiveSet, int], ...]


def weigh_halves(block: BlockBytes, *, owns_input: bool = True) -> HalvedBytes:
    """Sums of a block's halves.

    `owns_input` is true if the block's input is counted here when W needs it; else it is a receive buffer.
    """
    split, tensors = halves(block.part.replay, owns_input=owns_input), block.part.tensors
    return HalvedBytes(
        inputs=weigh(BlockReplay(split.inputs, tensors), block.gradients, in_place=block.in_place),
        late_bytes=sum([block.gradients[name] for name in split.late]),
        pending=split.pending,
        pending_bytes=block.point_bytes(split.pending, ()),
        arrived_bytes=tensors[OUTPUT][0] if OUTPUT in split.pending.gradients else 0,
        weights=tuple((point, block.point_bytes(point, point.params)) for point in split.weights),
    )
