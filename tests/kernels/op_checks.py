"""Measures shared by the kernel tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact value; the plain root mean square where the exact value is zero. NaN counts as infinite."""
    error, size = (found.double() - exact.double()).norm().item(), exact.double().norm().item()
    if error != error or size != size:
        return float("inf")
    return error / (size or exact.numel() ** 0.5)


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(list(outputs), list(inputs), list(cotangents))


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def live_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """Runs, and counts what torch's CPU allocator handed out and did not get back, whoever asked: operations, autograd, contexts, closures."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = profile.profiler.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")


def saved_by(run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """Runs, and lists the tensors that autograd packed."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, packed
