"""Checks the kernels on a device: every operation against its fp64 result at several sizes, each twice for the same bits."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu.case import Inputs, KernelCase
from torch import Tensor

from megakernels import use_kernels

Emit = Callable[[dict[str, Any]], None]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""RMS ratio to the fp64 result that is right without a further look."""
ZERO = 1e-12
"""Root mean square below which an fp64 result of inputs of order one is the rounding of zero."""


def sizes_of(case: KernelCase, *, small: bool = False) -> tuple[int, ...]:
    """Tokens of one sequence that a check looks at; one size for an operation without tokens."""
    if case.num_tokens == 1:
        return (1,)
    if small:
        return (1, 3, 17)
    return tuple(sorted({1, 3, case.tile - 1, case.tile + 1, 300, 2048}))


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact value, or of the error alone where the exact value is zero.

    A gradient that is zero in exact arithmetic, such as that of a turn before the first position, is rounding in fp64 too.
    """
    error, size, root = (found.double() - exact).norm().item(), exact.norm().item(), math.sqrt(max(1, exact.numel()))
    return error / size if size > ZERO * root else error / root


def results_of(call: Callable[..., Tensor], inputs: Inputs, grad: Tensor | None = None) -> list[Tensor]:
    """The output and every gradient; the output alone of an operation without gradients."""
    y = call(**inputs)
    if not y.requires_grad:
        return [y]
    seed = cotangent(y) if grad is None else grad
    return [y.detach(), *torch.autograd.grad(y, list(inputs.values()), seed.to(y.dtype))]


def cotangent(y: Tensor) -> Tensor:
    """Random values for an output of this shape, equal in every dtype: bf16 represents them."""
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=y.device).bfloat16()


def widened(case: KernelCase, inputs: Inputs) -> Inputs:
    """The inputs in fp64."""
    return {name: value.detach().double().requires_grad_(case.differentiable) for name, value in inputs.items()}


def exact_results(case: KernelCase, inputs: Inputs) -> list[Tensor]:
    """The fp64 results, by plain torch: no kernel takes fp64."""
    return results_of(case.call, widened(case, inputs))


def worst_error(
    case: KernelCase, device: str, dtype: torch.dtype, call: Callable[..., Tensor] | None = None, num_tokens: int = 300
) -> float:
    """Largest RMS ratio of output and gradients to fp64, of the case's operation or another one; NaN if any result is."""
    inputs = case.make(device, dtype, num_tokens)
    exact = exact_results(case, inputs)
    found = results_of(case.call if call is None else call, inputs)
    return worst([rms_ratio(a, b) for a, b in zip(found, exact, strict=True)])


def moved_by_a_unit(case: KernelCase, inputs: Inputs, exact: list[Tensor]) -> list[float]:
    """RMS ratios between the fp64 results and those of inputs that differ by at most one unit in the last place, drawn at random.

    A kernel rounds its operands, so an ill-conditioned result, such as a sum that cancels, is no closer to the exact one. A kernel
    within it is right: its result is the exact one of inputs that the dtype can hardly distinguish from those given.
    """
    generator = torch.Generator(next(iter(inputs.values())).device).manual_seed(2)
    near = {}
    for name, value in inputs.items():
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) * 2 - 1
        near[name] = (value.detach().double() * (1 + noise * torch.finfo(value.dtype).eps)).requires_grad_(case.differentiable)
    return [rms_ratio(a, b) for a, b in zip(results_of(case.call, near), exact, strict=True)]


def worst(ratios: list[float]) -> float:
    """The largest, NaN if there is one: `max` may drop it."""
    return math.nan if any(math.isnan(each) for each in ratios) else max(ratios)


def check(case: KernelCase, num_tokens: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One size: the error of each result, whether all values are finite, and whether a second run has the same bits.

    An error above the tolerance is right if a unit in the last place of the inputs moves the exact result as far.
    """
    began = time.perf_counter()
    inputs = case.make(device, dtype, num_tokens if case.num_tokens > 1 else None)
    found, again = results_of(case.call, inputs), results_of(case.call, inputs)
    exact = exact_results(case, inputs)
    errors = {name: rms_ratio(a, b) for name, a, b in zip(("y", *inputs), found, exact, strict=False)}
    error = worst(list(errors.values()))
    bounds = [TOLERANCE[dtype]] * len(errors)
    if error > TOLERANCE[dtype]:
        bounds = [max(TOLERANCE[dtype], each) for each in moved_by_a_unit(case, inputs, exact)]
    near = all(each <= bound for each, bound in zip(errors.values(), bounds, strict=True))
    bitwise = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    finite = all(bool(a.isfinite().all()) for a in found)
    return {
        "case": case.name,
        "num_tokens": num_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "errors": {name: float(f"{each:.3g}") for name, each in errors.items()},
        "bitwise": bitwise,
        "finite": finite,
        "bounds": {name: float(f"{each:.3g}") for name, each in zip(errors, bounds, strict=True) if each > TOLERANCE[dtype]},
        "right": bool(near and bitwise and finite),
        "seconds": round(time.perf_counter() - began, 2),
    }


def check_case(case: KernelCase, emit: Emit, device: str, *, small: bool = False) -> None:
    """Every size, each a separate line; one that fails does not stop the next. At last the full size once, which compiles its kernels.

    On a CPU plain torch: the interpreter would take minutes, and the kernel checks have it.
    """
    use_kernels("reference" if small else "triton")
    dtypes = [torch.bfloat16, torch.float32] if not small else [torch.float32]
    for num_tokens in sizes_of(case, small=small):
        for dtype in dtypes if num_tokens == 300 or small else dtypes[:1]:
            try:
                emit(check(case, num_tokens, device, dtype))
            except Exception as failure:  # whatever the error is, the other sizes are still checked
                emit({"case": case.name, "num_tokens": num_tokens, "dtype": str(dtype).removeprefix("torch."), "failure": said(failure)})
    if not small:
        began = time.perf_counter()
        found = results_of(case.call, case.make(device, torch.bfloat16))
        finite = all(bool(a.isfinite().all()) for a in found)
        emit({"case": case.name, "full_size": True, "finite": finite, "seconds": round(time.perf_counter() - began, 2)})


def said(failure: BaseException) -> str:
    """Type and the first line that says something."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"[:500]
