"""E blocks: token-choice top-k experts and a shared expert on the same normed input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megakernels.moe import combine, dispatch, dispatch_plan, experts, route
from megaplan.spec import models as spec
from megarun.model.mlp import Mlp
from megarun.model.norm import RMSNorm, linear
from megarun.model.rotary import Rotary


class ExpertBank(nn.Module):
    """The stacked matrices of E experts, gate and up [E, F, h], down [E, h, F]: a module of its own, wrapped before its block (R-55)."""

    def __init__(self, config: spec.MixtureOfExperts, hidden_size: int) -> None:
        super().__init__()
        num_experts, width = config.num_experts, config.ffn_hidden_size
        self.activation = config.activation
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size)) if config.activation == "swiglu" else None
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))

    def forward(self, x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, h] sorted by expert, weights fp32 [N, k], rows [M], counts [E] -> [M, h], each row scaled by its weight."""
        return experts(x, weights, rows, counts, self.gate_proj, self.up_proj, self.down_proj, self.activation)


class ExpertBlock(nn.Module):
    """E: x + combine(experts(dispatch(norm(x)))) + shared(norm(x))."""

    def __init__(self, config: spec.MixtureOfExperts, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.normalize = config.num_experts, config.top_k, config.normalize_top_k
        self.norm = RMSNorm(hidden_size, eps)
        self.router = linear(hidden_size, config.num_experts)
        self.experts = ExpertBank(config, hidden_size)
        shared_width = config.shared_ffn_hidden_size
        self.shared = Mlp(hidden_size, shared_width, config.activation) if shared_width else None

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream [B, T, h] in and out."""
        normed = self.norm(x)
        tokens = normed.flatten(0, 1)
        weights, indices = route(tokens, self.router.weight, self.top_k, self.normalize)
        rows, counts = dispatch_plan(indices, self.num_experts)
        processed = self.experts(dispatch(tokens, rows, self.top_k), weights, rows, counts)
        out = combine(processed, rows, self.top_k).view_as(x)
        return x + (out if self.shared is None else out + self.shared(normed))
