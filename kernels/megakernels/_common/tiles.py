"""Shared by the Triton kernels: products, narrowing, functions that are accurate near zero, and launch devices.

Import it only where triton is: from a `kernel.py`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.device import INTERPRETED as _INTERPRETED
from megakernels.facts import DESCRIPTOR_BYTES

INTERPRETED = tl.constexpr(_INTERPRETED)
LOG2_E = tl.constexpr(math.log2(math.e))
WITH_DESCRIPTORS = 9, 10
"""Major compute capabilities with tensor descriptors and 227 KiB of shared memory for a program."""
on_device_of: Callable[[Tensor], AbstractContextManager[None]] = torch.cuda.device_of
"""The context a kernel is launched in."""


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 in the interpreter."""
    return 2 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the last dim is not dense; a slice of a wider projection stays a view."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def given_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or a placeholder that the kernel does not read."""
    return other if tensor is None else tensor.contiguous()


def has_large_tiles(device: torch.device) -> bool:
    """True if descriptors fill four stages of 48 KiB of a program: on Hopper, data-center Blackwell, and in the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_properties(device).major in WITH_DESCRIPTORS


def has_descriptor(tensor: Tensor) -> bool:
    """True if a tensor descriptor reads this matrix: two bytes per element, dense rows at multiples of 16 bytes, and not empty."""
    fits = tensor.element_size() == 2 and tensor.stride(1) == 1 and tensor.numel() > 0
    return fits and tensor.data_ptr() % DESCRIPTOR_BYTES == 0 and tensor.stride(0) * tensor.element_size() % DESCRIPTOR_BYTES == 0


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """Matrix product of two tiles of one dtype, accumulated in fp32.

    fp32 operands keep fp32's precision, as three TF32 products. The interpreter multiplies bf16 wrongly, so there they are widened first,
    which is exact.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:  # noqa: RET505  one branch is compiled
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 rounded to `dtype`, to the nearest, ties to even. The interpreter truncates to bf16, so there the bits are rounded first."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def widen(x):  # type: ignore[no-untyped-def]
    """The same values in fp32. Two of bf16 take two instructions on CUDA, where Triton's conversion takes three."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:  # noqa: RET505  one branch is compiled
        two: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(two, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def computed_once(x):  # type: ignore[no-untyped-def]
    """The same fp32 values, computed once: no instruction is added, but the compiler exchanges derived values between threads instead.

    Where two layouts are needed it would otherwise recompute everything that it takes for cheap, from the loads on.
    """
    if INTERPRETED:
        return x
    else:  # noqa: RET505  one branch is compiled
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def prefetch(addresses):  # type: ignore[no-untyped-def]
    """Asks for the lines of memory of these addresses, which must exist, to be brought into L2; a hint, which waits for nothing."""
    asked: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asked, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_rows(at, there, whole, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for the first WIDTH elements of each row to be brought into L2.

    A barrier keeps the compiler from starting a load earlier, and registers from holding it: so a program prefetches first the data that it
    reads last.

    Args:
        at: Addresses of the rows.
        there: Mask of rows that exist.
        whole: An address that exists.
        WIDTH: Elements of a row, a power of two.
    """
    if not INTERPRETED:
        line: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth
        lines: tl.constexpr = WIDTH // line if line < WIDTH else 1
        rows = tl.where(there, at.to(tl.int64), whole.to(tl.int64))
        prefetch(rows[:, None] + tl.arange(0, lines)[None, :] * 128)


@triton.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """2 to the power of x, within 2 units in the last place: 0 below 2^−126, infinite above 2^128. One instruction on CUDA."""
    if INTERPRETED:
        return tl.exp2(x)
    else:  # noqa: RET505  one branch is compiled
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """The exponential, as exact as Triton's: 0 below −87.3, which Triton's guards with three instructions more."""
    if INTERPRETED:
        return tl.exp(x)
    else:  # noqa: RET505  one branch is compiled
        return exp2(x * LOG2_E)


@triton.jit
def cos_sin_within(x):  # type: ignore[no-untyped-def]
    """Cosine and sine of angles in [−π, π], within 2⁻²⁰ of them. Two instructions each on CUDA."""
    if INTERPRETED:
        return tl.cos(x), tl.sin(x)
    else:  # noqa: RET505  one branch is compiled
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return cos, tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x, within 1 unit in the last place: 0 above 2^126. One instruction on CUDA, where `/` guards that end."""
    if INTERPRETED:
        return 1.0 / x
    else:  # noqa: RET505  one branch is compiled
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log1p(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for x ≥ 0, exact to rounding however small x: with Kahan's correction of the rounding of 1 + x."""
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)); never overflows."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def expm1(x):  # type: ignore[no-untyped-def]
    """exp(x) − 1, exact to rounding near 0: its series to the ninth power where |x| < 0.35."""
    series = 1.0 + x * (1 / 8) * (1.0 + x * (1 / 9))
    series = 1.0 + x * (1 / 6) * (1.0 + x * (1 / 7) * series)
    series = 1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * series)
    series = x * (1.0 + x * (1 / 2) * (1.0 + x * (1 / 3) * series))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Hyperbolic tangent, exact to rounding near 0, and ±1 far from it."""
    below = expm1(-2.0 * tl.abs(x))
    size = -below / (2.0 + below)
    return tl.where(x < 0, -size, size)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(−x)) from the exponential of −|x|, which never overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)
