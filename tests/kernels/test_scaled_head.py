"""Head and loss in a recipe's format against numpy in fp64 with its own rounding, and the scratch that the facts state."""

from typing import Any

import numpy as np
import pytest
import torch
from delayed_numbers import numbers_for
from rounding import Peak, blocked, quantised
from torch import Tensor

from megakernels import linear_cross_entropy, linear_slice_gradients, linear_slice_statistics, scratch_bytes
from megakernels._common import device
from megakernels.ops.fp8_linear import facts as fp8_facts
from megakernels.ops.fp8_linear import reference
from megakernels.ops.linear_cross_entropy import facts, slices
from megakernels.ops.linear_cross_entropy.products import products_of

SCALINGS = pytest.mark.parametrize("scaling", ["tensor", "rows", "mxfp8", "nvfp4", "fp8_blockwise"])
ROWS, HIDDEN, VOCAB = 48, 64, 320
IGNORED = 5


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(count, HIDDEN, generator=generator).to(dtype) for count in (ROWS, VOCAB))
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[IGNORED] = -100
    return x, weight, labels


def values(x: np.ndarray, scaling: str, axis: int, *, format: str = "e4m3", weight: bool = False) -> np.ndarray:
    """The values of an operand whose summed dim is `axis`."""
    if scaling in ("tensor", "rows"):
        return quantised(x, format, axis if scaling == "rows" else None)
    return blocked(x, scaling, axis, format=format, square=weight and scaling != "mxfp8")


def exact(x: Tensor, weight: Tensor, labels: Tensor, scaling: str, format: str, words: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients, slice by slice; weights and gradients of one slice are quantised together."""
    rows, vocabulary, kept = x.double().numpy(), weight.double().numpy(), labels.numpy() >= 0
    parts = [slice(start, start + words) for start in range(0, VOCAB, words)]
    logits = np.concatenate([values(rows, scaling, 1) @ values(vocabulary[part], scaling, 1, weight=True).T for part in parts], 1)
    lse = np.log(np.exp(logits).sum(1))
    loss = float((lse - logits[np.arange(ROWS), labels.numpy()])[kept].sum())
    gradient = np.exp(logits - lse[:, None])
    gradient[np.arange(ROWS)[kept], labels.numpy()[kept]] -= 1
    gradient *= 0.25 * kept[:, None]
    sums = [values(gradient[:, part], scaling, 1, format=format) @ values(vocabulary[part], scaling, 0, weight=True) for part in parts]
    of_weight = [values(gradient[:, part], scaling, 0, format=format).T @ values(rows, scaling, 0) for part in parts]
    return loss, sum(sums), np.concatenate(of_weight)


def distance(found: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("words", [128, VOCAB])
@pytest.mark.parametrize("scaling", ["tensor", "rows", "mxfp8", "fp8_blockwise"])
def test_loss_and_gradients_are_of_the_operands_values(scaling: str, words: int, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in fp32 sum in another order, which changes the eight-bit rounding of some logits' gradients: by 2^-4 each."""
    monkeypatch.setattr(facts, "LOGITS_SLICE_ELEMENTS", words * ROWS)
    x, weight, labels = case()
    inputs = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*inputs, labels, scaling=scaling, gradient_format=format)
    found = torch.autograd.grad(loss * 0.25, inputs)
    expected, *gradients = exact(x.detach(), weight.detach(), labels, scaling, format, words)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert max(distance(each, made) for each, made in zip(found, gradients, strict=True)) < 2e-3
    assert not found[0][IGNORED].any()


def test_four_bits_are_those_of_the_forward() -> None:
    """Gradients round stochastically; the loss does not."""
    x, weight, labels = case()
    expected, of_x, of_weight = exact(x, weight, labels, "nvfp4", "e4m3", VOCAB)
    inputs = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*inputs, labels, scaling="nvfp4")
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    found = torch.autograd.grad(loss * 0.25, inputs)
    for each, wide in zip(found, (of_x, of_weight), strict=True):
        assert 0.001 < float(np.linalg.norm(each.numpy() - wide) / np.linalg.norm(wide)) < 0.4


