"""The kernels of the router, of its losses and of dispatched rows, compared with per-token formulas by autograd in fp64."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, no_reference, shuffled_grid, strided
from op_checks import rms_ratio
from storages import Storages
from torch import Tensor

from megakernels import combine, dispatch, route, route_scored, router_losses, scratch_bytes
from megakernels.ops.moe import kernel_route, reference, scores
from megakernels.ops.moe.scores import Router

SLOW = pytest.mark.slow
DRAWS = [*range(6), *(pytest.param(seed, marks=SLOW) for seed in range(6, 40))]

NEEDS = [[True] * 4, [True, False, False, False], [False, True, True, False], [False, False, True, False]]


class Drawn(NamedTuple):
    """A router: its sizes and options."""

    sequences: int
    positions: int
    width: int
    experts: int
    top_k: int
    keys: dict[str, Any]
    normalize: bool
    size: float
    views: bool


def drawn(seed: int) -> Drawn:
    """Odd sizes, one token, one expert, many experts, logits that are all equal or very different."""
    rng = random.Random(seed)
    groups, of_group = (1, rng.choice([1, 3, 16, 21, 130])) if rng.random() < 0.5 else (rng.choice([2, 3, 8]), rng.choice([2, 3, 5, 16]))
    experts, sigmoid = groups * of_group, rng.random() < 0.5
    top_groups = rng.randint(1, groups)
    top_k = rng.randint(1, min(9, top_groups * of_group))
    keys = {"sigmoid": sigmoid, "num_groups": groups, "top_groups": top_groups, "scale": rng.choice([1.0, 2.5])}
    sizes = rng.choice([1, 2, 3]), rng.choice([1, 5, 17, 40]), rng.choice([1, 9, 40, 130])
    return Drawn(*sizes, experts, top_k, keys, rng.random() < 0.6, rng.choice([0.0, 1.0, 1.0, 1.0, 12.0]), rng.random() < 0.3)


def inputs(given: Drawn, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = {
        "x": normal(given.sequences * given.positions, given.width),
        "weight": normal(given.experts, given.width) * (given.size / given.width**0.5),
    }
    if seed % 2:
        found["bias"] = normal(given.experts) * 0.3
    made = {name: value.to(dtype).requires_grad_() for name, value in found.items()}
    if given.views:
        made = {name: strided(value) for name, value in made.items()}
    if seed % 3:
        made["correction"] = (normal(given.experts) * 0.1).to(torch.float64 if seed % 3 == 1 else dtype)
    return made


def exact_scores(wide: dict[str, Tensor], sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Scores and logits, [N, E]."""
    logits = torch.einsum("nh,eh->ne", wide["x"], wide["weight"]) + wide.get("bias", torch.zeros(()))
    return (1 / (1 + (-logits).exp()) if sigmoid else logits.exp() / logits.exp().sum(-1, keepdim=True)), logits


def best_values(ranked: list[float], given: Drawn) -> list[float]:
    """The values of one token's experts that it should choose, in their order."""
    groups, size = given.keys["num_groups"], given.experts // given.keys["num_groups"]
    of_groups = [sorted(ranked[group * size : (group + 1) * size], reverse=True) for group in range(groups)]
    if groups > 1:
        of_groups.sort(key=lambda best: sum(best[: 2 if given.keys["sigmoid"] else 1]), reverse=True)
        of_groups = of_groups[: given.keys["top_groups"]]
    return sorted((value for best in of_groups for value in best), reverse=True)[: given.top_k]


