"""A hybrid of about a billion parameters trained in bf16 for fifty steps on one GPU: every phase's peaks beside the estimate.

python benchmarks/h200_hybrid.py --date YYYY-MM-DD     on a GPU; writes benchmarks/results/h200-hybrid.json
python benchmarks/h200_hybrid.py --cpu-check           no GPU: one small plan, two steps; measures no memory

Trains the hybrid of benchmarks/h200/train.yaml in processes of its own, on random tokens, eager and with compiled blocks. The bar:
allocated bytes of every phase within 2% of the estimate, and losses that are finite. Exits 1 past it, 2 without a GPU. What a machine
without pydantic needs stands in h200_memory.py.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks/accuracy", "benchmarks")]
PLANS = ROOT / "benchmarks/h200/train.yaml"
RESULT = ROOT / "benchmarks/results/h200-hybrid.json"
NUM_STEPS, NUM_STEPS_CHECKED = 50, 2
LIMIT = 0.02
PLAN_SECONDS = 280
NAME, SMALL, COMPILED = "hybrid", "tiny-hybrid", ", compiled"


def train(name: str) -> dict[str, Any]:
    """In a process of its own: what `h200.measure` finds, beside the estimate."""
    from h200.measure import trained  # noqa: PLC0415

    num_steps = NUM_STEPS_CHECKED if name.startswith(SMALL) else NUM_STEPS
    return trained(name.removesuffix(COMPILED), PLANS, num_steps=num_steps, compiled=name.endswith(COMPILED))


def alone(name: str) -> dict[str, Any]:
    """The same from here; {"failure": …} if it fails or takes too long."""
    from h200.alone import run_alone  # noqa: PLC0415

    return run_alone(__file__, "--train", name, seconds=PLAN_SECONDS)


def report(name: str, found: dict[str, Any]) -> bool:
    """Print a plan's phases; whether it is within the bar."""
    if "failure" in found:
        print(f"{name}: {found['failure']}")
        return False
    losses, within = found["losses"], all(math.isfinite(loss) for loss in found["losses"])
    print(f"{name}: {found['parameters']:,} parameters, {len(losses)} steps, loss {losses[0]:.4f} → {losses[-1]:.4f}")
    for phase, measured in found["phases"].items():
        if measured["allocated"] is None:
            continue
        error = found["estimate"][phase]["allocated"] / measured["allocated"] - 1
        within = within and abs(error) <= LIMIT
        print(f"    {phase:24} {measured['allocated'] / 2**30:7.2f} GiB  {error:+.2%}")
    return within


def main() -> int:
    """Train, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-check", action="store_true")
    parser.add_argument("--date", help="recorded beside the numbers, YYYY-MM-DD")
    parser.add_argument("--train", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        print(json.dumps(train(given.train)))
        return 0
    if given.cpu_check:
        return 0 if all(report(name, alone(name)) for name in (SMALL, SMALL + COMPILED)) else 1
    import torch  # noqa: PLC0415  (after the arguments, which answer at once)

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    results = {NAME + how: alone(NAME + how) for how in ("", COMPILED)}
    RESULT.write_text(json.dumps({"date": given.date, "python": platform.python_version(), "plans": results}, indent=1) + "\n")
    passed = [report(name, found) for name, found in results.items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
