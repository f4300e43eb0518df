"""Speed of training on one GPU: a hybrid of 1.1 and Mamba-2 of 1.3 billion parameters, bf16, kernels on and off, eager and compiled.

python benchmarks/h200_train.py [NAME …] --date YYYY-MM-DD     on a GPU; a run is a plan of benchmarks/h200/train.yaml, or "PLAN, compiled"
python benchmarks/h200_train.py --cpu                          no GPU: the harness on a small plan; no rate it prints is one of a GPU

Each run has a process of its own, trains on random tokens, and is written to benchmarks/results/h200-train.json at once, beside those of
earlier calls: tokens/s over the steps after the first ones, model FLOPs a second (what is made again in backward is not counted) and their
part of the peak (MFU), and the peak of allocated bytes beside the estimate. A compiled block keeps what the compiler chooses. Public rates
to set beside: Mamba-2 of 1.4 billion parameters on an H200 239 TFLOP/s (batch 4 × 4096), hybrids 328 TFLOP/s a GPU on H100s. What a
machine without pydantic needs stands in h200_memory.py. Exits 1 if a run failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks/accuracy", "benchmarks")]
PLANS = ROOT / "benchmarks/h200/train.yaml"
RESULT = ROOT / "benchmarks/results/h200-train.json"
NUM_STEPS, NUM_STEPS_CHECKED = 20, 3
NUM_WARM = 5
"""First steps, which compile, tune allocators and fill caches; of a check, one."""
RUN_SECONDS = 280
SMALL, COMPILED = "tiny-hybrid", ", compiled"


def all_runs() -> list[str]:
    """Every plan, eager and compiled."""
    from matrix import names  # noqa: PLC0415

    return [name + how for name in names(matrix=PLANS) for how in ("", COMPILED)]


def rates(found: dict[str, Any], num_warm: int) -> dict[str, Any]:
    """Median step, tokens/s, TFLOP/s and MFU of a run's steps after the first ones, and its peak beside the estimate's.

    Args:
        found: As `h200.measure.trained` returns it.
        num_warm: Steps that do not count; fewer than it has.

    Returns:
        `mfu`, `peak_bytes` and `peak_error` are None where no GPU was asked.
    """
    seconds = statistics.median(found["seconds"][num_warm:])
    tokens_per_second = found["step_tokens"] / seconds
    flops = tokens_per_second * found["flops_per_token"]
    peaks = [phase["allocated"] for phase in found["phases"].values()]
    on_gpu = all(peak is not None for peak in peaks)
    estimate = max(phase["allocated"] for phase in found["estimate"].values())
    return {
        "step_seconds": seconds,
        "tokens_per_second": round(tokens_per_second),
        "tflop_per_second": flops / 1e12,
        "mfu": flops / found["peak_flops"] if on_gpu else None,
        "peak_bytes": max(peaks) if on_gpu else None,
        "estimate_bytes": estimate,
        "peak_error": estimate / max(peaks) - 1 if on_gpu else None,
    }


def report(name: str, found: dict[str, Any]) -> bool:
    """Print a run; whether it succeeded with finite losses."""
    if "failure" in found:
        print(f"{name}: {found['failure']}")
        return False
    rate = found["rates"]
    shown = f"{rate['tokens_per_second']:,} tokens/s, {rate['tflop_per_second']:.3g} TFLOP/s"
    if rate["mfu"] is not None:
        shown += f" ({rate['mfu']:.1%} of the peak), {rate['peak_bytes'] / 2**30:.2f} GiB, estimate {rate['peak_error']:+.2%}"
    print(f"{name}: {found['parameters']:,} parameters, loss {found['losses'][0]:.4f} → {found['losses'][-1]:.4f}, {shown}")
    return all(math.isfinite(loss) for loss in found["losses"])


def run(name: str) -> dict[str, Any]:
    """A run in a process of its own, with its rates; {"failure": …} if it fails or takes too long."""
    from h200.alone import run_alone  # noqa: PLC0415

    found = run_alone(__file__, "--run", name, seconds=RUN_SECONDS)
    return found if "failure" in found else found | {"rates": rates(found, 1 if name.startswith(SMALL) else NUM_WARM)}


def keep(name: str, found: dict[str, Any], date: str | None) -> None:
    """Write one run beside those that are there."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept[name] = {"date": date, "python": platform.python_version(), **found}
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    """Train, reckon, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs; default: all")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--date", help="recorded beside the numbers, YYYY-MM-DD")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        from h200.measure import trained  # noqa: PLC0415

        num_steps = NUM_STEPS_CHECKED if given.run.startswith(SMALL) else NUM_STEPS
        plan, compiled = given.run.removesuffix(COMPILED), given.run.endswith(COMPILED)
        print(json.dumps(trained(plan, PLANS, num_steps=num_steps, compiled=compiled)))
        return 0
    if given.cpu:
        return 0 if all(report(name, run(name)) for name in (SMALL, f"{SMALL}-kernels")) else 1
    unknown = set(given.names) - set(all_runs())
    if unknown:
        parser.error(f"no run {', '.join(sorted(unknown))}; there are {', '.join(all_runs())}")
    import torch  # noqa: PLC0415  (after the arguments, which answer at once)

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    passed = []
    for name in given.names or all_runs():
        found = run(name)
        keep(name, found, given.date)
        passed.append(report(name, found))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