def run(given: Drawn, tensors: dict[str, Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Outputs of the router with the inputs of its losses, then gradients."""
    keys = {name: tensors.get(name) for name in ("bias", "correction")}
    made = route_scored(tensors["x"], tensors["weight"], given.top_k, given.normalize, given.sequences, **keys, **given.keys)
    weights, _, probs, log_sums, _ = made
    differentiated = [each for each in tensors.values() if each.requires_grad]
    return [*made, *torch.autograd.grad([weights, probs, log_sums], differentiated, cotangents)]


@DTYPES
@pytest.mark.parametrize("seed", DRAWS)
def test_values(seed: int, dtype: torch.dtype) -> None:
    given = drawn(seed)
    tensors = inputs(given, seed, dtype)
    rows, generator = given.sequences * given.positions, torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rows, given.top_k), (rows, given.experts), (rows,))
    ]
    narrow = [each.float() for each in cotangents]
    with no_reference(scores):
        found = run(given, tensors, narrow)
        with shuffled_grid(seed=seed):
            again = run(given, tensors, narrow)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    weights, indices, probs, log_sums, load, *gradients = found
    wide = {name: each.detach().double().requires_grad_(each.requires_grad) for name, each in tensors.items()}
    exact, logits = exact_scores(wide, given.keys["sigmoid"])
    slots, ranked = indices.long(), exact.detach() + wide.get("correction", torch.zeros(()))
    assert all(len(set(row)) == given.top_k for row in indices.tolist())
    for token, values in zip(ranked.tolist(), ranked.gather(1, slots).tolist(), strict=True):
        assert values == pytest.approx(best_values(token, given), rel=1e-4, abs=1e-6)
    assert load.tolist() == [torch.bincount(own.flatten(), minlength=given.experts).tolist() for own in slots.chunk(given.sequences)]
    chosen = exact.gather(1, slots)
    expected = given.keys["scale"] * (chosen / chosen.sum(-1, keepdim=True) if given.normalize else chosen)
    outputs = [expected, exact / exact.sum(-1, keepdim=True), logits.logsumexp(-1)]
    named = {name: each for name, each in wide.items() if each.requires_grad}
    exacts = torch.autograd.grad(outputs, list(named.values()), cotangents)
    tolerance = 1e-5 if given.size <= 1 else 1e-4  # very different logits: a logit's own rounding
    for one, other in zip((weights, probs, log_sums), outputs, strict=True):
        assert one.dtype == torch.float32
        assert rms_ratio(one.detach(), other.detach()) < tolerance
    for (name, own), one, other in zip(named.items(), gradients, exacts, strict=True):
        assert one.dtype == tensors[name].dtype
        size = max(other.norm().item(), 1e-4 * own.norm().item())  # a gradient that cancels to nothing
        assert (one.double() - other).norm().item() <= max(tolerance, TOLERANCE[dtype]) * size, name


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=SLOW) for seed in range(3, 20))])
def test_without_losses_the_same_bits(seed: int) -> None:
    given = drawn(seed)
    tensors = inputs(given, seed, torch.bfloat16)
    keys = {name: tensors.get(name) for name in ("bias", "correction")}
    plain = route(tensors["x"], tensors["weight"], given.top_k, given.normalize, **keys, **given.keys)
    scored = route_scored(tensors["x"], tensors["weight"], given.top_k, given.normalize, given.sequences, **keys, **given.keys)
    assert all(torch.equal(one, other) for one, other in zip(plain, scored, strict=False))
    cotangent = torch.randn(plain[0].shape)
    with no_reference(scores):
        (found,), (expected,) = (torch.autograd.grad(made[0], [tensors["x"]], cotangent) for made in (plain, scored))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_a_weight_of_another_dtype() -> None:
    x, weight = torch.randn(9, 12).bfloat16().requires_grad_(), torch.randn(5, 12).requires_grad_()
    with no_reference(scores):
        weights, *_ = route(x, weight, 2, True)
        found = torch.autograd.grad(weights.square().sum(), (x, weight))
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    chosen = (wide[0] @ wide[1].T).softmax(-1).topk(2).values
    expected = torch.autograd.grad((chosen / chosen.sum(-1, keepdim=True)).square().sum(), wide)
    assert rms_ratio(found[0], expected[0]) < TOLERANCE[torch.bfloat16]
    assert rms_ratio(found[1], expected[1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_experts_of_what_is_not_finite_exist(value: float) -> None:
    x = torch.full((3, 4), value)
    _, indices, _ = route(x, torch.randn(6, 4), 4, True, num_groups=3, top_groups=2)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 6 for row in indices.tolist())


@DTYPES
@pytest.mark.parametrize(
    "needs", [[True] * 4, [True, False, False, False], [False, True, True, False], [False, False, True, False]], ids=str
)
@pytest.mark.parametrize(("rows", "width"), [(50, 3), (3, 60)])
def test_the_inside_is_what_is_stated(
    dtype: torch.dtype, needs: list[bool], rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products like those of CUDA's GEMM library, which widens no operand."""
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(7, width).to(dtype)
    given = Router(x, weight, torch.randn(7).to(dtype), torch.randn(7).to(dtype), 2, True, 1, 1, 1.0)
    weights, indices, probs, _ = kernel_route.route_forward(given, None, is_sigmoid=False)
    grad = torch.randn(weights.shape)
    monkeypatch.setattr(kernel_route, "_wide_product", lambda left, right: torch.empty(left.shape[0], right.shape[1]))
    with Storages() as inside:
        gradients = kernel_route.route_backward((grad, None, None), given, probs, indices, needs, is_sigmoid=False)
    operands = grad, *given[:4], probs, indices, *given[4:], needs
    assert scratch_bytes("megakernels.route_backward.default", operands) == inside.scratch(gradients)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 7, 6, 2), (2, 40, 33, 5), (1, 130, 128, 8)])
