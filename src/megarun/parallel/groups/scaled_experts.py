"""A bank of experts that multiplies in eight bits (`precision.recipe`).

Tokens of the rank are saved unquantised, as the router does anyway, and quantised again in backward. No other operation keeps rows that
arrived from other ranks; for these the column-wise copy that the weight gradients multiply is kept in eight bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernels import fp8_experts, fp8_experts_backward
from megarun.parallel.groups.delayed import OwnNumbers, numbers_of
from megarun.parallel.groups.scaled import PackedMatrix


class BankScaling(NamedTuple):
    """Low-precision settings of a bank.

    Attributes:
        by: tensor or rows, the unit with one scale; delayed for scales of past steps; mxfp8, nvfp4 or fp8_blockwise for scales of blocks.
        keeps_low: True if a copy of the input is kept in place of the input.
        numbers: Numbers of gate if there is one, up and down under delayed scaling; empty for others.
    """

    by: str
    keeps_low: bool
    numbers: tuple[OwnNumbers, ...] = ()


class Bank(NamedTuple):
    """Matrices and biases of a bank as gathered, and its activation.

    Attributes:
        gate: [E, F, h] or None.
        up: [E, F, h].
        down: [E, h, F].
        gate_bias: [E, F] or None.
        up_bias: [E, F] or None.
        down_bias: [E, h] or None.
        activation: Name of the activation.
        limit: Limit of the clamped swiglu, or None.
        packed: Packed matrices of gate, up and down, None for each matrix that is gathered unpacked.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    limit: float | None
    packed: tuple[PackedMatrix | None, ...] = ()

    def rows(self, *, turned: bool) -> list[Tensor | None]:
        """Packed rows of gate, up and down for the forward, or turned for gradients, then their largest magnitudes; empty without any."""
        if not any(self.packed):
            return []
        rows = [None if each is None else each.operand(turned=turned) for each in self.packed]
        return [*rows, *(None if each is None else each.largest for each in self.packed)]


def multiply_bank(scaling: BankScaling, x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, bank: Bank) -> Tensor:
    """Each token's experts, weighted and summed: x [N, h], weights fp32 [N, k], rows int32 [N·k], counts int32 [E] -> [N, h]."""
    records = torch.is_grad_enabled()
    numbers = numbers_of(scaling.numbers, records=records)
    if not records:
        return _forward(scaling, numbers, x, weights, rows, counts, bank, keeps=False)[0]
    out: Tensor = _Experts.apply(scaling, numbers, x, weights, rows, counts, *bank)  # type: ignore[no-untyped-call]
    return out


def _forward(
    scaling: BankScaling, numbers: list[Tensor], x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, bank: Bank, *, keeps: bool
) -> list[Tensor]:
    biases = {"gate_bias": bank.gate_bias, "up_bias": bank.up_bias, "down_bias": bank.down_bias, "limit": bank.limit}
    packed = bank.rows(turned=False)
    given = (x, weights, rows, counts, bank.gate, bank.up, bank.down, bank.activation)
    return fp8_experts(*given, scaling.by, keeps, **biases, packed=packed, numbers=numbers)  # type: ignore[arg-type]


class _Experts(torch.autograd.Function):
    """The bank's MLPs, whose backward reads the parameters themselves: FSDP2 gathers their storages again."""

    @staticmethod
    def forward(
        ctx: Any, scaling: BankScaling, numbers: list[Tensor], x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, *values: Any
    ) -> Tensor:
        """The sum of each token's weighted experts."""
        bank = Bank(*values)
        y, *made = _forward(scaling, numbers, x, weights, rows, counts, bank, keeps=scaling.keeps_low)
        ctx.scaling, ctx.numbers, ctx.bank, ctx.gated = scaling, numbers, bank, bank.gate is not None
        ctx.save_for_backward(weights, rows, counts, *made, *(() if scaling.keeps_low else (x,)))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights, matrices and biases."""
        bank: Bank = ctx.bank
        weights, rows, counts, *made = ctx.saved_tensors
        gate_out, (up_out, *kept) = (made[0], made[1:]) if ctx.gated else (None, made)
        low, scales = kept if ctx.scaling.keeps_low else (kept[0], None)
        del made, kept
        found = fp8_experts_backward(
            *(grad_y, low, scales, weights, rows, counts, gate_out, up_out, bank.gate, bank.up, bank.down, bank.activation),
            ctx.scaling.by,
            gate_bias=bank.gate_bias,
            up_bias=bank.up_bias,
            down_bias=bank.down_bias,
            limit=bank.limit,
            packed=bank.rows(turned=True),
            numbers=ctx.numbers,
        )
        grad_x, grad_weights, *others = found
        gradients = iter(others)
        parameters = tuple(next(gradients) if isinstance(value, Tensor) else None for value in bank)
        return None, None, grad_x, grad_weights, None, None, *parameters
