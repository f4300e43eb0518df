"""Weights in four or eight bits, in plain torch: packing, and the matrix of packed rows.

Codes are relative to the exact magnitude of their block, and are multiplied by the stored one, as the published implementations do.
"""

import torch
from torch import Tensor

from megakernels.ops.packed_weight.facts import LARGEST, NF4, NF4_VALUES, Packing, slice_rows

STEPS = 128
"""Steps of a nested magnitude on either side of a row's mean."""


def pack(weight: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of the rows of `weight` [rows, columns]: codes, magnitudes, and mean and step, uint8 [rows, bytes] each."""
    rows, columns = weight.shape
    blocks = -(-columns // packing.block)
    values = torch.nn.functional.pad(weight.float(), (0, blocks * packing.block - columns)).view(rows, blocks, packing.block)
    largest = values.abs().amax(2)
    scaled = (values / torch.where(largest > 0, largest, 1).unsqueeze(2)).view(rows, -1)[:, :columns]
    return _codes(scaled, packing), *_magnitudes(largest, packing)


def join(codes: Tensor, magnitudes: Tensor, nested: Tensor) -> Tensor:
    """Packed rows of their parts."""
    return torch.cat([codes, magnitudes, nested], 1)


def _codes(scaled: Tensor, packing: Packing) -> Tensor:
    if packing.kind != NF4:
        return scaled.mul(LARGEST).round_().to(torch.int8).view(torch.uint8)
    table = torch.tensor(NF4_VALUES, device=scaled.device)
    codes = torch.bucketize(scaled.contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _magnitudes(largest: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    if not packing.nested:
        return largest.contiguous().view(torch.uint8), largest.new_empty((largest.shape[0], 0), dtype=torch.uint8)
    mean = largest.double().mean(1, keepdim=True).float()
    step = (largest - mean).abs().amax(1, keepdim=True) / STEPS
    steps = ((largest - mean) / torch.where(step > 0, step, 1)).round_().clamp_(-STEPS, STEPS - 1)
    return steps.to(torch.int8).view(torch.uint8), torch.cat([mean, step], 1).view(torch.uint8)


def unpack(packed: Tensor, columns: int, packing: Packing, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, columns] of packed rows, made in slices of them."""
    made = torch.empty((packed.shape[0], columns), dtype=dtype, device=packed.device)
    table = torch.tensor(NF4_VALUES if packing.kind == NF4 else (), device=packed.device)
    size = slice_rows(*made.shape)
    for start in range(0, packed.shape[0], size):
        _unpack_rows(packed[start : start + size], made[start : start + size], packing, table)
    return made


def _unpack_rows(packed: Tensor, made: Tensor, packing: Packing, table: Tensor) -> None:
    rows, columns = made.shape
    widths = [packing.code_bytes(columns), packing.maximum_bytes(columns), packing.nested_bytes]
    codes, magnitudes, nested = (part.clone(memory_format=torch.contiguous_format) for part in torch.split(packed, widths, 1))
    if packing.nested:
        numbers = nested.view(torch.float32)
        largest = magnitudes.view(torch.int8).float() * numbers[:, 1:] + numbers[:, :1]
    else:
        largest = magnitudes.view(torch.float32)
    if packing.kind == NF4:
        values = table[torch.stack([codes & 15, codes >> 4], 2).view(rows, -1)[:, :columns].int()]
    else:
        values = codes.view(torch.int8).float() * (1 / LARGEST)
    torch.mul(values, largest.repeat_interleave(packing.block, 1)[:, :columns], out=values)
    made.copy_(values)