def test_router_losses(shape: tuple[int, int, int, int]) -> None:
    sequences, positions, experts, top_k = shape
    rows = sequences * positions
    tensors = [torch.rand(rows, top_k), torch.rand(rows, experts), torch.randn(rows)]
    load = torch.randint(0, 9, (sequences, experts), dtype=torch.int32)
    for each in tensors:
        each.requires_grad_()
    cotangent = torch.randn(rows, top_k)

    def found() -> list[Tensor]:
        weighted, values = router_losses(*tensors, load, 0.3, 0.07)
        return [weighted, values, *torch.autograd.grad(weighted, tensors, cotangent)]

    with no_reference(reference):
        made = found()
        with shuffled_grid(seed=rows):
            assert all(torch.equal(one, other) for one, other in zip(made, found(), strict=True))
    wide = [each.detach().double().requires_grad_() for each in tensors]
    spread = load.double().repeat_interleave(positions, 0)
    values = torch.stack([0.3 * (spread * wide[1]).sum(), 0.07 * (wide[2] ** 2).sum()])
    grads = torch.autograd.grad([wide[0] * cotangent, values], wide, [torch.ones_like(wide[0]), torch.ones_like(values)])
    assert torch.equal(made[0], tensors[0])
    for one, other in zip(made[1:], (values, *grads), strict=True):
        assert rms_ratio(one, other) < TOLERANCE[torch.float32]


@DTYPES
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1), (9, 3, 70), (300, 1, 1), (5, 8, 1030), (0, 2, 4)])
def test_dispatched_rows(dtype: torch.dtype, tokens: int, top_k: int, width: int) -> None:
    x = strided(torch.randn(tokens, width).to(dtype).requires_grad_())
    rows = torch.randperm(tokens * top_k, dtype=torch.int32)
    with no_reference(reference), shuffled_grid(seed=tokens):
        sent = dispatch(x, rows, top_k)
        back = combine(sent, rows, top_k)
        (found,) = torch.autograd.grad(back, x, torch.ones_like(back))
    assert torch.equal(sent, x[rows.long() // top_k])
    if tokens:
        assert rms_ratio(back, top_k * x.detach().double()) < TOLERANCE[dtype]
    assert torch.equal(found, torch.full_like(found, top_k))
