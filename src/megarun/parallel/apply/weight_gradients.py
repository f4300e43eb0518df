"""The second half of a split backward: deferred weight gradients of linears.

A schedule that splits the backward runs I (gradients of the stage's input), sends them, and fills idle time with W (gradients of its
weights). Here I is a full autograd backward in which every linear of a layer defers one product, gradientᵀ · input, and W computes the
deferred products. Between I and W each linear holds its input and the gradient of its output; storages shared by several linears are held
once. All other gradients are complete after I: norms, convolutions, scans, expert banks and routers compute them together with the
gradient of their input, and deferring the head's would hold the gradient of the logits, as wide as the vocabulary.

The products equal autograd's, and each is added in the same place and order in which FSDP2 adds a microbatch's gradient, so sums are
bitwise equal. A forward that was recomputed for I is not recomputed for W.

Source: arXiv:2401.10241 (zero-bubble pipelines), section 2.1; torch's `PipelineStage(dw_builder=...)`. torch's own split walks the autograd
graph twice: it recomputes a checkpointed block three times, and runs the whole backward of a custom op in each half.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megarun.model.norm import RowLinear
from megarun.model.stage import Stage
from megarun.parallel.apply.gradients import parameter_groups
from megarun.parallel.apply.whole import add_gradient, whole_state
from megarun.parallel.groups.deferred import Fetch, Products, deferring_to, leave_pending, product
from megarun.parallel.groups.scaled import scaling_of

_unsafe_view = torch.ops.aten._unsafe_view.default


class _Pending(NamedTuple):
    """Deferred products of one input, see `leave_pending`."""

    weights: Sequence[Tensor]
    rows: Tensor
    gradients: Sequence[Tensor]
    fetch: Fetch | None
    made: Products


class WeightGradients:
    """The deferred products of one stage."""

    def __init__(self, stage: nn.Module) -> None:
        self._stage, self._whole = stage, whole_state(stage)
        self._pending: deque[_Pending] = deque()
        self._sharded: dict[Tensor, Any] = {}

    def deferring(self) -> AbstractContextManager[None]:
        """Context in which a backward defers its products."""
        return deferring_to(self)

    def add(self, weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor], fetch: Fetch | None, made: Products) -> None:
        """Defer the products of one input, see `leave_pending`."""
        # detached: otherwise a saved tensor's grad_fn would keep the stage's input, which a V's middle stage would then hold until W
        self._pending.append(_Pending(weights, rows.detach(), gradients, fetch, made))

    def take(self) -> Callable[[], None]:
        """A function that computes the deferred products, for torch's `dw_builder`."""
        products, self._pending = self._pending, deque()
        return partial(self._compute, products)

    @torch.no_grad()
    def _compute(self, products: deque[_Pending]) -> None:
        while products:
            weights, rows, gradients, fetch, make = products.popleft()  # each tensor is freed after its use
            rows = rows if fetch is None else fetch(rows)
            made = make(rows, gradients)
            for weight in weights:
                self.accumulate(weight, next(made))
            del rows, gradients, made  # free them before the next input is fetched

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Accumulate one microbatch's gradient, as autograd and the end of a group's backward do."""
        if self._whole is not None:
            lent = self._whole.lent(weight)
            if lent is None:
                add_gradient(weight, gradient)
            else:
                lent.add(gradient)
            return
        sharded = self._of(weight)
        if sharded.unsharded_accumulated_grad is not None:
            sharded.unsharded_accumulated_grad += gradient
        elif weight.grad is not None:
            weight.grad += gradient
        else:
            weight.grad = gradient
            sharded.to_accumulated_grad_if_needed()

    def accumulated(self, weight: Tensor) -> Tensor | None:
        """The accumulated gradient of a parameter in use, None if there is none."""
        if self._whole is not None:
            lent = self._whole.lent(weight)
            return weight.grad if lent is None else lent.stored.grad
        found: Tensor | None = self._of(weight).unsharded_accumulated_grad
        return weight.grad if found is None else found

    def _of(self, weight: Tensor) -> Any:
        """FSDP2's record of a gathered parameter."""
        if weight not in self._sharded:
            self._sharded = {sharded._unsharded_param: sharded for group in parameter_groups(self._stage) for sharded in group.fsdp_params}
        return self._sharded[weight]


def weight_gradient(weight: Tensor, rows: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of a linear's weight, for the backward of an op that multiplies by it.

    Args:
        weight: The gathered parameter itself, [out, in].
        rows: The linear's input, [..., in].
        gradient: Gradient of the linear's output, [..., out].

    Returns:
        [out, in], or None if a split backward defers it.
    """
    return None if leave_pending([weight], rows, [gradient]) else product(rows, gradient)


class SplitLinear(torch.autograd.Function):
    """A linear whose weight gradient can be deferred; it saves its input, as every linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """X [..., in], weight [out, in], bias [out] or none -> [..., out]."""
        ctx.save_for_backward(x)
        ctx.weight = weight  # save the parameter itself: recompute would unpack another tensor instead
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, of weight unless it is deferred, and of bias."""
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            _unsafe_view(flat @ ctx.weight, x.shape) if needs_x else None,  # not a view: autograd adds another gradient into it in place
            weight_gradient(ctx.weight, x, gradient) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )


def split_linears(stage: Stage) -> None:
    """Make every linear of a stage's layers defer its weight gradient in a split backward; eight-bit linears do it themselves."""
    for module in stage.layers.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and scaling_of(module) is None:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    bias = module.own_bias if isinstance(module, RowLinear) else module.bias
    out: Tensor = SplitLinear.apply(x, module.weight, bias)  # type: ignore[no-untyped-call]
    return out
