"""M blocks: Mamba-2."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from megakernels import gated_rms_norm, swiglu
from megaplan.spec import models as spec
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay import convolve
from megarun.parallel.groups.relay_scans import scan
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class Convolution(nn.Module):
    """Weights of a causal depthwise convolution: weight [C, K], bias [C] or none."""

    def __init__(self, num_channels: int, kernel: int, bias: bool = True, cp: ContextParallel = WHOLE) -> None:
        super().__init__()
        self.cp = cp
        self.weight = nn.Parameter(torch.empty(num_channels, kernel))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """silu(conv(x)): x [B, T, C] -> [B, T, C] contiguous."""
        return convolve(self.cp, x, self.weight, self.bias, starts)


class Scale(nn.Module):
    """The scale [width] of a gated norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _ScaledParts(torch.autograd.Function):
    """Columns times the factor of their part; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], factors: tuple[float, ...]) -> Tensor:
        """[..., sum of widths] in and out."""
        ctx.widths, ctx.factors = widths, factors
        return _times(x, widths, factors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The same of the gradient."""
        return _times(gradient, ctx.widths, ctx.factors), None, None


def _times(x: Tensor, widths: tuple[int, ...], factors: tuple[float, ...]) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for part, made, factor in zip(torch.split(x, list(widths), -1), torch.split(out, list(widths), -1), factors, strict=True):
        torch.mul(part, factor, out=made)
    return out


def scale_parts(x: Tensor, widths: tuple[int, ...], factors: tuple[float, ...]) -> Tensor:
    """Columns [..., sum of widths], each times the factor of its part."""
    scaled: Tensor = _ScaledParts.apply(x, widths, factors)  # type: ignore[no-untyped-call]
    return scaled


class Mamba2Block(MixerBlock):
    """M: in_proj → causal convolution → state-space dual scan → gated norm, or the gate alone → out_proj.

    z, x, B, C and dt are views of in_proj's output, so that its storage is saved once. Under TP a rank has a share of the heads with their
    groups (R-17): the state-space scan and the group norm are local to a rank. Under CP convolution and scan receive their state from the
    previous sequence piece and send it to the next.

    Source: arXiv:2405.21060, figure 6 (sequential block) and section 7.
    """

    def __init__(self, config: spec.Mamba2, hidden_size: int, eps: float, tp: TensorParallel = ALONE, cp: ContextParallel = WHOLE) -> None:
        super().__init__()
        self.tp, self.cp = tp, cp
        self.head_dim, self.state_dim, self.num_groups = config.head_dim, config.state_dim, tp.share(config.num_groups)
        self.num_heads = tp.share(config.num_heads or config.expand * hidden_size // config.head_dim)
        self.inner = self.num_heads * config.head_dim
        self.group_width = self.num_groups * config.state_dim
        self.eps, self.chunk_size = eps, config.chunk_size
        self.factors = config.part_multipliers
        self.dt_limits = config.time_step_min, math.inf if config.time_step_max is None else config.time_step_max
        self.norm = RMSNorm(hidden_size, eps)
        self.in_proj = linear(hidden_size, 2 * self.inner + 2 * self.group_width + self.num_heads, config.bias)
        self.conv1d = Convolution(self.inner + 2 * self.group_width, config.conv_kernel, config.conv_bias, cp)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.gated_norm = Scale(self.inner) if config.gated_norm else None
        self.out_proj = RowLinear(self.inner, hidden_size, config.bias, tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, inner]: everything between the block's norm and out_proj."""
        y, z = self.scan(normed, starts)
        return swiglu(z, y) if self.gated_norm is None else gated_rms_norm(y, z, self.gated_norm.weight, self.eps, self.num_groups)

    def project(self, normed: Tensor) -> Tensor:
        """[B, t, h] -> z, x, B, C and dt side by side [B, T, P], each times its factor."""
        projected = self.tp.project(normed, self.in_proj)[0]
        if self.factors is None:
            return projected
        widths = self.inner, self.inner, self.group_width, self.group_width, self.num_heads
        return scale_parts(projected, widths, self.factors)

    def scan(self, normed: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, t, h] -> y and its gate z, [B, T, inner] each."""
        widths = [self.inner, self.inner + 2 * self.group_width, self.num_heads]
        z, mixed, dt = torch.split(self.project(normed), widths, dim=-1)
        inner, b, c = self.conv1d(mixed, starts).split([self.inner, self.group_width, self.group_width], dim=-1)
        inner = inner.unflatten(-1, (self.num_heads, self.head_dim))
        b, c = b.unflatten(-1, (self.num_groups, self.state_dim)), c.unflatten(-1, (self.num_groups, self.state_dim))
        inputs = inner, dt, self.A_log, b, c, self.D, self.dt_bias
        return scan(self.cp, self.chunk_size, self.dt_limits, starts, *inputs).flatten(2), z
