"""Operations on slices of a row, joined by hand: the whole row's result."""

from typing import Any

import pytest
import torch
from op_checks import rms_ratio
from op_exact import exact_gated_rms_norm
from storages import Storages
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import (
    cross_entropy,
    gated_dot,
    gated_rms_norm,
    gated_scale,
    gated_scale_gradients,
    gated_square_sum,
    linear_cross_entropy,
    linear_slice_gradients,
    linear_slice_statistics,
    rms_norm,
    row_dot,
    row_gradients,
    row_scale,
    row_square_sum,
    scratch_bytes,
    slice_gradient,
    slice_statistics,
)
from megakernels.ops.linear_cross_entropy import facts as linear_facts
from megakernels.ops.linear_cross_entropy import slices
from megakernels.ops.linear_cross_entropy.products import Wide

EPS = 1e-5
TIGHT = {torch.float64: 1e-13, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", list(TIGHT), ids=str)


def words(num_slices: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (scale * torch.randn(7, 6 * num_slices, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, 6 * num_slices, (7,), generator=generator)
    labels[2], labels[3], labels[4] = -100, 0, 6 * num_slices - 1
    return logits, labels


def joined(parts: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and the whole lse."""
    found = [slice_statistics(part, labels, index * part.shape[1]) for index, part in enumerate(parts)]
    lse = torch.stack([lse for lse, _ in found]).logsumexp(0)
    chosen = torch.stack([chosen for _, chosen in found]).sum(0)
    return torch.where(labels != -100, lse - chosen, 0).sum(), lse


@DTYPES
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_slices_of_a_vocabulary_make_the_whole_loss_and_gradient(num_slices: int, dtype: torch.dtype) -> None:
    """First and last word, and a row that does not count, included."""
    logits, labels = words(num_slices, dtype)
    parts = [part.contiguous() for part in logits.chunk(num_slices, 1)]
    loss, lse = joined(parts, labels)
    weight = torch.tensor(0.7, dtype=lse.dtype)
    found = torch.cat([slice_gradient(weight, part, labels, lse, 6 * index) for index, part in enumerate(parts)], 1)
    logits.requires_grad_()
    expected = cross_entropy(logits, labels)
    assert rms_ratio(loss, expected.detach()) < TIGHT[dtype]
    assert rms_ratio(found, torch.autograd.grad(expected * weight, logits)[0]) < TIGHT[dtype]
    assert not found[2].any()


@DTYPES
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_of_a_head_make_the_whole_loss_and_gradients(num_parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part walks over slices of its own words."""
    monkeypatch.setattr(linear_facts, "LOGITS_SLICE_ELEMENTS", 7 * 4)
    _, labels = words(num_parts, dtype)
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(count, 9, generator=generator, dtype=torch.float64).to(dtype) for count in (7, 6 * num_parts))
    parts = weight.chunk(num_parts)
    found = [linear_slice_statistics(x, part, labels, 6 * index) for index, part in enumerate(parts)]
    lse, chosen = torch.stack([lse for lse, _ in found]).logsumexp(0), torch.stack([chosen for _, chosen in found]).sum(0)
    share = torch.tensor(0.7, dtype=lse.dtype)
    made = [linear_slice_gradients(share, x, part, labels, lse, 6 * index, [True, True]) for index, part in enumerate(parts)]
    inputs = [tensor.requires_grad_() for tensor in (x, weight)]
    expected = linear_cross_entropy(*inputs, labels)
    grad_x, grad_weight = torch.autograd.grad(expected * share, inputs)
    assert rms_ratio(torch.where(labels != -100, lse - chosen, 0).sum(), expected.detach()) < TIGHT[dtype]
    assert rms_ratio(torch.stack([one for one, _ in made]).sum(0), grad_x) < TIGHT[dtype]
    assert rms_ratio(torch.cat([one for _, one in made]), grad_weight) < TIGHT[dtype]


class InPlace:
    """The kernels read a slice of logits and write over it."""

    def join_slice(self, *_: Any) -> None:
        pass

    def slice_gradient(self, *_: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("needs", [[True, True], [True, False], [False, True]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_walk_holds_what_it_states(dtype: torch.dtype, needs: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that multiplies bf16 into fp32, which `meta` represents; without per-row values, smaller than any tensor here."""
    monkeypatch.setattr(linear_facts, "LOGITS_SLICE_ELEMENTS", 256 * 33)
    x, weight = (torch.empty(count, 64, dtype=dtype, device="meta") for count in (256, 100))
    labels, lse, share = torch.empty(256, dtype=torch.int64, device="meta"), torch.empty(256, device="meta"), torch.empty((), device="meta")
    with Storages(smallest=1001) as forward:
        slices.statistics(x, weight, labels, 0, InPlace(), Wide(x))
    with Storages(smallest=1001) as backward:
        results = slices.backward(share, x, weight, labels, lse, 0, -100, 0.0, needs, InPlace(), Wide(x))
    assert scratch_bytes("megakernels.linear_slice_statistics.default", (x, weight, labels, 0, "")) == forward.peak
    operands = (share, x, weight, labels, lse, 0, -100, "", "e4m3", needs)
    assert scratch_bytes("megakernels.linear_slice_gradients.default", operands) == backward.scratch(results)


def test_a_slice_far_below_the_others_is_finite() -> None:
    """The words of such a slice have probability zero, not NaN."""
    logits, labels = words(2, torch.float32)
    logits[:, 6:] -= 1e4
    labels[:] = 0
    parts = [part.contiguous() for part in logits.chunk(2, 1)]
    loss, lse = joined(parts, labels)
    assert torch.isfinite(loss)
    assert not slice_gradient(torch.tensor(1.0), parts[1], labels, lse, 6).any()


@DTYPES
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_slices_of_a_row_make_the_whole_norm(num_slices: int, dtype: torch.dtype) -> None:
    """Output and every gradient, against the op on whole rows."""
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(3, 5, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    pieces = [[part.contiguous() for part in tensor.chunk(num_slices, -1)] for tensor in (grad, x, weight)]
    rstd = torch.rsqrt(sum(row_square_sum(a) for _, a, _ in zip(*pieces, strict=True)) / 8 + EPS)
    y = torch.cat([row_scale(a, w, rstd) for _, a, w in zip(*pieces, strict=True)], -1)
    mean_dot = sum(row_dot(g, a, w, rstd) for g, a, w in zip(*pieces, strict=True)) / 8
    found = [row_gradients(g, a, w, rstd, mean_dot, [True, True]) for g, a, w in zip(*pieces, strict=True)]
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    expected = rms_norm(*inputs, EPS)
    assert rms_ratio(y, expected.detach()) < TIGHT[dtype]
    for index, wanted in enumerate(torch.autograd.grad(expected, inputs, grad)):
        assert rms_ratio(torch.cat([gradients[index] for gradients in found], -1), wanted) < TIGHT[dtype]


@DTYPES
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_slices_of_a_gated_row_make_the_whole_norm(num_slices: int, dtype: torch.dtype) -> None:
    """Output and every gradient, against autograd in fp64 and against the op on whole rows."""
    generator = torch.Generator().manual_seed(2)
    x, gate, grad = (torch.randn(3, 5, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    weight = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    pieces = [[part.contiguous() for part in tensor.chunk(num_slices, -1)] for tensor in (grad, x, gate, weight)]
    rstd = torch.rsqrt(sum(gated_square_sum(a, b) for _, a, b, _ in zip(*pieces, strict=True)) / 8 + EPS)
    y = torch.cat([gated_scale(a, b, w, rstd) for _, a, b, w in zip(*pieces, strict=True)], -1)
    mean_dot = sum(gated_dot(g, a, b, w, rstd) for g, a, b, w in zip(*pieces, strict=True)) / 8
    found = [gated_scale_gradients(g, a, b, w, rstd, mean_dot, [True, True, True]) for g, a, b, w in zip(*pieces, strict=True)]
    inputs = [tensor.clone().requires_grad_() for tensor in (x, gate, weight)]
    exact = exact_gated_rms_norm(*(tensor.double() for tensor in inputs), 1)
    for expected in (exact, gated_rms_norm(*inputs, EPS, 1)):
        assert rms_ratio(y, expected.detach()) < TIGHT[dtype]
        for index, wanted in enumerate(torch.autograd.grad(expected, inputs, grad.to(expected.dtype))):
            assert rms_ratio(torch.cat([parts[index] for parts in found], -1), wanted) < TIGHT[dtype]


def test_only_wanted_gradients_come_back() -> None:
    """In the order of x, gate, weight."""
    x, weight, row = torch.randn(2, 4), torch.ones(4), torch.ones(2, 1)
    (found,) = gated_scale_gradients(x, x, x, weight, row, row, [False, False, True])
    assert found.shape == (4,)


def test_fakes_have_the_shapes_of_results() -> None:
    """Under fake tensors every op has the shapes and dtypes of its results."""
    x, weight, row = torch.randn(2, 3, 4).bfloat16(), torch.ones(4).bfloat16(), torch.ones(2, 3, 1)
    logits, labels = torch.randn(5, 6).bfloat16(), torch.zeros(5, dtype=torch.int64)
    calls = (
        lambda m: [gated_square_sum(m(x), m(x))],
        lambda m: [gated_scale(m(x), m(x), m(weight), m(row))],
        lambda m: [gated_dot(m(x), m(x), m(x), m(weight), m(row))],
        lambda m: gated_scale_gradients(m(x), m(x), m(x), m(weight), m(row), m(row), [True, False, True]),
        lambda m: [row_square_sum(m(x))],
        lambda m: [row_scale(m(x), m(weight), m(row))],
        lambda m: [row_dot(m(x), m(x), m(weight), m(row))],
        lambda m: row_gradients(m(x), m(x), m(weight), m(row), m(row), [True, True]),
        lambda m: list(slice_statistics(m(logits), m(labels), 6)),
        lambda m: [slice_gradient(m(torch.tensor(1.0)), m(logits), m(labels), m(torch.ones(5)), 6)],
        lambda m: list(linear_slice_statistics(m(logits), m(logits), m(labels), 6)),
        lambda m: linear_slice_gradients(m(torch.tensor(1.0)), m(logits), m(logits), m(labels), m(torch.ones(5)), 6, [True, True]),
    )
    for call in calls:
        with FakeTensorMode() as mode:
            fake = call(mode.from_tensor)
        real = call(lambda tensor: tensor)
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]


@pytest.mark.parametrize("call", [slice_statistics, lambda *a: slice_gradient(torch.ones(()), a[0], a[1], torch.ones(5), a[2])])
def test_labels_must_be_int64(call: object) -> None:
    """The labels of a slice have the dtype of those of the whole vocabulary."""
    with pytest.raises(ValueError, match="labels must be int64"):
        call(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int32), 0)  # type: ignore[operator]
