"""Attention with capped scores: values and gradients against its definition, over whole sequences and over pieces."""

import pytest
import torch
from attention_exact import BATCH, HEADS, LENGTH, SCALE, assert_same, exact_attention, random_inputs

from megakernels import attention, attention_pieces, attention_pieces_backward
from megakernels.ops.attention.choice import chooses_kernels
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.vendor import library_for

CLASSES = 5


@pytest.mark.parametrize("cap", [0.3, 4.0])
@pytest.mark.parametrize("window", [None, 5])
def test_scores_are_capped_before_relations_are_added(window: int | None, cap: float) -> None:
    """Sinks are covered too; a small cap is reached, a large one bends."""
    tensors = random_inputs((CLASSES, HEADS))
    classes = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    found = attention(*tensors[:3], SCALE, window, None, tensors[3], classes, tensors[4], cap)
    expected = exact_attention(*tensors[:4], window, tensors[4][classes.long()].permute(0, 2, 1)[:, :, None], cap)
    assert_same(found, expected, tensors)


def test_pieces_of_two_ranks_make_the_whole() -> None:
    """Each rank has its queries and all keys; gradients of keys and values are summed over the ranks."""
    tensors = random_inputs()[:3]
    order, length = [0, 3, 1, 2], LENGTH // 4
    rows = torch.cat([torch.arange(piece * length, (piece + 1) * length) for piece in order])
    q, k, v = (each.detach() for each in tensors)
    whole = attention(*tensors, SCALE, 5, cap=0.5)
    cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(whole, tensors, cotangent)
    sums = [torch.zeros_like(each) for each in (k, v)]
    for pieces, own in ((order[:2], rows[: LENGTH // 2]), (order[2:], rows[LENGTH // 2 :])):
        out, lse = attention_pieces(q[:, own], k[:, rows], v[:, rows], None, SCALE, 5, pieces, order, cap=0.5)
        torch.testing.assert_close(out, whole[:, own], rtol=1e-12, atol=1e-14)
        given = (cotangent[:, own], q[:, own], k[:, rows], v[:, rows], None, out, lse)
        grad_q, *partial = attention_pieces_backward(*given, SCALE, 5, pieces, order, cap=0.5)
        torch.testing.assert_close(grad_q, expected[0][:, own], rtol=1e-10, atol=1e-12)
        for total, part in zip(sums, partial, strict=True):
            total.add_(part)
    back = rows.argsort()
    for found, value in zip(sums, expected[1:], strict=True):
        torch.testing.assert_close(found[:, back], value, rtol=1e-10, atol=1e-12)


def test_triton_kernels_run_but_no_library() -> None:
    """No library knows a cap."""
    q, k, v = (each.detach().bfloat16() for each in random_inputs()[:3])
    capped = Attention(q, k, v, None, SCALE, None, cap=1.0)
    assert chooses_kernels(capped)
    assert library_for(capped) is None


def test_a_cap_is_above_zero() -> None:
    with pytest.raises(ValueError, match="cap must be above 0"):
        attention(*random_inputs()[:3], SCALE, cap=0.0)
