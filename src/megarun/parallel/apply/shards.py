"""Gradient shards in the memory of the stream that computes.

FSDP2 makes a group's reduced output in its reduce-scatter stream. torch's allocator has a pool for each stream, so the shards of a stage
take further memory while memory of activations, which the backward frees layer by layer, is unused. Here an output that becomes the shards
is made in the computing stream instead.

This is safe without `record_stream`. The reduce-scatter stream waits for the computing stream before it writes the output, so all earlier
uses of that memory have run. Shards stay referenced by their parameters until the computing stream has waited for the last reduction, which
FSDP2 does at the end of a backward. An output that is only added to shards, or cast to them, is freed while the reduce-scatter stream still
reads it: it stays in that stream's pool.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`), _fsdp_param_group.py (`finalize_backward`).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from megarun.parallel.apply.gradients import groups_of


class ShardsWhereActivationsWere(DefaultReduceScatter):
    """A group's reduce-scatter; `foreach_reduce` asks it for the input in the computing stream, then for the output in its own."""

    def __init__(self, group: Any) -> None:
        """Keep a weak reference to the parameter group of FSDP2 that will own this: a strong reference would make a cycle."""
        super().__init__()
        self._group = weakref.ref(group)
        self._computing: Any = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an input, or for an output: in the computing stream if it becomes the shards."""
        streams = torch.get_device_module(device)
        if self._computing is None:
            self._computing = streams.current_stream()
            return super().allocate(size, dtype=dtype, device=device)
        computing, self._computing = self._computing, None
        if not self._becomes_shards(dtype):
            return super().allocate(size, dtype=dtype, device=device)
        with streams.stream(computing):
            return super().allocate(size, dtype=dtype, device=device)

    def _becomes_shards(self, dtype: torch.dtype) -> bool:
        group = self._group()
        if group is None or dtype != group._orig_dtype or not group.all_reduce_grads:
            return False
        return all(parameter.sharded_param.grad is None for parameter in group.fsdp_params)


def reuse_freed_activations(stage: nn.Module) -> None:
    """Make every group of a wrapped stage keep its gradient shards in the computing stream's memory."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module):
                module.set_custom_reduce_scatter(ShardsWhereActivationsWere(group))
