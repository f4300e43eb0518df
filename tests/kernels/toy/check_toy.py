"""The toy kernel in the interpreter: values, contract and saved set."""

import pytest
import torch
from kernel_checks import check_contract, check_values
from megakernels.ops.toy import reference
from op_makers import BATCH, Case

from megakernels import toy_square

CASE = Case(
    "toy_square",
    lambda n, t: {"x": n(BATCH, t, 37)},
    lambda i: (toy_square(i["x"], 0.5),),
    lambda i: (0.5 * i["x"] ** 2,),
    ("x",),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_positions", [1, 9])
def test_values(num_positions: int, dtype: torch.dtype) -> None:
    check_values(CASE, num_positions, dtype, reference)


def test_contract() -> None:
    check_contract(CASE)
