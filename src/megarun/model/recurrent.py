"""R blocks: M²RNN, a non-linear recurrence over one matrix state per head."""

import torch
from torch import Tensor, nn

from megaplan.spec import models as spec
from megarun.model.mamba import Convolution, Scale
from megarun.model.norm import Block, RMSNorm, linear
from megarun.model.rotary import Rotary
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_scans import recur
from megarun.parallel.groups.tensor import ALONE, TensorParallel
from megarun.parallel.groups.tensor_norm import row_gated_rms_norm


class MatrixRecurrenceBlock(Block):
    """R: projections → causal convolutions → recurrence → gated norm → out_proj; q and k are shared by all heads.

    Under TP a rank has a share of the heads, and computes q and k for them from all tokens; the gated norm is over the heads of all ranks.
    Under CP convolutions and recurrence receive their state from the previous sequence piece and send it to the next.

    Source: arXiv:2603.14360.
    """

    def __init__(
        self, config: spec.MatrixRecurrence, hidden_size: int, eps: float, tp: TensorParallel = ALONE, cp: ContextParallel = WHOLE
    ) -> None:
        super().__init__()
        heads, keys, values = tp.share(config.num_heads), config.key_dim, config.value_dim
        self.tp, self.cp, self.num_heads, self.key_dim, self.value_dim = tp, cp, heads, keys, values
        self.save_every, self.eps = config.save_every, eps
        self.norm = RMSNorm(hidden_size, eps)
        self.qk_proj = linear(hidden_size, 2 * keys)
        self.v_proj = linear(hidden_size, heads * values)
        self.forget_proj = linear(hidden_size, heads)
        self.gate_proj = linear(hidden_size, heads * values)
        self.conv_qk = Convolution(2 * keys, config.conv_kernel, cp=cp)
        self.conv_v = Convolution(heads * values, config.conv_kernel, cp=cp)
        self.state_map = nn.Parameter(torch.empty(heads, values, values))
        self.D = nn.Parameter(torch.empty(heads, values))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.gated_norm = Scale(heads * values)
        self.out_proj = linear(heads * values, hidden_size)

    def forward(self, x: Tensor, rotary: Rotary | None = None, starts: Tensor | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream, local tokens [B, t, h], in and out; document starts of all tokens [B, T] where rows are packed."""
        qk, v, forget, gate = self.tp.project(self.norm(x), self.qk_proj, self.v_proj, self.forget_proj, self.gate_proj)
        qk = self.conv_qk(qk, starts)
        v = self.conv_v(v, starts).unflatten(-1, (self.num_heads, self.value_dim))
        q, k = torch.split(qk, self.key_dim, dim=-1)
        return self.add(x, self.core(q, k, v, forget, gate, starts))

    def core(self, q: Tensor, k: Tensor, v: Tensor, forget: Tensor, gate: Tensor, starts: Tensor | None = None) -> Tensor:
        """q, k [B, T, K], v [B, T, H, V], forget [B, T, H], gate [B, T, H·V] -> [B, t, h]: recurrence, gated norm, out_proj."""
        # avoid locals that extend lifetimes
        return self.tp.reduce(self.out_proj(self.norm_heads(self.recur(q, k, v, forget, starts), gate)))

    def norm_heads(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm over the heads of all ranks, [B, T, H·V] in and out."""
        return row_gated_rms_norm(self.tp, y, gate, self.gated_norm.weight, self.eps)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, forget: Tensor, starts: Tensor | None = None) -> Tensor:
        """The recurrence alone, [B, T, H·V]."""
        parameters = self.state_map, self.D, self.dt_bias, self.A_log
        return recur(self.cp, self.save_every, starts, q, k, v, forget, *parameters).flatten(2)
