"""Gradients in `precision.grads`, where that is not the dtype of the resident parameters.

FSDP2 reduces in `precision.reduce` and hands the optimizer what it reduced in the parameter's own dtype. Two settings change that: every
parameter accepts gradients of another dtype (`Tensor.grad_dtype`), and every group casts what it reduced to that dtype. So

- without a pipeline, each microbatch's gradients are reduced and added to shards in `precision.grads`;
- with one, FSDP2 sums whole gradients of the microbatches in `precision.reduce`, which is why the two must be equal there (MP602), and the
  shards are cut from that sum.

If a version of FSDP2 no longer took the second setting, the first would make it fail at the first reduction.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`), _fsdp_param.py (`to_accumulated_grad_if_needed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES


def keep_gradient_dtype(stage: nn.Module, spec: Spec) -> None:
    """Let a sharded and materialised stage keep its gradient shards in `precision.grads`."""
    precision = spec.precision
    if precision.grads is precision.master:
        return
    dtype = TORCH_DTYPES[precision.grads]
    for parameter in stage.parameters():
        parameter.grad_dtype = dtype

    def set_once(*_: Any) -> None:
        handle.remove()
        for group in parameter_groups(stage):
            group._orig_dtype = dtype

    # a group learns its dtypes in FSDP2's own hook of the first forward, which runs before this one
    handle = stage.register_forward_pre_hook(set_once)


def parameter_groups(stage: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of a stage and the modules in it."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            state = fully_shard.state(module)  # type: ignore[attr-defined]  # set by torch's `contract`
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


@contextmanager
def in_parameter_dtype(parameter: Tensor) -> Iterator[None]:
    """Give a parameter its gradient in its own dtype for an update, then give the gradient back."""
    gradient, kept = parameter.grad, parameter.grad_dtype
    if gradient is None:
        raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} has no gradient; backward did not reach it")
    _set_gradient(parameter, gradient.to(parameter.dtype), parameter.dtype)
    try:
        yield
    finally:
        _set_gradient(parameter, gradient, kept)


def _set_gradient(parameter: Tensor, gradient: Tensor, dtype: torch.dtype | None) -> None:
    parameter.grad = None  # a dtype may only change where there is no gradient
    parameter.grad_dtype = dtype
    parameter.grad = gradient
