"""Attention residuals: each block reads a weighted sum of the results of earlier blocks, in place of the residual stream.

Layers are in groups. The results of a group's layers are summed, and that sum is one value; the embedding is the first value. A layer
reads the values of all groups before its own and, if it is not the first of its group, the sum of its group so far. For each token the
weights are a softmax over the values. With groups of one layer, a layer reads the result of every earlier layer.

The value of an earlier group is owned by the next layer, which saves it as its input, or by a receive buffer: a block keeps a reference.
Values are a payload (`megaplan.blocks.payload`). `megakernels.attend_depth` is the operation.

Source: arXiv:2603.15031.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megakernels.facts import Work
from megakernels.ops.depth_attention.facts import scratch_bytes
from megaplan.blocks.ops import EARLIER, INPUT, OUTPUT, BlockProgram, Dims, Op
from megaplan.blocks.payload import Payload
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Works
from megaplan.columns import Column
from megaplan.inventory.makers import replicated
from megaplan.inventory.tensors import Group, Init, ParamTensor
from megaplan.scalars import PositiveInt, Section

ATTEND = "attend depth"
VALUE = "value of a group"
ATTENDED, SCORES, RSTD, SUMS, GRADIENT_SUMS = "attended", "depth_scores", "depth_rstd", "depth_sums", "depth_gradient_sums"
QUERY, SCALE = "depth.query", "depth.scale"
SCALE_OUTPUT = "scale output"
"""The operation that multiplies a block's output."""
CAST_IN, CAST_OUT, CAST_INPUT, CAST_OUTPUT, CAST_RESULT = "cast in", "cast out", "cast_input", "cast_output", "cast_result"
"""Operations of a block with another dtype than the stream's (`precision.families`), its input in that dtype, and its output in each."""


class DepthReads(NamedTuple):
    """The values that a layer, or the last norm, reads.

    Attributes:
        earlier: Values in addition to its input.
        starts: True if it is the first layer of its group: its input is the value of the group before, and its result starts a sum.
    """

    earlier: int
    starts: bool


class AttentionResiduals(Section):
    """Attention residuals, in place of a residual stream.

    Attributes:
        group_layers: Layers whose results are one value.
    """

    group_layers: PositiveInt

    def reads(self, layer: int) -> DepthReads:
        """The values that a layer reads by its global index; the last norm has the number of layers as its index."""
        group, place = divmod(layer, self.group_layers)
        return DepthReads(group + (place > 0), place == 0)

    def payload(self, num_layers: int) -> tuple[Payload, ...]:
        """The values, by the first layer of the group that follows each one: its input, which all later layers and the last norm read."""
        return _payload(self.group_layers, num_layers)


@lru_cache(maxsize=64)
def _payload(group_layers: int, num_layers: int) -> tuple[Payload, ...]:
    sources = range(0, num_layers, group_layers)
    return tuple([Payload(INPUT, VALUE, each, range(each + 1, num_layers + 1), _residual, "input") for each in sources])


def _residual(dims: Dims) -> tuple[int, ...]:
    return dims.residual


def depth_tensors(hidden_size: int) -> tuple[ParamTensor, ...]:
    """Parameters of one reader: its query, and the scale of the norm of the scored values. Queries of zero weigh all values equally."""
    return (
        replicated(QUERY, (hidden_size,), Group.OTHER, Init.ZEROS),
        replicated(SCALE, (hidden_size,), Group.OTHER, Init.ONES),
    )


def attend_op(reads: DepthReads) -> Op:
    """The operation that makes the input of a block, or of the last norm.

    It saves the input; earlier values are storages of other blocks.
    """
    values = (INPUT, EARLIER) if reads.earlier else (INPUT,)
    kept = INPUT, SCORES, RSTD
    return Op(ATTEND, values, (ATTENDED, SCORES, RSTD, SUMS), keeps=kept, params=(QUERY, SCALE), fetches=(GRADIENT_SUMS,))


def attending(program: BlockProgram, reads: DepthReads) -> BlockProgram:
    """A block's operations on the sum that it reads, which its forward names to the end; it adds its result to its group's sum, if any."""
    found, names = [attend_op(reads)], {INPUT: ATTENDED}
    for op in program.ops:
        if op.name != "residual":
            found.append(op.renamed(names))
        elif reads.starts:  # the result is the sum
            made = {op.reads[1]: OUTPUT}
            found = [each.renamed(made) for each in found]
        else:
            found.append(op)
    return replace(program, ops=tuple(found), held=program.held | {ATTENDED})


def cast_attending(program: BlockProgram) -> BlockProgram:
    """The program of a block with another dtype than the values': it casts their sum, and its result before that is added."""
    ops = [op.renamed({ATTENDED: CAST_INPUT}) for op in program.ops[1:]]
    tail = [op for op in ops if op.name in (SCALE_OUTPUT, "residual")]
    if tail:
        made = next(name for name in tail[0].reads if name != INPUT)
        tail = [op.renamed({made: CAST_RESULT}) for op in tail]
        ops = [*ops[: len(ops) - len(tail)], Op(CAST_OUT, (made,), (CAST_RESULT,)), *tail]
    else:
        ops = [*(op.renamed({OUTPUT: CAST_OUTPUT}) for op in ops), Op(CAST_OUT, (CAST_OUTPUT,), (OUTPUT,))]
    casts = program.ops[0], Op(CAST_IN, (ATTENDED,), (CAST_INPUT,))
    return replace(program, ops=(*casts, *ops), held=program.held - {ATTENDED} | {CAST_INPUT})


def depth_shapes(reads: DepthReads, dims: Dims) -> Shapes:
    """Storages of a reader; the storage of earlier values has the size of their gradients, which leave the block."""
    batch, tokens, hidden = dims.residual
    rows, count, wide = batch * tokens, reads.earlier + 1, dims.stat_dtype.bytes
    scratch = {
        name: scratch_bytes(rows, hidden, dims.dtype.bytes, count, backward=name == GRADIENT_SUMS) // wide for name in (SUMS, GRADIENT_SUMS)
    }
    earlier = {EARLIER: (reads.earlier * batch, tokens, hidden)} if reads.earlier else {}
    return {
        **storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys((SCORES, RSTD), (batch, tokens, count))),
        **storages(dims.dtype, Column.ACTIVATIONS, {ATTENDED: dims.residual, **earlier}),
        **storages(dims.stat_dtype, Column.WORKSPACE, {name: (size,) for name, size in scratch.items()}),
    }


def depth_works(reads: DepthReads, hidden_size: int, itemsize: int) -> Works:
    """Work of a reader, on the rank's own tokens: plain torch reads a value for its norm, its score and the sum."""
    count = reads.earlier + 1
    values, row = count * hidden_size, hidden_size * itemsize
    flops = 6 * values
    read = 3 * count * row
    work = Work(forward=flops, input_grad=2 * flops, moved_forward=read + row, moved_input=2 * (read + row))
    return (OpWork(ATTEND, "head", work, own_tokens=True),)
