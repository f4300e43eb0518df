"""Products of frozen linears and their low-rank adapters: x Wᵀ + scale · x Aᵀ Bᵀ, without a gradient of W.

An adapted product saves its input and the adapter's narrow rows x Aᵀ. Its backward adds both terms of the input's gradient into one tensor.
A packed W (`megarun.parallel.groups.packed`) is made a matrix for each product, in forward and again in backward.
Under TP a column-parallel product gathers its input as `TensorParallel.project` does, and again in backward if an adapter needs it for A's
gradient. If a rank has an unsharded A or B of a linear that TP shards, its gradient is a partial sum over the group
(`sum_replicated`).

Source: arXiv:2106.09685, section 4.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megarun.parallel.groups.deferred import product
from megarun.parallel.groups.packed import PackedWeight, matrix, weight_of

_unsafe_view = torch.ops.aten._unsafe_view.default


class Adapter(NamedTuple):
    """A linear's adapter: gathered A [rank, in] and B [out, rank], and the factor of their product."""

    a: Tensor
    b: Tensor
    scale: float


class Gathers(Protocol):
    """Operations of a TP group that a column-parallel product needs."""

    def start_gather(self, x: Tensor) -> Any:
        """Start to gather local tokens."""
        ...

    def start_reduce(self, partial: Tensor) -> Any:
        """Start a reduce-scatter of partial results."""
        ...


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of a linear; None without one."""
    a: Tensor | None = getattr(module, "lora_a", None)
    return None if a is None else Adapter(a, module.lora_b, module.lora_scale)  # type: ignore[arg-type]  # set by `add_adapter`


def add_adapter(module: nn.Linear, a: Sequence[int], b: Sequence[int], scale: float, dtype: torch.dtype) -> None:
    """Give a linear the parameters A and B of these local shapes, and make its forward add their product."""
    module.lora_a, module.lora_b = (nn.Parameter(torch.empty(*shape, dtype=dtype, device=module.weight.device)) for shape in (a, b))
    module.lora_scale = scale  # type: ignore[assignment]  # a plain attribute
    run_frozen(module)


def run_frozen(module: nn.Linear) -> None:
    """Replace the forward of a linear with a packed weight, an adapter or both by this module's."""
    module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    bias = module.own_bias if hasattr(module, "own_bias") else module.bias
    adapter, weight = adapter_of(module), weight_of(module)
    of_adapter = () if adapter is None else adapter
    out: Tensor = _apply(_FrozenLinear if adapter is None else _AdaptedLinear, x, weight, bias, *of_adapter)
    return out


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


