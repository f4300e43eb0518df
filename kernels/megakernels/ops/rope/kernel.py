"""Triton kernels of the rotary embedding: a tile is a few complete heads; the backward of a rotation is the rotation by the opposite angle.

A row is one head of one position: row (b · T + t) · H + h.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, unit_stride
from megakernels.facts import TILE_ELEMENTS, block_of

NUM_WARPS = 8


@triton.jit
def head_at(row, num_heads, num_positions, batch_stride, position_stride, head_stride):  # type: ignore[no-untyped-def]
    """Offsets of heads in a strided [B, T, H, D]."""
    token = row // num_heads
    return (token // num_positions) * batch_stride + (token % num_positions) * position_stride + (row % num_heads) * head_stride


@triton.jit  # type: ignore[untyped-decorator]
def rotated(source, place, position, cos, sin, half, mask, column, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of rotary rows that start at `place`, rotated by the angles of `position`, or rotated back."""
    angle = position[:, None] * half + column[None, :]
    turn = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    lift = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        lift = -lift
    near = source + place[:, None] + column[None, :]
    first = tl.load(near, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(near + half, mask=mask, other=0.0).to(tl.float32)
    return first * turn - second * lift, second * turn + first * lift


@triton.jit
def stored(first, second, target, place, half, mask, column):  # type: ignore[no-untyped-def]
    """Stores both halves of rotary rows that begin at `place`."""
    near = target + place[:, None] + column[None, :]
    tl.store(near, narrow(first, target.dtype.element_ty), mask=mask)
    tl.store(near + half, narrow(second, target.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def copied(source, source_place, target, target_place, width, there, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies `width` elements of each row that is `there`."""
    column = tl.arange(0, BLOCK)
    mask = there[:, None] & (column < width)[None, :]
    value = tl.load(source + source_place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + target_place[:, None] + column[None, :], narrow(value, target.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rope_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, y, num_rows, num_heads, num_positions,
    batch_stride, position_stride, head_stride,
    straight, half,
    ROWS: tl.constexpr, STRAIGHT: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """ROWS heads of y: their first `straight` elements copied, the rest rotated."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    place = head_at(row, num_heads, num_positions, batch_stride, position_stride, head_stride)
    out = row * (straight + 2 * half)
    if STRAIGHT:
        copied(x, place, y, out, straight, there, BLOCK=STRAIGHT)
    column = tl.arange(0, HALF)
    mask = there[:, None] & (column < half)[None, :]
    first, second = rotated(x, place + straight, (row // num_heads) % num_positions, cos, sin, half, mask, column, BACK=BACK)
    stored(first, second, y, out + straight, half, mask, column)


@triton.jit  # type: ignore[untyped-decorator]
def mla_kv_forward_kernel(  # type: ignore[no-untyped-def]
    kv, k_rope, cos, sin, k, v, num_rows, num_heads, num_positions,
    batch_stride, position_stride, head_stride, rope_batch_stride, rope_position_stride,
    nope, value, half,
    ROWS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """ROWS heads of k and v; the rotary key of a position is rotated again for each of its heads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    place = head_at(row, num_heads, num_positions, batch_stride, position_stride, head_stride)
    out = row * (nope + 2 * half)
    if NOPE:
        copied(kv, place, k, out, nope, there, BLOCK=NOPE)
    if VALUE:
        copied(kv, place + nope, v, row * value, value, there, BLOCK=VALUE)
    column = tl.arange(0, HALF)
    mask = there[:, None] & (column < half)[None, :]
    shared = head_at(row // num_heads, 1, num_positions, rope_batch_stride, rope_position_stride, 0)
    first, second = rotated(k_rope, shared, (row // num_heads) % num_positions, cos, sin, half, mask, column, BACK=False)
    stored(first, second, k, out + nope, half, mask, column)


@triton.jit  # type: ignore[untyped-decorator]
def mla_kv_backward_kernel(  # type: ignore[no-untyped-def]
    grad_k, grad_v, grad_kv, num_rows, num_heads, num_positions,
    k_batch_stride, k_position_stride, k_head_stride, v_batch_stride, v_position_stride, v_head_stride,
    nope, value,
    ROWS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """ROWS heads of the gradient of kv."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    out = row * (nope + value)
    if NOPE:
        place = head_at(row, num_heads, num_positions, k_batch_stride, k_position_stride, k_head_stride)
        copied(grad_k, place, grad_kv, out, nope, there, BLOCK=NOPE)
    if VALUE:
        place = head_at(row, num_heads, num_positions, v_batch_stride, v_position_stride, v_head_stride)
        copied(grad_v, place, grad_kv, out + nope, value, there, BLOCK=VALUE)


@triton.jit  # type: ignore[untyped-decorator]
def k_rope_backward_kernel(  # type: ignore[no-untyped-def]
    grad_k, cos, sin, grad_k_rope, num_tokens, num_heads, num_positions,
    batch_stride, position_stride, head_stride,
    nope, half,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """ROWS positions of the gradient of the shared key: each head's rotated back, summed in the order of heads."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    mask = (token < num_tokens)[:, None] & (column < half)[None, :]
    first = tl.zeros([ROWS, HALF], dtype=tl.float32)
    second = tl.zeros([ROWS, HALF], dtype=tl.float32)
    for head in range(num_heads):
        place = head_at(token, 1, num_positions, batch_stride, position_stride, 0) + head * tl.cast(head_stride, tl.int64) + nope
        one, other = rotated(grad_k, place, token % num_positions, cos, sin, half, mask, column, BACK=True)
        first += one
        second += other
    stored(first, second, grad_k_rope, token * 2 * half, half, mask, column)


def tile(*widths: int) -> tuple[int, tuple[int, ...]]:
    """Rows per program, and a tile for each part of a row; an empty part has none."""
    blocks = tuple(block_of(width) if width else 0 for width in widths)
    rows = max(1, TILE_ELEMENTS // max(1, sum(blocks)))
    return 1 << rows.bit_length() - 1, blocks


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Follows the contract of `reference.rotate`, for fp32, bf16 and fp16; at least one pair is rotated."""
    x = unit_stride(x)
    batch, num_positions, num_heads, width = x.shape
    half = cos.shape[-1]
    rows, (straight_block, half_block) = tile(width - 2 * half, half)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = batch * num_positions * num_heads
    if num_rows:
        with on_device_of(x):
            rope_kernel[(triton.cdiv(num_rows, rows),)](
                x, cos.contiguous(), sin.contiguous(), y, num_rows, num_heads, num_positions,
                *x.stride()[:3],
                width - 2 * half, half,
                ROWS=rows, STRAIGHT=straight_block, HALF=half_block, BACK=back, num_warps=NUM_WARPS,
            )  # fmt: skip
    return y


def mla_kv_forward(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.mla_kv_forward`; the rotary key has at least one pair."""
    kv, k_rope = unit_stride(kv), unit_stride(k_rope)
    batch, num_positions, num_heads, width = kv.shape
    half, value = cos.shape[-1], width - nope_dim
    rows, (nope_block, value_block, half_block) = tile(nope_dim, value, half)
    k = torch.empty(batch, num_positions, num_heads, nope_dim + 2 * half, dtype=kv.dtype, device=kv.device)
    v = torch.empty(batch, num_positions, num_heads, value, dtype=kv.dtype, device=kv.device)
    num_rows = batch * num_positions * num_heads
    if num_rows:
        with on_device_of(kv):
            mla_kv_forward_kernel[(triton.cdiv(num_rows, rows),)](
                kv, k_rope, cos.contiguous(), sin.contiguous(), k, v, num_rows, num_heads, num_positions,
                *kv.stride()[:3], *k_rope.stride()[:2],
                nope_dim, value, half,
                ROWS=rows, NOPE=nope_block, VALUE=value_block, HALF=half_block, num_warps=NUM_WARPS,
            )  # fmt: skip
    return k, v


def mla_kv_backward(
    grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Follows the contract of `reference.mla_kv_backward`."""
    grad_k, grad_v = unit_stride(grad_k), unit_stride(grad_v)
    batch, num_positions, num_heads, width = grad_k.shape
    half, value = cos.shape[-1], grad_v.shape[-1]
    num_tokens = batch * num_positions
    grad_kv = grad_k_rope = None
    if needs[0]:
        grad_kv = torch.empty(batch, num_positions, num_heads, nope_dim + value, dtype=grad_k.dtype, device=grad_k.device)
        rows, (nope_block, value_block) = tile(nope_dim, value)
        if grad_kv.numel():
            with on_device_of(grad_k):
                mla_kv_backward_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
                    grad_k, grad_v, grad_kv, num_tokens * num_heads, num_heads, num_positions,
                    *grad_k.stride()[:3], *grad_v.stride()[:3],
                    nope_dim, value,
                    ROWS=rows, NOPE=nope_block, VALUE=value_block, num_warps=NUM_WARPS,
                )  # fmt: skip
    if needs[1]:
        grad_k_rope = torch.empty(batch, num_positions, width - nope_dim, dtype=grad_k.dtype, device=grad_k.device)
        rows, (half_block,) = tile(half)
        if grad_k_rope.numel():
            with on_device_of(grad_k):
                k_rope_backward_kernel[(triton.cdiv(num_tokens, rows),)](
                    grad_k, cos.contiguous(), sin.contiguous(), grad_k_rope, num_tokens, num_heads, num_positions,
                    *grad_k.stride()[:3],
                    nope_dim, half,
                    ROWS=rows, HALF=half_block, num_warps=NUM_WARPS,
                )  # fmt: skip
    return grad_kv, grad_k_rope
