"""Norms, linears, and what every block does with the residual stream: what it reads, and what it adds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.nn.functional import linear as linear_op

from megakernels import rms_norm
from megaplan.families.residual import CENTERED, NormKind, ResidualPath
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class RMSNorm(nn.Module):
    """RMS norm over the last dim with a learned scale [width], plus `offset`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, 0.0
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        return rms_norm(x, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Layer norm over the last dim with a learned scale and shift [width], by torch's operation.

    Source: arXiv:1607.06450.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def stream_norm(kind: NormKind, width: int, eps: float) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    return RMSNorm(width, eps) if kind == "rmsnorm" else LayerNorm(width, eps)


def center_norms(module: nn.Module) -> None:
    """Norms of the residual stream and of query and key heads scale by 1 + weight."""
    for name, norm in module.named_modules():
        if name.rpartition(".")[2] in CENTERED and isinstance(norm, RMSNorm):
            norm.offset = 1.0


class Block(nn.Module):
    """A layer: x + f(norm(x)), or another path from the residual stream and back.

    Attributes:
        norm: Of what the block reads; the identity if the only norm is `post_norm`.
        post_norm: Of what it adds; None for none.
    """

    norm: nn.Module
    post_norm: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.post_norm = None

    def place_norms(self, path: ResidualPath, width: int, eps: float) -> None:
        """Put norms of the path's kind where the path has them, in the place of the RMSNorm before the block."""
        if path.placement == "post":
            self.norm = nn.Identity()
        elif path.norm != "rmsnorm":
            self.norm = stream_norm(path.norm, width, eps)
        if path.placement != "pre":
            self.post_norm = stream_norm(path.norm, width, eps)

    def add(self, x: Tensor, made: Tensor) -> Tensor:
        """The residual stream with what the block has made, [B, t, h] each."""
        return x + (made if self.post_norm is None else self.post_norm(made))


def gated(made: Tensor, gate: Tensor | None) -> Tensor:
    """`made` times the sigmoid of a gate of its shape, or of one score a token [B, t, 1]; without a gate as it is."""
    return made if gate is None else made * torch.sigmoid(gate)


def linear(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """A linear layer with weight [out, in], by default without bias."""
    return nn.Linear(in_features, out_features, bias=bias)


class RowLinear(nn.Linear):
    """A row-parallel linear, weight [out, in / tp]: its bias [out] is added once, to the sum over the TP group."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, tp: TensorParallel = ALONE) -> None:
        super().__init__(in_features, out_features, bias)
        self.tp = tp

    @property
    def own_bias(self) -> Tensor | None:
        """What the product itself adds."""
        return self.bias if self.tp.degree == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in / tp] -> the rank's partial output [B, T, out]."""
        return linear_op(x, self.weight, self.own_bias)

    def reduce(self, partial: Tensor) -> Tensor:
        """Partial outputs [B, T, out] -> local tokens [B, t, out]; the product's input is free by then."""
        out = self.tp.reduce(partial)
        return out if self.bias is None or self.tp.degree == 1 else out.add_(self.bias)
