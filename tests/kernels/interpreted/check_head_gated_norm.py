"""The kernels of the head norm: odd and wide heads, views, both activations."""

import pytest
import torch
from kernel_checks import DTYPES, check_values, contract_tests, each
from op_cases import CASES
from op_exact import exact_head_gated_norm
from op_makers import BATCH, Case

from megakernels import head_gated_norm
from megakernels.ops.head_gated_norm import kernel, reference
from megakernels.ops.head_gated_norm.facts import HEAD_LARGEST_WIDTH

HERE = [case for case in CASES if case.name.startswith("head_gated_norm")]
EACH = each(HERE)


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, pytest.param(65, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.slow)])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 65)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("width", [16, 128, 200, HEAD_LARGEST_WIDTH])
def test_wide_heads(width: int, dtype: torch.dtype) -> None:
    case = Case(
        f"head_gated_norm {width}",
        lambda n, t: {"x": n(BATCH, t, 3, width), "gate": n(BATCH, t, 3, width) * 3, "weight": n(width)},
        lambda i: (head_gated_norm(**i, eps=1e-5),),
        lambda i: (exact_head_gated_norm(**i, sigmoid=False),),
        ("x", "gate", "weight"),
        lambda t: [((BATCH, t, 3), "accumulator")],
    )
    check_values(case, 17, dtype, reference)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, HERE, uniform=HERE[:1], slow=("needs", "uniform")
)


def test_what_stays_with_the_reference() -> None:
    assert kernel.accepts(torch.empty(1, HEAD_LARGEST_WIDTH))
    assert not kernel.accepts(torch.empty(1, HEAD_LARGEST_WIDTH + 1))
