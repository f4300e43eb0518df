"""Kernels that changed after the H200's steps were profiled: `benchmarks/results/h200-changed-kernels.json`.

    python benchmarks/gpu/changed.py
    megaplan calibrate benchmarks/gpu/specs --profile benchmarks/results/h200-2026-11-27b.json
    --changed benchmarks/results/h200-changed-kernels.json -o src/megaplan/measured/h200.json --force

Each row has the microseconds of a kernel's launches in one call before and after, and where they come from. A kernel that was measured as
it runs now has basis `measured`; one whose times are of an experiment, `modelled`.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels")]

from megaplan.api.profiled import label_of  # noqa: E402

FITTED, LATER = (ROOT / f"benchmarks/results/h200-2026-11-{day}.json" for day in ("27b", "27c"))
CHANGED = ROOT / "benchmarks/results/h200-changed-kernels.json"
CAPPED = ("mamba3_output_kernel", "mamba3_pair_kernel", "mamba3_value_kernel")
"""Kernels of Mamba-3's scan that a limit of registers makes faster."""
WALK, OF_TRAINING = "m2rnn_backward_kernel", "mamba3 112x64x128/4"


def rows() -> list[dict[str, Any]]:
    """M2RNN's backward in one walk, and three kernels of Mamba-3's scan with their limits of registers.

    M2RNN's backward has three kernels since, which no GPU has run: they count as the walk of the later file, of which they took work away.
    Mamba-3's kernels ask early for what they read last, which was not timed either.
    """
    fitted, later = (json.loads(path.read_text(encoding="utf-8")) for path in (FITTED, LATER))
    before, after = (_microseconds(found, WALK, "nam56r host.cuda_graphs=microbatch") for found in (fitted, later))
    source = f"{LATER.name}: the backward in one walk"
    found = [{"kernel": WALK, "runs": _runs(fitted, WALK), "us": [before, after], "basis": "modelled", "source": source}]
    for kernel in CAPPED:
        timed = [row for row in later["variants"] if row["kernel"] == kernel and row["case"] == OF_TRAINING]
        times = [sum(float(each) for each in column) for column in zip(*map(_tried, timed), strict=True)]
        source = f"{LATER.name}, variants: {OF_TRAINING}"
        found.append({"kernel": kernel, "runs": _runs(fitted, kernel), "us": times, "basis": "modelled", "source": source})
    return found


def _tried(row: dict[str, Any]) -> tuple[float, float]:
    """Microseconds with the defaults, and with the fastest options that are right."""
    return row["us"], min([row["us"], *(each["us"] for each in row["others"] if each.get("right"))])


def _runs(found: dict[str, Any], kernel: str) -> list[str]:
    """The profiled runs that have a kernel."""
    return [label_of(run) for run in found["runs"] if any(name == kernel for name, _, _ in run["gpu"]["by_kernel"])]


def _microseconds(found: dict[str, Any], kernel: str, label: str) -> float:
    """Microseconds of a kernel in one run's step."""
    run = next(run for run in found["runs"] if label_of(run) == label)
    return round(1e3 * sum(ms for name, _, ms in run["gpu"]["by_kernel"] if name == kernel), 1)


def text() -> str:
    """The file."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows())
    return f'{{\n  "kernels": [\n{lines}\n  ]\n}}\n'


if __name__ == "__main__":
    CHANGED.write_text(text(), encoding="utf-8")
