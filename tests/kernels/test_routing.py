"""The router's scores, groups and corrections: choices and gradients against the formulas token by token, what is kept, and fakes."""

from itertools import product
from typing import Any

import pytest
import torch
from op_checks import saved_by
from torch import Tensor

from megakernels import route, route_scored

TOKENS, WIDTH, EXPERTS, TOP_K, SEQUENCES = 12, 7, 8, 3, 2
CASES = list(product([False, True], [False, True], [1, 4]))
"""Sigmoid scores, normalised weights, groups."""


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (TOKENS, WIDTH), "weight": (EXPERTS, WIDTH), "bias": (EXPERTS,), "correction": (EXPERTS,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def options(sigmoid: bool, groups: int) -> dict[str, Any]:
    return {"sigmoid": sigmoid, "num_groups": groups, "top_groups": 2 if groups > 1 else 1, "scale": 2.5}


def exact(given: dict[str, Tensor], normalize: bool, sigmoid: bool, groups: int) -> tuple[Tensor, list[list[int]], Tensor]:
    """Weights, experts and distributions, one token at a time by autograd."""
    weights, chosen, shares = [], [], []
    for token in given["x"]:
        logits = given["weight"] @ token + given["bias"]
        scores = logits.sigmoid() if sigmoid else logits.exp() / logits.exp().sum()
        ranked = (scores + given["correction"]).tolist()
        size = EXPERTS // groups
        of_groups = [sorted(ranked[group * size : (group + 1) * size], reverse=True) for group in range(groups)]
        value = [sum(best[: 2 if sigmoid else 1]) for best in of_groups]
        left = sorted(range(groups), key=lambda group: -value[group])[: 2 if groups > 1 else 1]
        experts = sorted((each for each in range(EXPERTS) if each // size in left), key=lambda each: -ranked[each])[:TOP_K]
        own = torch.stack([scores[each] for each in experts])
        weights.append(2.5 * (own / own.sum() if normalize else own))
        chosen.append(experts)
        shares.append(scores / scores.sum())
    return torch.stack(weights), chosen, torch.stack(shares)


@pytest.mark.parametrize(("sigmoid", "normalize", "groups"), CASES)
def test_choice_weights_and_gradients_are_those_of_the_formulas(sigmoid: bool, normalize: bool, groups: int) -> None:
    given = inputs()
    keys = {"bias": given["bias"], "correction": given["correction"], **options(sigmoid, groups)}
    weights, indices, probs, log_sums, load = route_scored(given["x"], given["weight"], TOP_K, normalize, SEQUENCES, **keys)
    expected, chosen, shares = exact(given, normalize, sigmoid, groups)
    logits = given["x"] @ given["weight"].T + given["bias"]
    assert indices.tolist() == chosen
    assert load.sum().item() == TOKENS * TOP_K
    wanted = (expected, shares, logits.logsumexp(-1))
    for found, value in zip((weights, probs, log_sums), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in wanted]
    tensors = (given["x"], given["weight"], given["bias"])
    found = torch.autograd.grad((weights, probs, log_sums), (*tensors, given["correction"]), cotangents)
    for gradient, value in zip(found, torch.autograd.grad(wanted, tensors, cotangents), strict=False):
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-12)
    assert not found[-1].any()
    plain = route(given["x"], given["weight"], TOP_K, normalize, **keys)
    assert [torch.equal(one, other) for one, other in zip(plain, (weights, indices, probs), strict=True)] == [True] * 3
    once_more, _, _ = exact(given, normalize, sigmoid, groups)
    both = zip(torch.autograd.grad(plain[0], tensors, cotangents[0]), torch.autograd.grad(once_more, tensors, cotangents[0]), strict=True)
    for gradient, value in both:
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_one_array_of_scores_is_kept(sigmoid: bool) -> None:
    given = inputs(torch.float32)
    keys = {"bias": given["bias"], "correction": given["correction"].double().detach(), **options(sigmoid, 4)}
    _, packed = saved_by(lambda: route(given["x"], given["weight"], TOP_K, True, **keys)[0])
    kept = sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in packed)
    numbers = [((EXPERTS,), "torch.float32"), ((EXPERTS,), "torch.float64"), ((TOKENS, TOP_K), "torch.int32")]
    arrays = [((TOKENS, WIDTH), "torch.float32"), ((EXPERTS, WIDTH), "torch.float32"), ((TOKENS, EXPERTS), "torch.float32")]
    assert kept == sorted([*numbers, *arrays])


@pytest.mark.parametrize("name", ["route", "route_sigmoid", "route_scored", "route_scored_sigmoid"])
def test_fakes_and_schemas_are_right(name: str) -> None:
    given = inputs(torch.float32)
    arguments = (*given.values(), TOP_K, True, 4, 2, 1.5, *((SEQUENCES,) if "scored" in name else ()))
    report = torch.library.opcheck(getattr(torch.ops.megakernels, name).default, arguments)
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_groups": 3}, "num_groups must divide E"),
        ({"num_groups": 4, "top_groups": 1}, "the chosen groups must have top_k experts"),
        ({"num_groups": 8, "top_groups": 3, "sigmoid": True}, "the chosen groups must have top_k experts"),
        ({"bias": torch.ones(3)}, "bias must be"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    given = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        route(given["x"], given["weight"], TOP_K, True, **keys)
