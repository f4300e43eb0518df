"""Operands whose blocks have scales against numpy in fp64 with an independent rounding, and the products of the values."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from rounding import Peak, blocked
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megakernels import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients, scratch_bytes
from megakernels.ops.fp8_linear import blocks, facts
from megakernels.ops.fp8_linear import op as fp8_linear

BLOCKS = pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "fp8_blockwise"])
ROWS, K, WIDTHS = (2, 25), 72, (48, 64, 5)


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(shape, generator=generator))  # elements of many magnitudes
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def exact(x: Tensor) -> np.ndarray:
    return x.double().reshape(-1, x.shape[-1]).numpy()


def close(found: Tensor, expected: np.ndarray) -> None:
    tolerance = 2**-8 if found.dtype == torch.bfloat16 else 2**-20
    assert np.abs(exact(found) - expected).max() <= tolerance * np.abs(expected).max()


def transformed(x: np.ndarray) -> np.ndarray:
    """Whole groups of 16 columns times the Hadamard matrix, whose rows have signs; an element is negative if its indices share odd bits."""
    index = np.arange(16)
    signs = 1 - 2 * (np.bitwise_count(index[:, None] & index) % 2).astype(float)
    signs[[3, 5, 6, 7, 8, 9, 10, 12, 14, 15]] *= -1
    whole = x.shape[1] // 16 * 16
    return np.concatenate([(x[:, :whole].reshape(-1, 16) @ signs / 4).reshape(len(x), -1), x[:, whole:]], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_mxfp8_has_the_nearest_numbers(format: str, dtype: torch.dtype) -> None:
    x = made(64, 80, dtype=dtype)
    x[3] = 0
    x[4] *= 1e-30
    x[5, :32] = 448 * 2.0**-3  # a scale that is exactly the ratio
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    for transposed in (False, True):
        found = blocks.rounded(x, "mxfp8", blocks.INPUT, transposed=transposed, dtype=kind)
        values = blocked(exact(x), "mxfp8", 0 if transposed else 1, format=format)
        assert np.array_equal(exact(found), values.T if transposed else values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_in_blocks_has_the_nearest_numbers(format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 elements, of a weight 128 x 128, also of a matrix that is rounded in slices, whose last blocks are partial."""
    monkeypatch.setattr(facts, "SCALED_SLICE_ELEMENTS", 200 * 300)
    x = made(330, 300, dtype=dtype)
    x[:128, 128:256] = 0
    x[4] *= 1e-36
    x[200:, :100] *= 2.0**-130  # a scale beyond the numbers of fp32
    x[5, :128] = 448 * 2.0**-3
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    for role, transposed in product((blocks.INPUT, blocks.WEIGHT, blocks.GRADIENT), (False, True)):
        found = blocks.rounded(x, "fp8_blockwise", role, transposed=transposed, dtype=kind)
        values = blocked(exact(x), "fp8_blockwise", 0 if transposed else 1, format=format, square=role == blocks.WEIGHT)
        assert np.array_equal(exact(found), values.T if transposed else values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_has_the_nearest_numbers(dtype: torch.dtype) -> None:
    """A weight has scales of 16 x 16 elements and its transpose the same values; an input's transpose is transformed first."""
    x = made(64, 80, dtype=dtype)
    x[3] = 0
    x[4] *= 1e-30
    close(blocks.rounded(x, "nvfp4", blocks.INPUT), blocked(exact(x), "nvfp4", 1))
    weight = blocked(exact(x), "nvfp4", 1, square=True)
    close(blocks.rounded(x, "nvfp4", blocks.WEIGHT), weight)
    close(blocks.rounded(x, "nvfp4", blocks.WEIGHT, transposed=True), weight.T)
    close(blocks.rounded(x[:57], "nvfp4", blocks.INPUT, transposed=True), blocked(transformed(exact(x[:57]).T), "nvfp4", 1))


def test_gradients_round_to_either_neighbour_without_bias() -> None:
    """The same matrix always equally, another one otherwise; the mean of many is the number."""
    x = torch.full((256, 64), 2.25)
    x[:, ::16] = 6
    others = torch.arange(64) % 16 > 0
    first, again, other = (blocks.rounded(each, "nvfp4", blocks.GRADIENT) for each in (x, x, 1.5 * x))
    assert torch.equal(first, again)
    assert set(first.round(decimals=4).unique().tolist()) == {2.0, 3.0, 6.0}
    assert not torch.equal(1.5 * first, other)
    assert abs(float(first[:, others].mean()) - 2.25) < 0.02
    halves = [float(first[part][:, others].mean()) for part in (slice(0, 128), slice(128, None))]
    assert max(abs(each - 2.25) for each in halves) < 0.03


@BLOCKS
def test_products_are_of_the_values(scaling: str) -> None:
    x, weights = made(*ROWS, K), [made(width, K, seed=width) for width in WIDTHS]
    bias, square = made(WIDTHS[1], seed=3), scaling != "mxfp8"
    gradients = [made(*ROWS, width, seed=5 + width) for width in WIDTHS]
    values = [blocked(exact(weight), scaling, 1, square=square) for weight in weights]
    for out, weight, added in zip(fp8_linears(x, None, weights, [None, bias, None], scaling), values, (0, bias.numpy(), 0), strict=True):
        close(out, blocked(exact(x), scaling, 1) @ weight.T + added)
    sent = [exact(blocks.rounded(each.flatten(0, 1), scaling, blocks.GRADIENT)) for each in gradients]
    turned = [each if square else blocked(exact(weight), scaling, 0) for each, weight in zip(values, weights, strict=True)]
    close(fp8_input_gradients(gradients, weights, scaling, "e4m3"), sum(a @ b for a, b in zip(sent, turned, strict=True)))
    of_x = blocked(transformed(exact(x).T) if scaling == "nvfp4" else exact(x).T, scaling, 1)
    found = fp8_weight_gradients(gradients, x, None, K, scaling, "e4m3", [False, True, False])
    for out, gradient in zip(found, gradients, strict=False):
        close(out, exact(blocks.rounded(gradient.flatten(0, 1), scaling, blocks.GRADIENT, transposed=True)) @ of_x.T)
    close(found[3][None], exact(gradients[1]).sum(0, keepdims=True))
    again = fp8_weight_gradients(gradients, *fp8_quantize(x, scaling), K, scaling, "e4m3", [False, True, False])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, again, strict=True))


