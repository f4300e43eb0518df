"""Hyper-connections beyond the cases of all operations: the matrix, the sum that only reads, and refusals."""

import pytest
import torch
from op_exact import EPS, exact_collapse

from megakernels import collapse_streams, expand_streams
from megakernels.ops.hyper_connection.facts import Connection

COUNT, WIDTH = 4, 6


def drawn(kinds: int, seed: int = 0) -> list[torch.Tensor]:
    numbers = {1: COUNT, 2: 2 * COUNT, 3: 2 * COUNT + COUNT**2}[kinds]
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 5, COUNT * WIDTH), (numbers, COUNT * WIDTH), (numbers,), (kinds,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("seed", range(3))
def test_the_matrix_is_doubly_stochastic(seed: int) -> None:
    """After enough steps rows and columns sum to one, so that the sum over streams stays what it was."""
    x, *parameters = (0.3 * each.detach() for each in drawn(3, seed))
    weights = collapse_streams(x, *parameters, Connection(COUNT, EPS, 0.0, 2.0, 200))[1]
    matrix = weights[..., COUNT:].unflatten(-1, (COUNT, COUNT))
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.sum(dim), torch.ones_like(matrix[..., 0]), atol=1e-5, rtol=0)
    new = expand_streams(x, torch.zeros_like(x[..., :WIDTH]), weights, COUNT)
    before, after = (each.unflatten(-1, (COUNT, WIDTH)).sum(-2) for each in (x, new))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


def test_the_last_connection_only_reads() -> None:
    """It has no weights of new streams, and its gradients equal the formula's."""
    given = drawn(1)
    made, weights = collapse_streams(*given, Connection(COUNT, EPS, EPS, 2.0, 1))
    expected = exact_collapse(*given, count=COUNT, post_scale=2.0, steps=1)[0]
    assert weights.shape == (3, 5, 0)
    torch.testing.assert_close(made, expected)
    slope = torch.randn_like(made)
    for found, wanted in zip(torch.autograd.grad(made, given, slope), torch.autograd.grad(expected, given, slope), strict=True):
        torch.testing.assert_close(found, wanted)


def test_shapes_that_do_not_fit() -> None:
    x, weight, base, scale = drawn(2)
    with pytest.raises(ValueError, match=r"collapse_streams: weight must be \[N, 4 · h\]"):
        collapse_streams(x, weight[:-1], base, scale, Connection(COUNT, EPS, EPS, 2.0, 1))
    with pytest.raises(ValueError, match=r"expand_streams: made must be"):
        expand_streams(x, x, base.expand(3, 5, -1), COUNT)
