"""The norm kernels, plain, gated and of a sum."""

import math

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_exact import EPS, exact_gated_rms_norm, exact_rms_norm
from op_makers import BATCH, Case

from megakernels import add_rms_norm, gated_rms_norm, rms_norm
from megakernels.ops.rms_norm import kernel, reference
from megakernels.ops.rms_norm.facts import NORM_LARGEST_WIDTH

WIDE = Case(
    "gated_rms_norm_one_group",
    lambda n, t: {"x": n(BATCH, t, 200), "gate": n(BATCH, t, 200), "weight": n(200)},
    lambda i: (gated_rms_norm(i["x"], i["gate"], i["weight"], EPS, 1),),
    lambda i: (exact_gated_rms_norm(i["x"], i["gate"], i["weight"], 1),),
    ("x", "gate", "weight"),
    lambda t: [((BATCH, t, 1), "accumulator")],
)
HERE = [*(BY_NAME[name] for name in ("rms_norm", "rms_norm_offset", "add_rms_norm", "gated_rms_norm")), WIDE]
EACH = each(HERE)


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, pytest.param(64, marks=pytest.mark.slow), 65, pytest.param(1000, marks=pytest.mark.slow)])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 63)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, HERE)


def test_no_rows() -> None:
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, EPS) + gated_rms_norm(x, x, weight, EPS, 2) + sum(add_rms_norm(x, x, weight, EPS))
    y.backward(torch.empty(0, 8))
    assert y.shape == (0, 8)
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_is_torch_s_and_so_is_its_norm(dtype: torch.dtype) -> None:
    """The norm is of the rounded sum, which later blocks read: bitwise equal to the plain kernel. The interpreter rounds only fp32."""
    x, branch, weight = torch.randn(5, 200).to(dtype), torch.randn(5, 200).to(dtype), torch.randn(200).to(dtype)
    total, y = add_rms_norm(x, branch, weight, EPS)
    assert torch.equal(y, rms_norm(total, weight, EPS))
    assert dtype != torch.float32 or torch.equal(total, x + branch)


@pytest.mark.parametrize("shape", [(2, 5, 4, 3, 24), (1, 7, 1, 5, 128), (3, 1, 6, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_runs_are_read_where_they_are(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads or ranks in a slice of a wider projection: the bits of a contiguous copy, and no copy."""
    inner = math.prod(shape[2:])
    runs = torch.randn(*shape[:2], inner + 48).to(dtype)[..., 16 : 16 + inner].unflatten(-1, shape[2:]).requires_grad_()
    weight, cotangent = torch.randn(shape[-1]).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    copy = runs.detach().contiguous().requires_grad_()
    expected = rms_norm(copy, weight, EPS)
    of_copy = torch.autograd.grad(expected, (copy, weight), cotangent)
    monkeypatch.setattr(kernel, "_rows", lambda x: x.view(-1, x.shape[-1]))  # raises where it would copy
    found = rms_norm(runs, weight, EPS)
    of_runs = torch.autograd.grad(found, (runs, weight), cotangent)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(of_runs, of_copy, strict=True))


@pytest.mark.parametrize("kind", ["plain", "gated", "add", "runs"])
def test_rows_beyond_32_bit_offsets(kind: str) -> None:
    """Rows so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((3, 64), (1 << 30, 1))
    near, weight = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    far.copy_(near)
    x, wide, gain = far.requires_grad_(), near.double(), weight.double()
    y, exact = {
        "plain": lambda: (rms_norm(x, weight, EPS), exact_rms_norm(wide, gain)),
        "gated": lambda: (gated_rms_norm(x, x, weight, EPS, 1), exact_gated_rms_norm(wide, wide, gain, 1)),
        "add": lambda: (add_rms_norm(x, x, weight, EPS)[1], exact_rms_norm(2 * wide, gain)),
        "runs": lambda: (rms_norm(x.unflatten(-1, (4, 16)), weight[:16], EPS), exact_rms_norm(wide.unflatten(-1, (4, 16)), gain[:16])),
    }[kind]()
    assert rms_ratio(y, exact) < TOLERANCE[torch.bfloat16]
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert found.isfinite().all()


def test_wider_rows_stay_with_the_reference() -> None:
    x = torch.randn(2, NORM_LARGEST_WIDTH + 8)
    assert rms_ratio(rms_norm(x, x[0], EPS), exact_rms_norm(x.double(), x[0].double())) < TOLERANCE[torch.float32]
    assert kernel.accepts(x.bfloat16()[:, 8:], 1, gated=True)
    assert not kernel.accepts(x[:, 8:], 1, gated=True)
