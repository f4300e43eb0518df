"""A family's part of the ledger: its program and the size of every storage, and their evaluation."""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, TAKE, BlockProgram, Flow
from megaplan.blocks.storages import Shapes, Stored
from megaplan.columns import Column
from megaplan.families.attention_residuals import CAST_IN
from megaplan.families.residual import PASS_ON
from megaplan.hosts.allocator import slack_bytes
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.hosts.megarun.program import CALLER, Replay, replay, with_backward
from megaplan.hosts.values import BlockLedger, LedgerTensor
from megaplan.tuples import new

GRADIENTS = Column.GRADIENTS
"""The column of gradients: in Python 3.11 a lookup on the class takes as long as a call."""


class BlockReplay(NamedTuple):
    """One block's replay with its storages by name."""

    replay: Replay
    tensors: Shapes


@cache
def replay_of(program: BlockProgram, policy: str) -> Replay:
    """The replay of a block under a recompute policy."""
    names, region = frozenset(op.name for op in program.ops), frozenset[str]()
    if policy != "none":
        region = names & program.reruns if policy == "selective" else names - {PASS_ON, TAKE}
    cached = program.caches if policy == "selective" else frozenset[str]()
    passed = frozenset(name for op in program.ops if op.name == PASS_ON for name in op.keeps)
    return replay(program.ops, program.held, region, cached=cached, after=program.after - region, passed=passed)


class BlockBytes(NamedTuple):
    """The sums of a block's ledger that a budget needs.

    Attributes:
        part: The summed replay.
        gradients: Bytes of each parameter's gradient, in the dtype in which autograd makes it.
        saved: Bytes kept, by column.
        saved_bytes: Sum of `saved`.
        saved_slack_bytes: Bytes that the allocator's rounding adds to them.
        keeps_input: True if the block keeps its input, which belongs to the block before.
        output_bytes: The block's output in the residual stream.
        forward: The forward peak.
        forward_bytes: Allocated bytes at that peak.
        backward: The backward peak, with every parameter gradient made so far.
        backward_bytes: Allocated bytes at that peak.
        accumulating: The backward peak when gradients are added in place to existing ones, so that only those of the running operation are
            new; `backward` if they are not.
        accumulating_bytes: Allocated bytes at that peak.
        in_place: True if later microbatches add gradients in place.
    """

    part: BlockReplay
    gradients: dict[str, int]
    saved: dict[Column, int]
    saved_bytes: int
    saved_slack_bytes: int
    keeps_input: bool
    output_bytes: int
    forward: LiveSet
    forward_bytes: int
    backward: LiveSet
    backward_bytes: int
    accumulating: LiveSet
    accumulating_bytes: int
    in_place: bool

    def add_to(self, cells: dict[Column, int], point: LiveSet, params: tuple[str, ...]) -> None:
        """Add, by column, the allocated bytes at a point with these parameter gradients."""
        tensors = self.part.tensors
        for name in point.tensors:
            size, column, _, _, _ = tensors[name]
            cells[column] += size
        cells[GRADIENTS] += sum([self.gradients[name] for name in params])

    def point_bytes(self, point: LiveSet, params: tuple[str, ...]) -> int:
        """Allocated bytes at a point with these parameter gradients."""
        tensors = self.part.tensors
        return sum([tensors[name][0] for name in point.tensors]) + sum([self.gradients[name] for name in params])


def weigh(part: BlockReplay, gradients: dict[str, int], *, in_place: bool) -> BlockBytes:
    """Sums and peaks of a block.

    Args:
        part: Program and storages.
        gradients: Bytes of each parameter's gradient, in the dtype in which autograd makes it.
        in_place: True if later microbatches add gradients in place; else `accumulating` is `backward`.
    """
    tensors, run = part.tensors, part.replay
    sizes = {name: stored[0] for name, stored in tensors.items()}
    forward, forward_bytes = run.forward[0], -1
    for point, of_tensors, _ in run.forward_peaks:
        total = sum(of_tensors(sizes))
        if total > forward_bytes:
            forward, forward_bytes = point, total
    backward, backward_bytes = run.backward[0], -1
    made = (0, *accumulate(run.of_params(gradients)))
    for point, of_tensors, num_params in run.backward_peaks:
        total = sum(of_tensors(sizes)) + made[num_params]
        if total > backward_bytes:
            backward, backward_bytes = point, total
    accumulating, accumulating_bytes = (run.backward[0], -1) if in_place else (backward, backward_bytes)
    for point, of_tensors, of_params in run.accumulating_peaks if in_place else ():
        total = sum(of_tensors(sizes)) + sum(of_params(gradients))
        if total > accumulating_bytes:
            accumulating, accumulating_bytes = point, total
    saved: dict[Column, int] = {}
    for size, column, _, _, _ in run.of_saved(tensors):
        saved[column] = saved.get(column, 0) + size
    return new(
        BlockBytes,
        (
            part,
            gradients,
            saved,
            sum(saved.values()),
            slack_bytes(run.of_saved(sizes)),
            run.keeps_input,
            sizes[OUTPUT],
            forward,
            forward_bytes,
            backward,
            backward_bytes,
            accumulating,
            accumulating_bytes,
            in_place,
        ),
    )


