"""The kernels of routed experts with biases, geglu and the clamped swiglu: against rows computed one by one, by autograd in fp64."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, no_reference, shuffled_grid, strided
from op_checks import rms_ratio
from storages import Idle, Storages
from torch import Tensor
from torch.nn import functional

from megakernels import dispatch_plan, routed_experts, scratch_bytes
from megakernels.ops.moe import kernel, kernel_plan, reference
from megakernels.ops.moe.inputs import Experts

SLOW = pytest.mark.slow
DRAWS = [*range(8), *(pytest.param(seed, marks=SLOW) for seed in range(8, 40))]
SLOPE = 1.702


class Drawn(NamedTuple):
    """Experts: sizes and options. `spread` is how often a token chooses another than the first experts; `rows` are views if `views`."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int
    activation: str
    biases: tuple[str, ...]
    limit: float | None
    size: float
    spread: float
    views: bool


def drawn(seed: int) -> Drawn:
    """One token, one expert, one column, experts without rows, activations far beyond the limit; each kind of option alone and together."""
    rng = random.Random(seed)
    activation = rng.choice(["swiglu", "swiglu", "swiglu", "geglu", "relu2", "gelu"])
    limit = rng.choice([0.3, 1.0, 7.0]) if activation == "swiglu" and rng.random() < 0.8 else None
    names = ("gate", "up", "down") if activation in ("swiglu", "geglu") else ("up", "down")
    biases = tuple(name for name in names if rng.random() < 0.7)
    experts = rng.choice([1, 2, 5, 9])
    sizes = rng.choice([1, 2, 17, 30]), rng.randint(1, min(4, experts)), experts, rng.choice([1, 9, 40, 70]), rng.choice([1, 7, 33, 70])
    return Drawn(*sizes, activation, biases, limit, rng.choice([0.5, 1.0, 1.0, 6.0]), rng.random(), rng.random() < 0.3)


def inputs(given: Drawn, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    count, hidden, width = given.experts, given.hidden, given.width
    found = {"x": normal(given.tokens, hidden) * given.size}
    if given.activation in ("swiglu", "geglu"):
        found["gate"] = normal(count, width, hidden) / hidden**0.5
    found |= {"up": normal(count, width, hidden) / hidden**0.5, "down": normal(count, hidden, width) / width**0.5}
    found |= {f"{name}_bias": normal(count, hidden if name == "down" else width) for name in given.biases}
    made = {name: value.to(dtype).requires_grad_() for name, value in found.items()}
    if given.views:
        made = {name: strided(value) for name, value in made.items()}
    return made | {"weights": normal(given.tokens, given.top_k).float().requires_grad_()}


def chosen(given: Drawn, seed: int) -> Tensor:
    """Distinct experts of each token, int32 [N, k]: the first ones, or with probability `spread` any."""
    rng = random.Random(seed)
    ranges = [given.experts if rng.random() < given.spread else given.top_k for _ in range(given.tokens)]
    return torch.tensor([rng.sample(range(count), given.top_k) for count in ranges], dtype=torch.int32)


def run(given: Drawn, tensors: dict[str, Tensor], indices: Tensor) -> Tensor:
    rows, counts = dispatch_plan(indices, given.experts)
    biases = {f"{name}_bias": tensors[f"{name}_bias"] for name in given.biases}
    front = (tensors["x"], tensors["weights"], rows, counts, tensors.get("gate"), tensors["up"], tensors["down"])
    return routed_experts(*front, given.activation, **biases, limit=given.limit)


def exact(given: Drawn, tensors: dict[str, Tensor], indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Every token's experts, one by one. Products are rounded as they are saved: a clamp has another slope beyond its limit."""
    found = torch.zeros_like(tensors["x"])
    for token, own in enumerate(indices.tolist()):
        for slot, expert in enumerate(own):

            def product(name: str, inner: Tensor, expert: int = expert) -> Tensor:
                bias = tensors.get(f"{name}_bias")
                return tensors[name][expert] @ inner + (0 if bias is None else bias[expert])

            def saved(name: str, inner: Tensor) -> Tensor:
                value = product(name, inner)
                return value + (value.to(dtype).double() - value).detach()

            up = saved("up", tensors["x"][token])
            match given.activation, given.limit:
                case "geglu", _:
                    hidden = functional.gelu(saved("gate", tensors["x"][token]), approximate="tanh") * up
                case "relu2", _:
                    hidden = up.relu() ** 2
                case "gelu", _:
                    hidden = functional.gelu(up, approximate="tanh")
                case _, None:
                    hidden = functional.silu(saved("gate", tensors["x"][token])) * up
                case _, limit:
                    gate = saved("gate", tensors["x"][token]).clamp(max=limit)
                    hidden = gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-limit, limit) + 1)
            found = found.index_add(0, torch.tensor([token]), (tensors["weights"][token, slot] * product("down", hidden))[None])
    return found


