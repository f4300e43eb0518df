"""Outputs and every gradient against the exact formulations of op_cases, in fp64; repeats; views."""

import pytest
import torch
from op_cases import CASES
from op_checks import TOLERANCE, gradients, rms_ratio
from op_makers import Case

ODD_LENGTHS = (1, 63, 64, 65, 200)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.requirement("R-65")
@EACH_CASE
@pytest.mark.parametrize("num_positions", ODD_LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_every_gradient_match(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    inputs = case.make(num_positions, dtype)
    wide = {name: value.detach().double() if value.is_floating_point() else value for name, value in inputs.items()}
    names = case.differentiable(inputs)
    for name in names:
        wide[name].requires_grad_()
    outputs, exact = case.call(inputs), case.exact(wide)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype) for output in outputs]
    found = gradients(outputs, [inputs[name] for name in names], cotangents)
    expected = gradients(exact, [wide[name] for name in names], [cotangent.double() for cotangent in cotangents])

    ratios = {f"output {index}": rms_ratio(a, b) for index, (a, b) in enumerate(zip(outputs, exact, strict=True))}
    ratios |= {f"gradient of {name}": rms_ratio(a, b) for name, a, b in zip(names, found, expected, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    for name, gradient in zip(names, found, strict=True):
        assert (gradient.dtype, gradient.shape) == (inputs[name].dtype, inputs[name].shape), name


@EACH_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_repeat_is_bitwise_equal(case: Case, dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        inputs = case.make(65, dtype)
        outputs = case.call(inputs)
        return [
            *outputs,
            *gradients(outputs, [inputs[name] for name in case.differentiable(inputs)], [torch.ones_like(y) for y in outputs]),
        ]

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


@EACH_CASE
@pytest.mark.parametrize("layout", ["slice", "transposed"])
def test_views_give_the_same_values(case: Case, layout: str) -> None:
    """Slices of a fused projection and transposed tensors need no copy by the caller."""
    plain = case.make(65, torch.float32)
    names = case.differentiable(plain)
    strided = dict(plain)
    for name in names:
        value = plain[name].detach()
        if layout == "slice":
            storage = torch.full((*value.shape[:-1], value.shape[-1] + 5), torch.nan)
            storage[..., 2:-3] = value
            strided[name] = storage[..., 2:-3].requires_grad_()
        elif value.dim() > 1:
            strided[name] = value.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    outputs, expected = case.call(strided), case.call(plain)
    cotangents = [torch.linspace(-1, 1, y.numel()).view(y.shape) for y in outputs]
    found = gradients(outputs, [strided[name] for name in names], cotangents)
    wanted = gradients(expected, [plain[name] for name in names], cotangents)
    for first, second in zip((*outputs, *found), (*expected, *wanted), strict=True):
        assert rms_ratio(first, second) < 1e-6
        assert first.is_contiguous()
