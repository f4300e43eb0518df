"""The Triton kernels on one GPU: right first, then median kernel time and eager wall time, beside plain torch and this GPU's own limits.

python benchmarks/h200_kernels.py [NAME ...] [--date YYYY-MM-DD]
python benchmarks/h200_kernels.py --cpu

Needs a GPU; writes benchmarks/results/h200-kernels.csv. Copy bandwidth and cuBLAS rate are measured in the same run, and ratios are to
them. Kernel time is a CUDA graph's, wall time the eager call's. Plain torch is the row `reference`: of `moe` sorted copies and grouped_mm,
of `newton_schulz` full products. torch's attention libraries, and liger-kernel and flash-linear-attention where they are installed, are
measured beside; one that is wrong or fails is a row that says so. --cpu runs the harness on small sizes without timing: inputs,
correctness, counted bytes and FLOPs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from h200.case import Inputs, KernelCase  # noqa: E402
from h200.kernel_cases import cases  # noqa: E402
from h200.peers import peers  # noqa: E402

from megakernels import scratch_bytes, use_kernels  # noqa: E402

RESULT = ROOT / "benchmarks/results/h200-kernels.csv"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""RMS ratio to the fp64 result."""
NUM_REPEATS = 30
CORRECTNESS_TOKENS = 300


class Stated(TorchDispatchMode):
    """The most that an operation states of its inside (`megakernels.scratch_bytes`), of those that run meanwhile."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_bytes = max(self.num_bytes, scratch_bytes(str(func), args))
        return func(*args, **(kwargs or {}))


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact value; NaN where either is."""
    error: float = ((found.double() - exact).norm() / exact.norm()).item()
    return error


def gradients_of(call: Callable[..., Tensor], inputs: Inputs, grad: Tensor | None = None) -> list[Tensor]:
    """The output and every gradient; of an operation without gradients its output."""
    y = call(**inputs)
    if not y.requires_grad:
        return [y]
    found = torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *found]


def worst_error(case: KernelCase, device: str, dtype: torch.dtype, call: Callable[..., Tensor] | None = None) -> float:
    """Largest RMS ratio of output and gradients to the fp64 reference, of the first tokens; of the case's operation or another one."""
    short = case.make(device, dtype, CORRECTNESS_TOKENS)
    wide = {name: value.detach().double().requires_grad_(case.differentiable) for name, value in short.items()}
    exact = gradients_of(case.call, wide)
    found = gradients_of(case.call if call is None else call, short)
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
    """One row for each of kernels, reference and installed peers; refuses to time what of ours is wrong."""
    rows = []
    for kernels in ("triton", "reference"):
        use_kernels(kernels)  # type: ignore[arg-type]
        error = worst_error(case, "cuda", torch.bfloat16)
        if not error <= TOLERANCE[torch.bfloat16]:
            raise SystemExit(f"{case.name} with {kernels}: error {error}")
        rows.append({"case": case.name, "kernels": kernels, "error": f"{error:.1e}", **timed(case, case.call, copy, matmul)})
    use_kernels("triton")
    for library, call in peers(case):
        rows.append({"case": case.name, "kernels": library, **peer(case, call, copy, matmul)})
    return rows


def peer(case: KernelCase, call: Callable[..., Tensor], copy: float, matmul: float) -> dict[str, Any]:
    """A library's numbers; its failure, or only its error where that is past the tolerance."""
    try:
        error = worst_error(case, "cuda", torch.bfloat16, call)
        found = timed(case, call, copy, matmul) if error <= TOLERANCE[torch.bfloat16] else {"failure": "past the tolerance; not timed"}
    except Exception as failure:  # another library's: whatever it is, the other rows stand
        return {"failure": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    return {"error": f"{error:.1e}", **found}


def timed(case: KernelCase, call: Callable[..., Tensor], copy: float, matmul: float) -> dict[str, Any]:
    """Kernel times, their ratios to this GPU's limit, wall time, highest bytes with and without what is returned, and what is stated."""
    inputs = case.make("cuda", torch.bfloat16)
    grad = torch.randn_like(call(**inputs)) if case.differentiable else None
    limit, unit = (copy, "bytes") if case.bound == "copy" else (matmul, "flops")
    amounts, times = counted(case), {"forward": graph_ns(lambda: call(**inputs))}
    if case.differentiable:
        times["backward"] = graph_ns(lambda: gradients_of(call, inputs, grad)) - times["forward"]
    row: dict[str, Any] = {}
    for phase, nanoseconds in times.items():
        row[f"{phase}_ns"] = nanoseconds
        row[f"{phase}_of_{case.bound}"] = round(amounts[f"{phase}_{unit}"] / nanoseconds / limit, 3)
    if unit == "flops":
        row["tflop_s"] = round(sum(amounts[f"{phase}_flops"] for phase in times) / sum(times.values()) / 1000, 1)
    row["wall_ns"] = wall_ns(lambda: gradients_of(call, inputs, grad))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = gradients_of(call, inputs, grad)
    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    row["workspace_bytes"] = row["peak_bytes"] - sum(result.nbytes for result in results)
    return row | {"stated_bytes": stated_bytes(call, inputs)}


def stated_bytes(call: Callable[..., Tensor], inputs: Inputs) -> int:
    """What the operation's forward or backward states of its inside, the larger; what is saved between the two comes on top in a run."""
    with Stated() as stated:
        gradients_of(call, inputs)
    return stated.num_bytes


def check_on_cpu(chosen: list[KernelCase]) -> list[dict[str, Any]]:
    """The harness without a GPU: every small case within its tolerance of fp64, and what is counted for it."""
    use_kernels("triton")
    rows = []
    for case in chosen:
        error = worst_error(case, "cpu", torch.float32)
        if not error <= TOLERANCE[torch.float32]:
            raise SystemExit(f"{case.name}: error {error}")
        stated = stated_bytes(case.call, case.make("cpu", torch.bfloat16))
        rows.append({"case": case.name, "error": f"{error:.1e}", **counted(case), "stated_bytes": stated})
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
