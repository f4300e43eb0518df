"""Hyper-connections: a residual path of several streams, which every block reads as a weighted sum and to which it adds in parts.

A block with its norm computes on one stream of width h. Before it a product of all streams gives numbers for each token; they weigh the
streams that it reads (pre), the parts of its output that each stream gets (post), and, where streams are mixed, the old streams in the new
ones (comb). The streams are side by side in one tensor, n · h wide: what a block keeps as its input, and what crosses a stage boundary.

Source: arXiv:2409.19606 (hyper-connections); arXiv:2512.24880 (constrained mixing).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megakernels.facts import Work
from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Works
from megaplan.columns import Column
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Group, Init, ParamTensor
from megaplan.scalars import Section

MIX, COLLAPSE, EXPAND = "mix streams", "collapse", "expand"
WEIGHED, COLLAPSED = "stream_weights", "collapsed"


class Streams(Section):
    """Hyper-connections: streams of the residual path.

    Attributes:
        count: Streams; each is hidden_size wide.
        mixing: Old streams in the new ones: each by itself (independent), or mixed by a doubly stochastic matrix (constrained).
    """

    count: Annotated[int, Field(ge=2, le=64, strict=True)]
    mixing: Literal["independent", "constrained"] = "constrained"

    @property
    def numbers(self) -> int:
        """Numbers for each token: pre and post of each stream, and the matrix between streams."""
        return self.count * (2 + (self.count if self.mixing == "constrained" else 0))

    @property
    def factors(self) -> int:
        """Learned factors: of pre, of post, and of the matrix."""
        return 3 if self.mixing == "constrained" else 2


def block_tensors(streams: Streams, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Parameters of one block's connections."""
    return _tensors(streams.numbers, streams.factors, streams.count * hidden_size)


def last_tensors(streams: Streams, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Parameters of the sum of streams that the last norm reads."""
    return _tensors(streams.count, 1, streams.count * hidden_size)


def _tensors(numbers: int, factors: int, width: int) -> tuple[ParamTensor, ...]:
    return (
        replicated("streams.weight", (numbers, width), Group.OTHER),
        replicated("streams.base", (numbers,), Group.OTHER, Init.ZEROS),
        replicated("streams.scale", (factors,), Group.OTHER, Init.ONES),
    )


def collapse_ops(made: str = COLLAPSED) -> tuple[Op, ...]:
    """The numbers of the tokens, which are kept in fp32, and the stream that a block or the last norm reads."""
    params = tuple(f"streams.{name}" for name in ("weight", "base", "scale"))
    return (
        Op(MIX, (INPUT,), (WEIGHED,), keeps=(INPUT, WEIGHED), params=params),
        Op(COLLAPSE, (INPUT, WEIGHED), (made,), keeps=(INPUT, WEIGHED)),
    )


def connected(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """A block's operations on one stream, between those of the connections; its addition becomes the sum over streams."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(COLLAPSED if name == INPUT else name for name in names)

    found = [*collapse_ops()]
    for op in ops:
        if op.name == "residual":
            reads = INPUT, *(name for name in op.reads if name != INPUT), WEIGHED
            found.append(Op(EXPAND, reads, (OUTPUT,), keeps=reads, holds=op.holds))
            continue
        grads = None if op.grads is None else renamed(op.grads)
        found.append(op._replace(reads=renamed(op.reads), keeps=renamed(op.keeps), grads=grads, holds=renamed(op.holds)))
    return tuple(found)


def stream_shapes(dims: Dims, numbers: int, *, collapses: bool = False) -> Shapes:
    """Storages of the connections: streams in and out, or one stream out of those of the last norm."""
    found = storages(dims.stat_dtype, Column.ACTIVATIONS, {WEIGHED: (*dims.residual[:2], numbers)})
    ends = {INPUT: dims.boundary, COLLAPSED: dims.residual, **({} if collapses else {OUTPUT: dims.boundary})}
    return found | storages(dims.dtype, Column.ACTIVATIONS, ends)


def stream_works(streams: Streams, hidden_size: int, itemsize: int, *, last: bool = False) -> Works:
    """Work of the connections of a block, on the rank's own tokens: a narrow product of all streams, and sums over them."""
    count, numbers = streams.count, streams.count if last else streams.numbers
    wide, product = count * hidden_size, 2 * numbers * count * hidden_size
    mixing = Work(forward=product, input_grad=product, weight_grad=product, moved_forward=wide * itemsize, moved_input=2 * wide * itemsize)
    read = (wide + hidden_size) * itemsize
    collapse = OpWork(COLLAPSE, "head", Work(moved_forward=read, moved_input=2 * read), own_tokens=True)
    found: Works = (OpWork(MIX, "head", mixing, weights=numbers * wide, own_tokens=True), collapse)
    if last:
        return found
    sums = 2 * wide * (count if streams.mixing == "constrained" else 1)
    moved = (2 * wide + hidden_size) * itemsize
    return (
        *found,
        OpWork(EXPAND, "head", Work(forward=sums, input_grad=2 * sums, moved_forward=moved, moved_input=2 * moved), own_tokens=True),
    )
