"""Weights of products as bytes: rows of elements and of the scales of their blocks, of which each is made on one shard of rows.

A shard is packed on its rank, and the rows of all shards are the packed matrix. With scaling tensor a row has its elements in e4m3, with
mxfp8 elements and a scale for 32 of them, with nvfp4 two codes a byte and a scale for 16; with rows its elements and its scale; with
fp8_blockwise its elements, whose scales follow from the largest magnitudes of 128 x 128 elements, which shards may divide. Elements and
scales equal those of the operand made from the whole matrix. MXFP8 has other elements for the product that makes the input's gradient,
whose blocks are of 32 rows: their scales lie behind the elements, too, those of 32 rows together. With rows the elements of that product
are scaled by the columns of the whole matrix, whose largest numbers every shard has; the place of a row's scale is then empty. Blocks of
NVFP4 have 16 rows: one matrix serves both products.

With delayed a row has its elements, and the factor is given.

Blocks of a shard equal the matrix's blocks if the shard has whole ones (`packing.facts.packs`). Values of the whole matrix are given: its
largest number, or the largest of its columns or blocks.
"""

import torch
from torch import Tensor

from megakernels.ops.fp8_linear.blocks import E4M3, LEVELS, block_factor, leveled, nvfp4_factors, to_codes
from megakernels.ops.fp8_linear.delayed import Delayed, record
from megakernels.ops.fp8_linear.facts import BLOCKS, DELAYED, padded, rounded_up, slice_rows
from megakernels.ops.fp8_linear.packing.facts import PACKED_SLICE, squares, unpacked_columns
from megakernels.ops.fp8_linear.reference import Operand, power_of_two, round_rows


def pack_weight(
    shard: Tensor, scaling: str, packed: Tensor, largest: Tensor | None, dtype: torch.dtype,
    *, turned: bool, place: int = 0, delayed: Delayed | None = None,
) -> None:  # fmt: skip
    """Write the packed rows of a shard.

    Args:
        shard: Rows of a weight [rows, K], fp32 or bf16.
        scaling: tensor, rows, delayed, mxfp8, nvfp4 or fp8_blockwise.
        packed: uint8 [rows, packing.facts.packed_columns(K)], rows with dense elements.
        largest: The largest magnitudes of the whole weight in `dtype`, fp32 [packing.facts.num_largest(N, K)]; None for mxfp8 and delayed.
        dtype: The dtype of the weight when gathered unpacked; elements are first rounded to it.
        turned: True for the elements of the other product, if they differ (`packing.facts.TWO_FORMS`).
        place: Index of the first row in the weight.
        delayed: The weight's numbers of delayed scaling, to which the shard's largest magnitude is joined; None for others.
    """
    step = rounded_up(slice_rows(*shard.shape), PACKED_SLICE)
    for start in range(0, shard.shape[0], step):
        rows, out = shard[start : start + step], packed[start : start + step]
        if delayed is not None:
            used = rows.to(dtype)
            record(used, delayed)
            round_rows(used, delayed.factor[None, :], out.view(E4M3), saturates=True)
            del used
        elif scaling == "tensor":
            assert largest is not None
            out.view(E4M3).copy_(rows.to(dtype) * power_of_two(largest, E4M3).to(dtype))
        elif scaling == "rows":
            _pack_rows(rows.to(dtype), out, largest if turned else None)
        elif scaling == "fp8_blockwise":
            assert largest is not None
            _pack_squares(rows.to(dtype), out, largest, place + start)
        else:
            _pack_blocks(rows.to(dtype), scaling, out, largest, turned=turned)


def _pack_rows(rows: Tensor, out: Tensor, largest: Tensor | None) -> None:
    """Elements scaled by the largest magnitudes of columns, or by those of the rows themselves, whose scales lie behind them."""
    columns = rows.shape[1]
    factor = power_of_two(torch.linalg.vector_norm(rows, float("inf"), dim=1) if largest is None else largest, E4M3)
    factors = factor.to(rows.dtype)
    out[:, :columns].view(E4M3).copy_(rows * (factors[:, None] if largest is None else factors))
    if largest is None:
        out[:, columns:].view(torch.float32).copy_(1 / factor[:, None])


def _unpacked_rows(packed: Tensor, largest: Tensor | None, *, turned: bool) -> Operand:
    """An operand with a scale for each row, or turned for each column of the packed weight."""
    (height, width), columns = packed.shape, unpacked_columns(packed.shape[1], "rows")
    if turned:
        assert largest is not None
        scale = 1 / power_of_two(largest, E4M3)
    else:
        scale = torch.ones(padded(height), dtype=torch.float32, device=packed.device)
        scale[:height].copy_(packed[:, columns:width].view(torch.float32).view(-1))
    shape = (columns, padded(height)) if turned else (padded(height), columns)
    data = (torch.empty if padded(height) == height else torch.zeros)(shape, dtype=E4M3, device=packed.device)
    found = packed[:, :columns].view(E4M3)
    data[:, :height].copy_(found.mT) if turned else data[:height].copy_(found)
    return Operand(data, scale)


