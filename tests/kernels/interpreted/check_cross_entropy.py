"""The cross entropy's kernels: alone, on slices of a vocabulary, and inside the head's product."""

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each, no_reference
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_makers import Case
from torch import Tensor
from torch.nn import functional

from megakernels import cross_entropy, linear_cross_entropy, slice_gradient, slice_statistics
from megakernels.ops.cross_entropy import kernel, reference
from megakernels.ops.linear_cross_entropy import facts as linear_facts

HERE = [BY_NAME[name] for name in ("cross_entropy", "linear_cross_entropy")]
EACH = each(HERE)
SLOW = pytest.mark.slow


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, *(pytest.param(size, marks=SLOW) for size in (64, 65, 1000))])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 63)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, HERE)


@DTYPES
@pytest.mark.parametrize("rows_and_words", [7, 70])
def test_slices_of_the_product(dtype: torch.dtype, rows_and_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one word and of ten."""
    monkeypatch.setattr(linear_facts, "LOGITS_SLICE_ELEMENTS", rows_and_words)
    check_values(BY_NAME["linear_cross_entropy"], 7, dtype, reference)


def test_several_steps_and_tiles_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LOSS_STEP_COLUMNS", 8)
    monkeypatch.setattr(kernel, "LOSS_TILE_COLUMNS", 4)
    check_values(BY_NAME["cross_entropy"], 9, torch.float32, reference)


@DTYPES
def test_slices_of_a_vocabulary_joined_by_the_caller(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 20).to(dtype), torch.tensor([0, 9, 10, 19, -100, 5])
    with no_reference(reference):
        found = [slice_statistics(logits[:, first : first + 10], labels, first) for first in (0, 10)]
        lse = torch.stack([lse for lse, _ in found]).logsumexp(0)
        grad = torch.cat([slice_gradient(torch.tensor(0.5), logits[:, first : first + 10], labels, lse, first) for first in (0, 10)], 1)
    wide = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(functional.cross_entropy(wide, labels, reduction="sum") * 0.5, wide)
    assert rms_ratio(lse, wide.detach().logsumexp(1)) < TOLERANCE[torch.float32]
    assert rms_ratio(found[0][1] + found[1][1], wide.detach().gather(1, labels.clamp(0)[:, None])[:, 0] * (labels >= 0)) < 1e-6
    assert rms_ratio(grad, exact) < TOLERANCE[dtype]


def test_extremes_are_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-1e4, -1e4, -1e4], [90.0, 0.0, -90.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 0, 2]))
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert grad.isfinite().all()
    far = slice_statistics(logits.detach() - 1e4, torch.tensor([0, 0, 0]), 6)
    assert far[0].isfinite().all()
    assert not far[1].any()


def test_no_rows() -> None:
    x, weight = torch.empty(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64)
    (cross_entropy(torch.empty(0, 5), labels) + linear_cross_entropy(x, weight, labels)).backward()
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_rows_beyond_32_bit_offsets() -> None:
    """Rows so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((3, 64), (1 << 30, 1))
    near, labels = torch.randn(3, 64).bfloat16(), torch.tensor([0, 63, 5])
    far.copy_(near)
    found: list[Tensor] = []
    for logits in (far, near):
        logits.requires_grad_()
        loss = cross_entropy(logits, labels)
        found += [loss, *torch.autograd.grad(loss, logits)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
