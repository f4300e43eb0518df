"""Operations on pieces of a sequence: together they are the operation on the whole."""

import pytest
import torch
from op_checks import rms_ratio

from megakernels.attention import attention
from megakernels.attention.pieces import attention_pieces, attention_pieces_backward

NUM_RANKS, LENGTH = 2, 6
T = 2 * NUM_RANKS * LENGTH


def zig_zag(rank: int) -> tuple[int, int]:
    return rank, 2 * NUM_RANKS - 1 - rank


def own(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.unflatten(1, (2 * NUM_RANKS, LENGTH))[:, list(zig_zag(rank))].flatten(1, 2)


def document_starts(packed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of whole rows, and counted from each piece."""
    if not packed:
        return None, None
    edges = torch.tensor([[0, 4, 11, 12], [0, 13, 14, 19]])
    whole = torch.stack([row[(row.unsqueeze(1) <= torch.arange(T)).sum(0) - 1] for row in edges]).to(torch.int32)
    return whole, (whole - torch.arange(T) // LENGTH * LENGTH).to(torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 2, 9])
def test_attention_of_all_pieces_is_attention_of_the_sequence(window: int | None, packed: bool) -> None:
    """Outputs, log-sum-exps and gradients; what a rank's queries give to keys sums over the ranks."""
    torch.manual_seed(0)
    q = torch.randn(2, T, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, T, 2, width, dtype=torch.float64, requires_grad=True) for width in (8, 5))
    whole_starts, starts = document_starts(packed)
    expected = attention(q, k, v, 0.3, window, whole_starts)
    gradient = torch.randn_like(expected)
    expected_q, expected_k, expected_v = torch.autograd.grad(expected, (q, k, v), gradient)
    stored = [piece for rank in range(NUM_RANKS) for piece in zig_zag(rank)]
    keys, values = (torch.cat([own(tensor, rank) for rank in range(NUM_RANKS)], 1).detach() for tensor in (k, v))
    sums = [torch.zeros_like(keys), torch.zeros_like(values)]
    for rank in range(NUM_RANKS):
        queries, own_starts = own(q, rank).detach(), None if starts is None else own(starts, rank)
        settings = 0.3, window, zig_zag(rank), stored
        out, lse = attention_pieces(queries, keys, values, own_starts, *settings)
        assert rms_ratio(out, own(expected, rank)) < 1e-12
        grad_q, *partial = attention_pieces_backward(own(gradient, rank), queries, keys, values, own_starts, out, lse, *settings)
        assert rms_ratio(grad_q, own(expected_q, rank)) < 1e-12
        for total, part in zip(sums, partial, strict=True):
            total.add_(part)
    for total, right in zip(sums, (expected_k, expected_v), strict=True):
        assert rms_ratio(total, torch.cat([own(right, rank) for rank in range(NUM_RANKS)], 1)) < 1e-12


def test_pieces_are_refused_where_they_do_not_fit() -> None:
    q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 16, 2, 4)
    with pytest.raises(ValueError, match="attention_pieces"):
        attention_pieces(q, k, k, None, 1.0, None, (0, 3), (0, 3, 1, 1))
    with pytest.raises(ValueError, match="attention_pieces"):
        attention_pieces(q, k[:, :12], k[:, :12], None, 1.0, None, (0, 3), (0, 3, 1, 2))
