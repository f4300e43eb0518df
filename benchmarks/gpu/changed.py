"""Kernels that changed after the H200's steps were profiled: `benchmarks/results/h200-changed-kernels.json`.

    python benchmarks/gpu/changed.py
    megaplan calibrate benchmarks/gpu/specs --profile benchmarks/results/h200-2026-11-27b.json
    --changed benchmarks/results/h200-changed-kernels.json -o src/megaplan/measured/h200.json --force

Each row has the microseconds of a kernel's launches in one call before and after, and where they come from. A kernel that was measured as
it runs now has basis `measured`; one whose times are of an experiment, `modelled`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h200-2026-11-27b.json"
CHANGED = ROOT / "benchmarks/results/h200-changed-kernels.json"
BEFORE, AFTER = "backward, sums after the walks", "backward, sums in the walks"


def rows() -> list[dict[str, Any]]:
    """The backward of M²RNN, which adds up in its walks again: 20.6 ms a layer in training without, 16.6 as an experiment with them."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    before, after = (next(float(row["us"]) for row in found["experiments"] if words in row["what"]) for words in (BEFORE, AFTER))
    runs = [
        " ".join([run["run"], *run["overrides"]])
        for run in found["runs"]
        if any(name == "m2rnn_backward_kernel" for name, _, _ in run["gpu"]["by_kernel"])
    ]
    source = f"{RESULTS.name}, experiments: {AFTER}"
    return [{"kernel": "m2rnn_backward_kernel", "runs": runs, "us": [before, after], "basis": "modelled", "source": source}]


def text() -> str:
    """The file."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows())
    return f'{{\n  "kernels": [\n{lines}\n  ]\n}}\n'


if __name__ == "__main__":
    CHANGED.write_text(text(), encoding="utf-8")
