"""Runs the real step on fake tensors, as one rank of a fake process group."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._meta_registrations import create_fakework
from torch.distributed.pipelining import _utils
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.library import _scoped_library
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarun.trace.replaced import replaced

_LAYER_NORM = torch.ops.aten.native_layer_norm.default


@contextmanager
def lone_rank(rank: int, world_size: int) -> Iterator[None]:
    """A fake process group in which this process is `rank` and every collective completes immediately.

    The machine's devices are hidden. An optimizer's step checks whether an existing device captures a graph; that starts CUDA, and fails in
    a process forked from one with CUDA.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            replaced(torch.cuda, is_available=lambda: False),
            replaced(torch.accelerator, current_accelerator=_no_accelerator),
            _scoped_library("c10d", "IMPL") as library,
        ):
            library.impl("allreduce_coalesced_", _completed, "Meta")  # the only collective of megarun that torch has no fake for
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it caches meshes of the destroyed group


def as_on_gpu(operation: Any, outputs: Any) -> Any:
    """The outputs of an operation as its kernel for a GPU makes them: layer norm's statistics in fp32, not in the input's dtype."""
    if operation is not _LAYER_NORM:
        return outputs
    normed, *statistics = outputs
    return normed, *(each.float() for each in statistics)


def _no_accelerator(check_available: bool = False) -> None:
    """No device, as `torch.accelerator.current_accelerator` returns it."""


def _completed(*_: Any) -> Any:
    """A collective's work that is done."""
    return create_fakework((), return_first_arg=False)  # type: ignore[no-untyped-call]


@contextmanager
def static_shapes() -> Iterator[None]:
    """Make pipeline stages use their stated shapes.

    torch 2.13 votes on that at the first step, on the host, which needs values; megarun states every shape, so the result of the vote is
    known. torch 2.11 has no vote.
    """
    modes = getattr(_utils, "InferenceMode", None)
    if modes is None:
        yield
        return

    def stated(_: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:  # noqa: ARG001  the parameter names of `vote`
        for stage in stages:
            stage._inference_mode = modes.STATIC

    with replaced(_PipelineSchedule, _warmup_p2p=stated):
        yield


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector, so that the lifetime of tensors does not depend on it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
