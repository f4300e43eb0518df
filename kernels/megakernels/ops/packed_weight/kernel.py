"""The Triton kernel that makes the matrix of packed rows: a program makes some columns of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of
from megakernels.ops.packed_weight.facts import LARGEST, NF4, NF4_VALUES, PACKED_TILE, Packing

NUM_WARPS = 4
VALUES = tl.constexpr(NF4_VALUES)


@triton.jit
def value_of(codes):  # type: ignore[no-untyped-def]
    """Values of codes of four bits."""
    value = tl.full(codes.shape, VALUES[0], tl.float32)
    for index in tl.static_range(1, 16):
        value = tl.where(codes == index, VALUES[index], value)
    return value


@triton.jit
def fp32_at(place):  # type: ignore[no-untyped-def]
    """The fp32 number whose four bytes begin at `place`, at any address."""
    bits = tl.load(place).to(tl.uint32) | (tl.load(place + 1).to(tl.uint32) << 8)
    bits |= (tl.load(place + 2).to(tl.uint32) << 16) | (tl.load(place + 3).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_kernel(  # type: ignore[no-untyped-def]
    packed, made, columns, row_bytes, code_bytes, maximum_bytes, inverse,
    BLOCK: tl.constexpr, NESTED: tl.constexpr, FOUR_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    start = packed + row * row_bytes
    if FOUR_BITS:
        codes = tl.load(start + column // 2, mask=mask, other=0).to(tl.int32)
        value = value_of((codes >> (column % 2) * 4) & 15)
    else:
        byte = tl.load(start + column, mask=mask, other=0)
        value = byte.to(tl.int8, bitcast=True).to(tl.float32) * inverse
    block = tl.where(mask, column // BLOCK, 0)
    if NESTED:
        steps = tl.load(start + code_bytes + block).to(tl.int8, bitcast=True).to(tl.float32)
        nested = start + code_bytes + maximum_bytes
        largest = steps * fp32_at(nested + 4) + fp32_at(nested)
    else:
        largest = fp32_at(start + code_bytes + 4 * block)
    tl.store(made + row * columns + column, narrow(value * largest, made.dtype.element_ty), mask=mask)


def unpack(packed: Tensor, columns: int, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Follows the contract of the reference's, for fp32, bf16 and fp16."""
    rows = packed.shape[0]
    made = torch.empty((rows, columns), dtype=dtype, device=packed.device)
    if made.numel():
        with on_device_of(packed):
            unpack_kernel[(rows, triton.cdiv(columns, PACKED_TILE))](
                packed.contiguous(), made, columns, packed.shape[1],
                packing.code_bytes(columns), packing.maximum_bytes(columns), 1 / LARGEST,
                BLOCK=packing.block, NESTED=packing.nested, FOUR_BITS=packing.kind == NF4, TILE=PACKED_TILE, num_warps=NUM_WARPS,
            )  # fmt: skip
    return made
