"""The matrix of a weight whose rows are packed in four or eight bits, for one product. No gradient."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import require
from megakernels._common.device import module_for
from megakernels.ops.packed_weight import reference
from megakernels.ops.packed_weight.facts import INT8, NF4, Packing

__all__ = ["unpacked"]


def unpacked(packed: Tensor, columns: int, packing: Packing, dtype: torch.dtype) -> Tensor:
    """The matrix of packed rows, in the dtype in which a product reads it. No gradient.

    Args:
        packed: uint8 [N, bytes of a row], see `packed_weight.facts`.
        columns: K.
        packing: nf4 or int8, columns of a block, and true if the blocks' magnitudes are in eight bits.
        dtype: fp32, bf16 or fp16.

    Returns:
        [N, K], contiguous.

    Triton:
        One kernel. Plain torch makes slices of 2¹⁸ elements.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2305.14314, section 3.
    """
    fits = packed.dim() == 2 and packed.dtype is torch.uint8 and packed.shape[1] == packing.row_bytes(columns)
    require(fits, "unpacked", "packed must be uint8 [N, bytes of a row]", packed=packed.shape, row=packing.row_bytes(columns))
    require(packing.kind in (NF4, INT8), "unpacked", "the kind must be nf4 or int8", kind=packing.kind)
    made: Tensor = _unpacked(packed, columns, *packing, dtype)
    return made


@custom_op("megakernels::unpacked", mutates_args=())
def _unpacked(packed: Tensor, columns: int, kind: str, block: int, nested: bool, dtype: torch.dtype) -> Tensor:
    module = module_for(packed, reference, dtypes=(torch.uint8,))
    made: Tensor = module.unpack(packed, columns, Packing(kind, block, nested), dtype)
    return made


@_unpacked.register_fake
def _(packed: Tensor, columns: int, _kind: str, _block: int, _nested: bool, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], columns), dtype=dtype)