@DTYPES
@pytest.mark.parametrize("seed", DRAWS)
def test_values(seed: int, dtype: torch.dtype) -> None:
    """Outputs and every gradient; the same bits when the programs run in another order."""
    given = drawn(seed)
    if dtype == torch.bfloat16:  # the few values of one column may cancel except for their rounding
        given = given._replace(hidden=max(given.hidden, 9))
    tensors, indices = inputs(given, seed, dtype), chosen(given, seed)
    cotangent = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = list(tensors.values())

    def outcome() -> list[Tensor]:
        y = run(given, tensors, indices)
        return [y, *torch.autograd.grad(y, wanted, strided(cotangent.to(dtype)) if given.views else cotangent.to(dtype))]

    with no_reference(reference):
        found = outcome()
        with shuffled_grid(seed=seed):
            again = outcome()
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert [each.dtype for each in found[1:]] == [each.dtype for each in wanted]
    wide = {name: each.detach().double().requires_grad_() for name, each in tensors.items()}
    y = exact(given, wide, indices, dtype)
    expected = [y, *torch.autograd.grad(y, list(wide.values()), cotangent.to(dtype).double())]
    ratios = {name: rms_ratio(*pair) for name, *pair in zip(("y", *wide), found, expected, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}


def test_the_draws_have_every_option() -> None:
    given = [drawn(seed) for seed in range(40)]
    assert {each.activation for each in given if each.biases} == {"swiglu", "geglu", "relu2", "gelu"}
    assert {bool(each.biases) for each in given if each.limit} == {True, False}
    assert any(len(chosen(each, seed).unique()) < each.experts for seed, each in enumerate(given))


def test_each_gradient_alone_has_its_bits_among_all() -> None:
    given = drawn(0)._replace(
        tokens=9, top_k=2, experts=3, hidden=9, width=7, activation="swiglu", biases=("gate", "up", "down"), limit=0.3
    )
    tensors, indices = inputs(given, 0, torch.float32), chosen(given, 0)
    y = run(given, tensors, indices)
    cotangent = torch.randn(y.shape)
    together = dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), cotangent), strict=True))
    for name in tensors:
        alone = {other: value.detach().requires_grad_(other == name) for other, value in tensors.items()}
        (found,) = torch.autograd.grad(run(given, alone, indices), [alone[name]], cotangent)
        assert torch.equal(found, together[name]), name


def test_what_is_no_number_is_not_clamped() -> None:
    given = drawn(0)._replace(tokens=2, top_k=1, experts=1, hidden=3, width=4, activation="swiglu", biases=(), limit=1.0, views=False)
    tensors = {name: value.detach() for name, value in inputs(given, 0, torch.float32).items()}
    tensors["x"][1, 0] = torch.nan
    y = run(given, tensors, torch.zeros(2, 1, dtype=torch.int32))
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.parametrize(
    "needs", [[True] * 8, [*[True, False] * 4], [*[False] * 5, True, True, True], [*[True] * 5, *[False] * 3]], ids=str
)
@pytest.mark.parametrize(("num_tokens", "width", "num_hidden"), [(24, 24, 16), (1, 140, 130)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_inside_is_what_is_stated(
    gated: bool, num_tokens: int, width: int, num_hidden: int, needs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of the matrices' and biases' gradients is most of the error if there are few tokens."""
    num_experts, top_k = 3, 2
    x, grad_y = torch.randn(2, num_tokens, num_hidden, dtype=torch.bfloat16)
    rows, counts = kernel_plan.sort_by_expert(torch.randint(0, num_experts, (num_tokens * top_k,), dtype=torch.int32), num_experts)
    gate, up, down = torch.randn(3, num_experts, width, num_hidden, dtype=torch.bfloat16)
    biases = [torch.randn(num_experts, size, dtype=torch.bfloat16) for size in (width, width, num_hidden)]
    for name in ("up_kernel", "down_kernel", "pull_kernel", "outer_kernel", "bias_kernel", "down_bias_kernel"):
        monkeypatch.setattr(kernel, name, Idle())
    for name in ("sum_slots_kernel", "spread_kernel", "invert_kernel"):  # the interpreter frees a launch's arguments late
        monkeypatch.setattr(kernel_plan, name, Idle())
    operands: dict[str, Any] = {"x": x, "weights": torch.rand(num_tokens, top_k), "rows": rows, "counts": counts, "gate": gate, "up": up}
    operands |= {"down": down.mT.contiguous(), **dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True))}
    operands |= {"activation": "geglu" if gated else "gelu", "limit": None}
    absent = () if gated else ("gate", "gate_bias", "limit")
    given = Experts(**operands | dict.fromkeys(absent))
    saved = [x.new_empty(rows.numel(), width) for _ in range(1 + gated)]
    with Storages() as backward:
        gradients = kernel.routed_experts_backward(grad_y, given, saved[0] if gated else None, saved[-1], needs)
    wanted = [need for place, need in enumerate(needs) if gated or place not in (2, 5)]
    own = [value for name, value in operands.items() if name not in absent]
    values = grad_y, *own[: -2 if gated else -1], *saved, *own[-2 if gated else -1 :], wanted
    name = "routed_experts_gated" if gated else "routed_experts"
    assert scratch_bytes(f"megakernels.{name}_backward.default", values) == backward.scratch(gradients)
