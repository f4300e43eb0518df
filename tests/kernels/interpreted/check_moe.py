"""The kernels of routed experts: sorting by expert, grouped products, sums over slots."""

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_contract, check_values, contract_tests, each, no_reference, shuffled_grid
from op_cases import CASES
from op_checks import rms_ratio
from op_exact import TOP_K, exact_routed_experts
from op_makers import expert_case, plan, routed_case
from storages import Idle, Storages

from megakernels import arrival_plan, combine, dispatch, dispatch_plan, routed_experts, scratch_bytes
from megakernels.ops.moe import kernel, kernel_plan, reference
from megakernels.ops.moe.inputs import Experts

SMALL = [routed_case("swiglu", 16, 24), routed_case("relu2", 9, 7), routed_case("gelu", 5, 6)]
EACH = each(SMALL)
SLOW = pytest.mark.slow


@EACH
@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 63, *(pytest.param(size, marks=SLOW) for size in (64, 65, 1000))])
def test_values(case, dtype: torch.dtype, num_tokens: int) -> None:  # type: ignore[no-untyped-def]
    check_values(case, num_tokens, dtype, reference, views=num_tokens == 63)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16], ids=str)
def test_values_of_several_tiles_a_side(dtype: torch.dtype) -> None:
    check_values(routed_case("swiglu", 70, 140), 40, dtype, reference)


@pytest.mark.parametrize("sizes", [("swiglu", 128, 192), ("relu2", 128, 136), ("gelu", 192, 320)], ids=str)
def test_values_by_blocks(sizes: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough rows an expert that descriptors read the operands; widths that tiles and steps do not divide."""
    asked, found = kernel.reads_blocks, []
    monkeypatch.setattr(kernel, "reads_blocks", lambda *given: found.append(asked(*given)) or found[-1])
    check_values(routed_case(*sizes), 165, torch.bfloat16, reference)
    assert found.count(True) >= 2
    assert not found[0] or sizes[1] % 64 == 0


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, SMALL, SMALL[:1], SMALL[:1])


def test_one_slot_needs_no_sum() -> None:
    """Rows received from other ranks: sorted rows are returned in the order of arrival."""
    case = expert_case("swiglu", 6, 9)
    inputs = case.make(20, torch.float32)
    weights = inputs["weights"].reshape(-1, 1)
    banks = inputs["gate"], inputs["up"], inputs["down"]
    with no_reference(reference):
        found = routed_experts(inputs["x"], weights, inputs["rows"], inputs["counts"], *banks, "swiglu")
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    sorted_x = wide["x"][inputs["rows"].long()]
    exact = torch.empty_like(wide["x"])
    exact[inputs["rows"].long()] = case.exact({**wide, "x": sorted_x})[0]
    assert rms_ratio(found, exact) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("needs", [[True] * 5, [False, *[True] * 4], [True, *[False] * 4]], ids=str)
@pytest.mark.parametrize("num_slots", [1, TOP_K])
@pytest.mark.parametrize(("width", "num_hidden"), [(24, 16), (140, 9), (9, 140)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_inside_is_what_is_stated(
    gated: bool, width: int, num_hidden: int, num_slots: int, needs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activated rows, the sum over slots and the matrices' gradients are each the peak in some case."""
    num_tokens, num_experts = 24, 3
    x, grad_y = torch.randn(2, num_tokens, num_hidden, dtype=torch.bfloat16)
    weights = torch.rand(num_tokens, num_slots)
    rows, counts = kernel_plan.sort_by_expert(torch.randint(0, num_experts, (num_tokens * num_slots,), dtype=torch.int32), num_experts)
    gate, up, down = torch.randn(3, num_experts, width, num_hidden, dtype=torch.bfloat16)
    down = down.mT.contiguous()
    activation = "swiglu" if gated else "relu2"
    for name in ("up_kernel", "down_kernel", "pull_kernel", "outer_kernel"):
        monkeypatch.setattr(kernel, name, Idle())
    for name in ("sum_slots_kernel", "invert_kernel", "spread_kernel"):
        monkeypatch.setattr(kernel_plan, name, Idle())
    given = Experts(x, weights, rows, counts, gate if gated else None, up, down, None, None, None, activation, None)
    with Storages() as forward:
        results = kernel.routed_experts_forward(given)
    name, banks = ("routed_experts_gated", (gate, up, down)) if gated else ("routed_experts", (up, down))
    options = (*[None] * len(banks), activation, *([None] if gated else []))  # no biases, no limit
    assert scratch_bytes(f"megakernels.{name}.default", (x, weights, rows, counts, *banks, *options)) == forward.scratch(results)
    gate_out, up_out = results[1:]
    del results
    with Storages() as backward:
        gradients = kernel.routed_experts_backward(grad_y, given, gate_out, up_out, [*needs, *[False] * 3])
    saved = (gate_out, up_out) if gated else (up_out,)
    wanted = [*(needs if gated else [*needs[:2], *needs[3:]]), *[False] * len(banks)]
    numbers = options[len(banks) :]
    operands = grad_y, x, weights, rows, counts, *banks, *options[: len(banks)], *saved, *numbers, wanted
    assert scratch_bytes(f"megakernels.{name}_backward.default", operands) == backward.scratch(gradients)


@pytest.mark.parametrize("num_pairs", [0, 1, 127, 129, 300])
@pytest.mark.parametrize("num_experts", [1, 5, 40])
def test_pairs_are_sorted_stably(num_pairs: int, num_experts: int) -> None:
    indices = torch.randint(0, num_experts, (num_pairs, 1), dtype=torch.int32)
    indices[indices == 3] = 1  # expert 3 gets nothing
    with shuffled_grid(seed=1):
        rows, counts = kernel_plan.sort_by_expert(indices.flatten(), num_experts)
    expected = reference.sort_by_expert(indices.flatten(), num_experts)
    assert torch.equal(rows, expected[0])
    assert torch.equal(counts, expected[1])


def test_arrivals_are_sorted_stably() -> None:
    counts = torch.tensor([[3, 0, 2], [0, 0, 4], [1, 0, 0]], dtype=torch.int32)
    rows, totals = arrival_plan(counts, 10)
    assert rows.tolist() == [0, 1, 2, 9, 3, 4, 5, 6, 7, 8]
    assert totals.tolist() == [4, 0, 6]


@pytest.mark.parametrize("name", ["dispatch", "combine", "dispatch_partial", "combine_partial"])
@DTYPES
def test_values_of_moved_rows(name: str, dtype: torch.dtype) -> None:
    (case,) = [case for case in CASES if case.name == name]
    check_values(case, 65, dtype, reference, views=True)
    check_contract(case)


def test_rows_past_the_last_offset_are_not_read() -> None:
    """They are not multiplied either: NaN times zero would be NaN in an expert's gradient."""
    inputs = SMALL[0].make(5, torch.float32, requires_grad=False)
    rows, counts = inputs["rows"].clone(), inputs["counts"].clone()
    last = int(rows[-1])
    counts[int(counts.nonzero()[-1])] -= 1
    tiles = kernel_plan.tiles_of(counts, rows.numel(), 4)
    hidden, copied = torch.randn(rows.numel(), 24), inputs["x"][rows.long() // TOP_K]
    hidden[-1] = copied[-1] = torch.nan
    found = kernel.outer(tiles, hidden, copied)
    assert found.isfinite().all()
    assert not found[counts == 0].any()
    assert last in rows


@pytest.mark.parametrize(("across", "cols"), [(7, 512), (264, 16), (40, 24)])
@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 130, 5], [64, 64, 1]], ids=str)
def test_gradients_of_blocks_and_of_last_rows(across: int, cols: int, counts: list[int]) -> None:
    """Both orders of a tile's sides; rows of several blocks, of a block, and what is left; widths that descriptors do not read."""
    num_rows = sum(counts)
    a, b = torch.randn(num_rows, across).bfloat16(), torch.randn(num_rows, cols).bfloat16()
    tiles = kernel_plan.tiles_of(torch.tensor(counts, dtype=torch.int32), num_rows, 2)
    with shuffled_grid(seed=1):
        found = kernel.outer(tiles, a, b)
    for expert, (first, second) in enumerate(zip(a.double().split(counts), b.double().split(counts), strict=True)):
        assert rms_ratio(found[expert], first.T @ second) < TOLERANCE[torch.bfloat16]


