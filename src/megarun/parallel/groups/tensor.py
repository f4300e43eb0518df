"""Tensor parallelism with sequence parallelism: the collectives of a block's TP group.

The ranks of a TP group split a block's heads and widths. Outside these regions (the residual stream, norms, routers, MLA's down
projections) each rank processes its local tokens: T / tp consecutive positions of every sequence. So a TP region starts by gathering
tokens and ends by a reduce-scatter of partial results:

- `project`: column-parallel linears that read one input. The input is gathered along the sequence, multiplied, and freed; only the
  rank's local tokens are saved and gathered again in backward. The input's gradient is reduce-scattered while the weight gradients are
  computed.
- `reduce`: reduce-scatter of the partial outputs of a row-parallel linear. Backward gathers.
- `gather`: all-gather of tokens without a product; backward reduce-scatters.

All tensors are plain local tensors; FSDP2 shards the local parameters over the data ranks, independent of TP.

Source: arXiv:2205.05198, section 4.2.2 and figure 5 (the gathered input is not kept).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from megarun.parallel.groups.adapters import Adapter, adapter_of, frozen_column_parallel
from megarun.parallel.groups.deferred import leave_pending, product
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.packed import PackedWeight, weight_of
from megarun.parallel.groups.scaled import multiply, scaling_of


@dataclass(frozen=True, slots=True)
class AsyncTensor:
    """The output of a collective in progress."""

    tensor: Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """Wait for the collective and return the tensor."""
        for work in self.works:
            work.wait()
        return self.tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The TP group of a rank.

    Attributes:
        degree: Number of ranks in the group.
        index: Rank within the group, and index of its tokens in the sequence.
        group: Process group; None if the degree is one.
        may_wait: True if a split backward defers the weight gradients of `project`.
    """

    degree: int
    index: int
    group: dist.ProcessGroup | None
    may_wait: bool = True

    def project(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Column-parallel linears of one input: local tokens [B, t, in] -> [B, T, out / tp] each."""
        scaling = scaling_of(linears[0])
        if self.degree == 1 and scaling is None:
            return tuple(module(x) for module in linears)
        biases = [module.bias for module in linears]
        if scaling is not None:
            return multiply(self, [scaling_of(module) or scaling for module in linears], x, [module.weight for module in linears], biases)
        weights = [weight_of(module) for module in linears]
        return column_parallel(self, x, weights, biases, [adapter_of(module) for module in linears], may_wait=self.may_wait)

    def reduce(self, partial: Tensor) -> Tensor:
        """Reduce-scatter of the ranks' partial outputs [B, T, h] -> local tokens [B, t, h]."""
        return partial if self.degree == 1 else exchanged(self._reduce, self._gather, partial)

    def gather(self, x: Tensor) -> Tensor:
        """Local tokens [B, t, ...] -> all tokens [B, T, ...]."""
        return x if self.degree == 1 else exchanged(self._gather, self._reduce, x)

    def share(self, count: int) -> int:
        """This rank's share of heads, groups or a width; the spec's rules ensure that it divides (MP201)."""
        return count // self.degree

    def start_gather(self, x: Tensor) -> AsyncTensor:
        """Start to gather local tokens [B, t, ...].

        One collective per sequence: its output is the sequence in order, without an extra copy.
        """
        whole = x.new_empty((x.shape[0], x.shape[1] * self.degree, *x.shape[2:]))
        pairs = zip(whole.unbind(), x.contiguous().unbind(), strict=True)
        return AsyncTensor(whole, tuple(self._members._allgather_base(row, own) for row, own in pairs))

    def start_reduce(self, partial: Tensor) -> AsyncTensor:
        """Start a reduce-scatter of partial results [B, T, ...] into local tokens."""
        own = partial.new_empty((partial.shape[0], partial.shape[1] // self.degree, *partial.shape[2:]))
        pairs = zip(own.unbind(), partial.contiguous().unbind(), strict=True)
        return AsyncTensor(own, tuple(self._members._reduce_scatter_base(row, whole) for row, whole in pairs))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Rows of all ranks, by rank: [N, ...] -> [degree · N, ...]; without a gradient."""
        whole = rows.new_empty((rows.shape[0] * self.degree, *rows.shape[1:]))
        self._members._allgather_base(whole, rows.contiguous()).wait()
        return whole

    def scatter_rows(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum: [degree · N, ...] -> [N, ...]; without a gradient."""
        own = partial.new_empty((partial.shape[0] // self.degree, *partial.shape[1:]))
        self._members._reduce_scatter_base(own, partial.contiguous()).wait()
        return own

    def start_sum(self, value: Tensor) -> dist.Work:
        """Start to sum `value` in place over the group."""
        work: dist.Work = dist.all_reduce(value, group=self._members, async_op=True)
        return work

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed in place over the group."""
        return self._all_reduce(value, dist.ReduceOp.SUM)

    def largest(self, value: Tensor) -> Tensor:
        """The elementwise maximum of `value` over the group, in place."""
        return self._all_reduce(value, dist.ReduceOp.MAX)

    def _all_reduce(self, value: Tensor, operation: Any) -> Tensor:
        if self.degree > 1:
            dist.all_reduce(value, op=operation, group=self._members)
        return value

    def _gather(self, x: Tensor) -> Tensor:
        return self.start_gather(x).wait()

    def _reduce(self, partial: Tensor) -> Tensor:
        return self.start_reduce(partial).wait()

    @property
    def _members(self) -> Any:
        if self.group is None:
            raise RuntimeError("a TP group of one rank has no process group")
        return self.group


ALONE = TensorParallel(1, 0, None)


def tensor_parallel(mesh: RankMesh) -> TensorParallel:
    """This rank's TP group."""
    degree = mesh.size("tp")
    return TensorParallel(degree, mesh.coordinate["tp"], mesh.axes["tp"].get_group()) if degree > 1 else ALONE


def column_parallel(
    tp: TensorParallel,
    x: Tensor,
    weights: Sequence[Tensor | PackedWeight],
    biases: Sequence[Tensor | None] | None = None,
    adapters: Sequence[Adapter | None] | None = None,
    *,
    may_wait: bool = True,
) -> tuple[Tensor, ...]:
    """See `TensorParallel.project`.

    Args:
        tp: TP group of more than one rank.
        x: Local tokens [B, t, in].
        weights: Gathered parameters, [out / tp, in] each; packed if they are frozen.
        biases: Biases, [out / tp] or None each; None if no linear has one.
        adapters: Adapters of frozen weights, each None if its weight has none; None if no linear has one.
        may_wait: True if a split backward defers the weight gradients.
    """
    nothing = [None] * len(weights)
    if not weights[0].requires_grad:
        return frozen_column_parallel(tp, x, weights, biases or nothing, adapters or nothing)
    parameters = (*weights, *(biases or nothing))
    results: tuple[Tensor, ...] = _apply(_ColumnParallel, tp, may_wait, len(weights), x, *parameters)
    return results


def exchanged(exchange: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A linear exchange between ranks; the gradient is exchanged by its adjoint."""
    result: Tensor = _apply(_LinearExchange, exchange, adjoint, x)
    return result


class _LinearExchange(torch.autograd.Function):
    """See `exchanged`; saves nothing."""

    @staticmethod
    def forward(ctx: Any, exchange: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The exchanged tensor."""
        ctx.adjoint = adjoint
        return exchange(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        """Gradient of the own tensor."""
        return None, None, ctx.adjoint(gradient)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _ColumnParallel(torch.autograd.Function):
    """Gather, then multiply; saves local tokens."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, may_wait: bool, count: int, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Local tokens [B, t, in], `count` weights and `count` biases -> [B, T, out / tp] each."""
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x)
        ctx.tp, ctx.may_wait = tp, may_wait
        ctx.weights = weights  # save the parameters themselves: recompute would unpack other tensors instead
        gathered = tp.start_gather(x).wait()
        return tuple(linear(gathered, weight, bias) for weight, bias in zip(weights, biases, strict=True) if weight is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, of the weights unless they are deferred, and of the biases."""
        (x,) = ctx.saved_tensors
        tp, weights = ctx.tp, ctx.weights
        pending = ctx.may_wait and leave_pending(weights, x, gradients, lambda own: tp.start_gather(own).wait())
        arriving = None if pending else tp.start_gather(x)
        partial = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            partial.flatten(0, -2).addmm_(gradient.flatten(0, -2), weight)
        leaving = tp.start_reduce(partial)
        products: list[Tensor | None] = [None] * len(weights)
        if arriving is not None:
            gathered = arriving.wait()
            products = [product(gathered, gradient) for gradient in gradients]
        wanted = ctx.needs_input_grad[4 + len(weights) :]
        sums = [gradient.flatten(0, -2).sum(0) if needed else None for gradient, needed in zip(gradients, wanted, strict=True)]
        return None, None, None, leaving.wait(), *products, *sums
