"""M blocks: Mamba-1."""

import torch
from torch import Tensor, nn

from megakernels import swiglu
from megaplan.spec import models as spec
from megarun.model.mamba import Convolution
from megarun.model.norm import MixerBlock, PlainNorm, RMSNorm, RowLinear, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_scans import scan_channels
from megarun.parallel.groups.tensor import ALONE, TensorParallel, exchanged


class Mamba1Block(MixerBlock):
    """M: in_proj → causal convolution → x_proj → dt_proj → selective scan, gated → out_proj.

    x and z are views of in_proj's output; the step's latent, B and C are views of x_proj's output, which all channels share: under TP,
    which shards channels, that output and its gradient are summed over the group. Under CP convolution and scan receive their state from
    the previous sequence piece and send it to the next.

    Source: arXiv:2312.00752, figure 3 and section 3.6.
    """

    def __init__(self, config: spec.Mamba1, hidden_size: int, eps: float, tp: TensorParallel = ALONE, cp: ContextParallel = WHOLE) -> None:
        super().__init__()
        self.tp, self.cp, self.save_every = tp, cp, config.save_every
        self.inner, self.state_dim, self.rank = tp.share(config.expand * hidden_size), config.state_dim, config.step_width(hidden_size)
        self.norm = RMSNorm(hidden_size, eps)
        self.in_proj = linear(hidden_size, 2 * self.inner, config.bias)
        self.conv1d = Convolution(self.inner, config.conv_kernel, config.conv_bias, cp)
        self.x_proj = linear(self.inner, self.rank + 2 * self.state_dim)
        self.dt_proj = linear(self.rank, self.inner)
        self.dt_bias = nn.Parameter(torch.empty(self.inner))
        self.A_log = nn.Parameter(torch.empty(self.inner, self.state_dim))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.norms_steps = config.inner_norm != "none"
        if self.norms_steps:
            kind, inner_eps = RMSNorm if config.inner_norm == "scaled" else PlainNorm, config.inner_norm_eps or eps
            self.dt_norm = kind(self.rank, inner_eps)
            self.B_norm = kind(self.state_dim, inner_eps)
            self.C_norm = kind(self.state_dim, inner_eps)
        self.out_proj = RowLinear(self.inner, hidden_size, config.bias, tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, I]: everything between the block's norm and out_proj."""
        y, z = self.scan(normed, starts)
        return swiglu(z, y)

    def scan(self, normed: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, t, h] -> the scan's output and its gate z, [B, T, I] each."""
        x, z = torch.split(self.tp.project(normed, self.in_proj)[0], self.inner, dim=-1)
        x = self.conv1d(x, starts)
        dt, b, c = self.steps(x)
        return scan_channels(self.cp, self.save_every, starts, x, dt, self.A_log, b, c, self.D, self.dt_bias), z

    def steps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's output [B, T, I] -> the step dt [B, T, I], and of all channels B and C [B, T, S]."""
        latent, b, c = torch.split(summed(self.tp, self.x_proj(x)), [self.rank, self.state_dim, self.state_dim], dim=-1)
        if self.norms_steps:
            latent, b, c = self.dt_norm(latent), self.B_norm(b), self.C_norm(c)
        return self.dt_proj(latent), b, c


def summed(tp: TensorParallel, partial: Tensor) -> Tensor:
    """Sum of the ranks' partial results, on every rank; backward sums the gradients of all ranks."""

    def summed_copy(x: Tensor) -> Tensor:
        return tp.sum(x.clone())

    return partial if tp.degree == 1 else exchanged(summed_copy, summed_copy, partial)