def test_the_transform_cancels_in_a_product() -> None:
    x, y = exact(made(8, 50)), exact(made(9, 50, seed=1))
    assert np.allclose(transformed(x) @ transformed(y).T, x @ y.T)


@BLOCKS
@pytest.mark.parametrize("elements", [1 << 22, 400])
def test_stated_scratch_is_what_the_operations_allocate(scaling: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to their results, to a percent, and their shapes are those of tensors without data."""
    monkeypatch.setattr(facts, "SCALED_SLICE_ELEMENTS", elements)
    x, weights = made(*(2, 96), K, dtype=torch.bfloat16), [made(width, K, seed=width, dtype=torch.bfloat16) for width in (96, 208)]
    gradients = [made(2, 96, width, seed=width, dtype=torch.bfloat16) for width in (96, 208)]
    kept = fp8_quantize(x, scaling)
    operands: list[tuple[str, tuple[Any, ...]]] = [
        ("fp8_quantize", (x, scaling, None)),
        ("fp8_linears", (x, None, weights, [None, None], scaling, torch.bfloat16, [None, None], [], [])),
        ("fp8_linears", (x, None, weights[1:], [None], scaling, torch.bfloat16, [None], [], [5, 40])),
        ("fp8_input_gradients", (gradients, weights, scaling, "e4m3", [None, None], [])),
        *(("fp8_weight_gradients", (gradients, *pair, K, scaling, "e4m3", [True, False], [])) for pair in (kept, (x, None))),
    ]
    for name, values in operands:
        with Peak(values) as counted:
            results = tree_leaves(getattr(fp8_linear, f"_{name}")._init_fn(*values))
        inside = counted.peak - sum(tensor.nbytes for tensor in results)
        stated = scratch_bytes(f"megakernels.{name}.default", values)
        assert inside <= stated <= 1.01 * inside, name
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, values)
            shaped = tree_leaves(getattr(torch.ops.megakernels, name)(*fake))
        assert [(each.shape, each.dtype, each.stride()) for each in shaped] == [(each.shape, each.dtype, each.stride()) for each in results]


@BLOCKS
def test_values_that_are_not_finite_reach_the_result(scaling: str) -> None:
    for value in (float("inf"), float("nan")):
        x = made(16, 32)
        x[2, 3] = value
        (out,) = fp8_linears(x, None, [made(16, 32, seed=1)], [None], scaling)
        assert not out[2].isfinite().any()
