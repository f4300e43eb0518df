"""Shared by all operations: registration, accumulation dtype, shape checks, device dispatch."""

from megakernels._common.cost import Cost, register_cost, registered_cost
from megakernels._common.device import chooses_triton, runs_triton, use_kernels
from megakernels._common.numerics import accumulator_dtype, row_blocks, span_sums, upcast
from megakernels._common.operations import operation, piece, types_of
from megakernels._common.pieces import absolute, as_stored, in_order, piece_rows, require_pieces
from megakernels._common.registration import fake_like, join, only_needed
from megakernels._common.scratch import dropped_bytes, register_scratch, scratch_bytes
from megakernels._common.shapes import require, require_starts

__all__ = [
    "Cost", "absolute", "accumulator_dtype", "as_stored", "chooses_triton", "dropped_bytes", "fake_like", "in_order", "join", "only_needed",
    "operation", "piece", "piece_rows", "register_cost", "register_scratch", "registered_cost", "require", "require_pieces",
    "require_starts", "row_blocks", "runs_triton", "scratch_bytes", "span_sums", "types_of", "upcast", "use_kernels",
]  # fmt: skip
