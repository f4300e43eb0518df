"""What every operation shares: registration, accumulation dtype, shape checks, device dispatch."""

from megakernels._common.device import runs_triton, use_kernels
from megakernels._common.numerics import accumulator_dtype, row_blocks, upcast
from megakernels._common.registration import fake_like, join, only_needed
from megakernels._common.shapes import require, require_starts

__all__ = [
    "accumulator_dtype",
    "fake_like",
    "join",
    "only_needed",
    "require",
    "require_starts",
    "row_blocks",
    "runs_triton",
    "upcast",
    "use_kernels",
]
