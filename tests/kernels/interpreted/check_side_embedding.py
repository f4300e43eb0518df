"""The kernels of side embeddings: the gated addition, whose gates sum over all elements, and rows of hashed n-grams."""

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests
from op_cases import CASES
from op_checks import gradients, rms_ratio

from megakernels import gated_add, ngram_rows
from megakernels._common.device import INTERPRETED
from megakernels.ops.side_embedding import reference
from megakernels.ops.side_embedding.facts import ADD_TILE, NUM_SUMS

(CASE,) = [case for case in CASES if case.name == "gated_add"]


@DTYPES
@pytest.mark.parametrize("num_positions", [1, 65, 1000])
def test_values(dtype: torch.dtype, num_positions: int) -> None:
    check_values(CASE, num_positions, dtype, reference, views=num_positions == 65)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, [CASE])


def test_programs_of_several_tiles_sum_all_elements() -> None:
    size = ADD_TILE * (NUM_SUMS + 3) + 5
    x, side = torch.zeros(size), torch.randn(size, requires_grad=True)
    gates = torch.tensor([0.3, -0.7], requires_grad=True)
    y = gated_add(x, side, gates)
    wide = [tensor.detach().double().requires_grad_() for tensor in (side, gates)]
    exact = wide[1][1] * wide[1][0].tanh() * wide[0]
    pairs = zip((y, *gradients([y], [side, gates], [y])), (exact, *gradients([exact], wide, [exact])), strict=True)
    assert max(rms_ratio(a, b) for a, b in pairs) < TOLERANCE[torch.float32]


def test_no_elements() -> None:
    x, gates = torch.empty(0, 5), torch.ones(2, requires_grad=True)
    y = gated_add(x, x, gates)
    assert y.shape == (0, 5)
    assert torch.autograd.grad(y.sum(), gates)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shape", "lead", "tables", "rows"),
    [
        ((2, 9), 3, 5, 103),
        ((1, 1), 1, 1, 1),
        ((3, 130), 4, 16, 7_998_862),
        ((2, 33), 2, 7, 7),
        ((1, 70), 5, 33, 2**31 + 11),
        ((0, 4), 2, 3, 9),
    ],
)
def test_hashed_rows_are_the_references(shape: tuple[int, int], lead: int, tables: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(lead)
    tokens = torch.randint(0, 2**31, shape, generator=draw)
    before = torch.randint(-1, 2**31, (shape[0], lead, shape[1]), generator=draw)
    assert INTERPRETED
    assert torch.equal(ngram_rows(tokens, before, tables, rows), reference.ngram_rows(tokens, before, tables, rows))
