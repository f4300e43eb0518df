"""E blocks: routed experts, which tokens choose or which choose tokens, and a shared expert on the same normed input.

With EP a rank has some of the experts, with ETP a slice of each, and rows are sent to their experts and back
(`megarun.parallel.groups.expert`). Router, dispatch and the shared expert always process the rank's local tokens.

With `host.kernels: triton`, and in eight bits, the experts gather tokens, or received rows, inside, and no sorted copy is saved.
"""

from typing import TypedDict

import torch
from torch import Tensor, nn

from megakernels import (
    arrival_plan,
    capacity_plan,
    combine,
    dispatch,
    dispatch_plan,
    experts,
    route,
    route_scored,
    routed_experts,
    router_losses,
)
from megaplan.families.moe.program import capacity
from megaplan.scalars import GATED
from megaplan.spec import models as spec
from megarun.model.mlp import Mlp
from megarun.model.norm import Block, RMSNorm, gated, linear
from megarun.model.rotary import Rotary
from megarun.model.router_losses import LossFactors
from megarun.model.step_sums import EXPERT_BIAS, num_sums
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.expert import LOCAL, ExpertParallel
from megarun.parallel.groups.scaled import packed_of
from megarun.parallel.groups.scaled_experts import Bank, BankScaling, multiply_bank
from megarun.parallel.groups.slices import sliced_bias
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class ExpertBank(nn.Module):
    """The stacked matrices of a rank's E experts, gate and up [E, F, h], down [E, h, F], and biases: a module that FSDP2 wraps separately.

    Parameters are the rows of all experts, [E · F, h] and [E · h, F], biases [E · F] and [E · h] (`ParamTensor.stored_shape`), so that
    FSDP2 can shard a bank over more ranks than it has experts; the operation reads them as stacks, which are views.

    Attributes:
        gathers: True if inputs and outputs are unsorted tokens instead of rows sorted by expert.
        scaling: Scaling of the bank's products in eight bits; None if they are not in eight bits. A bank with scaling gathers.
        slices: Ranks with the slices of these experts: each has a part of the width F, and gives a part of every output's sum.
    """

    def __init__(
        self, config: spec.MixtureOfExperts, hidden_size: int, num_experts: int, slices: TensorParallel = ALONE, *, gathers: bool = False
    ) -> None:
        super().__init__()
        width, self.gathers, self.num_experts, self.slices = slices.share(config.ffn_hidden_size), gathers, num_experts, slices
        self.activation, self.limit = config.activation, config.swiglu_limit
        self.scaling: BankScaling | None = None
        gated, biased = config.activation in GATED, config.bias
        self.gate_proj = nn.Parameter(torch.empty(num_experts * width, hidden_size)) if gated else None
        self.up_proj = nn.Parameter(torch.empty(num_experts * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts * hidden_size, width))
        self.gate_proj_bias = nn.Parameter(torch.empty(num_experts * width)) if gated and biased else None
        self.up_proj_bias = nn.Parameter(torch.empty(num_experts * width)) if biased else None
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts * hidden_size)) if biased else None

    def forward(self, x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, h] sorted by expert, weights fp32 [N, k], rows [M], counts [E] -> [M, h], each row scaled by its weight.

        If it gathers, tokens [N, h] -> [N, h], the sum of each token's scaled rows.
        """
        gate = None if self.gate_proj is None else self._stack(self.gate_proj)
        up, down = self._stack(self.up_proj), self._stack(self.down_proj)
        gate_bias, up_bias, down_bias = (self._values(bias) for bias in (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias))
        down_bias = sliced_bias(self.slices, down_bias)
        if self.scaling is not None:
            packed = tuple(map(packed_of, (self.gate_proj, self.up_proj, self.down_proj)))
            bank = Bank(gate, up, down, gate_bias, up_bias, down_bias, self.activation, self.limit, packed)
            return multiply_bank(self.scaling, x, weights, rows, counts, bank)
        run, given = routed_experts if self.gathers else experts, (x, weights, rows, counts, gate, up, down, self.activation)
        return run(*given, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias, limit=self.limit)

    def _stack(self, rows: Tensor) -> Tensor:
        return rows.view(self.num_experts, -1, rows.shape[-1])

    def _values(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.view(self.num_experts, -1)


def banks_of(block: nn.Module) -> list[ExpertBank]:
    """The banks of a layer or a prediction depth."""
    return [module for module in block.modules() if isinstance(module, ExpertBank)]


class RoutingOptions(TypedDict):
    """Arguments of `megakernels.route` that a spec decides."""

    sigmoid: bool
    num_groups: int
    top_groups: int
    scale: float


class Router(nn.Module):
    """Router with weight [E, h]; optionally a bias [E] of the logits, and a correction [E] of the scores for the choice of experts only."""

    def __init__(self, hidden_size: int, num_experts: int, *, bias: bool, correction: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.correction = nn.Parameter(torch.empty(num_experts)) if correction else None


class ExpertBlock(Block):
    """E: x + combine(experts(dispatch(norm(x)))) + shared(norm(x)) [· sigmoid(shared_gate(norm(x)))].

    With a latent the experts read latent_down(norm(x)), and latent_up projects their output.
    """

    sums: Tensor
    expert_bias: Tensor

    def __init__(
        self,
        config: spec.MixtureOfExperts,
        hidden_size: int,
        eps: float,
        tp: TensorParallel = ALONE,
        ep: ExpertParallel = LOCAL,
        factors: LossFactors | None = None,
        cp: ContextParallel = WHOLE,
        *,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.ep, self.cp, self.factors, self.config = tp, ep, cp, factors, config
        self.loss_scale = 1.0
        self.num_choices, self.slots = config.num_choices, config.slots
        self.normalize = config.normalize_top_k and not config.expert_choice
        self.has_bias = config.expert_bias
        self.choice: RoutingOptions = {
            "sigmoid": config.score == "sigmoid",
            "num_groups": config.num_groups,
            "top_groups": config.top_groups,
            "scale": config.routed_scale,
        }
        self.norm = RMSNorm(hidden_size, eps)
        self.router = Router(hidden_size, config.num_choices, bias=config.router_bias, correction=config.score_correction)
        width, latent = config.row_width(hidden_size), config.latent_size is not None
        self.experts = ExpertBank(config, width, ep.share(config.num_experts), ep.slices, gathers=gathers)
        self.latent_down = linear(hidden_size, width) if latent else None
        self.latent_up = linear(width, hidden_size) if latent else None
        shared_width = config.shared_ffn_hidden_size
        self.shared = Mlp(hidden_size, shared_width, config.activation, tp) if shared_width else None
        self.shared_gate = linear(hidden_size, 1) if config.shared_gate else None

    def forward(self, x: Tensor, rotary: Rotary | None = None, starts: Tensor | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream [B, T, h] in and out."""
        normed = self.norm(x)
        tokens = normed.flatten(0, 1)
        weights, indices, probs = self.choose(tokens, x.shape[0])
        config, limit = self.config, capacity(self.config, tokens.shape[0])
        if limit is None:
            rows, counts = dispatch_plan(indices, self.num_choices)
        else:
            by_score, num_null = config.capacity_drop == "score", config.null_experts
            rows, counts = capacity_plan(indices, weights, config.num_experts, limit, by_score=by_score, num_null=num_null)
        self.record(probs, counts)
        del probs
        latent = tokens if self.latent_down is None else self.latent_down(tokens)
        if self.ep.travels and self.ep.by_gather:
            combined = self.travel_by_gather(latent, weights, indices, rows, limit)
        elif self.ep.travels or config.takes_some:
            combined = self.travel(latent, weights, rows, counts, limit)
        elif self.experts.gathers:
            combined = self.experts(latent, weights, rows, counts)
        else:
            combined = combine(self.experts(dispatch(latent, rows, self.slots), weights, rows, counts), rows, self.slots)
        combined = torch.unflatten(combined, 0, x.shape[:2])
        out = combined if self.latent_up is None else self.latent_up(combined)
        return self.add(x, out if self.shared is None else out + self.shared_output(self.shared, normed))

    def shared_output(self, shared: Mlp, normed: Tensor) -> Tensor:
        """The shared expert's output, [B, t, h] in and out, times its gate if it has one."""
        return gated(shared(normed), None if self.shared_gate is None else self.shared_gate(normed))

    def choose(self, tokens: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Local tokens [B·t, h] -> weights fp32 [B·t, k], experts int32 [B·t, k], probs fp32 [B·t, E]; adds the losses to `sums`."""
        router, common = self.router, (self.slots, self.normalize)
        bias, correction = router.bias, self.expert_bias if self.has_bias else router.correction
        if self.factors is None:
            return route(tokens, router.weight, *common, bias=bias, correction=correction, **self.choice)
        weights, indices, probs, log_sums, load = route_scored(
            tokens, router.weight, *common, num_sequences, bias=bias, correction=correction, **self.choice
        )
        scale = self.loss_scale
        factors = self.factors.balance * scale, self.factors.z * scale
        weights, values = router_losses(weights, probs, log_sums, self.cp.sum(self.tp.sum(load)), *factors)
        if torch.is_grad_enabled():
            self.sums[self.num_choices + 1 :] += values if scale == 1 else values / scale
        return weights, indices, probs

    def record(self, probs: Tensor, counts: Tensor) -> None:
        """Add the router statistics of local tokens to `sums`, from probs [N, E] and counts [E]; not during evaluation."""
        if torch.is_grad_enabled():
            self.sums[: self.num_choices] += counts
            self.sums[self.num_choices] += torch.special.entr(probs.detach()).sum()

    def add_sums(self, device: torch.device) -> None:
        """Create the sums of a step on `device`: fp64 [`num_sums`], not in checkpoints; and the experts' bias [E], which is."""
        self.register_buffer("sums", torch.zeros(num_sums(self.num_choices), dtype=torch.float64, device=device), persistent=False)
        if self.has_bias:
            self.register_buffer(EXPERT_BIAS, torch.zeros(self.num_choices, dtype=torch.float64, device=device))

    def travel(self, tokens: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, limit: int | None) -> Tensor:
        """Apply each token's experts on their ranks: tokens [N, h], weights fp32 [N, k], rows [N·k], counts [E] -> [N, h].

        Rows are sent sorted by expert and received by source rank; the experts sort them by expert again. Sent rows and the experts'
        outputs have no local names, so that they are freed after use. With a capacity, `limit` is the number of rows of each expert's
        buffer; rows of null experts, which are last, are dropped.
        """
        some = self.config.takes_some
        arriving, splits = self.ep.announce(counts[: self.config.num_experts], limit)
        order, totals = arrival_plan(arriving, splits.num_received)
        rows, num_tokens = rows[: sum(splits.sent)], tokens.shape[0] if some else None
        sent = dispatch(tokens, rows, self.slots, partial=some), dispatch(weights.view(-1, 1), rows, 1, partial=some)
        arrived, arrived_weights = self.ep.exchange(splits, *sent)
        del sent
        if self.experts.gathers or not self.ep.travels:
            returned = self.ep.give_back(splits, self.experts(arrived, arrived_weights, order, totals))
        else:
            received = dispatch(arrived, order, 1)
            del arrived  # as large as the experts' saved set
            returned = self.ep.give_back(splits, combine(self.experts(received, arrived_weights, order, totals), order, 1))
        return combine(returned, rows, self.slots, num_tokens)

    def travel_by_gather(self, tokens: Tensor, weights: Tensor, indices: Tensor, rows: Tensor, limit: int | None) -> Tensor:
        """Apply this rank's experts to the tokens of all ranks, and sum the ranks' results: tokens [N, h], weights fp32 [N, k] -> [N, h].

        Args:
            tokens: This rank's tokens, or their latents.
            weights: Routing weights.
            indices: Choices, int32 [N, k].
            rows: Rows of the experts' buffers, int32 [E · limit]; not read without a limit.
            limit: Rows of an expert from one rank, its capacity.
        """
        ep, config = self.ep, self.config
        if limit is None:
            chosen, counts = ep.own_rows(indices, self.num_choices, config.num_experts)
        else:
            chosen, counts = ep.own_buffers(rows, config.num_experts, weights.numel())
        arrived_weights = dispatch(ep.gather(weights).view(-1, 1), chosen, 1, partial=True)
        whole = ep.gather(tokens)
        num_tokens = len(whole)
        arrived = dispatch(whole, chosen, self.slots, partial=True)
        del whole  # as large as the tokens of all ranks
        order = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)  # the copies are sorted
        return ep.scatter(combine(self.experts(arrived, arrived_weights, order, counts), chosen, self.slots, num_tokens))