class Arriving(NamedTuple):
    """Gradients that exist when a block's backward begins, in addition to that of its output.

    Attributes:
        output: True if the gradient of its output is in a receive buffer.
        values: Storages that later blocks read too: their gradients are sums over these blocks, or in a receive buffer.
        received: True if they are in a receive buffer.
    """

    output: bool = False
    values: tuple[str, ...] = ()
    received: bool = False


NOTHING_ARRIVES = Arriving()


@cache
def _arrived(run: Replay, arriving: Arriving, *, splittable: bool) -> Replay:
    """The same block with a gradient that a receive buffer holds to the end: an addition to it makes a new storage."""
    found = dict(run.program.arriving)
    if arriving.output:
        found[CALLER] = OUTPUT
    for name in (run.program.graph.roots[name] for name in arriving.values):
        found[name] = name
        if arriving.received:
            found[f"{CALLER} of {name}"] = name
    return with_backward(run, run.program._replace(arriving=found), splittable=splittable)[0]


def _adds_at_its_end(part: BlockReplay) -> bool:
    """True if, except for the addition, only the first operation reads the input, and its result has the input's size: a norm.

    The gradient of the norm's output exists when the gradient of its input is made. It is freed when that is added, and the sum takes its
    place.
    """
    ops, tensors = part.replay.program.graph.ops, part.tensors
    readers = [op for op in ops if INPUT in op.reads and op.flow is not Flow.ADD]
    if not any(INPUT in op.reads for op in ops if op.flow is Flow.ADD):
        return False
    if readers != [ops[0]] or ops[0].name == CAST_IN:
        return False
    first = ops[0]
    return first.flow is Flow.COMPUTE and not first.is_linear and tensors[first.makes[0]][0] >= tensors[OUTPUT][0]


def summarize_with_arriving(block: BlockBytes, arriving: Arriving, *, splittable: bool) -> BlockBytes:
    """A block's sums with these gradients.

    `splittable` is the same as for the block. If the result is not larger, the block itself is returned.
    """
    if not arriving.values and (not arriving.output or _adds_at_its_end(block.part)):
        return block
    run = _arrived(block.part.replay, arriving, splittable=splittable)
    return weigh(BlockReplay(run, block.part.tensors), block.gradients, in_place=block.in_place)


def ledger(block: BlockBytes, gradients: Shapes, *, in_place: bool) -> BlockLedger:
    """A block's ledger, tensor by tensor.

    Args:
        block: Sums of the block.
        gradients: Parameter gradients by parameter name.
        in_place: True if a later microbatch, which adds gradients in place, has the backward peak.
    """
    tensors = block.part.tensors
    point = block.accumulating if in_place else block.backward
    params = point.new_params if in_place else point.params
    backward = f"alive in backward of {point.op}"
    return BlockLedger(
        saved=tuple(_tensor(name, tensors[name], f"kept by {', '.join(keepers)}", keepers) for name, keepers in block.part.replay.saved),
        output=_tensor(OUTPUT, tensors[OUTPUT], "passed on"),
        forward_live=_tensors(block.forward.storages, tensors, f"alive in {block.forward.op}"),
        backward_live=(
            *_tensors(point.storages, tensors, backward),
            *(_gradient(index, point, block.part) for index in range(len(point.gradients))),
            *(_tensor(f"d.{name}", gradients[name], f"gradient {backward}") for name in params),
        ),
    )


def _gradient(index: int, point: LiveSet, part: BlockReplay) -> LedgerTensor:
    name = point.gradients[index]
    again = "+" if name in point.gradients[:index] else ""
    return _tensor(f"d.{name}{again}", part.tensors[name], f"gradient alive in backward of {point.op}")


def _tensors(names: Iterable[str], tensors: Shapes, why: str) -> tuple[LedgerTensor, ...]:
    return tuple(_tensor(name, tensors[name], why) for name in names)


def _tensor(name: str, stored: Stored, why: str, keepers: tuple[str, ...] = ()) -> LedgerTensor:
    _, column, shape, dtype, basis = stored
    return LedgerTensor(name, shape, dtype, column, why, basis, keepers)
