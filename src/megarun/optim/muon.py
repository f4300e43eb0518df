"""Muon: momentum orthogonalised by Newton-Schulz, for plain tensors and FSDP2 shards, single matrices and stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megakernels import symmetric_product
from megarun.parallel.groups.ownership import local_shard
from megarun.parallel.groups.tensor import ALONE, TensorParallel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
EPSILON = 1e-7
ADAMW_RMS = 0.2


def orthogonalise(matrices: Tensor, num_steps: int) -> Tensor:
    """Approximations of the nearest semi-orthogonal matrices, with singular values between about 0.7 and 1.2.

    Args:
        matrices: [n, rows, cols]; the iteration runs in their dtype.
        num_steps: Newton-Schulz steps.

    Returns:
        [n, rows, cols].

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), quintic coefficients.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(num_steps):
        gram = symmetric_product(x)
        x = torch.baddbmm(x, symmetric_product(gram, gram, alpha=c, beta=b), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix, with decoupled weight decay.

    The update of a matrix [rows, cols] is scaled by 0.2 · sqrt(max(rows, cols)), which gives it the RMS of an AdamW update, so that both
    groups share one learning rate and decay (arXiv:2502.16982, equation 4). The momentum of a sharded parameter is sharded; the update is
    gathered in the iteration's dtype, orthogonalised on every rank, and each rank applies its shard: equal to the unsharded update.
    A matrix that TP shards is gathered over the TP group, too.

    Args:
        params: (parameter, num_matrices) pairs; dims before the last, read as rows, are split into num_matrices equal matrices.
        lr: Learning rate.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        moments_dtype: Dtype of the momentum.
        iteration_dtype: Dtype of Newton-Schulz and of the gathered update.
        num_steps: Newton-Schulz steps.
        cut: Dim along which TP shards a parameter's matrix, for the parameters that it shards.
        tp: The TP group.
    """

    def __init__(
        self,
        params: Iterable[tuple[Tensor, int]],
        *,
        lr: float,
        weight_decay: float,
        moments_dtype: torch.dtype,
        iteration_dtype: torch.dtype,
        num_steps: int,
        cut: Mapping[Tensor, int] | None = None,
        tp: TensorParallel = ALONE,
    ) -> None:
        self._cut, self._tp = dict(cut or {}), tp
        self.moments_dtype, self.iteration_dtype, self.num_steps = moments_dtype, iteration_dtype, num_steps
        groups = [{"params": [parameter], "num_matrices": count} for parameter, count in params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter; all ranks of a shard group must call it together."""
        if closure is not None:
            raise ValueError("Muon does not support a closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first update."""
        return {"momentum": torch.zeros_like(parameter, dtype=self.moments_dtype)}

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            raise RuntimeError(f"a matrix of shape {tuple(parameter.shape)} has no gradient; backward did not reach it")
        weights, gradient = _local(parameter), _local(parameter.grad)
        state = self.state[parameter]
        if not state:
            state |= self.first_state(parameter)
        momentum = _local(state["momentum"])
        # mixed-dtype operations avoid a copy of the gradient in the momentum's dtype
        momentum.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
        update = momentum.mul(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM).to(self.iteration_dtype)
        update, scale = self._orthogonalised(_whole(update, parameter), group["num_matrices"], self._cut.get(parameter))
        if isinstance(parameter, DTensor):
            update = local_shard(update, parameter)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(update.to(weights.dtype), alpha=-group["lr"] * scale)

    def _orthogonalised(self, update: Tensor, num_matrices: int, cut: int | None) -> tuple[Tensor, float]:
        """This rank's part of an orthogonalised update, of the part's shape, and the scale of its matrices."""
        shape, width = update.shape, update.shape[-1]
        if cut is None:
            matrices = update.view(num_matrices, -1, width)
        else:
            # the concatenated parts are the full matrix, or its transpose if columns are sharded
            part = update if cut == 0 else update.mT
            matrices = self._tp.start_gather(part[None]).wait()
        scale = ADAMW_RMS * max(matrices.shape[1:]) ** 0.5
        found = orthogonalise(matrices, self.num_steps)
        if cut is None:
            return found.reshape(shape), scale
        own = found[0].chunk(self._tp.degree)[self._tp.index]
        return (own if cut == 0 else own.mT), scale


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(local: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which `local` is this rank's shard, sharded like `like`."""
    if not isinstance(like, DTensor):
        return local
    sharded = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    return sharded.full_tensor()
