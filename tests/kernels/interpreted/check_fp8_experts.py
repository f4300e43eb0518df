"""The kernels of experts in eight bits: copies bitwise as plain torch's, and operations between products, in any order of programs."""

from random import Random
from typing import Any

import pytest
import torch
from delayed_numbers import numbers_for
from kernel_checks import shuffled_grid
from op_checks import rms_ratio
from torch import Tensor

from megakernels import dispatch_plan, fp8_experts, fp8_experts_backward, use_kernels
from megakernels._common.device import module_for
from megakernels.ops.fp8_experts import kernel, reference
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.moe.inputs import Experts

SEEDS, QUICK = range(24), 2
KINDS = (("swiglu", None), ("swiglu", 0.7), ("geglu", None), ("relu2", None), ("gelu", None))


def drawn(seed: int) -> tuple[Tensor, Experts]:
    """Gradients of the result, and arguments: experts without rows and with many, one slot and several, magnitudes of many orders."""
    draw, generator = Random(seed), torch.Generator().manual_seed(seed)
    activation, limit = KINDS[seed % len(KINDS)]
    dtype = draw.choice([torch.float32, torch.bfloat16])
    tokens, count, hidden, width = draw.choice([1, 7, 70]), draw.choice([1, 5, 9]), draw.choice([16, 48, 144]), draw.choice([16, 80, 144])
    top_k, used = 1 if count == 1 else draw.choice([1, 2]), draw.randint(min(2, count), count)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        spread = torch.exp(draw.choice([0, 2]) * torch.randn(shape, generator=generator))
        return (torch.randn(shape, generator=generator) * spread * scale).to(dtype)

    chosen = [draw.sample(range(used), min(top_k, used)) for _ in range(tokens)]
    rows, counts = dispatch_plan(torch.tensor(chosen, dtype=torch.int32), count)
    gated, biased = activation in ("swiglu", "geglu"), draw.random() < 0.6
    weights = torch.rand(tokens, len(chosen[0]), generator=generator)
    given = Experts(
        made(tokens, hidden),
        weights,
        rows,
        counts,
        made(count, width, hidden, scale=hidden**-0.5) if gated else None,
        made(count, width, hidden, scale=hidden**-0.5),
        made(count, hidden, width, scale=width**-0.5),
        made(count, width) if gated and biased else None,
        made(count, width) if biased else None,
        made(count, hidden) if biased else None,
        activation,
        limit,
    )
    return made(tokens, hidden), given


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("seed", [each if each < QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SEEDS])
def test_copies_and_what_is_between_products(seed: int) -> None:
    _, given = drawn(seed)
    groups, top_k = reference.groups_of(given.counts, given.rows.shape[0]), given.weights.shape[1]
    used = int(groups.stops[-1])  # what is behind is not read
    for by_row in (False, True):
        for x, places in ((given.x, {"rows": given.rows, "top_k": top_k}), (given.x.index_select(0, given.rows // top_k), {})):
            expected = reference.turned(x, groups, by_row=by_row, **places)
            with shuffled_grid(seed):
                found = kernel.turned(x, groups, by_row=by_row, **places)
            assert torch.equal(bits(found.data[:, :used]), bits(expected.data[:, :used]))
            assert torch.equal(found.scale, expected.scale)
            if not by_row:
                mine, theirs = (numbers_for("delayed", 1)[0] for _ in range(2))
                expected = reference.turned(x, groups, by_row=False, **places, delayed=delayed_of(theirs, "input"))
                with shuffled_grid(seed):
                    found = kernel.turned(x, groups, by_row=False, **places, delayed=delayed_of(mine, "input"))
                assert torch.equal(bits(found.data[:, :used]), bits(expected.data[:, :used]))
                assert torch.equal(found.scale, expected.scale)
                assert torch.equal(mine, theirs)
    shape = (given.rows.shape[0], given.up.shape[1])
    generator = torch.Generator().manual_seed(seed)
    up_out, gate_out, pulled = (torch.randn(shape, generator=generator).to(given.x.dtype) for _ in range(3))

    def between(pieces: Any) -> list[Tensor]:
        gate, up = None if given.gate is None else gate_out.clone(), up_out.clone()
        hidden = pieces.hidden_rows(gate, up, given, groups)
        found = [hidden, up, *([] if gate is None else [gate])]
        products = given.x.index_select(0, given.rows // top_k)
        pieces.add_down_bias(products, given, groups)
        return [*found, products, *(each for each in pieces.pull(pulled, gate, up, given, groups) if each is not None)]

    expected_ones = between(reference)
    with shuffled_grid(seed):
        found_ones = between(kernel)
    for mine, theirs in zip(found_ones, expected_ones, strict=True):
        assert mine.dtype == theirs.dtype
        assert rms_ratio(mine, theirs) < (1e-5 if given.x.dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 4))])
@pytest.mark.parametrize("scaling", ["tensor", "rows"])
def test_operations_use_them(scaling: str, seed: int) -> None:
    """Results are near plain torch's: activations differ by a unit in the last place, and an eight-bit rounding may differ by that."""
    grad_y, given = drawn(seed)
    biases = {"gate_bias": given.gate_bias, "up_bias": given.up_bias, "down_bias": given.down_bias, "limit": given.limit}

    def results() -> list[Tensor]:
        made = fp8_experts(*given[:7], given.activation, scaling, True, **biases)  # type: ignore[arg-type]
        gate_out, up_out = (made[1], made[2]) if given.gate is not None else (None, made[1])
        low, scales = made[-2:]
        return [
            *made[:-2],
            scales,
            *fp8_experts_backward(
                *(grad_y, low, scales, given.weights, given.rows, given.counts, gate_out, up_out),
                *(given.gate, given.up, given.down, given.activation, scaling),
                **biases,  # type: ignore[arg-type]
            ),
        ]

    assert module_for(given.x, reference) is kernel
    with shuffled_grid(seed):
        found = results()
    try:
        use_kernels("reference")
        assert module_for(given.x, reference) is reference
        expected = results()
    finally:
        use_kernels("triton")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert rms_ratio(mine, theirs) < 0.02


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay(value: float) -> None:
    x, counts = torch.randn(6, 16), torch.tensor([2, 0, 4], dtype=torch.int32)
    x[3, 5] = value
    groups = reference.groups_of(counts, 6)
    for by_row in (False, True):
        found = kernel.turned(x, groups, by_row=by_row)
        assert not (found.data[5, 16 + 16 + 1].float() * found.scale.view(3, 16)[2, 5]).isfinite()