@SCALINGS
def test_parts_of_a_vocabulary_are_slices_of_it(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that have half of the words each compute the same as one process of slices as large."""
    monkeypatch.setattr(facts, "LOGITS_SLICE_ELEMENTS", ROWS * 128)
    x, weight, labels = case(torch.bfloat16)
    weight = weight[:256]
    labels = torch.where(labels >= 256, 0, labels)
    parts = weight.chunk(2)
    found = [linear_slice_statistics(x, part, labels, 128 * index, scaling) for index, part in enumerate(parts)]
    lse, chosen = torch.stack([lse for lse, _ in found]).logsumexp(0), torch.stack([chosen for _, chosen in found]).sum(0)
    made = [
        linear_slice_gradients(torch.tensor(1.0), x, part, labels, lse, 128 * index, [True, True], scaling=scaling)
        for index, part in enumerate(parts)
    ]
    inputs = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*inputs, labels, scaling=scaling)
    of_x, of_weight = torch.autograd.grad(loss, inputs)
    assert float(torch.where(labels >= 0, lse - chosen, 0).sum()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert distance(torch.cat([one for _, one in made]), of_weight.double().numpy()) < 0.01
    assert distance(sum(one.float() for one, _ in made), of_x.double().numpy()) < 0.01  # type: ignore[arg-type]


class InPlace:
    """The kernels read a slice of logits and write over it."""

    def join_slice(self, *_: Any) -> None:
        pass

    def slice_gradient(self, *_: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("scaling", ["tensor", "rows", "mxfp8", "nvfp4", "fp8_blockwise", "delayed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab", "words"), [(320, 320), (320, 128), (330, 256)])
def test_stated_scratch_is_what_the_walk_allocates(
    scaling: str, dtype: torch.dtype, vocab: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with tensor cores, in plain torch; without numbers per row, to a percent."""
    rows, hidden = 192, 160
    monkeypatch.setattr(facts, "LOGITS_SLICE_ELEMENTS", rows * words)
    monkeypatch.setattr(fp8_facts, "SCALED_SLICE_ELEMENTS", 64 * 160)
    monkeypatch.setitem(device._chosen, "kernels", "torch")
    monkeypatch.setattr(reference, "has_tensor_cores", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: None)
    x, weight = (torch.randn(count, hidden).to(dtype) for count in (rows, vocab))
    labels, lse, share = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), torch.tensor(1.0)
    numbers, numbers_of_head = 16 * rows * 4, (*numbers_for(scaling, 1), None)[0]
    with Peak((x, weight, labels)) as forward:
        slices.statistics(x, weight, labels, 0, InPlace(), products_of(x, scaling, numbers=numbers_of_head))
    stated = scratch_bytes("megakernels.linear_slice_statistics.default", (x, weight, labels, 0, scaling, None))
    assert stated - 0.01 * stated <= forward.peak <= stated + numbers
    with Peak((x, weight, labels, lse, share)) as backward:
        products = products_of(x, scaling, "e5m2", numbers_of_head, backward=True)
        slices.backward(share, x, weight, labels, lse, 0, -100, 0.0, [True, True], InPlace(), products)
    operands = (share, x, weight, labels, lse, 0, -100, scaling, "e5m2", numbers_of_head, [True, True])
    stated = scratch_bytes("megakernels.linear_slice_gradients.default", operands)
    found = backward.peak - weight.nbytes - x.nbytes
    assert stated - 0.01 * stated <= found <= stated + numbers


def test_bits_of_other_dtypes_are_refused() -> None:
    x, weight, labels = case()
    with pytest.raises(ValueError, match="scaling must be one of fp8_linears"):
        linear_cross_entropy(x.double(), weight.double(), labels, scaling="rows")
    with pytest.raises(ValueError, match="scaling must be one of fp8_linears"):
        linear_cross_entropy(x, weight, labels, scaling="columns")
