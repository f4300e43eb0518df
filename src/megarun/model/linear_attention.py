"""G blocks: gated delta net and Kimi delta attention."""

import torch
from torch import Tensor, nn

from megakernels import head_gated_norm
from megakernels.ops.gated_delta.piece import DeltaSettings
from megaplan.spec import models as spec
from megarun.model.mamba import Convolution, Scale
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_scans import delta_rule
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class LinearAttentionBlock(MixerBlock):
    """G: projections → causal convolutions → gated delta rule → gated norm per head → out_proj.

    Kimi delta attention has a decay per row of a head's state, and makes decays and gate from latents that all heads share. Under TP a rank
    has a share of the key heads with their value heads, and computes the latents from all tokens. Under CP convolutions and delta rule
    receive their state from the previous sequence piece and send it to the next.

    Source: arXiv:2412.06464, figure 1; arXiv:2510.26692, section 4.
    """

    def __init__(
        self,
        config: spec.GatedDeltaNet | spec.KimiDeltaAttention,
        hidden_size: int,
        eps: float,
        tp: TensorParallel = ALONE,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.by_row, self.latent = isinstance(config, spec.KimiDeltaAttention), config.has_latents
        self.tp, self.cp, self.eps = tp, cp, (None if isinstance(config, spec.KimiDeltaAttention) else config.gated_norm_eps) or eps
        self.key_heads, self.num_heads = tp.share(config.num_key_heads), tp.share(config.num_value_heads)
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.settings = DeltaSettings(config.chunk_size, config.save_every, 2.0 if config.negative_eigenvalues else 1.0)
        keys, values = self.key_heads * config.key_dim, self.num_heads * config.value_dim
        self.norm = RMSNorm(hidden_size, eps)
        self.qk_proj = linear(hidden_size, 2 * keys)
        self.v_proj = linear(hidden_size, values)
        self.beta_proj = linear(hidden_size, self.num_heads)
        if self.latent:
            self.latent_proj = linear(hidden_size, 2 * config.value_dim)
            self.decay_up = linear(config.value_dim, keys)
            self.gate_up = linear(config.value_dim, values)
        else:
            self.decay_proj = linear(hidden_size, keys if self.by_row else self.num_heads)
            self.gate_proj = linear(hidden_size, values)
        self.conv_qk = Convolution(2 * keys, config.conv_kernel, bias=False, cp=cp)
        self.conv_v = Convolution(values, config.conv_kernel, bias=False, cp=cp)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty((self.num_heads, config.key_dim) if self.by_row else (self.num_heads,)))
        self.gated_norm = Scale(config.value_dim)
        self.out_proj = RowLinear(values, hidden_size, tp=tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, H·V]: everything between the block's norm and out_proj."""
        y, gate = self.run_rule(normed, starts)
        return head_gated_norm(y, torch.unflatten(gate, -1, y.shape[2:]), self.gated_norm.weight, self.eps, sigmoid=self.by_row).flatten(2)

    def run_rule(self, normed: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, t, h] -> the delta rule's output [B, T, H, V] and its gate [B, T, H·V]."""
        own = (self.latent_proj,) if self.latent else (self.decay_proj, self.gate_proj)
        # names are rebound, so that the inputs of a step are freed
        qk, v, beta, *gates = self.tp.project(normed, self.qk_proj, self.v_proj, self.beta_proj, *own)
        qk = self.conv_qk(qk, starts)
        v = self.conv_v(v, starts)
        if self.latent:
            gates = self.expand(*gates)
        q, k = (torch.unflatten(each, -1, (self.key_heads, self.key_dim)) for each in qk.chunk(2, dim=-1))
        decay = torch.unflatten(gates[0], -1, (self.num_heads, self.key_dim)) if self.by_row else gates[0]
        inputs = q, k, torch.unflatten(v, -1, (self.num_heads, self.value_dim)), decay, beta, self.A_log, self.dt_bias
        return delta_rule(self.cp, self.settings, starts, *inputs), gates[1]

    def expand(self, latents: Tensor) -> list[Tensor]:
        """[B, T, 2d] -> decays and gate of the local heads, [B, T, H·d] each."""
        of_decay, of_gate = latents.chunk(2, dim=-1)
        return [self.decay_up(of_decay), self.gate_up(of_gate)]
