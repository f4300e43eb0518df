"""R blocks: M²RNN, a non-linear recurrence over one matrix state per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megakernels.m2rnn import m2rnn
from megakernels.rms_norm import gated_rms_norm
from megaplan.spec import models as spec
from megarun.model.mamba import Convolution, Scale
from megarun.model.norm import RMSNorm, linear
from megarun.model.rotary import Rotary


class MatrixRecurrenceBlock(nn.Module):
    """R: projections → causal convolutions → recurrence → gated norm → out_proj; q and k are shared by all heads.

    Source: arXiv:2603.14360.
    """

    def __init__(self, config: spec.MatrixRecurrence, hidden_size: int, eps: float) -> None:
        super().__init__()
        heads, keys, values = config.num_heads, config.key_dim, config.value_dim
        self.num_heads, self.key_dim, self.value_dim = heads, keys, values
        self.save_every, self.eps = config.save_every, eps
        self.norm = RMSNorm(hidden_size, eps)
        self.qk_proj = linear(hidden_size, 2 * keys)
        self.v_proj = linear(hidden_size, heads * values)
        self.forget_proj = linear(hidden_size, heads)
        self.gate_proj = linear(hidden_size, heads * values)
        self.conv_qk = Convolution(2 * keys, config.conv_kernel)
        self.conv_v = Convolution(heads * values, config.conv_kernel)
        self.state_map = nn.Parameter(torch.empty(heads, values, values))
        self.D = nn.Parameter(torch.empty(heads, values))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.gated_norm = Scale(heads * values)
        self.out_proj = linear(heads * values, hidden_size)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream [B, T, h] in and out."""
        normed = self.norm(x)
        q, k = self.conv_qk(self.qk_proj(normed)).split(self.key_dim, dim=-1)
        v = self.conv_v(self.v_proj(normed)).unflatten(-1, (self.num_heads, self.value_dim))
        return x + self.core(q, k, v, self.forget_proj(normed), self.gate_proj(normed))

    def core(self, q: Tensor, k: Tensor, v: Tensor, forget: Tensor, gate: Tensor) -> Tensor:
        """q, k [B, T, K], v [B, T, H, V], forget [B, T, H], gate [B, T, H·V] -> [B, T, h]: recurrence, gated norm, out_proj."""
        out: Tensor = self.out_proj(gated_rms_norm(self.recur(q, k, v, forget), gate, self.gated_norm.weight, self.eps, 1))
        return out

    def recur(self, q: Tensor, k: Tensor, v: Tensor, forget: Tensor) -> Tensor:
        """The recurrence alone, [B, T, H·V]."""
        return m2rnn(q, k, v, forget, self.state_map, self.D, self.dt_bias, self.A_log, self.save_every).flatten(2)
