"""The keys that an indexer chooses, and the loss that trains it."""

import math

import pytest
import torch
from op_cases import CASES
from op_checks import gradients, rms_ratio
from op_exact import seen_by
from op_makers import document_starts, words_of
from torch import Tensor

from megakernels import attention, chosen_attention, indexed_attention, indexed_attention_choice
from megakernels.ops.indexed_attention import reference


def test_few_visible_keys_are_all_attended_to() -> None:
    """An indexer that chooses all positions equals plain attention, also with windows or documents."""
    inputs = next(case for case in CASES if case.name == "indexed_attention").make(20, torch.float64, requires_grad=False)
    for window, starts in ((None, None), (5, None), (None, torch.tensor([[0] * 7 + [7] * 13] * 2, dtype=torch.int32))):
        found = indexed_attention(**inputs, scale=0.3, top_k=20, loss_factor=1.0, eps=1e-5, window=window, starts=starts)
        assert rms_ratio(found, attention(*(inputs[name] for name in "qkv"), 0.3, window, starts)) < 1e-12


def test_an_indexer_is_trained_by_its_own_loss_alone() -> None:
    """The indexer's gradient does not depend on the output's gradient, and does not reach q, k and v."""
    inputs = next(case for case in CASES if case.name == "indexed_attention").make(20, torch.float64)
    index, attended = ("index_q", "index_k", "index_weights", "k_scale", "k_bias"), ("q", "k", "v")

    def found(names: tuple[str, ...], cotangent: float, loss_factor: float) -> tuple[Tensor, ...]:
        out = indexed_attention(**inputs, scale=0.3, top_k=4, loss_factor=loss_factor, eps=1e-5)
        return gradients([out], [inputs[name] for name in names], [torch.full_like(out, cotangent)])

    assert all(torch.equal(one, other) for one, other in zip(found(index, 0.0, 1.0), found(index, 7.0, 1.0), strict=True))
    assert all(gradient.count_nonzero() == 0 for gradient in found(index, 1.0, 0.0))
    assert all(gradient.count_nonzero() > 0 for gradient in found(index, 0.0, 1.0))
    assert all(torch.equal(one, other) for one, other in zip(found(attended, 1.0, 0.0), found(attended, 1.0, 9.0), strict=True))


@pytest.mark.parametrize("num_queries", [7, 64])
def test_of_equal_scores_the_first_keys_are_chosen(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero weights score all keys equally: the first three are selected, as if the others did not exist, also in backward."""
    monkeypatch.setattr(reference, "PLAIN_QUERIES", num_queries)
    inputs = next(case for case in CASES if case.name == "indexed_attention").make(20, torch.float64)
    inputs["index_weights"] = torch.zeros_like(inputs["index_weights"])
    found = indexed_attention(**inputs, scale=0.3, top_k=3, loss_factor=1.0, eps=1e-5)
    q, k, v = (inputs[name] for name in "qkv")
    scores = torch.einsum("bthd,bshd->bhts", q, k[:, :3]) * 0.3
    hidden = torch.arange(3) > torch.arange(20)[:, None]
    expected = torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -math.inf).softmax(-1), v[:, :3])
    assert rms_ratio(found, expected) < 1e-12
    seed = torch.randn_like(found)
    for one, other in zip(gradients([found], [q, k, v], [seed]), gradients([expected], [q, k, v], [seed]), strict=True):
        assert rms_ratio(one, other) < 1e-12


@pytest.mark.parametrize("num_queries", [7, 64])
@pytest.mark.parametrize(("window", "packed"), [(None, False), (9, False), (None, True)])
def test_another_layer_attends_to_the_choice(num_queries: int, window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is the largest scores, by sorting them; attention to it has the values and gradients of the layer that chose."""
    monkeypatch.setattr(reference, "PLAIN_QUERIES", num_queries)
    inputs = next(case for case in CASES if case.name == "indexed_attention").make(40, torch.float64)
    starts, numbers = document_starts(40) if packed else None, {"scale": 0.3, "top_k": 6, "loss_factor": 0.0, "eps": 1e-5}
    expected = indexed_attention(**inputs, **numbers, window=window, starts=starts)
    out, choice = indexed_attention_choice(*inputs.values(), **numbers, window=window, starts=starts)
    assert torch.equal(out, expected)
    assert not choice.requires_grad
    visible = seen_by(40, window, starts)
    keys = torch.nn.functional.layer_norm(inputs["index_k"], (8,), inputs["k_scale"], inputs["k_bias"], 1e-5)
    table = inputs["cos"], inputs["sin"]
    keys, queries = reference._rotated(keys[:, :, None], *table)[:, :, 0], reference._rotated(inputs["index_q"], *table)
    scores = torch.einsum("bti,bits->bts", inputs["index_weights"], torch.einsum("btid,bsd->bits", queries, keys).relu())
    best = scores.masked_fill(~visible, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :6]
    assert torch.equal(choice, words_of(visible & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)))
    attended = [inputs[name] for name in "qkv"]
    found = chosen_attention(*attended, choice, 0.3, window, starts)
    assert rms_ratio(found, expected) < 1e-12
    seed = torch.randn_like(found)
    for one, other in zip(gradients([found], attended, [seed]), gradients([expected], attended, [seed]), strict=True):
        assert rms_ratio(one, other) < 1e-12
