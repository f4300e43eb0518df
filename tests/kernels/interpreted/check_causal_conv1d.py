"""The convolution kernels: taps, bias, silu, documents, a state before the first position."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_exact import exact_conv
from op_makers import Case

from megakernels import causal_conv1d
from megakernels.ops.causal_conv1d import reference
from megakernels.ops.causal_conv1d.facts import CONV_BACKWARD_POSITIONS, LARGEST_KERNEL

NAMES = ("causal_conv1d", "causal_conv1d_plain", "causal_conv1d_packed", "causal_conv1d_initial")
WIDE = replace(
    BY_NAME["causal_conv1d"], name="causal_conv1d_two_tiles", inputs=lambda n, t: {"x": n(1, t, 300), "weight": n(300, 2), "bias": n(300)}
)
HERE = [*(BY_NAME[name] for name in NAMES), WIDE]
EACH = each(HERE)
SLOW = pytest.mark.slow


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 5, *(pytest.param(size, marks=SLOW) for size in (63, 64, 65, 129, 1000))])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 5)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, HERE)


def test_more_positions_than_a_backward_program_takes() -> None:
    check_values(BY_NAME["causal_conv1d_packed"], CONV_BACKWARD_POSITIONS + 2, torch.float32, reference)


def test_a_document_that_began_before_the_row() -> None:
    """Cut in two, with the first piece's last inputs before the second, a row of documents gives the uncut row's result."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(1, 12, 5, requires_grad=True), torch.randn(5, 4), torch.randn(1, 12, 5)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8, 8]], dtype=torch.int32)
    for cut in (4, 7, 8):
        whole = causal_conv1d(x, weight, None, True, starts)
        second = causal_conv1d(x[:, cut:], weight, None, True, starts[:, cut:] - cut, x[:, cut - 3 : cut])
        pieces = torch.cat([causal_conv1d(x[:, :cut], weight, None, True, starts[:, :cut]), second], 1)
        assert torch.equal(pieces, whole)
        (found,), (expected,) = (torch.autograd.grad(y, x, grad) for y in (pieces, whole))
        assert rms_ratio(found, expected) < 1e-6


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_no_positions(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    causal_conv1d(x, weight).backward(torch.empty(shape))
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_positions_beyond_32_bit_offsets() -> None:
    """Positions so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 64), (64, 1 << 30, 1))
    near, weight = torch.randn(1, 3, 64).bfloat16(), torch.randn(64, 4).bfloat16()
    far.copy_(near)
    x, wide = far.requires_grad_(), near.double().requires_grad_()
    y, exact = causal_conv1d(x, weight), exact_conv(wide, weight.double(), None, silu=True)
    found, expected = torch.autograd.grad(y, x, far.detach()), torch.autograd.grad(exact, wide, near.double())
    assert rms_ratio(y, exact) < TOLERANCE[torch.bfloat16]
    assert rms_ratio(found[0], expected[0]) < TOLERANCE[torch.bfloat16]


def test_more_taps_stay_with_the_reference() -> None:
    x, weight = torch.randn(1, 9, 3), torch.randn(3, LARGEST_KERNEL + 1)
    assert rms_ratio(causal_conv1d(x, weight), exact_conv(x.double(), weight.double(), None, silu=True)) < TOLERANCE[torch.float32]
