"""Times the candidates of a case's kernels (`megakernels._common.tuning`), each checked for its values and for the same bits twice.

Jobs of a case: one for each candidate position, at the same time as others, which gives every kernel of the case its candidate of that
position and so compiles it into the cache; then one alone that times kernel by kernel. `tuned.py` makes the file of a device from the
lines.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from gpu.case import KernelCase
from gpu.checks import TOLERANCE, Emit, results_of, rms_ratio, said, worst
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from megakernels import use_kernels
from megakernels._common.tuning import CANDIDATES, Choice, Options, forced

NUM_TIMINGS = 3
"""Timings of a kernel's launches in a call; their median counts."""
SLEEP_CYCLES = 60_000_000
"""Cycles of the device, about 0.03 s, in which the host queues the launches of a call."""
MOST_CANDIDATES = max(map(len, CANDIDATES.values()))
Key = tuple[str, frozenset[tuple[str, Any]]]
"""A kernel's name and its compile-time constants."""


class Setting(NamedTuple):
    """Warps, stages and the limit of registers of a launch; None for what it does not give."""

    warps: int
    stages: int | None
    registers: int | None

    @classmethod
    def of(cls, options: Options) -> "Setting":
        """Setting of a launch's options."""
        return cls(options["num_warps"], options.get("num_stages"), options.get("maxnreg"))


def tunable(case: KernelCase, device: str) -> dict[Key, Options]:
    """Kernels of a call with candidates, and their default options."""
    found: dict[Key, Options] = {}

    def note(kernel: str, constants: frozenset[tuple[str, Any]], default: Options) -> None:
        if kernel in CANDIDATES:
            found[kernel, constants] = default

    with forced(note):
        results_of(case.call, inputs_of(case, device))
    return found


def inputs_of(case: KernelCase, device: str) -> dict[str, Tensor]:
    """Inputs of the full size; on a CPU, where the interpreter runs, of fp32."""
    return case.make(device, torch.bfloat16 if device.startswith("cuda") else torch.float32)


def compile_candidates(case: KernelCase, position: int, emit: Emit, device: str) -> None:
    """Run a call in which every kernel has its candidate of a position, and compare it with the default's."""
    use_kernels("triton")
    inputs = inputs_of(case, device)
    default = results_of(case.call, inputs)
    with forced(lambda kernel, _constants, _default: _at(kernel, position)):
        emit({"case": case.name, "position": position, **_compared(default, case, inputs, device)})


def _at(kernel: str, position: int) -> Options | None:
    candidates = CANDIDATES.get(kernel, ())
    return candidates[position] if position < len(candidates) else None


def _compared(default: list[Tensor], case: KernelCase, inputs: dict[str, Tensor], device: str) -> dict[str, Any]:
    """Right: within rounding of the default's results, finite, and the same bits twice."""
    found, again = results_of(case.call, inputs), results_of(case.call, inputs)
    error = worst([rms_ratio(a, b.double()) for a, b in zip(found, default, strict=True)])
    bitwise = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    tolerance = TOLERANCE[torch.bfloat16 if device.startswith("cuda") else torch.float32]
    same = all(torch.equal(a, b) for a, b in zip(found, default, strict=True))
    return {"error": error, "bitwise": bitwise, "right": bool(error <= tolerance and bitwise), "same_bits": same}


def time_candidates(case: KernelCase, emit: Emit, device: str) -> None:
    """A line for each kernel: microseconds of its launches with the default and with each candidate, fastest first."""
    use_kernels("triton")
    inputs, keys = inputs_of(case, device), tunable(case, device)
    if not keys:
        emit({"case": case.name, "kernels": 0})
        return
    default = results_of(case.call, inputs)
    for key, options in keys.items():
        launches, taken = _time(case, inputs, key, device)
        others = []
        for candidate in CANDIDATES[key[0]][: None if device.startswith("cuda") else 2]:
            if Setting.of({**options, **candidate}) == Setting.of(options):
                continue
            row = Setting.of({**options, **candidate})._asdict()
            try:
                with forced(_only(key, candidate)):
                    row |= _compared(default, case, inputs, device)
                    row["us"] = _time(case, inputs, key, device)[1]
            except Exception as failure:  # a candidate that does not compile or fit is not a candidate
                row |= {"us": float("inf"), "right": False, "failure": said(failure)}
            others.append(row)
        others.sort(key=lambda row: float(row["us"]))
        about = {"case": case.name, "kernel": key[0], "constants": dict(sorted(key[1])), "launches": launches}
        emit({**about, **Setting.of(options)._asdict(), "us": taken, "others": others})


def _only(key: Key, candidate: Options) -> Choice:
    """The candidate for the launches of one kernel with these constants."""
    return lambda kernel, constants, _default: candidate if (kernel, constants) == key else None


def _time(case: KernelCase, inputs: dict[str, Tensor], key: Key, device: str) -> tuple[int, float]:
    """Launches of a kernel in a call, and the median of their microseconds together."""
    on_gpu, times, count = device.startswith("cuda"), [], 0
    for _ in range(NUM_TIMINGS if on_gpu else 1):
        if on_gpu:  # launches wait for it, so that no event waits for the host
            torch.cuda._sleep(SLEEP_CYCLES)
        with launches_of(key, on_gpu=on_gpu) as events:
            results_of(case.call, inputs)
        if on_gpu:
            torch.cuda.synchronize()
        count = len(events)
        times.append(sum(before.elapsed_time(after) for before, after in events) * 1e3 if on_gpu else 0.0)
    return count, round(statistics.median(times), 1)


@contextmanager
def launches_of(key: Key, *, on_gpu: bool) -> Iterator[list[Any]]:
    """Context in which each launch of a kernel with these constants adds the events before and after it to the list."""
    name, constants = key
    found: list[Any] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, **named: Any) -> Any:
            if kernel.fn.__name__ != name or not constants <= {k: v for k, v in named.items() if _is_plain(v)}.items():
                return run(kernel, *args, **named)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else [None, None]
            if on_gpu:
                events[0].record()
            result = run(kernel, *args, **named)
            if on_gpu:
                events[1].record()
            found.append(events)
            return result

        return launch

    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    before = [kind.run for kind in kinds]
    try:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = timed(run)
        yield found
    finally:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, bool, str))
