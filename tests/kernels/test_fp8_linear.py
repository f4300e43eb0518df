"""Products in eight bits against numpy in fp64 with an independent rounding, and their stated shapes and scratch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from delayed_numbers import numbers_for
from rounding import Peak, quantised
from storages import Idle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megakernels import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients, scratch_bytes
from megakernels._common import device
from megakernels.ops.fp8_linear import facts, reference
from megakernels.ops.fp8_linear import op as fp8_linear

SCALED = pytest.mark.parametrize("scaling", ["tensor", "rows"])
ALL = pytest.mark.parametrize("scaling", ["tensor", "rows", "delayed"])
ROWS, K, WIDTHS = (2, 9), 20, (16, 24, 5)


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(shape, generator=generator))  # elements of many magnitudes
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def exact(x: Tensor) -> np.ndarray:
    return x.double().reshape(-1, x.shape[-1]).numpy()


def close(found: Tensor, expected: np.ndarray) -> None:
    flat = found.double().reshape(expected.shape)
    tolerance = 2**-8 if found.dtype == torch.bfloat16 else 2**-20
    assert (flat - torch.from_numpy(expected)).abs().max() <= tolerance * np.abs(expected).max()


def case(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor]]:
    x, weights = made(*ROWS, K, seed=1, dtype=dtype), [made(width, K, seed=2 + width, dtype=dtype) for width in WIDTHS]
    biases = [None, made(WIDTHS[1], seed=3, dtype=dtype), made(WIDTHS[2], seed=4, dtype=dtype)]
    return x, weights, biases, [made(*ROWS, width, seed=5 + width, dtype=dtype) for width in WIDTHS]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_a_copy_has_the_nearest_eight_bit_values(format: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    x = made(64, 48, seed=0)
    x[3] = 0
    x[4] *= 1e-30
    for by_row in (False, True):
        for transposed in (False, True):
            copy = reference.operand(x, dtype=dtype, by_row=by_row, transposed=transposed)
            values = copy.data.double() * copy.scale.double()[:, None]
            axis = (0 if transposed else 1) if by_row else None
            expected = quantised(x.double().numpy(), format, axis)
            assert torch.equal(values, torch.from_numpy(expected.T.copy() if transposed else expected))
            assert copy.data.is_contiguous()
            fraction, _ = torch.frexp(copy.scale)
            assert (fraction == 0.5).all()  # powers of two


def test_slices_give_the_same_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(37, 48, seed=0)

    def copies() -> list[Tensor]:
        kept = reference.kept(x, by_column=True)
        others = (reference.operand(x, dtype=torch.float8_e4m3fn, by_row=True, transposed=turned) for turned in (False, True))
        return [tensor.float() for pair in (kept, *others) for tensor in pair]

    whole = copies()
    monkeypatch.setattr(facts, "SCALED_SLICE_ELEMENTS", 5 * 48)
    assert reference.slice_rows(37, 48) == 5
    assert all(torch.equal(first, second) for first, second in zip(whole, copies(), strict=True))


def test_a_part_of_a_matrix_rounds_as_the_whole_except_its_smallest_elements() -> None:
    """Ranks can therefore scale their own parts: the scales differ, and only what is 2^-14 of the largest or below can."""
    x = made(256, 64, seed=0)
    x[:128] *= 37
    whole, part = (reference.operand(each, dtype=torch.float8_e4m3fn, by_row=False) for each in (x, x[128:]))
    assert whole.scale != part.scale
    first, second = whole.data[128:].double() * whole.scale, part.data.double() * part.scale
    differ = first != second
    assert differ.any()
    assert (x[128:].abs()[differ] <= 2**-13 * x.abs().max()).all()
    assert (first - second).abs().max() <= 2**-10 * whole.scale  # half of the smallest number


@SCALED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linears_are_products_of_quantised_matrices(dtype: torch.dtype, scaling: str) -> None:
    x, weights, biases, _ = case(dtype)
    axis = 1 if scaling == "rows" else None
    low = quantised(exact(x), "e4m3", axis)
    found = fp8_linears(x, None, weights, biases, scaling)
    for out, weight, bias in zip(found, weights, biases, strict=True):
        expected = low @ quantised(exact(weight), "e4m3", axis).T
        close(out, expected if bias is None else expected + bias.double().numpy())
        assert out.dtype == dtype
    if scaling == "tensor":
        again = fp8_linears(*fp8_quantize(x, "tensor"), weights, biases, scaling)
        assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))


@SCALED
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_products_of_quantised_matrices(dtype: torch.dtype, scaling: str, format: str) -> None:
    x, weights, _, gradients = case(dtype)
    along, across = (1, 0) if scaling == "rows" else (None, None)
    expected = sum(
        quantised(exact(gradient), format, along) @ quantised(exact(weight), "e4m3", across)
        for gradient, weight in zip(gradients, weights, strict=True)
    )
    assert isinstance(expected, np.ndarray)
    close(fp8_input_gradients(gradients, weights, scaling, format), expected)
    given = [False, True, True]
    found = fp8_weight_gradients(gradients, x, None, K, scaling, format, given)
    for out, gradient in zip(found, gradients, strict=False):
        close(out, quantised(exact(gradient), format, across).T @ quantised(exact(x), "e4m3", across))
    for total, gradient in zip(found[3:], gradients[1:], strict=True):
        close(total, exact(gradient).sum(0))
    kept = fp8_quantize(x, "columns" if scaling == "rows" else "tensor")
    again = fp8_weight_gradients(gradients, *kept, K, scaling, format, given)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))


def calls(x: Tensor, weights: list[Tensor], biases: list[Any], gradients: list[Tensor], scaling: str) -> list[Callable[[], Any]]:
    kept = "columns" if scaling == "rows" else scaling
    own: Any = (*numbers_for(scaling, 1), None)[0]
    each = numbers_for(scaling, len(weights))
    return [
        lambda: fp8_quantize(x, kept, own),
        lambda: fp8_linears(x, None, weights, biases, scaling, numbers=each),
        lambda: fp8_input_gradients(gradients, weights, scaling, "e5m2", numbers=each),
        lambda: fp8_weight_gradients(gradients, *fp8_quantize(x, kept, own), K, scaling, "e5m2", [False, True, True], each),
    ]


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors_match_real_ones(dtype: torch.dtype, scaling: str) -> None:
    def described(results: Any) -> list[tuple[Any, ...]]:
        tensors = [results] if isinstance(results, Tensor) else results
        return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in tensors]

    x, weights, biases, gradients = case(dtype)
    real = [described(call()) for call in calls(x, weights, biases, gradients, scaling)]
    with FakeTensorMode() as mode:

        def fake(tensors: list[Any]) -> list[Any]:
            return [None if tensor is None else mode.from_tensor(tensor) for tensor in tensors]

        made_fake = calls(mode.from_tensor(x), fake(weights), fake(biases), fake(gradients), scaling)
        assert [described(call()) for call in made_fake] == real


class Inside(TorchDispatchMode):
    """Bytes stated by the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.stated: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stated.append(scratch_bytes(str(func), args))
        return func(*args, **(kwargs or {}))


