"""Gradients in `precision.grads`, if that differs from the dtype of the sharded parameters.

FSDP2 reduces in `precision.reduce` and casts the result to the parameter's dtype. Two settings change that: every
parameter accepts gradients of another dtype (`Tensor.grad_dtype`), and every group casts its reduced gradients to that dtype. So

- without a pipeline, each microbatch's gradients are reduced and added to shards in `precision.grads`;
- with one, FSDP2 accumulates unsharded gradients in `precision.reduce`, so the two must be equal (MP602), and the shards are slices of
  that sum.

If a version of FSDP2 ignored the second setting, the first one would make the first reduction fail.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`), _fsdp_param.py (`to_accumulated_grad_if_needed`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.parallel.apply.whole import whole_state
from megarun.parallel.groups.local import gradient_of


def keep_gradient_dtype(stage: nn.Module, spec: Spec) -> None:
    """Make a sharded and materialised stage store its gradient shards in `precision.grads`."""
    precision = spec.precision
    if precision.grads is precision.master:
        return
    dtype = TORCH_DTYPES[precision.grads]
    for parameter in stage.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype

    if whole_state(stage) is not None:
        return

    def set_once(*_: Any) -> None:
        handle.remove()
        for group in parameter_groups(stage):
            group._orig_dtype = dtype

    # FSDP2 sets a group's dtypes in its own hook of the first forward, which runs before this one
    handle = stage.register_forward_pre_hook(set_once)


def parameter_groups(stage: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of a stage and its submodules; a group of several layers is listed for each of them."""
    found = chain.from_iterable(groups_of(module) for module in stage.modules() if isinstance(module, FSDPModule))
    yield from dict.fromkeys(found)


def groups_of(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of one wrapped module."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]  # set by torch's `contract`
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def in_parameter_dtype(parameter: Tensor) -> Iterator[None]:
    """Cast a parameter's gradient to the parameter's dtype for an update, then restore the gradient."""
    gradient, kept = gradient_of(parameter), parameter.grad_dtype
    _set_gradient(parameter, gradient.to(parameter.dtype), parameter.dtype)
    try:
        yield
    finally:
        _set_gradient(parameter, gradient, kept)


def _set_gradient(parameter: Tensor, gradient: Tensor, dtype: torch.dtype | None) -> None:
    parameter.grad = None  # the dtype can be changed only while there is no gradient
    parameter.grad_dtype = dtype
    parameter.grad = gradient
