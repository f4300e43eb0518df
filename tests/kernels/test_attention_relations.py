"""Attention with relations: values and gradients against scores with an added term, over whole sequences and over pieces."""

import pytest
import torch
from attention_exact import BATCH, HEADS, LENGTH, SCALE, assert_same, exact_attention, random_inputs
from torch import Tensor

from megakernels import attention, attention_pieces, attention_pieces_backward

CLASSES = 5


def inputs() -> list[Tensor]:
    return random_inputs((CLASSES, HEADS))


def classes() -> Tensor:
    """One class has no key."""
    return torch.randint(0, CLASSES - 1, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3), dtype=torch.int32)


def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, relations: Tensor, window: int | None) -> Tensor:
    return exact_attention(q, k, v, sinks, window, relations[classes().long()].permute(0, 2, 1)[:, :, None])


@pytest.mark.parametrize("window", [None, 5])
def test_a_relation_adds_to_the_scores_of_its_keys(window: int | None) -> None:
    """Sinks are covered too."""
    tensors = inputs()
    found = attention(*tensors[:3], SCALE, window, None, tensors[3], classes(), tensors[4])
    expected = exact(*tensors, window)
    assert_same(found, expected, tensors)


def test_a_relation_alone_has_a_gradient() -> None:
    """Nothing else requires a gradient."""
    *given, relations = (each.detach() for each in inputs())
    found = torch.autograd.grad(
        attention(*given[:3], SCALE, None, None, None, classes(), relations.requires_grad_()).square().sum(), relations
    )
    none = torch.full((HEADS,), -1e9, dtype=torch.float64)  # a sink without weight
    expected = torch.autograd.grad(exact(*given[:3], none, relations, None).square().sum(), relations)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_pieces_of_two_ranks_make_the_whole() -> None:
    """Each rank has its queries and all keys; gradients of keys, values, sinks and relations are summed over the ranks."""
    tensors = inputs()
    order, length = [0, 3, 1, 2], LENGTH // 4
    rows = torch.cat([torch.arange(piece * length, (piece + 1) * length) for piece in order])
    q, k, v, sinks, relations = (each.detach() for each in tensors)
    whole = attention(*tensors[:3], SCALE, 5, None, tensors[3], classes(), tensors[4])
    cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(whole, tensors, cotangent)
    sums = [torch.zeros_like(each) for each in (k, v, sinks, relations)]
    more = sinks, classes(), relations
    for pieces, own in ((order[:2], rows[: LENGTH // 2]), (order[2:], rows[LENGTH // 2 :])):
        out, lse = attention_pieces(q[:, own], k[:, rows], v[:, rows], None, SCALE, 5, pieces, order, *more)
        torch.testing.assert_close(out, whole[:, own], rtol=1e-12, atol=1e-14)
        given = (cotangent[:, own], q[:, own], k[:, rows], v[:, rows], None, out, lse)
        grad_q, *partial = attention_pieces_backward(*given, SCALE, 5, pieces, order, *more)
        torch.testing.assert_close(grad_q, expected[0][:, own], rtol=1e-10, atol=1e-12)
        for total, part in zip(sums, partial, strict=True):
            total.add_(part)
    back = rows.argsort()
    for found, value in zip((sums[0][:, back], sums[1][:, back], *sums[2:]), expected[1:], strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


def test_relations_without_a_class_of_each_key_are_refused() -> None:
    q, k, v, _, relations = inputs()
    with pytest.raises(ValueError, match="given together"):
        attention(q, k, v, SCALE, relations=relations)
    with pytest.raises(ValueError, match="classes must be"):
        attention(q, k, v, SCALE, classes=classes()[:, 1:], relations=relations)
