"""The router with its own losses: values and gradients against the formulas, what is kept, and fakes."""

import pytest
import torch
from op_checks import saved_by
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import route, route_scored, router_losses

SEQUENCES, POSITIONS, WIDTH, EXPERTS, TOP_K = 3, 7, 9, 6, 2
BALANCE, Z = 0.3, 0.07


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SEQUENCES * POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(EXPERTS, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def routed(x: Tensor, weight: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    weights, _, probs, log_sums, load = route_scored(x, weight, TOP_K, normalize, SEQUENCES)
    return router_losses(weights, probs, log_sums, load, BALANCE, Z)


def exact_losses(x: Tensor, weight: Tensor) -> Tensor:
    """Sequence by sequence and token by token, by autograd."""
    logits = x @ weight.T
    probs = logits.softmax(-1)
    balance = torch.zeros((), dtype=x.dtype)
    for sequence in probs.split(POSITIONS):
        for expert in range(EXPERTS):
            rows = sum(int(expert in token.topk(TOP_K).indices) for token in sequence)
            balance = balance + BALANCE * rows * sequence[:, expert].sum()
    return torch.stack([balance, Z * (logits.exp().sum(-1).log() ** 2).sum()])


@pytest.mark.requirement("R-13")
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_the_model_and_of_both_losses(normalize: bool) -> None:
    """The losses' gradient is 1, independent of the weights' gradient."""
    x, weight = inputs()
    cotangent = torch.randn(SEQUENCES * POSITIONS, TOP_K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weighted, values = routed(x, weight, normalize)
    found = torch.autograd.grad(weighted, (x, weight), cotangent)
    plain, *_ = route(x, weight, TOP_K, normalize)
    losses = exact_losses(x, weight)
    expected = torch.autograd.grad([plain, losses], (x, weight), [cotangent, torch.ones_like(losses)])
    assert torch.equal(weighted, plain)
    torch.testing.assert_close(values, losses.detach(), rtol=1e-12, atol=0)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-12)
    assert not values.requires_grad


def test_a_balanced_router_has_the_coefficient_as_its_loss() -> None:
    """The loss with E / (k · T² · B) is the mean over sequences of E Σ f P, which is 1 where both are even."""
    probs = torch.full((SEQUENCES * 6, EXPERTS), 1 / EXPERTS)
    load = torch.full((SEQUENCES, EXPERTS), 6 * TOP_K // EXPERTS, dtype=torch.int32)
    factor = EXPERTS / (TOP_K * 6 * 6 * SEQUENCES)
    _, values = router_losses(torch.ones(SEQUENCES * 6, TOP_K), probs, torch.zeros(SEQUENCES * 6), load, factor, 0.0)
    assert values.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_the_contract(dtype: torch.dtype) -> None:
    x, weight = inputs(dtype)
    _, packed = saved_by(lambda: routed(x, weight, normalize=True))
    tokens = SEQUENCES * POSITIONS
    kept = sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in packed)
    route_keeps = [((tokens, WIDTH), str(dtype)), ((EXPERTS, WIDTH), str(dtype)), ((tokens, EXPERTS), "torch.float32")]
    losses_keep = [((tokens,), "torch.float32"), ((SEQUENCES, EXPERTS), "torch.int32")]
    assert kept == sorted([*route_keeps, ((tokens, TOP_K), "torch.int32"), *losses_keep])


def test_fakes_and_schemas_are_right() -> None:
    x, weight = inputs(torch.float32)
    report = torch.library.opcheck(torch.ops.megakernels.route_scored.default, (x, weight, None, None, TOP_K, True, 1, 1, 1.0, SEQUENCES))
    scored = [tensor.detach() for tensor in route_scored(x, weight, TOP_K, True, SEQUENCES)]
    arguments = (scored[0].requires_grad_(), scored[2].requires_grad_(), scored[3].requires_grad_(), scored[4], BALANCE, Z)
    report |= torch.library.opcheck(torch.ops.megakernels.router_losses.default, arguments)
    assert set(report.values()) == {"SUCCESS"}
    with FakeTensorMode() as mode:
        fake_x, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        weighted, values = routed(fake_x, fake_weight, normalize=True)
        gradients = torch.autograd.grad(weighted.sum(), (fake_x, fake_weight))
    assert [tuple(tensor.shape) for tensor in (weighted, values, *gradients)] == [(21, TOP_K), (2,), (21, WIDTH), (EXPERTS, WIDTH)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = inputs()
    with pytest.raises(ValueError, match="num_sequences divide N"):
        route_scored(x, weight, TOP_K, True, 4)
    weights, _, probs, log_sums, load = route_scored(x, weight, TOP_K, True, SEQUENCES)
    with pytest.raises(ValueError, match="router_losses"):
        router_losses(weights, probs, log_sums, load[:2], BALANCE, Z)
