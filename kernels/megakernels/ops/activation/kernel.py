"""Triton kernels of the activations: one tile of a few rows per program, forward and backward; only the inputs are saved.

One pair of kernels for all: KIND is a constant of the compiled kernel. A plain activation reads one tensor, a gated one two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, sigmoid, tanh, unit_stride
from megakernels.facts import LARGEST_TILE_WIDTH, TILE_ELEMENTS, block_of
from megakernels.ops.activation.reference import GELU_CUBIC, SQRT_2_OVER_PI

KINDS = {"swiglu": 0, "relu2": 1, "gelu": 2, "geglu": 3, "relu2glu": 5}
"""Kinds of compiled kernels; swiglu and those from geglu on read two tensors. The experts' clamped swiglu is 4."""
CUBIC = tl.constexpr(GELU_CUBIC)
ROOT = tl.constexpr(SQRT_2_OVER_PI)


@triton.jit  # type: ignore[untyped-decorator]
def activated(x, up, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(x) · up, max(x, 0)², gelu(x), gelu(x) · up or max(x, 0)² · up of fp32 tiles; `up` for the gated ones only."""
    if KIND == 0:
        found = x * sigmoid(x) * up
    elif KIND == 1 or KIND == 5:  # noqa: PLR1714  triton has no `in`
        positive = tl.maximum(x, 0.0)
        found = positive * positive
    else:
        found = 0.5 * x * (1.0 + tanh((x + x * x * x * CUBIC) * ROOT))
    if KIND >= 3:
        found = found * up
    return found


@triton.jit  # type: ignore[untyped-decorator]
def slopes(x, up, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Derivatives of `activated` by x and by up; of a plain activation both are the one by its only operand."""
    if KIND == 0:
        share = sigmoid(x)
        by_up = x * share
        by_x = up * (share + by_up * (1.0 - share))
    elif KIND == 1 or KIND == 5:  # noqa: PLR1714
        positive = tl.maximum(x, 0.0)
        by_x = 2.0 * positive
        by_up = positive * positive
    else:
        square = x * x
        bent = tanh((x + square * x * CUBIC) * ROOT)
        by_x = 0.5 * (1.0 + bent + x * (1.0 - bent * bent) * ((1.0 + square * 3.0 * CUBIC) * ROOT))
        by_up = 0.5 * x * (1.0 + bent)
    if KIND >= 3:
        by_x = by_x * up
    elif KIND > 0:
        by_up = by_x
    return by_x, by_up


@triton.jit  # type: ignore[untyped-decorator]
def activation_forward_kernel(  # type: ignore[no-untyped-def]
    x, up, y, x_stride, up_stride, num_rows, width, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of `activated`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (cols < width)[None, :]
    value = tl.load(x + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = value
    if KIND == 0 or KIND >= 3:
        factor = tl.load(up + row[:, None] * up_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * width + cols[None, :], narrow(activated(value, factor, KIND), y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def activation_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, up, grad_x, grad_up,
    grad_stride, x_stride, up_stride,
    num_rows, width,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_UP: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of x and up, with activations recomputed from x and up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (cols < width)[None, :]
    place = row[:, None] * width + cols[None, :]
    value = tl.load(x + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + row[:, None] * grad_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = value
    if (KIND == 0 or KIND >= 3) and NEEDS_X:
        factor = tl.load(up + row[:, None] * up_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    by_x, by_up = slopes(value, factor, KIND)
    if NEEDS_X:
        tl.store(grad_x + place, narrow(grad * by_x, grad_x.dtype.element_ty), mask=mask)
    if NEEDS_UP:
        tl.store(grad_up + place, narrow(grad * by_up, grad_up.dtype.element_ty), mask=mask)


def launch_options(width: int) -> dict[str, int]:
    """Tile and warps for a width: 16 elements in each thread."""
    block = min(LARGEST_TILE_WIDTH, block_of(width))
    return {"ROWS": TILE_ELEMENTS // block, "BLOCK": block, "num_warps": 4}


def forward(kind: int, x: Tensor, up: Tensor | None = None) -> Tensor:
    """Follows the contract of the reference's forwards, for fp32, bf16 and fp16; `up` for the gated ones only."""
    rows, others = _rows(x), _rows(x if up is None else up)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        options = launch_options(rows.shape[1])
        with on_device_of(x):
            activation_forward_kernel[_grid(rows, options)](
                rows, others, y, rows.stride(0), others.stride(0), *rows.shape, KIND=kind, **options
            )
    return y


def backward(kind: int, grad_y: Tensor, x: Tensor, up: Tensor | None = None, *, needs: list[bool]) -> list[Tensor | None]:
    """Follows the contract of the reference's backwards: the gradients of x and, if given, of up."""
    rows, grad_rows, others = _rows(x), _rows(grad_y), _rows(x if up is None else up)
    wanted = zip((x,) if up is None else (x, up), needs, strict=True)
    made = [torch.empty(like.shape, dtype=like.dtype, device=x.device) if need else None for like, need in wanted]
    grad_x, grad_up = (*made, None)[:2]
    if x.numel():
        options = launch_options(rows.shape[1])
        with on_device_of(x):
            activation_backward_kernel[_grid(rows, options)](
                grad_rows, rows, others, grad_rows if grad_x is None else grad_x, grad_rows if grad_up is None else grad_up,
                grad_rows.stride(0), rows.stride(0), others.stride(0),
                *rows.shape,
                KIND=kind, NEEDS_X=needs[0], NEEDS_UP=grad_up is not None, **options,
            )  # fmt: skip
    return made


def _grid(rows: Tensor, options: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows.shape[0], options["ROWS"]), triton.cdiv(rows.shape[1], options["BLOCK"])


def _rows(x: Tensor) -> Tensor:
    """`x` as rows of unit stride; a slice of a wider projection stays a view."""
    return unit_stride(x.reshape(-1, x.shape[-1]) if x.dim() else x.view(1, 1))
