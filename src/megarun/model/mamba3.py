"""M blocks: Mamba-3, single-input and MIMO."""

import torch
from torch import Tensor, nn

from megakernels.ops.mamba3.piece import Mamba3Settings
from megaplan.spec import models as spec
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_mamba3 import trapezoidal_scan
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class Mamba3Block(MixerBlock):
    """M: in_proj → norms of B and C → scan, gated and summed over ranks → out_proj; no convolution, no gated norm.

    z, x, dt, A and the trapezoid gate are views of in_proj's output, so that its storage is saved once. Under TP a rank has a share of the
    heads with their groups, and computes the angles, which all heads share, from all tokens (R-17); the weights of angles and norms are
    replicated. Under CP the scan receives its state from the previous sequence piece and sends it to the next.

    Source: arXiv:2603.15569, section 3.
    """

    def __init__(self, config: spec.Mamba3, hidden_size: int, eps: float, tp: TensorParallel = ALONE, cp: ContextParallel = WHOLE) -> None:
        super().__init__()
        self.tp, self.cp = tp, cp
        self.head_dim, self.state_dim, self.num_groups = config.head_dim, config.state_dim, tp.share(config.num_groups)
        self.rank = config.mimo_rank
        self.settings = Mamba3Settings(config.chunk_positions, config.save_every, config.rate_activation == "heavy_tail")
        self.num_heads = tp.share(config.expand * hidden_size // config.head_dim)
        self.inner = self.num_heads * config.head_dim
        self.group_width = self.rank * self.num_groups * config.state_dim
        per_rank = (self.num_heads, self.rank, config.head_dim) if self.rank > 1 else None
        per_state = (self.num_heads, self.rank, config.state_dim)
        self.norm = RMSNorm(hidden_size, eps)
        self.in_proj = linear(hidden_size, 2 * self.inner + 2 * self.group_width + 3 * self.num_heads)
        self.angle_proj = linear(hidden_size, config.num_angles) if config.num_angles else None
        self.B_bias = nn.Parameter(torch.empty(per_state))
        self.C_bias = nn.Parameter(torch.empty(per_state))
        self.mimo_x = nn.Parameter(torch.empty(per_rank)) if per_rank else None
        self.mimo_z = nn.Parameter(torch.empty(per_rank)) if per_rank else None
        self.mimo_o = nn.Parameter(torch.empty(per_rank)) if per_rank else None
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.B_norm = RMSNorm(config.state_dim, eps)
        self.C_norm = RMSNorm(config.state_dim, eps)
        self.out_proj = RowLinear(self.inner, hidden_size, tp=tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, inner]: everything between the block's norm and out_proj."""
        projections = (self.in_proj,) if self.angle_proj is None else (self.in_proj, self.angle_proj)
        projected, *angles = self.tp.project(normed, *projections)
        widths = [self.inner, self.inner, self.group_width, self.group_width, *(self.num_heads,) * 3]
        z, x, b, c, dt, a, trapezoid = torch.split(projected, widths, dim=-1)
        heads, groups = (self.num_heads, self.head_dim), (self.rank, self.num_groups, self.state_dim)
        tokens = (
            torch.unflatten(x, -1, heads),
            torch.unflatten(z, -1, heads),
            self.B_norm(torch.unflatten(b, -1, groups)),
            self.C_norm(torch.unflatten(c, -1, groups)),
            dt,
            a,
            trapezoid,
        )
        weights, mimo = (self.B_bias, self.C_bias, self.D, self.dt_bias), (self.mimo_x, self.mimo_z, self.mimo_o)
        return trapezoidal_scan(self.cp, self.settings, starts, tokens, angles[0] if angles else None, weights, mimo).flatten(2)
