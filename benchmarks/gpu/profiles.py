"""One training step under torch's profiler: every kernel with its launches, time and operation, and how long the device was busy."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from gpu.groups import group_of

CUT_NAME = 110
"""Characters of a kernel's name that are kept: templates run to thousands."""


def profiled(run: Callable[[], Any], *, on_gpu: bool) -> dict[str, Any]:
    """Run once under the profiler; as `summary`, of the device's events, or on a CPU of the operations'."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        run()
    results = found.profiler.kineto_results if found.profiler is not None else None
    return summary([] if results is None else results.events(), on_gpu=on_gpu)


def summary(events: Iterable[Any], *, on_gpu: bool) -> dict[str, Any]:
    """Kernels by name, and by part of the step.

    Args:
        events: Events of one step, from torch's profiler.
        on_gpu: True if the device's events count; else all.

    Returns:
        `kernels` launches; `busy_ms`, the time in which at least one ran; `span_ms` from the first's start to the last's end; `sum_ms` of
        all, more than `busy_ms` where streams overlap; `by_kernel` [name, launches, ms] and `by_group` [part, launches, ms], longest first;
        `idle` [part before, part after, times, ms], of the times in which nothing ran.
    """
    seen = [event for event in events if not event.is_user_annotation()]  # a range around kernels, which the device's events have too
    operations = {event.correlation_id(): event.name() for event in seen if not _on_device(event)}
    kernels = [event for event in seen if _on_device(event) == on_gpu and event.duration_ns() > 0]
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    by_group: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    idle: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    until, last = 0, ""
    for event in sorted(kernels, key=lambda event: int(event.start_ns())):
        name, milliseconds = event.name()[:CUT_NAME], event.duration_ns() / 1e6
        part = group_of(name, operations.get(event.linked_correlation_id()))
        if last and event.start_ns() > until:
            idle[last, part][0] += 1
            idle[last, part][1] += (event.start_ns() - until) / 1e6
        if event.start_ns() + event.duration_ns() > until:
            until, last = event.start_ns() + event.duration_ns(), part
        for table, key in ((by_kernel, name), (by_group, part)):
            table[key][0] += 1
            table[key][1] += milliseconds
    spans = sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in kernels)
    return {
        "kernels": len(kernels),
        "busy_ms": busy_ns(spans) / 1e6,
        "span_ms": (max(end for _, end in spans) - spans[0][0]) / 1e6 if spans else 0.0,
        "sum_ms": sum(event.duration_ns() for event in kernels) / 1e6,
        "by_kernel": _longest_first(by_kernel),
        "by_group": _longest_first(by_group),
        "idle": [[*parts, int(times), round(ms, 4)] for parts, (times, ms) in sorted(idle.items(), key=lambda item: -item[1][1])],
    }


def busy_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of intervals, sorted by their start."""
    total, until = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _on_device(event: Any) -> bool:
    return "CUDA" in str(event.device_type())


def _longest_first(table: dict[str, list[float]]) -> list[list[Any]]:
    return [[name, int(launches), round(ms, 4)] for name, (launches, ms) in sorted(table.items(), key=lambda item: -item[1][1])]
