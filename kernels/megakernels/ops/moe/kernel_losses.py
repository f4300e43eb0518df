"""Triton kernels of the router losses: each tile's share of both losses with the copied weights, and all gradients in one."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import on_device_of
from megakernels.facts import block_of
from megakernels.ops.moe.facts import LOSSES_TILE_ELEMENTS


@triton.jit  # type: ignore[untyped-decorator]
def losses_kernel(  # type: ignore[no-untyped-def]
    weights, probs, log_sums, load, weighted, shares, num_positions, num_tiles, num_experts, top_k, balance, z,
    COLUMNS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence: their share of both losses, and a copy of their weights."""
    sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
    position = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    inside = position < num_positions
    row = sequence * num_positions + position
    expert, slot = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    there = expert < num_experts
    prob = tl.load(probs + row[:, None] * num_experts + expert[None, :], mask=inside[:, None] & there[None, :], other=0.0).to(tl.float32)
    rows = tl.load(load + sequence * num_experts + expert, mask=there, other=0).to(tl.float32)
    log_sum = tl.load(log_sums + row, mask=inside, other=0.0).to(tl.float32)
    share = shares + tl.program_id(0).to(tl.int64) * 2
    tl.store(share, tl.sum(tl.sum(prob, 0) * rows, 0) * balance)
    tl.store(share + 1, tl.sum(log_sum * log_sum, 0) * z)
    place, mask = row[:, None] * top_k + slot[None, :], inside[:, None] & (slot < top_k)[None, :]
    tl.store(weighted + place, tl.load(weights + place, mask=mask, other=0.0).to(tl.float32), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def losses_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_weighted, log_sums, load, grad_weights, grad_probs, grad_log_sums, num_positions, num_tiles, num_experts, top_k, balance, z,
    NEEDS_WEIGHTS: tl.constexpr, NEEDS_PROBS: tl.constexpr, NEEDS_SUMS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence: the gradients of their weights, distributions and log-sum-exps."""
    sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
    position = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    inside = position < num_positions
    row = sequence * num_positions + position
    if NEEDS_WEIGHTS:
        slot = tl.arange(0, SLOTS)
        place, mask = row[:, None] * top_k + slot[None, :], inside[:, None] & (slot < top_k)[None, :]
        tl.store(grad_weights + place, tl.load(grad_weighted + place, mask=mask, other=0.0).to(tl.float32), mask=mask)
    if NEEDS_PROBS:
        expert = tl.arange(0, COLUMNS)
        there = expert < num_experts
        share = tl.load(load + sequence * num_experts + expert, mask=there, other=0).to(tl.float32) * balance
        made = tl.zeros([ROWS, COLUMNS], dtype=tl.float32) + share[None, :]
        tl.store(grad_probs + row[:, None] * num_experts + expert[None, :], made, mask=inside[:, None] & there[None, :])
    if NEEDS_SUMS:
        tl.store(grad_log_sums + row, tl.load(log_sums + row, mask=inside, other=0.0).to(tl.float32) * (2.0 * z), mask=inside)


def router_losses_forward(
    weights: Tensor, probs: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float
) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.router_losses_forward`, for fp32."""
    (num_sequences, num_experts), top_k = load.shape, weights.shape[1]
    num_positions, options = probs.shape[0] // num_sequences, losses_options(num_experts, top_k)
    num_tiles = triton.cdiv(num_positions, options["ROWS"])
    weighted = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    shares = torch.empty(num_sequences * num_tiles, 2, dtype=torch.float32, device=weights.device)
    if probs.numel():
        with on_device_of(probs):
            losses_kernel[(num_sequences * num_tiles,)](
                weights.contiguous(), probs.contiguous(), log_sums.contiguous(), load.contiguous(), weighted, shares, num_positions,
                num_tiles, num_experts, top_k, balance, z,
                **options,
            )  # fmt: skip
    return weighted, shares.sum(0)


def router_losses_backward(
    grad_weighted: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Follows the contract of `reference.router_losses_backward`, for fp32."""
    (num_rows, top_k), (num_sequences, num_experts) = grad_weighted.shape, load.shape
    num_positions, options = num_rows // num_sequences, losses_options(num_experts, top_k)
    num_tiles = triton.cdiv(num_positions, options["ROWS"])
    shapes = (num_rows, top_k), (num_rows, num_experts), (num_rows,)
    made = [
        torch.empty(shape, dtype=torch.float32, device=load.device) if need else None for shape, need in zip(shapes, needs, strict=True)
    ]
    if num_rows and any(needs):
        unused = next(each for each in made if each is not None)
        with on_device_of(load):
            losses_gradient_kernel[(num_sequences * num_tiles,)](
                grad_weighted.contiguous(), log_sums.contiguous(), load.contiguous(), *(unused if each is None else each for each in made),
                num_positions, num_tiles, num_experts, top_k, balance, z,
                NEEDS_WEIGHTS=needs[0], NEEDS_PROBS=needs[1], NEEDS_SUMS=needs[2], **options,
            )  # fmt: skip
    return tuple(made)


def losses_options(num_experts: int, top_k: int) -> dict[str, Any]:
    """Tile and warps of both kernels."""
    columns = block_of(num_experts)
    return {"COLUMNS": columns, "SLOTS": block_of(top_k), "ROWS": max(1, LOSSES_TILE_ELEMENTS // columns), "num_warps": 4}
