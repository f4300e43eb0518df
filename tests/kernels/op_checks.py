"""Measures shared by the kernel tests."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """RMS of the error divided by that of the exact value, or undivided if the exact value is zero; infinite if there is a NaN."""
    error: float = (found.double() - exact.double()).norm().item()
    size: float = exact.double().norm().item()
    return math.inf if math.isnan(error + size) else error / (size or math.sqrt(exact.numel()))


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.autograd.grad(list(outputs), list(inputs), list(cotangents))
    return found


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def allocations(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Runs, and lists all allocations (positive) and frees (negative) of torch's CPU allocator, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def live_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """Runs, and counts the bytes still allocated afterwards."""
    result, changes = allocations(run)
    return result, sum(changes)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes allocated at once during a run, above those before it."""
    return max(itertools.accumulate(allocations(run)[1]))


def saved_by(run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """Runs, and lists the tensors that autograd packed."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, packed