def fakes_write_scaled_products() -> bool:
    """True if torch's products of scaled rows write into a given result without data too; torch 2.11's do not."""
    with FakeTensorMode():
        a, scales, out = torch.empty(16, 16, dtype=torch.float8_e4m3fn), torch.empty(16, 1), torch.empty(16, 16, dtype=torch.bfloat16)
        try:
            torch._scaled_mm(a, a.mT, scales, scales.mT, out_dtype=out.dtype, out=out)
        except RuntimeError:  # without a fake, the CPU is asked, which scales no rows
            return False
    return True


@pytest.mark.skipif(not fakes_write_scaled_products(), reason="this torch has no fake of a product that writes into a given result")
@ALL
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_stated_scratch_is_what_the_operations_allocate(scaling: str, given: bool, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to their results: of the code that CUDA runs, on tensors without data."""
    kept = "columns" if scaling == "rows" else scaling
    monkeypatch.setitem(device._chosen, "kernels", kernels)
    if kernels == "triton":
        kernel = pytest.importorskip("megakernels.ops.fp8_linear.kernel")
        monkeypatch.setattr(device, "runs_triton", lambda *_: True)
        for name in [name for name in vars(kernel) if name.endswith("_kernel")]:
            monkeypatch.setattr(kernel, name, Idle())
    monkeypatch.setattr(reference, "has_tensor_cores", lambda _: True)
    with FakeTensorMode():
        x, weights = torch.empty(*ROWS, K, dtype=torch.bfloat16), [torch.empty(width, K, dtype=torch.bfloat16) for width in WIDTHS]
        gradients = [torch.empty(*ROWS, width, dtype=torch.bfloat16) for width in WIDTHS]
        biases = [None, torch.empty(WIDTHS[1], dtype=torch.bfloat16), None]
        numbers: list[Tensor] = numbers_for(scaling, len(weights))
        own = numbers[0] if numbers else None
        with_x = fp8_quantize(x, kept, own) if given else (x, None)
        operands: dict[str, tuple[Any, ...]] = {
            "_fp8_input_gradients": (gradients, weights, scaling, "e4m3", [None] * len(weights), numbers),
            "_fp8_weight_gradients": (gradients, *with_x, K, scaling, "e4m3", [True, False, True], numbers),
        }
        if not given or scaling != "rows":
            operands["_fp8_linears"] = (*with_x, weights, biases, scaling, torch.bfloat16, [None] * len(weights), numbers, [])
        if not given:
            operands["_fp8_quantize"] = (x, kept, own)
        for name, values in operands.items():
            with Peak(values) as counted:
                results = getattr(fp8_linear, name)._init_fn(*values)
            inside = counted.peak - sum(tensor.nbytes for tensor in tree_leaves(results))
            assert inside == scratch_bytes(f"megakernels.{name.removeprefix('_')}.default", values), name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, _: fp8_quantize(x, "rows"), "scaling = rows"),
        (lambda x, _: fp8_quantize(x.double(), "tensor"), "float64"),
        (lambda x, w: fp8_linears(x, None, [w], [], "rows"), "biases = 0"),
        (lambda x, w: fp8_linears(x, None, [w], [None], "rows", taken=slice(0, 4)), "taken = slice"),
        (lambda x, w: fp8_linears(x[..., :8], None, [w], [None], "rows"), "K = 20"),
        (lambda x, w: fp8_linears(*fp8_quantize(x, "columns"), [w], [None], "rows"), "x must be"),
        (lambda x, w: fp8_linears(x, None, [w, w.bfloat16()], [None, None], "rows"), "weights must be"),
        (lambda x, w: fp8_input_gradients([x], [w], "rows", "e4m3"), "gradients must be"),
        (lambda x, w: fp8_linears(x, None, [w], [None], "delayed"), "numbers = ()"),
        (lambda x, _: fp8_quantize(x, "delayed", torch.ones(2, 3)), "numbers = ((2, 3),)"),
        (lambda x, w: fp8_linears(x, None, [w], [None], "tensor", numbers=[torch.ones(3, 3)]), "scaling = tensor"),
        (lambda x, _: fp8_weight_gradients([x[:1]], x, None, K, "rows", "e4m3", [False]), "gradients [...,N]"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[Tensor, Tensor], Any], said: str) -> None:
    with pytest.raises(ValueError, match="fp8_") as caught:
        call(made(*ROWS, K, seed=0), made(16, K, seed=1))
    assert said in str(caught.value)


def test_values_that_are_not_finite_reach_the_result() -> None:
    """So that the loss shows them."""
    for value in (float("inf"), float("nan")):
        x = made(16, 16, seed=0)
        x[2, 3] = value
        for scaling in ("tensor", "rows"):
            (out,) = fp8_linears(x, None, [made(16, 16, seed=1)], [None], scaling)
            assert not out[2].isfinite().any()
