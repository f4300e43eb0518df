"""Hyper-connections: a residual path of several streams, which every block reads as a weighted sum and to which it adds in parts.

A block with its norm computes on one stream of width h. Before it a product of all streams gives numbers for each token; they weigh the
streams that it reads (pre), the parts of its output that each stream gets (post), and, where streams are mixed, the old streams in the new
ones (comb). The streams are concatenated in one tensor of width n · h, which a block saves as its input and stages exchange.
`megakernels.collapse_streams` and `expand_streams` are the two operations.

Source: arXiv:2409.19606 (hyper-connections); arXiv:2512.24880 (constrained mixing).
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from megakernels.facts import Work
from megakernels.ops.hyper_connection.facts import Connection, expand_scratch_bytes
from megaplan.blocks.ops import INPUT, OUTPUT, BlockProgram, Dims, Op
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Works
from megaplan.columns import Column
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Group, Init, ParamTensor
from megaplan.scalars import Section

MIX, COLLAPSE, EXPAND = "mix streams", "collapse", "expand"
WEIGHED, COLLAPSED = "stream_weights", "collapsed"
NUMBERS, RSTD, SUMS, GRADIENT_SUMS = "stream_numbers", "stream_rstd", "stream_sums", "stream_gradient_sums"
EXPAND_SUMS = "expand_sums"


class Streams(Section):
    """Hyper-connections: streams of the residual path.

    Attributes:
        count: Streams; each is hidden_size wide.
        mixing: Old streams in the new ones: each by itself (independent), or mixed by a doubly stochastic matrix (constrained).
        sinkhorn_steps: Divisions of the matrix by the sums of its columns and of its rows.
        eps: Added to weights of streams, and to the sums by which the matrix is divided.
        post_scale: Factor of the weights by which streams get a block's output.
    """

    count: Annotated[int, Field(ge=2, le=64, strict=True)]
    mixing: Literal["independent", "constrained"] = "constrained"
    sinkhorn_steps: Annotated[int, Field(ge=1, le=100, strict=True)] = 20
    eps: Annotated[float, Field(ge=0, lt=1, strict=True)] = 1e-6
    post_scale: Annotated[float, Field(gt=0, le=100, strict=True)] = 2.0

    @property
    def numbers(self) -> int:
        """Numbers for each token: pre and post of each stream, and the matrix between streams."""
        return self.count * (2 + (self.count if self.mixing == "constrained" else 0))

    def connection(self, norm_eps: float) -> Connection:
        """The constants of the operations."""
        return Connection(self.count, norm_eps, self.eps, self.post_scale, self.sinkhorn_steps)

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
    """The stream that a block or the last norm reads, with the weights for its output, in fp32."""
    kept, params = (INPUT, NUMBERS, RSTD), tuple(f"streams.{name}" for name in ("weight", "base", "scale"))
    return (Op(COLLAPSE, (INPUT,), (made, WEIGHED, NUMBERS, RSTD, SUMS), keeps=kept, params=params, fetches=(GRADIENT_SUMS,)),)


def connected(program: BlockProgram) -> BlockProgram:
    """A block's operations on one stream, which its forward references to the end, between the connections' operations.

    Its addition becomes the sum over streams.
    """
    found = [*collapse_ops()]
    for op in program.ops:
        if op.name == "residual":
            reads = INPUT, *(name for name in op.reads if name != INPUT), WEIGHED
            found.append(Op(EXPAND, reads, (OUTPUT, EXPAND_SUMS), keeps=reads, fetches=(EXPAND_SUMS,)))
            continue
        found.append(op.renamed({INPUT: COLLAPSED}))
    return replace(program, ops=tuple(found), held=program.held | {COLLAPSED}, after=program.after | {EXPAND})


def stream_shapes(streams: Streams, dims: Dims, *, last: bool = False) -> Shapes:
    """Storages of the connections: streams in and out; of the last norm, streams in and one stream out."""
    lead, numbers, rows = dims.residual[:2], streams.count if last else streams.numbers, dims.batch * dims.residual_tokens
    narrow = {WEIGHED: (*lead, numbers - streams.count), NUMBERS: (*lead, numbers), RSTD: lead}
    ends = {INPUT: dims.boundary, COLLAPSED: dims.residual, **({} if last else {OUTPUT: dims.boundary})}
    size, how = dims.dtype.bytes, streams.connection(0.0)
    scratch = {
        **{name: how.scratch_bytes(rows, dims.hidden, size, numbers, backward=name == GRADIENT_SUMS) for name in (SUMS, GRADIENT_SUMS)},
        EXPAND_SUMS: expand_scratch_bytes(rows, dims.hidden, size),
    }
    wide = dims.stat_dtype.bytes
    return {
        **storages(dims.stat_dtype, Column.ACTIVATIONS, narrow),
        **storages(dims.dtype, Column.ACTIVATIONS, ends),
        **storages(dims.stat_dtype, Column.WORKSPACE, {name: (bytes_ // wide,) for name, bytes_ in scratch.items()}),
    }


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
