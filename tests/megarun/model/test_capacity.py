"""Experts with a capacity, null experts, and experts that choose: each is a plain layer of which some pairs weigh nothing."""

import pytest
import torch

from megaplan.spec.models import MixtureOfExperts
from megarun.model import moe as module
from megarun.model.moe import ExpertBlock

pytestmark = pytest.mark.runtime
SIZES = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 6, "shared_ffn_hidden_size": 5, "bias": True}
HIDDEN, TOKENS = 8, 12


def block_of(*, gathers: bool, **options: object) -> ExpertBlock:
    block = ExpertBlock(MixtureOfExperts.model_validate(SIZES | options), HIDDEN, 1e-6, gathers=gathers).double()
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    block.add_sums(torch.device("cpu"))
    return block


def kept_pairs(weights: torch.Tensor, indices: torch.Tensor, capacity: int, drop: str) -> torch.Tensor:
    """True for each pair that its expert keeps, counted pair by pair."""
    kept = torch.zeros_like(weights, dtype=torch.bool)
    for expert in range(SIZES["num_experts"]):
        pairs = [(token, slot) for token in range(TOKENS) for slot in range(indices.shape[1]) if indices[token, slot] == expert]
        if drop == "score":
            pairs.sort(key=lambda pair: -float(weights[pair].detach()))
        for pair in pairs[:capacity]:
            kept[pair] = True
    return kept


@pytest.mark.requirement("R-43")
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("drop", ["score", "position"])
@pytest.mark.parametrize(("factor", "capacity"), [(0.7, 5), (2.0, 12)])
def test_dropped_pairs_weigh_nothing(factor: float, capacity: int, drop: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and every gradient; with a bias, which an empty row must not have."""
    limited = block_of(gathers=gathers, capacity_factor=factor, capacity_drop=drop)
    plain = block_of(gathers=gathers)
    dropped = []
    choose = plain.choose

    def masked(tokens: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, indices, probs = choose(tokens, num_sequences)
        kept = kept_pairs(weights, indices, capacity, drop)
        dropped.append(int((~kept).sum()))
        return weights * kept, indices, probs

    monkeypatch.setattr(plain, "choose", masked)
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.float64)
    cotangent = torch.randn_like(x)
    found, expected = limited(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    names = [name for name, _ in plain.named_parameters()]
    for name, one, other in zip(
        names,
        torch.autograd.grad(found, list(limited.parameters()), cotangent),
        torch.autograd.grad(expected, list(plain.parameters()), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=name)
    assert (dropped[0] > 0) is (factor < 2)
    assert torch.equal(limited.sums, plain.sums)  # what the router chose, dropped or not


def test_every_expert_multiplies_its_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each expert are known without a look at the choice: an idle expert has as many as a busy one."""
    counts = []
    run = module.experts
    monkeypatch.setattr(module, "experts", lambda *given, **options: counts.append(given[3].tolist()) or run(*given, **options))
    block_of(gathers=False, capacity_factor=0.7)(torch.ones(2, TOKENS // 2, HIDDEN, dtype=torch.float64))
    assert counts == [[5] * 4]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.8}, {"router_bias": True, "balance_loss_coefficient": 0.1}], ids=str)
def test_a_null_expert_is_one_whose_output_is_zero(options: dict[str, object], gathers: bool) -> None:
    """Outputs and the gradients of all that both have; the null experts' pairs are counted."""
    nulls = block_of(gathers=gathers, null_experts=2, **options)
    plain = block_of(gathers=gathers, **options | {"num_experts": 6})
    values = dict(nulls.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            rows = values[name].shape[0]
            parameter[:rows] = values[name]
            parameter[rows:] = 0 if "down" in name else 1
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.float64)
    found, expected = nulls(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    found.sum().backward()
    expected.sum().backward()
    for name, parameter in plain.named_parameters():
        own = values[name].grad
        assert own is not None
        torch.testing.assert_close(own, parameter.grad[: own.shape[0]], rtol=1e-8, atol=1e-10, msg=name)
    assert torch.equal(nulls.sums, plain.sums)
    assert nulls.sums[4:6].sum() > 0


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_that_choose_take_their_best_tokens(score: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose tokens choose all experts, of which each keeps the tokens with its largest scores."""
    chooses = block_of(gathers=gathers, expert_choice=True, score=score)
    plain = block_of(gathers=gathers, top_k=4, normalize_top_k=False, score=score)
    choose = plain.choose

    def masked(tokens: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, indices, probs = choose(tokens, num_sequences)
        return weights * kept_pairs(weights, indices, 6, "score"), indices, probs

    monkeypatch.setattr(plain, "choose", masked)
    x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.float64)
    found, expected = chooses(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    cotangent = torch.randn_like(x)
    one, other = (torch.autograd.grad(y, list(block.parameters()), cotangent) for y, block in ((found, chooses), (expected, plain)))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
