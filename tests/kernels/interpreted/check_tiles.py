"""Shared kernel functions: products, rounding and functions near zero, each compared with the naive form that fails."""

import pytest
import torch
import triton
import triton.language as tl
from op_checks import rms_ratio
from torch import Tensor

from megakernels._common import tiles
from megakernels._common.tiles import dot, narrow

SMALL = 10.0 ** torch.linspace(-8, 1, 64)


@triton.jit
def product_kernel(a, b, c, N: tl.constexpr, NAIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left, right = tl.load(a + place), tl.load(b + place)
    if NAIVE:
        tl.store(c + place, tl.dot(left, right))
    else:
        tl.store(c + place, dot(left, right))


@triton.jit
def round_kernel(x, y, N: tl.constexpr, NAIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + tl.arange(0, N))
    if NAIVE:
        tl.store(y + tl.arange(0, N), value.to(y.dtype.element_ty))
    else:
        tl.store(y + tl.arange(0, N), narrow(value, y.dtype.element_ty))


@triton.jit
def function_kernel(x, y, N: tl.constexpr, FUNCTION: tl.constexpr, NAIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + tl.arange(0, N))
    if FUNCTION == "expm1":
        found = tl.exp(value) - 1.0 if NAIVE else tiles.expm1(value)
    elif FUNCTION == "tanh":
        found = 2.0 / (1.0 + tl.exp(-2.0 * value)) - 1.0 if NAIVE else tiles.tanh(value)
    elif FUNCTION == "softplus":
        found = tl.log(1.0 + tl.exp(value)) if NAIVE else tiles.softplus(value)
    else:
        found = tl.exp(value) / (1.0 + tl.exp(value)) if NAIVE else tiles.sigmoid(value)
    tl.store(y + tl.arange(0, N), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    c = torch.empty(32, 32)
    product_kernel[(1,)](a, b, c, N=32, NAIVE=False)
    assert rms_ratio(c, a.double() @ b.double()) < 1e-6


@pytest.mark.interpreter
def test_the_interpreters_own_bf16_product_is_wrong() -> None:
    a, b = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    c = torch.empty(32, 32)
    product_kernel[(1,)](a, b, c, N=32, NAIVE=True)
    assert not rms_ratio(c, a.double() @ b.double()) < 1


def rounded(x: Tensor, *, naive: bool) -> Tensor:
    y = torch.empty(64, dtype=torch.bfloat16)
    round_kernel[(1,)](x, y, N=64, NAIVE=naive)
    return y


def with_two_ties() -> Tensor:
    return torch.cat([torch.randn(60), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("inf"), -0.0])])


def test_rounding() -> None:
    x = with_two_ties()
    assert torch.equal(rounded(x, naive=False), x.bfloat16())


@pytest.mark.interpreter
def test_the_interpreters_own_rounding_truncates() -> None:
    x = with_two_ties()
    assert not torch.equal(rounded(x, naive=True), x.bfloat16())


EXACT = {"expm1": torch.expm1, "tanh": torch.tanh, "softplus": torch.nn.functional.softplus, "sigmoid": torch.sigmoid}


@pytest.mark.parametrize(
    ("function", "x"),
    [
        ("expm1", -SMALL),
        ("tanh", SMALL),
        ("tanh", -SMALL * 8),
        ("softplus", -2 * SMALL),
        ("softplus", 8 * SMALL),
        ("sigmoid", -8 * SMALL),
        ("sigmoid", 8 * SMALL),
    ],
)
def test_functions(function: str, x: Tensor) -> None:
    """Relative error, value by value."""
    y = torch.empty(64)
    function_kernel[(1,)](x, y, N=64, FUNCTION=function, NAIVE=False)
    exact = EXACT[function](x.double())
    assert ((y.double() - exact).abs() / exact.abs()).max() < 1e-6


@pytest.mark.parametrize(("function", "x"), [("expm1", -SMALL), ("tanh", SMALL), ("softplus", -2 * SMALL - 10), ("sigmoid", 20 * SMALL)])
def test_naive_functions_lose_or_overflow(function: str, x: Tensor) -> None:
    y = torch.empty(64)
    function_kernel[(1,)](x, y, N=64, FUNCTION=function, NAIVE=True)
    exact = EXACT[function](x.double())
    assert not ((y.double() - exact).abs() / exact.abs()).max() < 1e-4
