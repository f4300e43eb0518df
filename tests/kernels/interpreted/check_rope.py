"""The rotary kernels, alone and in the keys of multi-head latent attention."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_exact import angles, exact_mla_kv, exact_rope
from op_makers import BATCH, Case

from megakernels import mla_kv, rope
from megakernels.ops.rope import reference

WHOLE = replace(BY_NAME["rope"], name="rope_whole_head", inputs=lambda n, t: {"x": n(BATCH, t, 5, 6), **angles(n, t, 3)})
BARE = replace(
    BY_NAME["mla_kv"],
    name="mla_kv_all_rotary",
    inputs=lambda n, t: {"kv": n(1, t, 7, 5), "k_rope": n(1, t, 6), **angles(n, t, 3)},
    call=lambda i: mla_kv(**i, nope_dim=0),
    exact=lambda i: exact_mla_kv(**i, nope_dim=0),
)
HERE = [BY_NAME["rope"], WHOLE, BY_NAME["mla_kv"], BARE]
EACH = each(HERE)
SLOW = pytest.mark.slow


@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 65, *(pytest.param(size, marks=SLOW) for size in (63, 64, 1000))])
def test_values(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 65)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, HERE)


def test_transposed_heads() -> None:
    x, cos, sin = torch.randn(2, 3, 9, 10), torch.randn(9, 4), torch.randn(9, 4)
    assert torch.equal(rope(x.transpose(1, 2), cos, sin), rope(x.transpose(1, 2).contiguous(), cos, sin))


def test_no_positions() -> None:
    cos = torch.empty(0, 3)
    assert rope(torch.empty(2, 0, 3, 8), cos, cos).shape == (2, 0, 3, 8)
    assert [tuple(found.shape) for found in mla_kv(torch.empty(2, 0, 3, 8), torch.empty(2, 0, 6), cos, cos, 5)] == [
        (2, 0, 3, 11),
        (2, 0, 3, 3),
    ]


def test_nothing_to_turn() -> None:
    x, cos = torch.randn(2, 3, 4, 5), torch.empty(3, 0)
    assert torch.equal(rope(x, cos, cos), x)


@pytest.mark.parametrize("operation", ["rope", "mla_kv"])
def test_heads_beyond_32_bit_offsets(operation: str) -> None:
    """Heads so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 1, 3, 64), (64, 64, 1 << 30, 1))
    near, key, angle = torch.randn(1, 1, 3, 64).bfloat16(), torch.randn(1, 1, 16).bfloat16(), torch.randn(1, 8)
    far.copy_(near)
    wide, cos, sin = near.double(), angle.cos(), angle.sin()
    if operation == "rope":
        found, exact = [rope(far, cos, sin)], [exact_rope(wide, cos.double(), sin.double())]
        back = torch.autograd.grad(rope(near.requires_grad_(), cos, sin), near, far)[0]
        found, exact = [*found, back], [*exact, exact_rope(wide, cos.double(), -sin.double())]
    else:
        found = list(mla_kv(far, key, cos, sin, 40))
        exact = list(exact_mla_kv(wide, key.double(), cos.double(), sin.double(), 40))
    assert max(rms_ratio(a, b) for a, b in zip(found, exact, strict=True)) < TOLERANCE[torch.bfloat16]