def test_tokens_beyond_32_bit_offsets() -> None:
    """Tokens so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    inputs = routed_case("relu2", 64, 8).make(3, torch.bfloat16, requires_grad=False)
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((3, 64), (1 << 30, 1))
    far.copy_(inputs["x"])
    x, cotangent = far.requires_grad_(), torch.randn(3, 64).bfloat16()
    y = routed_experts(x, inputs["weights"], inputs["rows"], inputs["counts"], None, inputs["up"], inputs["down"], "relu2")
    near = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    near["x"].requires_grad_()
    exact = exact_routed_experts(near, "relu2")
    assert rms_ratio(y, exact) < TOLERANCE[torch.bfloat16]
    (found,), (expected,) = (torch.autograd.grad(a, b, c) for a, b, c in ((y, x, cotangent), (exact, near["x"], cotangent.double())))
    assert rms_ratio(found, expected) < TOLERANCE[torch.bfloat16]


def test_no_tokens() -> None:
    bank = torch.ones(3, 4, 4, requires_grad=True)
    rows, counts = dispatch_plan(torch.empty(0, 2, dtype=torch.int32), 3)
    y = routed_experts(torch.empty(0, 4), torch.empty(0, 2), rows, counts, None, bank, bank.detach(), "gelu")
    y.backward(torch.empty(0, 4))
    assert bank.grad is not None
    assert not bank.grad.any()
    assert combine(dispatch(y.detach(), rows, 2), rows, 2).shape == (0, 4)


def test_the_plan_of_the_cases_has_an_idle_expert() -> None:
    assert (plan(63)["counts"] == 0).any()
