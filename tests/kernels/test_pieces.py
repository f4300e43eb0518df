"""Operations on pieces of a sequence: together they equal the operation on the whole sequence."""

import pytest
import torch
from op_checks import rms_ratio

from megakernels import (
    attention,
    attention_pieces,
    attention_pieces_backward,
    chosen_attention,
    chosen_attention_pieces,
    chosen_attention_pieces_backward,
    index_keys,
    index_keys_backward,
    indexed_attention_choice,
    indexed_attention_pieces,
    indexed_attention_pieces_backward,
    indexed_attention_pieces_choice,
)
from megakernels.ops.indexed_attention.pieces import IndexedSettings

NUM_RANKS, LENGTH = 2, 6
T = 2 * NUM_RANKS * LENGTH


def zig_zag(rank: int) -> tuple[int, int]:
    return rank, 2 * NUM_RANKS - 1 - rank


def own(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.unflatten(1, (2 * NUM_RANKS, LENGTH))[:, list(zig_zag(rank))].flatten(1, 2)


def document_starts(packed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Starts of whole rows, and counted from each piece."""
    if not packed:
        return None, None
    edges = torch.tensor([[0, 4, 11, 12], [0, 13, 14, 19]])
    whole = torch.stack([row[(row.unsqueeze(1) <= torch.arange(T)).sum(0) - 1] for row in edges]).to(torch.int32)
    return whole, (whole - torch.arange(T) // LENGTH * LENGTH).to(torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 2, 9])
def test_attention_of_all_pieces_is_attention_of_the_sequence(window: int | None, packed: bool) -> None:
    """Outputs, log-sum-exps and gradients; the keys' gradients are summed over the ranks."""
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


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_indexed_attention_of_all_pieces_chooses_as_over_the_sequence(window: int | None, packed: bool, has_sinks: bool) -> None:
    """Outputs and all gradients: queries' and the indexer's own of each piece, keys' and the norm's summed over the ranks."""
    torch.manual_seed(0)
    num_heads, width, index_heads, index_width, rotated = 3, 6, 2, 8, 4
    shapes = [(num_heads, width)] * 2 + [(num_heads, 5), (index_heads, index_width), (index_width,), (index_heads,)]
    inputs = [torch.randn(2, T, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    norm = [torch.randn(index_width, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    sinks = torch.randn(num_heads, dtype=torch.float64, requires_grad=True) if has_sinks else None
    angles = torch.randn(1, T, rotated // 2)
    table = angles.cos(), angles.sin()
    whole_starts, starts = document_starts(packed)
    numbers = {"scale": 0.3, "top_k": 4, "loss_factor": 0.7, "window": window}
    given = *inputs, *norm, table[0][0], table[1][0]
    expected, choice = indexed_attention_choice(*given, **numbers, eps=1e-5, starts=whole_starts, sinks=sinks)
    gradient = torch.randn_like(expected)
    right = torch.autograd.grad(expected, (*inputs, *norm, *([] if sinks is None else [sinks])), gradient)
    stored = [piece for rank in range(NUM_RANKS) for piece in zig_zag(rank)]
    parts = [[own(tensor.detach(), rank) for tensor in inputs] for rank in range(NUM_RANKS)]
    tables = [tuple(own(each, rank)[0] for each in table) for rank in range(NUM_RANKS)]
    scale, bias = (each.detach() for each in norm)
    made = [index_keys(part[4], scale, bias, *of_rank, 1e-5) for part, of_rank in zip(parts, tables, strict=True)]
    gathered = [torch.cat(each, 1) for each in ([part[1] for part in parts], [part[2] for part in parts], made)]
    of_sinks = [] if sinks is None else [sinks.detach()]
    sums = [torch.zeros_like(each) for each in (*gathered, *of_sinks)]
    for rank, (q, _, _, index_q, _, weights) in enumerate(parts):
        k, v, keys = gathered
        given = q, k, v, index_q, keys, weights, *tables[rank], None if starts is None else own(starts, rank)
        settings = IndexedSettings(**numbers, query_pieces=zig_zag(rank), key_pieces=stored)
        found = indexed_attention_pieces(*given, settings, *of_sinks)
        assert rms_ratio(found[0], own(expected, rank)) < 1e-12
        with_choice = indexed_attention_pieces_choice(*given, settings, sinks=of_sinks[0] if has_sinks else None)
        assert all(torch.equal(one, other) for one, other in zip(with_choice, (*found, own(choice, rank)), strict=True))
        of_rank = indexed_attention_pieces_backward(own(gradient, rank), *given, found, settings, *of_sinks)
        for mine, whole in zip(of_rank[:3], (right[0], right[3], right[5]), strict=True):
            assert rms_ratio(mine, own(whole, rank)) < 1e-12
        for total, part in zip(sums, of_rank[3:], strict=True):
            total.add_(part)
    for total, whole in zip(sums[:2], right[1:3], strict=True):
        assert rms_ratio(total, torch.cat([own(whole, rank) for rank in range(NUM_RANKS)], 1)) < 1e-12
    of_norm = [torch.zeros_like(scale), torch.zeros_like(bias)]
    for rank, grad_keys in enumerate(sums[2].chunk(NUM_RANKS, 1)):
        grad_k, *grad_norm = index_keys_backward(grad_keys, parts[rank][4], scale, *tables[rank], 1e-5)
        assert rms_ratio(grad_k, own(right[4], rank)) < 1e-12
        for total, part in zip(of_norm, grad_norm, strict=True):
            total.add_(part)
    for total, whole in zip((*of_norm, *sums[3:]), right[6:], strict=True):
        assert rms_ratio(total, whole) < 1e-12


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_of_all_pieces_to_what_was_chosen(window: int | None, packed: bool, has_sinks: bool) -> None:
    torch.manual_seed(1)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True) if has_sinks else None
    q, k, v = (torch.randn(2, T, 3, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 5))
    index = torch.randn(2, T, 2, 8), torch.randn(2, T, 8), torch.randn(2, T, 2), torch.ones(8), torch.zeros(8), *torch.randn(2, T, 2)
    whole_starts, starts = document_starts(packed)
    numbers = {"scale": 0.3, "top_k": 4, "loss_factor": 0.0, "eps": 1e-5}
    choice = indexed_attention_choice(q, k, v, *index, **numbers, window=window, starts=whole_starts)[1]
    expected = chosen_attention(q, k, v, choice, 0.3, window, whole_starts, sinks)
    gradient = torch.randn_like(expected)
    right_q, *right = torch.autograd.grad(expected, (q, k, v, *([] if sinks is None else [sinks])), gradient)
    of_sinks = [] if sinks is None else [sinks.detach()]
    keys, values = (torch.cat([own(each.detach(), rank) for rank in range(NUM_RANKS)], 1) for each in (k, v))
    stored = [piece for rank in range(NUM_RANKS) for piece in zig_zag(rank)]
    sums = [torch.zeros_like(each) for each in (keys, values, *of_sinks)]
    for rank in range(NUM_RANKS):
        given = own(q.detach(), rank), keys, values, own(choice, rank), None if starts is None else own(starts, rank)
        numbers_of = 0.3, window, zig_zag(rank), stored
        made = chosen_attention_pieces(*given, *numbers_of, *of_sinks)
        assert rms_ratio(made[0], own(expected, rank)) < 1e-12
        grad_q, *parts = chosen_attention_pieces_backward(own(gradient, rank), *given, *made, *numbers_of, *of_sinks)
        assert rms_ratio(grad_q, own(right_q, rank)) < 1e-12
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
    for total, whole in zip(sums[:2], right[:2], strict=True):
        assert rms_ratio(total, torch.cat([own(whole, rank) for rank in range(NUM_RANKS)], 1)) < 1e-12
    assert all(rms_ratio(total, whole) < 1e-12 for total, whole in zip(sums[2:], right[2:], strict=True))


def test_pieces_are_refused_where_they_do_not_fit() -> None:
    q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 16, 2, 4)
    with pytest.raises(ValueError, match="attention_pieces"):
        attention_pieces(q, k, k, None, 1.0, None, (0, 3), (0, 3, 1, 1))
    with pytest.raises(ValueError, match="attention_pieces"):
        attention_pieces(q, k[:, :12], k[:, :12], None, 1.0, None, (0, 3), (0, 3, 1, 2))
