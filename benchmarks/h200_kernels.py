"""The Triton kernels on one GPU: right first, then median kernel time and eager wall time, beside plain torch and this GPU's own limits.

python benchmarks/h200_kernels.py [NAME ...] [--date YYYY-MM-DD]
python benchmarks/h200_kernels.py --cpu

Needs a GPU; writes benchmarks/results/h200-kernels.csv. Copy bandwidth and cuBLAS rate are measured in the same run, and ratios are to
them. Kernel time is a CUDA graph's, wall time the eager call's. liger-kernel is measured beside where it is installed. --cpu runs the
harness on small sizes without timing: inputs, correctness, counted bytes and FLOPs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from h200.kernel_cases import KernelCase, cases  # noqa: E402

from megakernels import use_kernels  # noqa: E402

RESULT = ROOT / "benchmarks/results/h200-kernels.csv"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""RMS ratio to the fp64 result."""
NUM_REPEATS = 30
CORRECTNESS_TOKENS = 300


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact value; NaN where either is."""
    error: float = ((found.double() - exact).norm() / exact.norm()).item()
    return error


def gradients_of(case: KernelCase, inputs: dict[str, Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The output and every gradient."""
    y = case.call(**inputs)
    found = torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *found]


def worst_error(case: KernelCase, device: str, dtype: torch.dtype) -> float:
    """Largest RMS ratio of output and gradients to the fp64 reference, of the first tokens."""
    inputs = case.make("cpu", dtype)
    tokens = next(iter(case.shapes.values()))[:2]
    short = {
        name: (value[:1, :CORRECTNESS_TOKENS] if value.shape[:2] == tokens else value).detach().to(device).requires_grad_()
        for name, value in inputs.items()
    }
    found = gradients_of(case, short)
    exact = gradients_of(case, {name: value.detach().double().requires_grad_() for name, value in short.items()})
    return max(rms_ratio(a, b) for a, b in zip(found, exact, strict=True))


def graph_ns(run: Callable[[], Any]) -> int:
    """Median kernel time of a call captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return median_ns(graph.replay)


def median_ns(run: Callable[[], Any]) -> int:
    """Median time on the device between two events around a call."""
    times = []
    for _ in range(NUM_REPEATS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return round(statistics.median(times) * 1e6)


def wall_ns(run: Callable[[], Any]) -> int:
    """Median time on the host of a call and its end."""
    times = []
    for _ in range(NUM_REPEATS):
        began = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - began)
    return round(statistics.median(times))


def limits() -> tuple[float, float]:
    """Bytes per ns of a copy of 2 GiB and FLOPs per ns of cuBLAS in bf16 at 8192³, here and now."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() * source.itemsize / median_ns(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return copy, 2 * 8192**3 / median_ns(lambda: a @ b)


def counted(case: KernelCase) -> dict[str, int]:
    """Ideal bytes and FLOPs of a call."""
    work = case.work
    return {
        "forward_bytes": work.moved_forward * case.num_tokens,
        "backward_bytes": (work.moved_input + work.moved_weight) * case.num_tokens,
        "forward_flops": work.forward * case.num_tokens,
        "backward_flops": (work.input_grad + work.weight_grad) * case.num_tokens,
    }


def measure(case: KernelCase, copy: float, matmul: float) -> list[dict[str, Any]]:
    """One row for each of kernels and reference; refuses to time what is wrong."""
    rows = []
    for kernels in ("triton", "reference"):
        use_kernels(kernels)  # type: ignore[arg-type]
        error = worst_error(case, "cuda", torch.bfloat16)
        if not error <= TOLERANCE[torch.bfloat16]:
            raise SystemExit(f"{case.name} with {kernels}: error {error}")
        inputs = case.make("cuda", torch.bfloat16)
        y = case.call(**inputs)
        grad = torch.randn_like(y)
        forward = graph_ns(lambda case=case, inputs=inputs: case.call(**inputs))
        both = graph_ns(lambda case=case, inputs=inputs, grad=grad: gradients_of(case, inputs, grad))
        amounts = counted(case)
        times = {"forward": forward, "backward": both - forward}
        limit, unit = (copy, "bytes") if case.bound == "copy" else (matmul, "flops")
        row: dict[str, Any] = {"case": case.name, "kernels": kernels, "error": f"{error:.1e}"}
        for phase, nanoseconds in times.items():
            row[f"{phase}_ns"] = nanoseconds
            row[f"{phase}_of_{case.bound}"] = round(amounts[f"{phase}_{unit}"] / nanoseconds / limit, 3)
        row["wall_ns"] = wall_ns(lambda case=case, inputs=inputs, grad=grad: gradients_of(case, inputs, grad))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients_of(case, inputs, grad)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        rows.append(row)
    return rows


def liger(name: str) -> Callable[..., Tensor] | None:
    """liger-kernel's operation beside one of ours, where it is installed."""
    if importlib.util.find_spec("liger_kernel") is None or name.split(maxsplit=1)[0] not in ("rms_norm", "swiglu"):
        return None
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # noqa: PLC0415

    if name.startswith("swiglu"):
        return LigerSiLUMulFunction.apply
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-5)


def check_on_cpu(chosen: list[KernelCase]) -> list[dict[str, Any]]:
    """The harness without a GPU: every small case within its tolerance of fp64, and what is counted for it."""
    rows = []
    for case in chosen:
        error = worst_error(case, "cpu", torch.float32)
        if not error <= TOLERANCE[torch.float32]:
            raise SystemExit(f"{case.name}: error {error}")
        rows.append({"case": case.name, "error": f"{error:.1e}", **counted(case)})
    return rows


def main() -> int:
    """Measure and write; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="operations; default: all")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    chosen = [case for case in cases(small=arguments.cpu) if not arguments.names or case.name.split()[0] in arguments.names]
    if arguments.cpu:
        for row in check_on_cpu(chosen):
            print(*(f"{key}={value}" for key, value in row.items()))
        return 0
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    copy, matmul = limits()
    rows = []
    for case in chosen:
        rows += measure(case, copy, matmul)
        peer = liger(case.name)
        if peer is not None:
            inputs = case.make("cuda", torch.bfloat16)
            grad = torch.randn_like(peer(**inputs))
            forward = graph_ns(lambda peer=peer, inputs=inputs: peer(**inputs))
            both = graph_ns(lambda peer=peer, inputs=inputs, grad=grad: torch.autograd.grad(peer(**inputs), list(inputs.values()), grad))
            rows.append({"case": case.name, "kernels": "liger", "forward_ns": forward, "backward_ns": both - forward})
    about = {"date": arguments.date, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"copy_gb_s": round(copy), "matmul_tflop_s": round(matmul / 1000)}
    rows = [about | row for row in rows]
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items() if key not in about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
