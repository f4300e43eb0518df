"""Norms, linears, and how every block reads the residual stream and adds to it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.nn.functional import linear as linear_op

from megakernels import rms_norm
from megaplan.families.residual import CENTERED, ResidualPath, StreamNorm
from megaplan.inventory.towers import STATED
from megaplan.spec.models import Precision
from megarun.dtypes import TORCH_DTYPES
from megarun.model.attention_residuals import DepthAttention
from megarun.model.payload import read_together
from megarun.model.rotary import Rotary
from megarun.model.streams import StreamConnections
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class RMSNorm(nn.Module):
    """RMS norm over the last dim with a learned scale [width], plus `offset`, times a constant factor."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.offset, self.factor = eps, 0.0, 1.0
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        normed = rms_norm(x, self.weight, self.eps, self.offset)
        return normed if self.factor == 1 else normed * self.factor


class LayerNorm(nn.Module):
    """Layer norm over the last dim with a learned scale, and with `bias` a shift [width], by torch's operation, times a constant factor.

    Source: arXiv:1607.06450.
    """

    def __init__(self, width: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.eps, self.factor = eps, 1.0
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        normed = layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return normed if self.factor == 1 else normed * self.factor


class PlainNorm(nn.Module):
    """RMS norm over the last dim without a scale, times a constant factor."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps, self.factor = width, eps, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        normed = rms_norm(x, torch.ones(self.width, dtype=x.dtype, device=x.device), self.eps)
        return normed if self.factor == 1 else normed * self.factor


def stream_norm(kind: StreamNorm, width: int, eps: float) -> RMSNorm | LayerNorm | PlainNorm:
    """A norm of the residual stream."""
    if kind == "rmsnorm_no_scale":
        return PlainNorm(width, eps)
    return RMSNorm(width, eps) if kind == "rmsnorm" else LayerNorm(width, eps, bias=kind == "layernorm")


def center_norms(module: nn.Module) -> None:
    """Norms of the residual stream of text and of its query and key heads scale by 1 + weight."""
    for name, norm in module.named_modules():
        of_text = name.partition(".")[0] not in STATED
        if of_text and name.rpartition(".")[2] in CENTERED and isinstance(norm, RMSNorm):
            norm.offset = 1.0


class GivenNorm(nn.Module):
    """Norm of a block that shares the norm of the block before: it returns that output once, in the dtype of the block."""

    given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Take [B, t, h] and return the given output in the dtype of x."""
        given, self.given = self.given, None
        if given is None:
            raise RuntimeError("the block before did not pass its normed input")
        return given.to(x.dtype)


class Block(nn.Module):
    """A layer: x + f(norm(x)), or another path from the residual stream and back.

    Attributes:
        norm: Norm of the block's input; the identity if the only norm is `post_norm`.
        post_norm: Norm of the block's output before it is added; None for none.
        streams: Connections with several residual streams; None for one stream.
        depth: Module that reads earlier results in place of the residual stream; None with a stream.
        starts_sum: True if the result is added to nothing.
        own_dtype: Dtype of the block's computation, if it differs from the dtype of the earlier results that it reads; None if that is
            theirs.
        multiplier: Factor of the block's output.
        letter: Letter of its family in the pattern; empty in a prediction depth.
        sends_values: True if it returns values for later layers too.
    """

    norm: nn.Module
    post_norm: nn.Module | None
    streams: StreamConnections | None
    depth: DepthAttention | None
    own_dtype: torch.dtype | None
    sends_values = False

    def __init__(self) -> None:
        super().__init__()
        self.post_norm, self.streams, self.depth, self.multiplier, self.letter = None, None, None, 1.0, ""
        self.starts_sum, self.own_dtype = False, None
        self._sum: Tensor | None = None
        self._normed: Tensor | None = None

    def place_norms(self, path: ResidualPath, width: int, eps: float) -> None:
        """Replace the RMSNorm before the block by norms of the path's kind, at the path's places."""
        if path.placement == "post":
            self.norm = nn.Identity()
        elif path.norm != "rmsnorm":
            self.norm = stream_norm(path.norm, width, eps)
        if path.placement != "pre":
            self.post_norm = stream_norm(path.norm, width, eps)
        if path.streams is not None:
            self.streams = StreamConnections(path.streams, width, eps)
            self.forward = partial(self._on_streams, self.forward, self.streams)
        if path.depth is not None:
            self.depth, self.starts_sum = DepthAttention(width, eps), path.depth.starts
            self.forward = partial(self._on_depth, self.forward, self.depth)

    def add(self, x: Tensor, made: Tensor) -> Tensor:
        """Add the block's output to the residual stream, [B, t, h] each, or to the streams or the sum of which it has read x."""
        made = made if self.post_norm is None else self.post_norm(made)
        made = made if self.own_dtype is None else made.to(self.stream_dtype)
        if self.starts_sum:
            return made if self.multiplier == 1 else made * self.multiplier
        x = x if self._sum is None else self._sum
        return torch.add(x, made, alpha=self.multiplier) if self.streams is None else self.streams.expand(made, self.multiplier)

    def share_norm(self, *, reads: bool, passes_on: bool) -> None:
        """Read the previous block's normed input, or pass this block's to the next; stream and normed stream are then a pair."""
        if reads:
            self.norm = GivenNorm()
        elif passes_on:
            self.norm.register_forward_hook(self._note)
        if reads or passes_on:
            self.forward = partial(self._with_pairs, self.forward, reads, passes_on)

    def compute_in(self, letter: str, precision: Precision) -> None:
        """Compute in the dtype of a letter: a stream of another dtype is cast on the way in and on the way out.

        Instead of a stream, the block's input from earlier results is cast, and its own result is cast before it is added to their sum.
        """
        self.letter, own, stream = letter, TORCH_DTYPES[precision.of(letter)], TORCH_DTYPES[precision.params]
        if own is stream:
            return
        if self.depth is None:
            self.forward = partial(self._with_casts, self.forward, own, stream)
        else:
            self.own_dtype, self.stream_dtype = own, stream

    def read_values(self) -> None:
        """Return the gradients of values of earlier layers with its input's, when all its operations have run backward."""
        self.forward = partial(self._reading, self.forward)

    def _reading(self, inner: Callable[..., Any], x: Tensor | tuple[Tensor, ...], shared: Any, *rest: Any) -> Any:
        own = x if isinstance(x, tuple) else (x,)
        read = read_together(*own, *shared.given)
        x = read[: len(own)] if isinstance(x, tuple) else read[0]
        return inner(x, shared._replace(given=read[len(own) :]), *rest)

    def _on_streams(self, inner: Callable[..., Any], streams: StreamConnections, x: Tensor, *rest: Any) -> Any:
        return inner(streams(x), *rest)

    def _on_depth(self, inner: Callable[..., Any], depth: DepthAttention, values: tuple[Tensor, ...], *rest: Any) -> Any:
        self._sum = values[0]
        try:
            return inner(depth(values) if self.own_dtype is None else depth(values).to(self.own_dtype), *rest)
        finally:  # a recomputed forward may stop before its addition
            self._sum = None

    def _with_casts(self, inner: Callable[..., Any], own: torch.dtype, stream: torch.dtype, x: Any, *rest: Any) -> Any:
        return _with_stream(stream, inner(_with_stream(own, x), *rest))

    def _note(self, _norm: nn.Module, _inputs: tuple[Tensor, ...], normed: Tensor) -> None:
        self._normed = normed

    def _with_pairs(self, inner: Callable[..., Tensor], reads: bool, passes_on: bool, x: Tensor | tuple[Tensor, Tensor], *rest: Any) -> Any:
        if reads:
            x, self.norm.given = x
            self._normed = self.norm.given if passes_on else None
        try:
            out = inner(x, *rest)
        finally:  # a recomputed forward may stop before its end
            normed, self._normed = self._normed, None
        if not passes_on:
            return out
        if normed is None:
            raise RuntimeError("a block that passes on its normed input has not computed it")
        return ((out[0], normed), out[1]) if self.sends_values else (out, normed)


def _with_stream(dtype: torch.dtype, x: Any) -> Any:
    """The stream in another dtype; a norm that is passed with it, and values for later layers, keep their dtype."""
    return (_with_stream(dtype, x[0]), *x[1:]) if isinstance(x, tuple) else x.to(dtype)


def used_dtype(module: nn.Module, precision: Precision) -> torch.dtype:
    """Dtype in which the parameters of a layer, of a prediction depth, or of a stage outside of them are used."""
    return TORCH_DTYPES[precision.of(module.letter if isinstance(module, Block) else "")]


def gated(made: Tensor, gate: Tensor | None, *, by_head: bool = False, bias: Tensor | None = None) -> Tensor:
    """`made` times the sigmoid of a gate of its shape, or of one score per token [B, t, 1]; unchanged without a gate.

    With `by_head` the gate has one score for each head of `made`, [B, t, heads], whose channels are next to each other. A bias [heads]
    is added to the gate of each head.
    """
    if gate is None or not by_head:
        return made if gate is None else made * torch.sigmoid(_biased(gate, bias))
    by_heads = torch.unflatten(made, -1, (gate.shape[-1], -1))
    return torch.flatten(by_heads * torch.sigmoid(_biased(gate, bias)).unsqueeze(-1), -2)


def _biased(gate: Tensor, bias: Tensor | None) -> Tensor:
    """A gate plus its heads' bias; a separate function, so that no local name keeps the sum alive."""
    return gate if bias is None else torch.flatten(torch.unflatten(gate, -1, (bias.shape[0], -1)) + bias.unsqueeze(-1), -2)


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
        """Bias that the product itself adds."""
        return self.bias if self.tp.degree == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in / tp] -> the rank's partial output [B, T, out]."""
        return linear_op(x, self.weight, self.own_bias)

    def reduce(self, partial: Tensor) -> Tensor:
        """Partial outputs [B, T, out] -> local tokens [B, t, out]; the product's input is free by then."""
        out = self.tp.reduce(partial)
        return out if self.bias is None or self.tp.degree == 1 else out.add_(self.bias)


class MixerBlock(Block):
    """A layer that mixes positions: x + out_proj(mix(norm(x))), out_proj row-parallel over the TP group."""

    out_proj: RowLinear

    def forward(self, x: Tensor, rotary: Rotary | None = None, starts: Tensor | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream, local tokens [B, t, h], in and out; document starts of all tokens [B, T] where rows are packed."""
        return self.add(x, self.out_proj.reduce(self.out_proj(self.mix(self.norm(x), starts))))

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, width / tp]: everything between the block's norm and out_proj."""
        raise NotImplementedError
