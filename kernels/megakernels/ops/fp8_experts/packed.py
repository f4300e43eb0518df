"""Matrices of a bank that are given packed (`fp8_linear.weights`), as the second operands of products.

The rows of all matrices [E, a, b] are one packed matrix [E · a, …]. Elements and scales are those of the operands that are made of the
matrices themselves: with scaling tensor of the whole bank, with others of each matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels.ops.fp8_experts.reference import FORMAT
from megakernels.ops.fp8_linear.blocks import WEIGHT
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.facts import BLOCKS
from megakernels.ops.fp8_linear.reference import Operand, power_of_two
from megakernels.ops.fp8_linear.weights import unpacked
from megakernels.ops.moe.inputs import Experts


class Stack(NamedTuple):
    """One kind of a bank's matrices.

    Attributes:
        like: [E, a, b], the matrices; if they are packed, of no elements.
        packed: uint8 [E · a, packing.facts.packed_columns(b)], or None.
        largest: fp32, the largest magnitudes of packed matrices; None where no scale depends on them.
        numbers: fp32 [3, 3], the numbers of the products with these matrices under delayed scaling; None for others.
    """

    like: Tensor
    packed: Tensor | None
    largest: Tensor | None
    numbers: Tensor | None = None


def stacks_of(given: Experts, packed: Sequence[Tensor | None], numbers: Sequence[Tensor]) -> tuple[Stack | None, Stack, Stack]:
    """Gate, up and down.

    Args:
        given: The operation's arguments.
        packed: The packed rows of the three and the largest magnitudes of the three, or empty.
        numbers: The numbers of those that there are under delayed scaling, or empty.
    """
    rows, largest = (packed[:3], packed[3:]) if packed else ((None,) * 3, (None,) * 3)
    *of_gate, of_up, of_down = numbers or (None, None)
    gate = None if given.gate is None else Stack(given.gate, rows[0], largest[0], of_gate[0] if of_gate else None)
    return gate, Stack(given.up, rows[1], largest[1], of_up), Stack(given.down, rows[2], largest[2], of_down)


def stacked_of(stack: Stack, packed: Tensor, scaling: str) -> Operand:
    """Packed matrices [E, a, b] as the operand of products that sum over b; a scale for each of their rows."""
    if scaling in BLOCKS:
        return Operand(_values(stack, packed, scaling, turned=False), None)
    if scaling == "rows":
        data, scale = unpacked(packed, scaling, None, turned=False)
        return Operand(data.view(stack.like.shape), scale)
    return Operand(packed.view(FORMAT).view(stack.like.shape), _one_scale(stack, packed.shape[0]))


def turned_of(stack: Stack, packed: Tensor, scaling: str) -> Operand:
    """Packed matrices [E, a, b] as the operand [E, b, a] of products that sum over a; a scale for each of their columns."""
    if scaling in BLOCKS:
        return Operand(_values(stack, packed, scaling, turned=True), None)
    count, rows, columns = stack.like.shape
    if scaling == "rows":
        assert stack.largest is not None
        scale = 1 / power_of_two(stack.largest, FORMAT)
    else:
        scale = _one_scale(stack, count * columns)
    data = torch.empty((columns, count * rows), dtype=FORMAT, device=packed.device)
    data.copy_(packed[:, :columns].view(FORMAT).mT)
    return Operand(data.view(columns, count, rows).transpose(0, 1), scale)


def _one_scale(stack: Stack, count: int) -> Tensor:
    given = delayed_of(stack.numbers, WEIGHT)
    if given is not None:
        return given.factor.reciprocal().expand(count).contiguous()
    assert stack.largest is not None
    return (1 / power_of_two(stack.largest, FORMAT)).expand(count).contiguous()


def _values(stack: Stack, packed: Tensor, scaling: str, *, turned: bool) -> Tensor:
    """The values of matrices whose blocks have scales, or of their transposes."""
    data = torch.empty((stack.like.mT if turned else stack.like).shape, dtype=torch.float32, device=packed.device)
    for index, (rows, place) in enumerate(zip(packed.chunk(len(data)), data, strict=True)):
        largest = None if stack.largest is None else stack.largest.view(len(data), -1)[index]
        place.copy_(unpacked(rows, scaling, largest, turned=turned).data)
    return data
