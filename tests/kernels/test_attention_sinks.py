"""Attention with sinks: values and gradients against a softmax with one more column, over whole sequences and over pieces."""

import pytest
import torch
from attention_exact import LENGTH, SCALE, assert_same, exact_attention, random_inputs

from megakernels import attention, attention_pieces, attention_pieces_backward


@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_is_one_more_column_of_the_softmax(window: int | None) -> None:
    tensors = random_inputs()
    found, expected = attention(*tensors[:3], SCALE, window, None, tensors[3]), exact_attention(*tensors, window)
    assert_same(found, expected, tensors)


def test_pieces_of_two_ranks_make_the_whole() -> None:
    """Each rank has its queries and all keys; gradients of keys, values and sinks are summed over the ranks."""
    tensors = random_inputs()
    order, length = [0, 3, 1, 2], LENGTH // 4
    rows = torch.cat([torch.arange(piece * length, (piece + 1) * length) for piece in order])
    q, k, v, sinks = (each.detach() for each in tensors)
    whole = attention(*tensors[:3], SCALE, 5, None, tensors[3])
    cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(whole, tensors, cotangent)
    sums = [torch.zeros_like(each) for each in (k, v, sinks)]
    for pieces, own in ((order[:2], rows[: LENGTH // 2]), (order[2:], rows[LENGTH // 2 :])):
        out, lse = attention_pieces(q[:, own], k[:, rows], v[:, rows], None, SCALE, 5, pieces, order, sinks)
        torch.testing.assert_close(out, whole[:, own], rtol=1e-12, atol=1e-14)
        given = (cotangent[:, own], q[:, own], k[:, rows], v[:, rows], None, out, lse)
        grad_q, *partial = attention_pieces_backward(*given, SCALE, 5, pieces, order, sinks)
        torch.testing.assert_close(grad_q, expected[0][:, own], rtol=1e-10, atol=1e-12)
        for total, part in zip(sums, partial, strict=True):
            total.add_(part)
    back = rows.argsort()
    for found, value in zip((sums[0][:, back], sums[1][:, back], sums[2]), expected[1:], strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    q, k, v, _ = random_inputs()
    with pytest.raises(ValueError, match="sinks must be"):
        attention(q, k, v, SCALE, None, None, torch.zeros(3))
