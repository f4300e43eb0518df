"""Products in eight bits of every expert's rows with its matrix, or of two expert's rows; torch's scaled product of groups on CUDA.

On Hopper bf16 has one launch for all experts, which reads the groups on the device. That product gives bf16 alone and is built for no other
generation, so the rest has a product for each expert, whose rows the host reads, as fp32 has in `RowGroups`. A CPU multiplies the same
eight-bit values in fp32, as every device does the values of blocks with scales.
"""

import torch
from torch import Tensor

from megakernels.ops.fp8_experts.reference import Groups
from megakernels.ops.fp8_linear.reference import Operand, multiply

HOPPER = 9
"""Major compute capability."""
MOST_GROUPS = 1023
"""Source: pytorch, `aten/src/ATen/native/cuda/ScaledGroupMM.cu`."""


def has_grouped_product(like: Tensor, num_groups: int) -> bool:
    """True if torch's scaled product of so many groups gives results of this dtype and device.

    Source: pytorch, `torch/testing/_internal/common_cuda.py`, PLATFORM_SUPPORTS_FP8_GROUPED_GEMM.
    """
    if not like.is_cuda or like.dtype != torch.bfloat16 or num_groups > MOST_GROUPS:
        return False
    return torch.cuda.get_device_capability(like.device)[0] == HOPPER


def times(first: Operand, second: Operand, groups: Groups, like: Tensor, *, fast: bool) -> Tensor:
    """Each expert's rows times its matrix.

    Args:
        first: Rows [M, K], a scale for each.
        second: Matrices [E, N, K] with dense rows, scales [E · N].
        groups: Groups of the rows.
        like: A tensor of the result's dtype.
        fast: True if the tensor cores may sum in less than fp32.

    Returns:
        [M, N].
    """
    num_experts, columns, _ = second.data.shape
    scales = None if second.scale is None else second.scale.view(num_experts, columns)
    if first.scale is not None and scales is not None and has_grouped_product(like, num_experts) and first.data.shape[0]:
        found: Tensor = torch._scaled_grouped_mm(
            first.data, second.data.mT, first.scale, scales, offs=groups.ends, out_dtype=like.dtype, use_fast_accum=fast
        )
        return found
    out = like.new_empty((first.data.shape[0], columns))
    if first.data.shape[0]:
        for index, rows in enumerate(groups.spans(turned=False)):
            if rows.stop > rows.start:
                own = Operand(first.data[rows], None if first.scale is None else first.scale[rows])
                multiply(own, Operand(second.data[index], None if scales is None else scales[index]), out[rows], fast=fast)
    return out


def outer(first: Operand, second: Operand, groups: Groups, like: Tensor) -> Tensor:
    """Σ over each expert's rows of first ⊗ second, both transposed: [a, columns] and [b, columns] give [E, a, b], of no rows zeros."""
    count, across, columns = groups.counts.shape[0], first.data.shape[0], second.data.shape[0]
    if first.scale is not None and second.scale is not None and has_grouped_product(like, count):
        found: Tensor = torch._scaled_grouped_mm(
            first.data, second.data.mT, first.scale, second.scale, offs=groups.stops, out_dtype=like.dtype, use_fast_accum=False
        )
        return found
    out = like.new_empty((count, across, columns))
    scales = None if first.scale is None else first.scale.view(count, across)
    others = None if second.scale is None else second.scale.view(count, columns)
    for index, rows in enumerate(groups.spans(turned=True)):
        own = Operand(first.data[:, rows], None if scales is None else scales[index])
        multiply(own, Operand(second.data[:, rows], None if others is None else others[index]), out[index])
    return out
