"""Time of an operation: kernel time of a captured graph and wall time of the eager call, both compared with the device's own limits."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu.case import KernelCase
from gpu.checks import TOLERANCE, Emit, check, results_of, worst_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels import scratch_bytes, use_kernels

NUM_REPEATS, MOST_SECONDS = 30, 1.0
"""A median is taken over so many repeats, or those that fit in the time; at least three."""
COPY_VALUES, PRODUCT_SIZE = 1 << 30, 8192
SMALL_COPY_VALUES, SMALL_PRODUCT_SIZE = 1 << 16, 64


class Stated(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """The most that an operation states of its inside (`megakernels.scratch_bytes`), of those that run meanwhile."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_bytes = max(self.num_bytes, scratch_bytes(str(func), args))
        return func(*args, **(kwargs or {}))


def stated_bytes(call: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor | None = None) -> int:
    """The bytes that the operations of forward and backward state for their inside."""
    with Stated() as stated:  # type: ignore[no-untyped-call]
        results_of(call, inputs, grad)
    return stated.num_bytes


class Clock:
    """Times calls on a device; on a CPU, for a run that only exercises the code, by the host's clock."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")

    def graph_ns(self, run: Callable[[], Any]) -> int:
        """Median kernel time of a call captured in a CUDA graph."""
        if not self.on_gpu:
            return self.event_ns(run)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return self.event_ns(graph.replay)

    def event_ns(self, run: Callable[[], Any]) -> int:
        """Median time between two events around a call, after one that does not count."""
        if not self.on_gpu:
            return self.wall_ns(run)

        def once() -> float:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            after.synchronize()
            return before.elapsed_time(after) * 1e6

        return self._median(once)

    def wall_ns(self, run: Callable[[], Any]) -> int:
        """Median time on the host of a call and its end."""

        def once() -> float:
            began = time.perf_counter_ns()
            run()
            if self.on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter_ns() - began

        return self._median(once)

    def _median(self, once: Callable[[], float]) -> int:
        once()
        times: list[float] = []
        stop = time.perf_counter() + MOST_SECONDS
        while len(times) < NUM_REPEATS and (len(times) < 3 or time.perf_counter() < stop):
            times.append(once())
        return round(statistics.median(times))


def limits(device: str, *, small: bool = False) -> dict[str, float]:
    """GB/s of a copy of 2 GiB and TFLOP/s of a product in bf16 at 8192³, here and now."""
    clock, values, size = Clock(device), SMALL_COPY_VALUES if small else COPY_VALUES, SMALL_PRODUCT_SIZE if small else PRODUCT_SIZE
    source = torch.empty(values, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / clock.event_ns(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return {"copy_gb_s": round(copy, 1), "matmul_bf16_8192_tflop_s": round(2 * size**3 / clock.event_ns(lambda: a @ b) / 1000, 1)}


def counted(case: KernelCase) -> dict[str, int]:
    """Ideal bytes and FLOPs of a call."""
    work = case.work
    return {
        "forward_bytes": work.moved_forward * case.num_tokens,
        "backward_bytes": (work.moved_input + work.moved_weight) * case.num_tokens,
        "forward_flops": work.forward * case.num_tokens,
        "backward_flops": (work.input_grad + work.weight_grad) * case.num_tokens,
    }


def time_call(case: KernelCase, call: Callable[..., Tensor], emit: Emit, device: str, about: dict[str, Any]) -> None:
    """Emit wall time and memory first, then kernel times: a capture that fails makes the process unusable; earlier results are kept."""
    clock = Clock(device)
    inputs = case.make(device, torch.bfloat16)
    grad = torch.randn_like(call(**inputs)) if case.differentiable else None
    row: dict[str, Any] = {**about, "wall_ns": clock.wall_ns(lambda: results_of(call, inputs, grad)), **counted(case), "bound": case.bound}
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = results_of(call, inputs, grad)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        row["workspace_bytes"] = row["peak_bytes"] - sum(result.nbytes for result in results)
        del results
    row["stated_bytes"] = stated_bytes(call, inputs, grad)
    emit(row | {"part": "wall"})
    times = {"forward_ns": clock.graph_ns(lambda: call(**inputs))}
    if case.differentiable:
        times["backward_ns"] = clock.graph_ns(lambda: results_of(call, inputs, grad)) - times["forward_ns"]
    emit({**about, **times, "part": "kernels"})


def time_own(case: KernelCase, emit: Emit, device: str) -> None:
    """An operation of ours; one that is wrong is not timed."""
    on_gpu = device.startswith("cuda")
    use_kernels("triton" if on_gpu else "reference")
    found = check(case, 300, device, torch.bfloat16 if on_gpu else torch.float32)
    about = {"case": case.name, "kernels": "triton" if on_gpu else "reference", "error": found["error"]}
    if not found["right"]:
        emit(about | {"failure": "wrong; not timed"})
        return
    time_call(case, case.call, emit, device, about)


def time_peer(case: KernelCase, library: str, call: Callable[..., Tensor], emit: Emit, device: str) -> None:
    """A library's operation, or plain torch; its error alone where that is past the tolerance."""
    use_kernels("reference")  # of this project's implementations only the fp64 reference runs, and the row of plain torch
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    error = worst_error(case, device, dtype, call)
    about = {"case": case.name, "kernels": library, "error": error}
    if not error <= TOLERANCE[dtype]:
        emit(about | {"failure": "past the tolerance; not timed"})
        return
    time_call(case, call, emit, device, about)
