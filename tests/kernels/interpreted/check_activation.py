"""The activation kernels."""

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each
from op_cases import CASES
from op_checks import gradients, rms_ratio
from op_exact import exact_xielu
from op_makers import Case
from torch.nn import functional

from megakernels import geglu, gelu, relu2, relu2glu, swiglu, xielu
from megakernels.ops.activation import reference

NAMES = ("swiglu", "geglu", "relu2glu", "relu2", "gelu", "xielu")
HERE = [case for case in CASES if case.name in NAMES]
EACH = each(HERE)


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 1000])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 63)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, HERE)


def test_wide_rows_have_several_tiles() -> None:
    gate, up = (torch.randn(3, 1500, requires_grad=True) for _ in range(2))
    y = swiglu(gate, up)
    wide = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    exact = functional.silu(wide[0]) * wide[1]
    pairs = zip((y, *gradients([y], [gate, up], [y])), (exact, *gradients([exact], wide, [exact])), strict=True)
    assert max(rms_ratio(a, b) for a, b in pairs) < TOLERANCE[torch.float32]


def test_extremes_are_finite() -> None:
    x = torch.tensor([-3e4, -90.0, -1e-30, 0.0, 1e-30, 90.0, 3e4], requires_grad=True)
    for y in (swiglu(x, x), geglu(x, x), relu2glu(x, x), relu2(x), gelu(x), xielu(x, torch.tensor([0.2, -40.0]))):
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.isfinite().all()
        assert grad.isfinite().all()


def test_elements_beyond_32_bit_offsets() -> None:
    torch.use_deterministic_algorithms(False)  # which would fill the memory between with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((3, 64), (1 << 30, 1))
    near = torch.randn(3, 64).bfloat16()
    far.copy_(near)
    assert torch.equal(relu2(far), relu2(near))


def test_sums_of_several_tiles_in_a_program() -> None:
    x, alphas = torch.randn(1100, 2048, requires_grad=True), torch.tensor([0.3, -0.4], requires_grad=True)
    y = xielu(x, alphas)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, alphas)]
    exact = exact_xielu(*wide)
    pairs = zip(gradients([y], [x, alphas], [y]), gradients([exact], wide, [exact]), strict=True)
    assert max(rms_ratio(a, b) for a, b in pairs) < TOLERANCE[torch.float32]


def test_no_elements() -> None:
    assert relu2(torch.empty(0, 5)).shape == (0, 5)