def square_maxima(rows: Tensor, place: int, found: Tensor) -> None:
    """Raise `found`, the largest magnitudes of a weight's blocks [down, across], to those of these rows, the first at `place`.

    Rows after the last block, which fill a shard, are zeros.
    """
    (height, columns), size = rows.shape, BLOCKS["fp8_blockwise"]
    first, whole = place // size, columns // size
    maxima = rows.new_zeros((rounded_up(place % size + height, size), found.shape[1]))
    own = maxima[place % size : place % size + height]
    if whole:
        own[:, :whole].copy_(torch.linalg.vector_norm(torch.unflatten(rows[:, : whole * size], 1, (-1, size)), float("inf"), dim=2))
    if whole < found.shape[1]:
        own[:, whole].copy_(torch.linalg.vector_norm(rows[:, whole * size :], float("inf"), dim=1))
    covered = found[first : first + maxima.shape[0] // size]
    covered.copy_(torch.maximum(covered, torch.unflatten(maxima, 0, (-1, size)).amax(1)[: covered.shape[0]]))


def _pack_squares(rows: Tensor, out: Tensor, largest: Tensor, place: int) -> None:
    """Elements scaled by the largest magnitudes of a weight's blocks; the first row is at `place`."""
    (height, columns), size = rows.shape, BLOCKS["fp8_blockwise"]
    maxima = largest.view(-1, squares(height, columns)[1])
    block = torch.arange(place, place + height, device=rows.device).div_(size, rounding_mode="floor").clamp_(max=maxima.shape[0] - 1)
    factors = block_factor(maxima.index_select(0, block), E4M3)
    out.view(E4M3).copy_(factors.repeat_interleave(size, 1)[:, :columns].mul_(rows))


def _unpacked_squares(packed: Tensor, largest: Tensor, *, turned: bool) -> Operand:
    """The values of a packed weight, or of its transpose, rows padded to whole blocks, like an operand's."""
    found, size = packed.view(E4M3).mT if turned else packed.view(E4M3), BLOCKS["fp8_blockwise"]
    across = squares(*found.shape)[1]
    values = torch.empty((found.shape[0], across * size), dtype=torch.float32, device=packed.device)
    values[:, : found.shape[1]].copy_(found)
    scales = block_factor(largest, E4M3).reciprocal_().view(squares(*packed.shape))
    of_rows = (scales.mT if turned else scales).repeat_interleave(size, 0)[: found.shape[0]]
    torch.unflatten(values, 1, (across, size)).mul_(of_rows[..., None])
    return Operand(values[:, : found.shape[1]], None)


def _pack_blocks(rows: Tensor, scaling: str, out: Tensor, largest: Tensor | None, *, turned: bool) -> None:
    size, (height, columns) = BLOCKS[scaling], rows.shape
    values = torch.empty((columns, height) if turned else (height, columns), dtype=torch.float32, device=rows.device)
    values.copy_(rows.mT if turned else rows)
    del rows
    whole = None if largest is None else nvfp4_factors(largest.view(()))
    scales, _ = leveled(torch.unflatten(values, 1, (-1, size)), scaling, whole, E4M3, square=True)
    if whole is None:
        out[:, :columns].view(E4M3).copy_(values.mT if turned else values)
        out[:, columns:].copy_(scales.mT.reshape(height, -1) if turned else scales)
        return
    to_codes(values)
    low = values.to(torch.uint8)
    del values
    out[:, : columns // 2].copy_(low[:, ::2] | low[:, 1::2] << 4)
    out[:, columns // 2 :].copy_(scales)


def unpacked(packed: Tensor, scaling: str, largest: Tensor | None, *, turned: bool) -> Operand:
    """A packed weight as the second operand of a product: of the forward, or turned of the one that makes the input's gradient.

    With delayed `largest` is the factor that its elements have.
    """
    (rows, _), columns = packed.shape, unpacked_columns(packed.shape[1], scaling)
    if scaling in ("tensor", DELAYED):
        assert largest is not None
        factor, found = largest if scaling == DELAYED else power_of_two(largest, E4M3), packed.view(E4M3)
        scale = 1 / factor
        height, summed = (columns, padded(rows)) if turned else (padded(rows), columns)
        if not turned and height == rows:
            return Operand(found, scale)
        data = (torch.empty if summed == rows else torch.zeros)((height, summed), dtype=E4M3, device=packed.device)
        data[:, :rows].copy_(found.mT) if turned else data[:rows].copy_(found)
        return Operand(data, scale)
    if scaling == "rows":
        return _unpacked_rows(packed, largest, turned=turned)
    if scaling == "fp8_blockwise":
        assert largest is not None
        return _unpacked_squares(packed, largest, turned=turned)
    size, values = BLOCKS[scaling], torch.empty((columns, rows) if turned else (rows, columns), dtype=torch.float32, device=packed.device)
    placed, table = values.mT if turned else values, packed[:, -(columns // size) :]
    if scaling == "mxfp8":
        placed.copy_(packed[:, :columns].view(E4M3))
        decoded = table.view(torch.float8_e8m0fnu).float()
        if turned:
            values.view(columns, -1, size).mul_(decoded.view(-1, columns).mT[..., None])
        else:
            values.view(rows, -1, size).mul_(decoded[..., None])
        return Operand(values, None)
    assert largest is not None
    levels = torch.tensor((*LEVELS, *(-level for level in LEVELS)), dtype=torch.float32, device=packed.device)
    for odd in (0, 1):
        codes = (packed[:, : columns // 2] >> 4 * odd & 15).int()
        placed[:, odd::2].copy_(levels.index_select(0, codes.view(-1)).view(codes.shape))
        del codes
    decoded = table.view(E4M3).float()
    torch.unflatten(placed, 1, (-1, size)).mul_(decoded[..., None])
    return Operand(values.mul_(nvfp4_factors(largest.view(()))[1]), None)
