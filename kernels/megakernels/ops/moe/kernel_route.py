"""Triton kernels of the router: one forward from logits to everything that it returns, one backward to the gradient of the logits.

The three products with the router's weight are the GEMM library's: of bf16 operands into fp32, without fp32 copies of them. The gradient of
the logits is passed as two bf16 parts, whose sum has 16 significant bits, so that its rounding is small.

Columns of a tile are experts, of several groups padded to a power of two each. A row is processed by one program: no atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common import upcast
from megakernels._common.tiles import narrow, on_device_of, sigmoid
from megakernels.facts import TILE_ELEMENTS, block_of
from megakernels.ops.moe.facts import router_columns
from megakernels.ops.moe.scores import Router
from megakernels.ops.moe.sizes import gradient_parts

LOWEST = tl.constexpr(-float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def experts_of(group_size, num_groups, SIZE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of a tile, their experts, and whether there is such an expert."""
    column = tl.arange(0, COLUMNS)
    group, place = column // SIZE, column % SIZE
    return column, group * group_size + place, (place < group_size) & (group < num_groups)


@triton.jit  # type: ignore[untyped-decorator]
def best_of(value, left, column, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column with the largest remaining value in each row, the first of equal ones; the first remaining one if all are NaN."""
    top = tl.max(tl.where(left, value, LOWEST), 1)
    found = tl.min(tl.where(left & (value >= top[:, None]), column[None, :], COLUMNS), 1)
    return tl.where(found < COLUMNS, found, tl.min(tl.where(left, column[None, :], COLUMNS), 1))


@triton.jit  # type: ignore[untyped-decorator]
def in_chosen_groups(  # type: ignore[no-untyped-def]
    ranked, num_groups, top_groups, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """True if a column is of a group that its row chooses: by its best value, of sigmoid scores by the sum of its best two."""
    place = tl.arange(0, SIZE)[None, None, :]
    values = tl.reshape(ranked, [ROWS, GROUPS, SIZE])
    value = tl.max(values, 2)
    if SIGMOID:
        first = tl.min(tl.where(values >= value[:, :, None], place, SIZE), 2)
        value += tl.max(tl.where(place == first[:, :, None], LOWEST, values), 2)
    group = tl.arange(0, GROUPS)
    left = (group < num_groups)[None, :] & (tl.zeros([ROWS, GROUPS], dtype=tl.int32) == 0)
    for _ in range(top_groups):
        left = left & (group[None, :] != best_of(value, left, group, GROUPS)[:, None])
    chosen = (group < num_groups)[None, :] & (left == 0)
    return tl.reshape(tl.broadcast_to(chosen[:, :, None], [ROWS, GROUPS, SIZE]), [ROWS, GROUPS * SIZE])


@triton.jit  # type: ignore[untyped-decorator]
def route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, correction, weights, indices, probs, log_sums, counts, num_positions, num_tiles, num_experts, group_size, num_groups,
    top_groups, top_k, scale,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, SCORED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one sequence: their distributions, experts and weights, and if SCORED log-sum-exps and this tile's rows by expert.

    `probs` may be `logits`. With a bias of sigmoid scores it is added to `logits` in place.
    """
    column, expert, there = experts_of(group_size, num_groups, SIZE, GROUPS * SIZE)
    position = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    row = (tl.program_id(0) // num_tiles).to(tl.int64) * num_positions + position
    inside = position < num_positions
    mask = inside[:, None] & there[None, :]
    place = row[:, None] * num_experts + expert[None, :]
    logit = tl.load(logits + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logit += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)[None, :]
        if SIGMOID:
            tl.store(logits + place, logit, mask=mask)
    top = tl.max(tl.where(there[None, :], logit, LOWEST), 1)
    power = tl.where(there[None, :], tl.exp(logit - top[:, None]), 0.0)
    total = tl.sum(power, 1)
    if SIGMOID:
        score = tl.where(there[None, :], sigmoid(logit), 0.0)
        tl.store(probs + place, score / tl.sum(score, 1)[:, None], mask=mask)
    else:
        score = power / total[:, None]
        tl.store(probs + place, score, mask=mask)
    if SCORED:
        tl.store(log_sums + row, top + tl.log(total), mask=inside)
    ranked = score
    if HAS_CORRECTION:
        ranked += tl.load(correction + expert, mask=there, other=0.0).to(tl.float32)[None, :]
    ranked = tl.where(there[None, :], ranked, LOWEST)
    left = there[None, :] & (tl.zeros([ROWS, GROUPS * SIZE], dtype=tl.int32) == 0)
    if GROUPS > 1:
        left = left & in_chosen_groups(ranked, num_groups, top_groups, SIGMOID=SIGMOID, GROUPS=GROUPS, SIZE=SIZE, ROWS=ROWS)
    slots = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros([ROWS, SLOTS], dtype=tl.float32)
    found = tl.zeros([ROWS, SLOTS], dtype=tl.int32)
    taken = tl.zeros([ROWS, GROUPS * SIZE], dtype=tl.int32)
    for slot in range(top_k):
        best = best_of(ranked, left, column, GROUPS * SIZE)
        own = column[None, :] == best[:, None]
        chosen = tl.where(slots == slot, tl.sum(tl.where(own, score, 0.0), 1)[:, None], chosen)
        found = tl.where(slots == slot, ((best // SIZE) * group_size + best % SIZE)[:, None], found)
        taken += own.to(tl.int32)
        left = left & (own == 0)
    if NORMALIZE:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    into, filled = row[:, None] * top_k + slots, inside[:, None] & (slots < top_k)
    tl.store(weights + into, chosen * scale, mask=filled)
    tl.store(indices + into, found, mask=filled)
    if SCORED:
        of_tile = tl.sum(tl.where(inside[:, None], taken, 0), 0)
        tl.store(counts + tl.program_id(0).to(tl.int64) * num_experts + expert, of_tile, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def route_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_weights, grad_probs, grad_log_sums, kept, indices, gradient, num_rows, num_experts, top_k, scale,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of ROWS tokens, in fp32 or in two parts; `kept` is the softmax's result, or the logits of sigmoids."""
    expert = tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, there = row < num_rows, (expert < num_experts)[None, :]
    mask = inside[:, None] & there
    place = row[:, None] * num_experts + expert[None, :]
    value = tl.load(kept + place, mask=mask, other=0.0).to(tl.float32)
    score = value
    if SIGMOID:
        score = tl.where(there, sigmoid(value), 0.0)
    grad = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    taken = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    inner = tl.zeros([ROWS], dtype=tl.float32)
    for slot in range(top_k):
        own = expert[None, :] == tl.load(indices + row * top_k + slot, mask=inside, other=0)[:, None]
        of_weight = tl.load(grad_weights + row * top_k + slot, mask=inside, other=0.0).to(tl.float32) * scale
        weight = tl.sum(tl.where(own, score, 0.0), 1)
        total += weight
        inner += weight * of_weight
        grad = tl.where(own, of_weight[:, None], grad)
        taken += own.to(tl.int32)
    if NORMALIZE:
        grad = tl.where(taken > 0, (grad - (inner / total)[:, None]) / total[:, None], 0.0)
    if SCORED:
        of_probs = tl.load(grad_probs + place, mask=mask, other=0.0).to(tl.float32)
        if SIGMOID:
            whole = tl.sum(score, 1)
            of_probs = (of_probs - (tl.sum(of_probs * score, 1) / whole)[:, None]) / whole[:, None]
        grad += of_probs
    grad = grad * score * (1.0 - score) if SIGMOID else score * (grad - tl.sum(grad * score, 1)[:, None])
    if SCORED:
        share = score
        if SIGMOID:
            power = tl.where(there, tl.exp(value - tl.max(tl.where(there, value, LOWEST), 1)[:, None]), 0.0)
            share = power / tl.sum(power, 1)[:, None]
        grad += tl.load(grad_log_sums + row, mask=inside, other=0.0).to(tl.float32)[:, None] * share
    if PARTS == 1:
        tl.store(gradient + place, grad, mask=mask)
    else:
        place += row[:, None] * num_experts  # the parts of a row are adjacent
        high = narrow(grad, gradient.dtype.element_ty)
        tl.store(gradient + place, high, mask=mask)
        tl.store(gradient + place + num_experts, narrow(grad - high.to(tl.float32), gradient.dtype.element_ty), mask=mask)


def route_forward(given: Router, num_sequences: int | None, *, is_sigmoid: bool) -> tuple[Tensor, ...]:
    """Follows the contract of `scores.softmax_forward` and `scores.sigmoid_forward`, with the inputs of the router losses if asked.

    Args:
        given: fp32, bf16 or fp16, with at most `sizes.LARGEST_ROUTER` columns.
        num_sequences: Whose loads are counted, or None.
        is_sigmoid: True if scores are sigmoids of the logits.

    Returns:
        weights, indices, probs and logits; with sequences also log-sum-exps and loads. The logits of a softmax are overwritten by probs.
    """
    logits = _wide_product(given.x, given.weight.mT)
    (num_rows, num_experts), top_k, sequences = logits.shape, given.top_k, num_sequences or 1
    probs = torch.empty_like(logits) if is_sigmoid else logits
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    options = route_options(num_experts, given.num_groups, top_k)
    num_positions = num_rows // sequences
    num_tiles = triton.cdiv(num_positions, options["ROWS"])
    log_sums, counts = weights, indices
    if num_sequences is not None:
        log_sums = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        counts = torch.empty(sequences, num_tiles, num_experts, dtype=torch.int32, device=logits.device)
    if num_rows:
        with on_device_of(logits):
            route_kernel[(sequences * num_tiles,)](
                logits, logits if given.bias is None else given.bias.contiguous(),
                logits if given.correction is None else given.correction.contiguous(), weights, indices, probs, log_sums, counts,
                num_positions, num_tiles, num_experts, num_experts // given.num_groups, given.num_groups, given.top_groups, top_k,
                given.scale,
                SIGMOID=is_sigmoid, NORMALIZE=given.normalize, HAS_BIAS=given.bias is not None,
                HAS_CORRECTION=given.correction is not None, SCORED=num_sequences is not None, **options,
            )  # fmt: skip
    if num_sequences is None:
        return weights, indices, probs, logits
    return weights, indices, probs, logits, log_sums, counts.sum(1, dtype=torch.int32)


def route_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None], given: Router, kept: Tensor, indices: Tensor, needs: list[bool], *, is_sigmoid: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and correction, from those of weights, and of probs and log-sum-exps or None."""
    x, weight, bias, correction = given[:4]
    grad_weights, grad_probs, grad_log_sums = (None if each is None else each.contiguous() for each in grads)
    assert grad_weights is not None
    (num_rows, num_experts), parts = kept.shape, gradient_parts(given)
    dtype = torch.float32 if parts == 1 else x.dtype
    gradient = torch.empty(num_rows, parts * num_experts, dtype=dtype, device=x.device)
    options = gradient_options(num_experts)
    if num_rows:
        with on_device_of(x):
            route_gradient_kernel[(triton.cdiv(num_rows, options["ROWS"]),)](
                grad_weights, kept if grad_probs is None else grad_probs, kept if grad_log_sums is None else grad_log_sums, kept, indices,
                gradient, num_rows, num_experts, given.top_k, given.scale,
                SIGMOID=is_sigmoid, NORMALIZE=given.normalize, SCORED=grad_probs is not None, PARTS=parts, **options,
            )  # fmt: skip
    grad_x = None
    if needs[0] and parts == 1:
        grad_x = (gradient @ upcast(weight)).to(x.dtype)
    elif needs[0]:
        grad_x = gradient @ torch.cat([weight, weight])
    grad_weight = _joined(_wide_product(gradient.mT, x), parts, weight.dtype) if needs[1] else None
    grad_bias = _joined(gradient.sum(0, dtype=torch.float32), parts, bias.dtype) if bias is not None and needs[2] else None
    return grad_x, grad_weight, grad_bias, torch.zeros_like(correction) if correction is not None and needs[3] else None


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product in fp32. CUDA multiplies bf16 and fp16 into it; other dtypes, and operands on a CPU, are widened."""
    if left.device.type != "cpu" and left.dtype == right.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return upcast(left) @ upcast(right)


def _joined(values: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """The sum of a gradient's parts, rounded once."""
    if parts == 1:
        return values.to(dtype)
    high, low = values.chunk(2)
    return torch.add(high, low, out=torch.empty(high.shape, dtype=dtype, device=high.device))


def route_options(num_experts: int, num_groups: int, top_k: int) -> dict[str, Any]:
    """Tile and warps of the forward."""
    groups, size = router_columns(num_experts, num_groups)
    return {"GROUPS": groups, "SIZE": size, "SLOTS": block_of(top_k), "ROWS": max(1, TILE_ELEMENTS // (groups * size)), "num_warps": 4}


def gradient_options(num_experts: int) -> dict[str, Any]:
    """Tile and warps of the backward."""
    columns = block_of(num_experts)
    return {"COLUMNS": columns, "ROWS": max(1, TILE_ELEMENTS // columns), "num_warps": 4}
