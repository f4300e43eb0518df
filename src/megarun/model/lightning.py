"""G blocks: lightning attention."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from megakernels import accumulator_dtype
from megaplan.families.linear_attention.lightning import log_decays
from megaplan.spec import models as spec
from megarun.model.mamba import Scale
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, gated, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_scans import scan
from megarun.parallel.groups.tensor import ALONE, TensorParallel
from megarun.parallel.groups.tensor_norm import row_rms_norm

ONE_STEP = 1.0, 1.0
"""Limits of the scan's step sizes, which are all 1."""


class LightningBlock(MixerBlock):
    """G: queries, keys and values of one product, silu → states that decay by a constant → norm of all heads → gate → out_proj.

    Mamba-2's scan runs it, with steps of one (`megaplan.families.linear_attention.lightning`). Under TP a rank has a share of the heads;
    ranks sum the squares of the norm. Under CP the scan receives its state from the previous sequence piece and sends it to the next.

    Source: arXiv:2401.04658; arXiv:2501.08313, section 2.2.
    """

    def __init__(
        self,
        config: spec.LightningAttention,
        hidden_size: int,
        eps: float,
        letters: Sequence[str],
        layer: int,
        tp: TensorParallel = ALONE,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.tp, self.cp, self.eps, self.chunk_size = tp, cp, config.gated_norm_eps or eps, config.chunk_size
        self.num_heads, self.head_dim = tp.share(config.num_heads), config.head_dim
        first, self.decay_step = log_decays(config.num_heads, letters, layer)
        self.first_decay = first + tp.index * self.num_heads * self.decay_step
        width = self.num_heads * self.head_dim
        self.norm = RMSNorm(hidden_size, eps)
        self.qkv_proj = linear(hidden_size, 3 * width)
        self.gate_proj = linear(hidden_size, width)
        self.gated_norm = Scale(width)
        self.out_proj = RowLinear(width, hidden_size, tp=tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, H·d]: everything between the block's norm and out_proj."""
        y, gate = self.read_states(normed, starts)
        return gated(row_rms_norm(self.tp, y, self.gated_norm.weight, self.eps), gate)

    def read_states(self, normed: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, t, h] -> the heads' outputs, and the gate, [B, T, H·d] each."""
        qkv, gate = self.tp.project(normed, self.qkv_proj, self.gate_proj)
        qkv = silu(qkv)
        q, k, v = torch.unflatten(qkv, -1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        decays, zeros = self.constants(qkv)
        steps = qkv.new_zeros(1).expand(v.shape[:3])
        return scan(self.cp, self.chunk_size, ONE_STEP, starts, v, steps, decays, k, q, zeros, zeros).flatten(2), gate

    def constants(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays of the local heads, and zeros, [H] each."""
        dtype = accumulator_dtype(like.dtype)
        decays = torch.arange(self.num_heads, dtype=dtype, device=like.device).mul_(self.decay_step).add_(self.first_decay)
        return decays, torch.zeros_like(decays)
