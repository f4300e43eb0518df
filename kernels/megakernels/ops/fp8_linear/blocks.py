"""Operands with a scale for each block of the summed dim, as the fp32 values that they represent: MXFP8, NVFP4 and blocks of 128, emulated.

MXFP8 has blocks of 32 elements and scales that are powers of two, the largest element over the format's largest number rounded up. NVFP4
has blocks of 16 elements in e2m1, scales in e4m3, and a factor of the whole matrix; a weight has one scale per 16 x 16 elements, so that
its transpose has the same values. Operands of a weight gradient are transformed by a signed Hadamard matrix over blocks of 16 tokens (not a
shorter last block), and output gradients round stochastically. Other elements round to nearest, ties to even. FP8 in blocks has scales of
128 elements in fp32 that are powers of two, of a weight's 128 x 128.

The random numbers are a hash of an element's place and of the matrix' largest number: a recomputed or resumed step rounds equally.

Source: Transformer Engine, `common/cast/mxfp8`, `common/recipe/nvfp4.cu` and `recipe_common.cuh`, `NVFP4BlockScaling` (arXiv:2509.25149);
the hash is lowbias32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megakernels.ops.fp8_linear.facts import BLOCKS, SCALE_BYTES, SQUARE_ROWS, padded, rounded_up, slice_rows

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
"""Roles of an operand."""
E4M3 = torch.float8_e4m3fn
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by their code."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the rows of the Hadamard matrix, as Transformer Engine has them."""
_EXPONENT, _ONE, _HALF_OF_SMALLEST = 0x7F800000, 0x3F800000, 0x400000
_MIX = ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, 0x846CA68B - (1 << 32)), (16, 0xFFFF, 1))
_SEED = 0x9E3779B9 - (1 << 32)


def rounded(
    x: Tensor, scaling: str, role: str, *, transposed: bool = False, dtype: torch.dtype = E4M3, largest: Tensor | None = None
) -> Tensor:
    """The values of x [rows, summed], or of its transpose, that an operand of a product represents, fp32.

    Args:
        x: fp32 or bf16.
        scaling: mxfp8, nvfp4 or fp8_blockwise.
        role: input, weight or gradient.
        transposed: True if the operand is x's transpose; other than weights it is then an operand of a weight gradient.
        dtype: The dtype of elements in eight bits.
        largest: The largest magnitude of a weight of which x has some rows, fp32, for NVFP4; None for that of x.
    """
    found = x.mT if transposed else x
    values, whole = _prepared(found, scaling, spread=transposed and role != WEIGHT, largest=largest)
    for start, part in _parts(values, scaling):
        _, scales = leveled(part, scaling, whole, dtype, square=role == WEIGHT, place=start if role == GRADIENT else None)
        part.mul_(scales[..., None])
    if whole is not None:
        values.mul_(whole[1])
    return values[:, : found.shape[1]]