def start_gradients(x: Tensor) -> Tensor:
    """The stream after frozen embeddings, x itself, with a gradient: so that every layer runs as on the other stages."""
    if not torch.is_grad_enabled():
        return x
    started: Tensor = _Start.apply(x, x.new_empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return started


def frozen_column_parallel(
    tp: Gathers, x: Tensor, weights: Sequence[Tensor | PackedWeight], biases: Sequence[Tensor | None], adapters: Sequence[Adapter | None]
) -> tuple[Tensor, ...]:
    """Column-parallel linears of one input whose weights are frozen: local tokens [B, t, in] -> [B, T, out / tp] each.

    Args:
        tp: TP group of more than one rank.
        x: Local tokens.
        weights: Gathered parameters, [out / tp, in] each.
        biases: Bias of each linear, or None.
        adapters: Adapter of each linear, or None.
    """
    scales = tuple(None if adapter is None else adapter.scale for adapter in adapters)
    pairs = [each for adapter in adapters if adapter is not None for each in (adapter.a, adapter.b)]
    results: tuple[Tensor, ...] = _apply(_FrozenColumnParallel, tp, scales, x, *weights, *biases, *pairs)
    return results


class _Start(torch.autograd.Function):
    """Identity of x without a gradient; the second input makes the output require one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _start: Tensor) -> Tensor:  # noqa: ARG004 (autograd's signature)
        """Return x."""
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004 (autograd's signature)
        """Drop the gradient."""
        return None, None


class _FrozenLinear(torch.autograd.Function):
    """A linear with a packed weight; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """X [..., in] -> [..., out]."""
        ctx.weight = weight
        return linear(x, matrix(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x."""
        flat = gradient.flatten(0, -2) @ matrix(ctx.weight, gradient.dtype)
        return _unsafe_view(flat, (*gradient.shape[:-1], flat.shape[-1])), None, None


class _AdaptedLinear(torch.autograd.Function):
    """Saves its input and the adapter's narrow rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """X [..., in] -> [..., out]."""
        ctx.weight, ctx.a, ctx.b, ctx.scale = weight, a, b, scale  # the parameters themselves: recompute would unpack other tensors
        out, narrow = _adapted(x, weight, bias, Adapter(a, b, scale))
        ctx.save_for_backward(x, narrow)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, A and B."""
        x, narrow = ctx.saved_tensors
        flat = gradient.flatten(0, -2) @ matrix(ctx.weight, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_narrow, of_a, of_b = _of_adapter(x, narrow, gradient, Adapter(ctx.a, ctx.b, ctx.scale))
        if flat is None:
            return None, None, None, of_a, of_b, None
        flat.addmm_(of_narrow.flatten(0, -2), ctx.a)
        return _unsafe_view(flat, x.shape), None, None, of_a, of_b, None


class _FrozenColumnParallel(torch.autograd.Function):
    """Gather, then multiply; saves local tokens and narrow rows if any linear is adapted, else nothing."""

    @staticmethod
    def forward(ctx: Any, tp: Gathers, scales: tuple[float | None, ...], x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Local tokens [B, t, in], weights, biases, then A and B of adapted linears -> [B, T, out / tp] each."""
        count = len(scales)
        weights, biases = parameters[:count], parameters[count : 2 * count]
        ctx.tp, ctx.scales, ctx.weights = tp, scales, weights  # the parameters themselves: recompute would unpack other tensors
        ctx.adapters = _pairs(scales, parameters[2 * count :])
        gathered = tp.start_gather(x).wait()
        outs, kept = [], []
        for weight, bias, adapter in zip(weights, biases, ctx.adapters, strict=True):
            if adapter is None:
                outs.append(linear(gathered, matrix(weight, x.dtype), bias))  # type: ignore[arg-type]  # weights are given
            else:
                out, narrow = _adapted(gathered, weight, bias, adapter)  # type: ignore[arg-type]
                outs.append(out)
                kept.append(narrow)
        ctx.save_for_backward(*([x, *kept] if kept else []))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, and of A and B of adapted linears."""
        tp = ctx.tp
        own_tokens, *kept = ctx.saved_tensors or (None,)  # kept under a name to the end: the gather reads them until it is waited for
        arriving = None if own_tokens is None else tp.start_gather(own_tokens)
        partial = gradients[0] @ matrix(ctx.weights[0], gradients[0].dtype)
        rows = partial.flatten(0, -2)
        for gradient, weight in zip(gradients[1:], ctx.weights[1:], strict=True):
            rows.addmm_(gradient.flatten(0, -2), matrix(weight, gradient.dtype))
        made: list[Tensor | None] = []
        of_narrow: list[Tensor] = []
        adapted = [(gradient, adapter) for gradient, adapter in zip(gradients, ctx.adapters, strict=True) if adapter is not None]
        for gradient, adapter in adapted:
            of_narrow.append(_of_narrow(gradient, adapter))
            rows.addmm_(of_narrow[-1].flatten(0, -2), adapter.a)
        leaving = tp.start_reduce(partial)
        if arriving is not None:
            gathered = arriving.wait()
            for (gradient, adapter), narrow, own in zip(adapted, kept, of_narrow, strict=True):
                made += [product(gathered, own), product(narrow, gradient).mul_(adapter.scale)]
        return None, None, leaving.wait(), *([None] * (2 * len(ctx.scales))), *made


def _pairs(scales: Sequence[float | None], pairs: Sequence[Any]) -> tuple[Adapter | None, ...]:
    left = iter(pairs)
    return tuple(None if scale is None else Adapter(next(left), next(left), scale) for scale in scales)


def _adapted(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """The product, and the narrow rows x Aᵀ."""
    narrow = linear(x, adapter.a)
    out = linear(x, matrix(weight, x.dtype), bias)
    out.flatten(0, -2).addmm_(narrow.flatten(0, -2), adapter.b.mT, alpha=adapter.scale)
    return out, narrow


def _of_narrow(gradient: Tensor, adapter: Adapter) -> Tensor:
    """Gradient of the narrow rows."""
    return (gradient @ adapter.b).mul_(adapter.scale)


def _of_adapter(x: Tensor, narrow: Tensor, gradient: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the narrow rows, of A and of B."""
    of_narrow = _of_narrow(gradient, adapter)
    return of_narrow, product(x, of_narrow), product(narrow, gradient).mul_(adapter.scale)
