"""Work of the operations of R blocks: projections, two convolutions, M²RNN's sequential recurrence, gated norm, output.

Source: arXiv:2603.14360.
"""

from __future__ import annotations

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.m2rnn.facts import RecurrenceSizes
from megakernels.ops.rms_norm.facts import GATED_NORM, gated_norm
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import lane_of
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.recurrent.section import MatrixRecurrence

PART = "R"


def recurrence_sizes(recurrent: MatrixRecurrence, batch: int, positions: int, heads: int, itemsize: int) -> RecurrenceSizes:
    """Sizes of the recurrence of these heads."""
    return RecurrenceSizes(batch, positions, heads, recurrent.key_dim, recurrent.value_dim, recurrent.save_every, itemsize)


def recurrence_inside(dims: Dims, recurrent: MatrixRecurrence, heads: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of the recurrence of these heads of this rank; None if the kernels do not support its sizes.

    Args:
        dims: Local sizes.
        recurrent: The model's section.
        heads: Heads of this rank.
        parameters: Dtype of the parameters' gradients.
    """
    run = lane_of(dims, heads, heads)
    sizes = recurrence_sizes(recurrent, dims.batch, run.positions, run.heads, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    forward, backward = sizes.forward_bytes(), sizes.backward_bytes((parameters.bytes,) * 4, run.copied_starts)
    starts = max(0, run.copied_starts - backward.last)  # freed before the last state is copied
    return run.inside(dims, forward._replace(scratch=starts), backward, sizes.states[1], backward.last, with_starts=False)


def recurrent_work(load: Workload, recurrent: MatrixRecurrence, hidden_size: int, _variant: None = None) -> Works:
    """One R block, pre-norm and residual included.

    `tp` shards the heads; q and k, which serve all of them, are projected on every rank. The recurrence takes one step per position of a
    sequence, whatever runs concurrently.
    """
    heads, shared, kernel, size = recurrent.num_heads // load.tp, 2 * recurrent.key_dim, recurrent.conv_kernel, load.itemsize
    inner = heads * recurrent.value_dim
    recurrence = recurrence_sizes(recurrent, load.sequences, load.positions, heads, size)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qk_proj", PART, hidden_size, shared),
        linear_work(load, "v_proj", PART, hidden_size, inner),
        linear_work(load, "forget_proj", PART, hidden_size, heads),
        linear_work(load, "gate_proj", PART, hidden_size, inner),
        OpWork("conv_qk", PART, causal_conv1d(shared, kernel, size), CONVOLUTION),
        OpWork("conv_v", PART, causal_conv1d(inner, kernel, size), CONVOLUTION),
        OpWork("m2rnn", "recurrence", recurrence.work(load.seq_length), recurrence, num_steps=load.seq_length),
        OpWork("gated_norm", PART, gated_norm(inner, 1, size), GATED_NORM),
        linear_work(load, "out_proj", PART, inner, hidden_size, closes=True),
    )
