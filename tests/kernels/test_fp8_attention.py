"""Attention of eight-bit operands against numpy in fp64 with an independent rounding, and its stated scratch."""

from typing import Any

import numpy as np
import pytest
import torch
from rounding import Peak, quantised, rounded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megakernels import attention, fp8_attention, scratch_bytes
from megakernels.ops.attention import facts as attention_facts
from megakernels.ops.attention import reference as plain
from megakernels.ops.fp8_attention import op as low_op
from megakernels.ops.fp8_linear import facts as fp8_facts

CASES: dict[str, dict[str, Any]] = {
    "shared": {"groups": 2},
    "window": {"window": 5, "groups": 4},
    "packed": {"starts": True},
    "capped": {"cap": 3.0, "groups": 2},
    "all": {"window": 7, "starts": True, "cap": 5.0, "groups": 1},
}
B, T, H, D, DV = 2, 24, 4, 16, 24
SCALE = 0.3


def made(groups: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (B, T, H, D), (B, T, groups, D), (B, T, groups, DV), (B, T, H, DV)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v * 1e-3, grad


def document_starts() -> Tensor:
    return torch.tensor([[0] * 9 + [9] * 15, [0] * 20 + [20] * 4], dtype=torch.int32)


def exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, format: str, window: int | None, starts: Tensor | None, cap: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Output and gradients, head by head."""
    low = [quantised(each.double().numpy(), "e4m3", None) for each in (q, k, v)]
    grads, shared = quantised(grad.double().numpy(), format, None), H // k.shape[2]
    place = np.arange(T)
    out, steps = np.zeros(grad.shape), np.zeros((B, H, T, T))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for row in range(B):
        sees = place[:, None] >= place[None]
        sees &= place[None] > place[:, None] - (window or T)
        sees &= place[None] >= (0 if starts is None else starts[row].numpy()[:, None])
        for head in range(H):
            queries, keys, values = low[0][row, :, head], low[1][row, :, head // shared], low[2][row, :, head // shared]
            scores = SCALE * queries @ keys.T
            bent = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.where(sees, np.exp(bent - bent.max()), 0)
            weights /= weights.sum(1, keepdims=True)
            coarse = rounded(weights * 256, "e4m3") / 256
            out[row, :, head] = coarse @ values
            of_weights = grads[row, :, head] @ values.T
            step = weights * (of_weights - (weights * of_weights).sum(1, keepdims=True))
            steps[row, head] = step if cap is None else step * (1 - (bent / cap) ** 2)
            found.append((coarse, grads[row, :, head]))
    coarse_steps = quantised(steps, format, None)
    of_q, of_k, of_v = (np.zeros(each.shape) for each in (q, k, v))
    for row in range(B):
        for head in range(H):
            group, (coarse, own) = head // shared, found[row * H + head]
            of_q[row, :, head] = SCALE * coarse_steps[row, head] @ low[1][row, :, group]
            of_k[row, :, group] += SCALE * coarse_steps[row, head].T @ low[0][row, :, head]
            of_v[row, :, group] += coarse.T @ own
    return out, of_q, of_k, of_v


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_of_the_operands_values(case: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of sums changes the eight-bit rounding of some weights or scores' gradients: by 2^-4 each."""
    monkeypatch.setattr(attention_facts, "PLAIN_QUERIES", 7)
    monkeypatch.setattr(plain, "PLAIN_QUERIES", 7)
    settings = dict(CASES[case])
    q, k, v, grad = made(settings.pop("groups", H))
    starts = document_starts() if settings.pop("starts", False) else None
    window, cap = settings.get("window"), settings.get("cap")
    inputs = [each.requires_grad_() for each in (q, k, v)]
    out = fp8_attention(q, k, v, SCALE, window, starts, cap, format)
    gradients = torch.autograd.grad(out, inputs, grad)
    expected = exact(q.detach(), k.detach(), v.detach(), grad, format, window, starts, cap)
    for found, wanted in zip((out.detach(), *gradients), expected, strict=True):
        assert np.abs(found.double().numpy() - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_results_are_near_those_of_wide_attention() -> None:
    q, k, v, grad = made(2, torch.bfloat16)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    found, wide = (run(q, k, v, SCALE) for run in (fp8_attention, attention))
    pairs = zip((found, *torch.autograd.grad(found, inputs, grad)), (wide, *torch.autograd.grad(wide, inputs, grad)), strict=True)
    distances = [float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs]
    assert all(0.005 < distance < 0.15 for distance in distances)


def test_a_sequence_alone_rounds_as_in_a_batch_of_its_scale() -> None:
    """Scales are powers of two: elements above 2^-14 of a tensor's largest round equally by a part's scale."""
    q, k, v, _ = made(2)
    whole = fp8_attention(q, k, v, SCALE)
    parts = torch.cat([fp8_attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], SCALE) for row in range(B)])
    assert float((whole - parts).abs().max() / whole.abs().max()) < 1e-4


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_reach_the_result(value: float) -> None:
    q, k, v, _ = made()
    v[0, 0, 1] = value
    assert not fp8_attention(q, k, v, SCALE)[0, -1, 1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize(("window", "packed", "cap"), [(None, False, None), (40, False, 4.0), (None, True, None), (60, True, None)])
@pytest.mark.parametrize("positions", [192, 330])
def test_stated_scratch_is_what_the_operation_allocates(
    dtype: torch.dtype, groups: int, window: int | None, packed: bool, cap: float | None, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In addition to results, to two percent; shapes are those of tensors without data."""
    monkeypatch.setattr(fp8_facts, "SCALED_SLICE_ELEMENTS", 1000)
    q, k = (torch.randn(2, positions, heads, 16, dtype=dtype) for heads in (4, groups))
    v = torch.randn(2, positions, groups, 32, dtype=dtype)
    starts = torch.zeros(2, positions, dtype=torch.int32) if packed else None
    forward = (q, k, v, starts, SCALE, window, cap, "e5m2")
    with Peak(forward) as counted:
        results = low_op._fp8_attention._init_fn(*forward)
    inside = counted.peak - sum(each.nbytes for each in results)
    stated = scratch_bytes("megakernels.fp8_attention.default", forward)
    assert inside <= stated <= 1.02 * inside
    out, lse, *low = results
    backward = (torch.randn_like(out), *low, starts, lse, SCALE, window, cap, "e5m2", [True] * 3)
    with Peak(backward) as counted:
        made_here = low_op._fp8_attention_backward._init_fn(*backward)
    inside = counted.peak - sum(each.nbytes for each in made_here)
    stated = scratch_bytes("megakernels.fp8_attention_backward.default", backward)
    assert inside <= stated <= 1.02 * inside
    for name, values, found in (("fp8_attention", forward, results), ("fp8_attention_backward", backward, made_here)):
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, values)
            shaped = tree_leaves(getattr(torch.ops.megakernels, name)(*fake))
        assert [(each.shape, each.dtype, each.stride()) for each in shaped] == [(each.shape, each.dtype, each.stride()) for each in found]
