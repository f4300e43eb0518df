"""Delayed scaling against numpy in fp64 with an independent rounding, torch's eight-bit dtypes, and a plain history of maxima."""

from collections import deque

import numpy as np
import pytest
import torch
from delayed_numbers import numbers_for
from rounding import FORMATS, rounded
from test_fp8_linear import WIDTHS, K, case, close, exact, made

from megakernels import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients
from megakernels.ops.fp8_linear import reference
from megakernels.ops.fp8_linear.blocks import GRADIENT, INPUT, WEIGHT
from megakernels.ops.fp8_linear.delayed import FACTOR, LARGEST, LIMIT, ROLES, delayed_of, update_factors
from megakernels.ops.fp8_linear.facts import delayed_bytes

FACTORS = (37.3, 2.71, 811.0)


def quantised(x: np.ndarray, format: str, factor: float) -> np.ndarray:
    """Values of a matrix with this factor; larger values are clamped to the format's largest number. The factor's products are in fp32."""
    limit = FORMATS[format][2]
    scaled = x.astype(np.float32) * np.float32(factor)
    return rounded(np.clip(scaled.astype(float), -limit, limit), format) / float(np.float32(factor))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_elements_are_torchs_nearest_and_saturate(dtype: torch.dtype, format: str, transposed: bool) -> None:
    x, (numbers,) = made(64, 48, seed=0, dtype=dtype), numbers_for("delayed", 1)
    eight = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    found = reference.operand(x, dtype=eight, by_row=False, transposed=transposed, delayed=delayed_of(numbers, GRADIENT))
    limit = torch.finfo(eight).max
    wanted = (x.float() * FACTORS[2]).clamp(-limit, limit).to(eight)
    assert torch.equal(found.data.view(torch.uint8), (wanted.mT if transposed else wanted).contiguous().view(torch.uint8))
    assert (x.float().abs() * FACTORS[2] > limit).any()
    expected = quantised(x.double().numpy(), format, FACTORS[2])
    assert np.abs(exact(found.data) * float(found.scale) - (expected.T if transposed else expected)).max() <= 1e-6 * np.abs(expected).max()
    assert numbers[LARGEST].tolist() == [0, 0, x.abs().max().float()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_of_operands_with_given_factors(dtype: torch.dtype) -> None:
    x, weights, biases, gradients = case(dtype)
    numbers = numbers_for("delayed", len(weights), FACTORS)
    low = quantised(exact(x), "e4m3", FACTORS[0])
    each = [quantised(exact(weight), "e4m3", FACTORS[1]) for weight in weights]
    found = fp8_linears(x, None, weights, biases, "delayed", numbers=numbers)
    for out, weight, bias in zip(found, each, biases, strict=True):
        close(out, low @ weight.T + (0 if bias is None else bias.double().numpy()))
    again = fp8_linears(*fp8_quantize(x, "delayed", numbers[0]), weights, biases, "delayed", numbers=numbers)
    assert all(map(torch.equal, found, again))
    back = [quantised(exact(gradient), "e5m2", FACTORS[2]) for gradient in gradients]
    close(fp8_input_gradients(gradients, weights, "delayed", "e5m2", numbers=numbers), sum(g @ w for g, w in zip(back, each, strict=True)))
    for given in ((x, None), fp8_quantize(x, "delayed", numbers[0])):
        *made_here, total, _ = fp8_weight_gradients(gradients, *given, K, "delayed", "e5m2", [False, True, True], numbers)
        for one, gradient in zip(made_here, back, strict=True):
            close(one, gradient.T @ low)
        close(total, exact(gradients[1]).sum(0))


def test_each_operand_leaves_its_largest_magnitude_and_the_factors_as_they_are() -> None:
    x, weights, biases, gradients = case(torch.float32)
    numbers = numbers_for("delayed", len(weights))
    fp8_linears(x, None, weights, biases, "delayed", numbers=numbers)
    fp8_input_gradients(gradients, weights, "delayed", "e5m2", numbers=numbers)
    seen = [[float(each.abs().max()) for each in (x, weight, gradient)] for weight, gradient in zip(weights, gradients, strict=True)]
    for index, (own, largest) in enumerate(zip(numbers, seen, strict=True)):
        assert own[LARGEST].tolist() == (largest if index == 0 else [0, *largest[1:]])  # the first has the input's
        assert torch.equal(own[FACTOR], numbers_for("delayed", 1)[0][FACTOR])
    before = [each.clone() for each in numbers]
    fp8_weight_gradients([gradient / 2 for gradient in gradients], x / 2, None, K, "delayed", "e5m2", [False] * 3, numbers)
    assert all(map(torch.equal, numbers, before))  # smaller ones, and the ones of a recomputed forward, change nothing


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(("steps", "margin"), [(1, 0), (3, 0), (5, 2)])
def test_factors_follow_from_the_history(steps: int, margin: int, most_recent: bool) -> None:
    """Against a queue of maxima for each operand, over steps of which some have zeros, and numbers that are not finite."""
    generator, count = torch.Generator().manual_seed(5), 12
    numbers = torch.ones(3, count)
    numbers[LARGEST], numbers[LIMIT] = 0, torch.tensor([448.0, 448.0, 57344.0]).repeat(count // 3)
    history = torch.zeros(count, steps)
    queues, factors = [deque([0.0] * steps, maxlen=steps) for _ in range(count)], [1.0] * count
    for step in range(11):
        seen = torch.exp(4 * torch.randn(count, generator=generator))
        seen[torch.rand(count, generator=generator) < 0.3] = 0
        seen[3] = {4: float("inf"), 7: float("nan")}.get(step, 1.0)
        seen[4] = 1e-44 if step == 2 else seen[4]
        numbers[LARGEST].copy_(seen)
        update_factors(numbers, history, step % steps, most_recent=most_recent, margin=margin)
        for index, (queue, one) in enumerate(zip(queues, seen.tolist(), strict=True)):
            queue.append(one)
            largest = one if most_recent else float(np.max(queue))
            if largest > 0 and np.isfinite(largest):
                with np.errstate(over="ignore"):
                    ratio = np.float32(numbers[LIMIT, index]) / np.float32(largest) / np.float32(2**margin)
                factors[index] = float(min(ratio, np.finfo(np.float32).max))
        assert numbers[FACTOR].tolist() == factors
        assert not numbers[LARGEST].any()


def test_numbers_that_are_none_stay_and_others_are_bounded() -> None:
    """So a NaN reaches the loss; infinity becomes the largest number of the format, as in Transformer Engine."""
    x = made(16, 16, seed=0)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    found = fp8_linears(x, None, [torch.eye(16)], [None], "delayed", numbers=numbers_for("delayed", 1))[0]
    assert found[2].isnan().all()
    assert found[4].isfinite().all()
    assert float(found[4, 5]) == pytest.approx(448 / FACTORS[0] * round(FACTORS[1] * 4) / 4 / FACTORS[1], rel=0.1)


def test_roles_and_bytes() -> None:
    assert ROLES == (INPUT, WEIGHT, GRADIENT)
    numbers, history = torch.zeros(3, 3 * len(WIDTHS)), torch.zeros(3 * len(WIDTHS), 1024)
    assert delayed_bytes(len(WIDTHS), 1024) == numbers.nbytes + history.nbytes