def kept(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """The copy of a product's input [rows, columns] that its weight gradient multiplies, in blocks of rows, and its scales, all as e4m3.

    Elements are [rows, padded columns], or two codes a byte [rows, padded columns / 2], of which the first has the low bits. Scales are
    the bytes of [padded columns, blocks] in one dim, after them those of NVFP4's factor.
    """
    (rows, columns), width = x.shape, padded(x.shape[1])
    values, whole = _prepared(x.mT, scaling, spread=True)
    stored = torch.float32 if scaling == "fp8_blockwise" else torch.uint8
    table = torch.zeros((width, values.shape[1] // BLOCKS[scaling]), dtype=stored, device=x.device)
    table[:columns] = torch.cat([leveled(part, scaling, whole, E4M3)[0] for _, part in _parts(values, scaling)])
    if whole is None:
        low = torch.zeros((rows, width), dtype=E4M3, device=x.device)
        low[:, :columns].copy_(values[:, :rows].mT)
        return low, table.flatten().view(E4M3)
    to_codes(values)
    low = torch.zeros((rows, width), dtype=torch.uint8, device=x.device)
    low[:, :columns].copy_(values[:, :rows].mT)
    del values
    scales = torch.cat((table.flatten(), whole[1].view(1).view(torch.uint8)))
    return (low[:, ::2] | low[:, 1::2] << 4).view(E4M3), scales.view(E4M3)


def restored(low: Tensor, scales: Tensor, width: int, scaling: str) -> Tensor:
    """The values of a kept copy's transpose [width, rows], fp32."""
    rows, size = low.shape[0], BLOCKS[scaling]
    values = torch.zeros((width, rounded_up(rows, size)), dtype=torch.float32, device=low.device)
    if scaling == "nvfp4":
        low, scales = low.view(torch.uint8), scales.view(torch.uint8)
        levels = torch.tensor((*LEVELS, *(-level for level in LEVELS)), dtype=torch.float32, device=low.device)
        for odd in (0, 1):
            codes = (low[:, : (width + 1 - odd) // 2] >> 4 * odd & 15).int()
            values[odd::2, :rows].copy_(levels.index_select(0, codes.view(-1)).view(codes.shape).mT)
        table, factor = scales[:-SCALE_BYTES].view(E4M3).float(), scales[-SCALE_BYTES:].clone().view(torch.float32)
    else:
        values[:, :rows].copy_(low[:, :width].mT)
        table = scales.view(torch.uint8)
        table, factor = table.view(torch.float32) if scaling == "fp8_blockwise" else table.view(torch.float8_e8m0fnu).float(), None
    values.view(width, -1, size).mul_(table.view(padded(width), -1)[:width, :, None])
    return (values if factor is None else values.mul_(factor))[:, :rows]


def _prepared(x: Tensor, scaling: str, *, spread: bool, largest: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The matrix in fp32, rows filled up to whole blocks; for NVFP4 spread by the Hadamard matrix, with its largest number and factor."""
    rows, columns = x.shape
    values = torch.zeros((rows, rounded_up(columns, BLOCKS[scaling])), dtype=torch.float32, device=x.device)
    values[:, :columns].copy_(x)
    if scaling != "nvfp4":
        return values, None
    if spread:
        matrix = _hadamard(x.device)
        for _, part in _parts(values, scaling):
            of_whole = part[:, : columns // 16]
            of_whole.copy_(of_whole @ matrix)
    return values, nvfp4_factors(torch.linalg.vector_norm(values, float("inf")) if largest is None else largest.view(()))


def _parts(values: Tensor, scaling: str) -> Iterator[tuple[int, Tensor]]:
    """Rows of a matrix that are rounded at once, with the first one's index, as blocks."""
    step = rounded_up(slice_rows(*values.shape), max(16, SQUARE_ROWS[scaling]))
    for start in range(0, values.shape[0], step):
        yield start, torch.unflatten(values[start : start + step], 1, (-1, BLOCKS[scaling]))


def leveled(
    part: Tensor, scaling: str, whole: tuple[Tensor, Tensor] | None, dtype: torch.dtype, *, square: bool = False, place: int | None = None
) -> tuple[Tensor, Tensor]:
    """Scale blocks [rows, blocks, size] and round them to the format's numbers in place; returns the scales as stored, and their values.

    Args:
        part: Blocks.
        scaling: mxfp8, nvfp4 or fp8_blockwise.
        whole: The matrix' largest number and factor for NVFP4; None for others.
        dtype: The dtype of elements in eight bits.
        square: True for a weight, of which rows may share a scale.
        place: Index of the first row if elements round stochastically; None if to nearest.
    """
    amax = torch.linalg.vector_norm(part, float("inf"), dim=-1)
    if square and SQUARE_ROWS[scaling] > 1:
        amax = _of_squares(amax, SQUARE_ROWS[scaling])
    if scaling == "fp8_blockwise":
        factor = block_factor(amax, dtype)
        part.copy_(part.mul_(factor[..., None]).to(dtype))
        scales = factor.reciprocal_()
        return scales, scales
    if whole is None:
        most = torch.finfo(dtype).max
        scales = _exponents(amax, most)
        decoded = scales.view(torch.float8_e8m0fnu).float()
        part.mul_((254 - scales.int() << 23).view(torch.float32)[..., None]).clamp_(-most, most)
        part.copy_(part.to(dtype))
        return scales, decoded
    largest, factor = whole
    low = (amax / LEVELS[-1] * _encoding(largest)).clamp_(max=torch.finfo(E4M3).max).to(E4M3)
    decoded = low.float()
    part.mul_((1 / (decoded * factor)).clamp_(max=torch.finfo(torch.float32).max)[..., None]).clamp_(-LEVELS[-1], LEVELS[-1])
    shift = None if place is None else _uniform(part, place, largest)
    unit = part.abs()
    unit.view(torch.int32).bitwise_and_(_EXPONENT).clamp_(min=_ONE)
    part.div_(unit.mul_(0.5))
    (part.round_() if shift is None else part.add_(shift).floor_()).mul_(unit)
    return low.view(torch.uint8), decoded


def _of_squares(amax: Tensor, rows: int) -> Tensor:
    """The largest magnitudes of blocks [rows, blocks], where this number of rows shares the largest of all."""
    found = torch.unflatten(torch.nn.functional.pad(amax, (0, 0, 0, -amax.shape[0] % rows)), 0, (-1, rows)).amax(1)
    return found.repeat_interleave(rows, 0)[: amax.shape[0]]


def block_factor(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor of the elements of blocks with these largest magnitudes, rounded down to a power of two; 0 for inf and inf for nan."""
    ratio = (torch.finfo(dtype).max / amax).clamp_(max=torch.finfo(torch.float32).max)
    return (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)


def nvfp4_factors(largest: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a matrix, and the factor of its elements and scales."""
    return largest, 1 / _encoding(largest)


def _encoding(largest: Tensor) -> Tensor:
    """The factor of scales before they are rounded to e4m3; the factor of the matrix is one over it."""
    return (torch.finfo(E4M3).max * LEVELS[-1] / largest).clamp(max=torch.finfo(torch.float32).max)


def _exponents(amax: Tensor, most: float) -> Tensor:
    """The exponents as bytes of the scales of blocks: of amax over the format's largest number, rounded up; 255 is nan."""
    bits = (amax * (1 / most)).view(torch.int32)
    found = torch.where(bits <= _HALF_OF_SMALLEST, 0, ((bits + 0x7FFFFF) >> 23).clamp(max=254))
    return torch.where(bits > _EXPONENT, 255, found).to(torch.uint8)


def _uniform(part: Tensor, place: int, largest: Tensor) -> Tensor:
    """A random number in [0, 1) for each element, from its place and the largest number's first bits."""
    found = torch.arange(part.numel(), dtype=torch.int32, device=part.device)
    found.add_((largest.view(torch.int32) >> 15) * _SEED + place * part.shape[1] * part.shape[2])
    for shift, mask, factor in _MIX:
        found.bitwise_xor_((found >> shift).bitwise_and_(mask)).mul_(factor)
    return found.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2**-24).view(part.shape)


def _hadamard(device: torch.device) -> Tensor:
    found = torch.ones((1, 1), device=device)
    for _ in range(4):
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found * torch.tensor(SIGNS, dtype=torch.float32, device=device)[:, None] / 4


def to_codes(levels: Tensor) -> None:
    """Replace e2m1's numbers by their codes."""
    negative = torch.signbit(levels)
    levels.abs_().mul_(2)
    for above, less in ((8, 3), (6, 1), (4, 1)):
        levels.add_(levels > above, alpha=-less)
    levels.add_(negative, alpha=8)
