"""Kernels that became faster after the H200's steps were profiled: `benchmarks/results/h200-changed-kernels.json`.

    python benchmarks/gpu/changed.py
    megaplan calibrate benchmarks/gpu/specs --profile benchmarks/results/h200-2026-11-26.json --held-out
    benchmarks/results/h200-2026-11-27.json --changed benchmarks/results/h200-changed-kernels.json -o src/megaplan/measured/h200.json

Each row has the microseconds of a kernel's launches in one call before and after, and where they come from: launches with other warps or
stages were measured as they run now. Other rows are of experiments, or of an operation that takes the kernel's place; their basis is
`modelled`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]

from gpu.tuned import choices, rows_of  # noqa: E402

RESULTS = ROOT / "benchmarks/results/h200-2026-11-27.json"
CHANGED = ROOT / "benchmarks/results/h200-changed-kernels.json"
RUNS = {"mamba3 112x64x128/4": ["nam56r"], "ssd 64x64x128": ["hybrid-1b", "mamba2-1b"]}
"""Runs whose layers have the sizes of a case."""


def rows() -> list[dict[str, Any]]:
    """All changed kernels."""
    return [*tuned_rows(), *recurrence_rows()]


def tuned_rows() -> Iterator[dict[str, Any]]:
    """Kernels that run with other warps or stages now: all their launches in a call, with those that stay as they were."""
    _, variants = rows_of(RESULTS)
    chosen = {(each.kernel, frozenset(each.when.items())): each.options for each in choices(variants)}
    for case, runs in RUNS.items():
        found: dict[str, list[float]] = {}
        for row in variants:
            if row["case"] == case:
                total = found.setdefault(row["kernel"], [0.0, 0.0])
                total[0] += row["us"]
                total[1] += _time(row, chosen.get((row["kernel"], frozenset(row["constants"].items()))))
        for kernel, (before, after) in found.items():
            if after != before:
                source = f"{RESULTS.name}, variants of {case}"
                yield {"kernel": kernel, "runs": runs, "us": [round(before, 1), round(after, 1)], "basis": "measured", "source": source}


def recurrence_rows() -> Iterator[dict[str, Any]]:
    """The recurrence of M²RNN, whose loads start a position earlier: an experiment of the forward; the backward was not measured yet."""
    found, case = json.loads(RESULTS.read_text(encoding="utf-8")), "m2rnn 44x64x16"
    before = next(row for row in found["kernel_times"] if row["case"] == case and row["kernels"] == "triton")
    like = {"kind": "tf32x3", "ahead": True, "R": 64, "warps": 2}
    experiment = next(row for row in found["m2rnn_forward"] if like.items() <= row.items())
    forward, backward = before["forward_ns"] / 1e3, before["backward_ns"] / 1e3
    shared = {"runs": ["nam56r", "hybrid-1b"], "basis": "modelled"}
    source = f"{RESULTS.name}, m2rnn_forward: all rows of a state in 2 warps with early loads, an experiment"
    yield {"kernel": "m2rnn_forward_kernel", "us": [round(forward, 1), 1e3 * experiment["ms"]], "source": source} | shared
    source = f"{RESULTS.name}, {case}: the kernel without early loads"
    yield {"kernel": "m2rnn_backward_kernel", "us": [round(backward, 1)] * 2, "source": source} | shared


def _time(row: dict[str, Any], options: Any) -> float:
    if options is None:
        return float(row["us"])
    setting = options["num_warps"], options.get("num_stages")
    return next(float(each["us"]) for each in row["others"] if (each["warps"], each["stages"]) == setting)


def text() -> str:
    """The file."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows())
    return f'{{\n  "kernels": [\n{lines}\n  ]\n}}\n'


if __name__ == "__main__":
    CHANGED.write_text(text(), encoding="utf-8")
