"""Writes docs/reference/measured.md: a GPU's measurements, the estimate, the modelled step and the counted floor of the same plans.

python benchmarks/gpu/measured/page.py        of the newest benchmarks/results/h200-YYYY-MM-DD.json

It needs no GPU. The counted floors run each spec on tensors without values (`benchmarks/roofline.py`), about half a minute a spec.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]

from gpu.measured import times  # noqa: E402
from gpu.measured.reserved import ReservedRow, reserved_rows, reserved_table  # noqa: E402
from gpu.measured.results import NEWEST, TrainingRun, document, training_runs  # noqa: E402
from gpu.tables import markdown  # noqa: E402

import megaplan  # noqa: E402
from megaplan.layout.step_time import PlannedTime  # noqa: E402

PAGE = ROOT / "docs/reference/measured.md"
GIB = 2**30
TEMPLATE = Path(__file__).with_name("page.md")
COPY_GB_S, MATMUL_TFLOP_S = 4800, 989
"""Rates of the data sheet."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    return "\n".join(markdown(head, rows)).rstrip()


def percent(estimate: float, measured: float) -> str:
    """The error of an estimate, (estimate − measured) / measured."""
    error = 100 * (estimate / measured - 1)
    return f"{error:+.2f} %" if abs(error) < 1 else f"{error:+.1f} %"


def step_rows(runs: Sequence[TrainingRun], estimates: dict[str, megaplan.Estimate], floors: dict[str, float]) -> Iterator[Sequence[str]]:
    """Step, its model and interval, MFU, and the first step."""
    for run in runs:
        planned = estimates[run.name].step_time
        if run.expandable_segments or not isinstance(planned, PlannedTime):
            continue
        busy = (f"{run.busy_ms:,.0f}", f"{run.launches:,}") if run.busy_ms is not None else ("", "")
        measured = 1e3 * run.step_seconds
        yield (
            run.name,
            f"{measured:,.0f}",
            f"{1e3 * planned.seconds:,.0f}",
            percent(planned.seconds, run.step_seconds),
            f"{1e3 * planned.low:,.0f} to {1e3 * planned.high:,.0f}",
            f"{1e3 * floors[run.name]:,.0f}",
            *busy,
            f"{100 * run.mfu:.1f} %",
            f"{run.first_step_seconds:.1f}",
        )


def allocated_rows(rows: Iterable[ReservedRow]) -> Iterator[Sequence[str]]:
    """Allocated bytes of every phase under the default allocator."""
    for row in rows:
        if not row.expandable_segments:
            sizes = (f"{row.allocated / GIB:.3f}", f"{row.estimated_allocated / GIB:.3f}")
            yield row.run, str(row.phase), *sizes, percent(row.estimated_allocated, row.allocated)


def operation_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Isolated operations: time of both passes, and the reason where one was not timed."""
    seen = set()
    for row in rows:
        key = row["case"], row["kernels"]
        if key in seen:
            continue
        seen.add(key)
        if "forward_ns" not in row:
            yield *key, "not timed", "", row["failure"].split(":", 1)[0]
            continue
        yield *key, f"{row['forward_ns'] / 1e6:.2f}", f"{row['backward_ns'] / 1e6:.2f}", f"{row['tflop_s']:,.0f}"


def check_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """The largest error of each operation against fp64."""
    for row in rows:
        if "error300" in row:
            yield row["case"], f"{row['error300']:.1e}", "yes" if row["bitwise"] else "no"
        else:
            yield row["case"], "failed", ""


def floor_seconds(spec: Path) -> float:
    """The counted lower bound of a spec's step."""
    import roofline  # noqa: PLC0415  (loads torch)

    return float(roofline.counted(str(spec), []).floor.seconds)


def page() -> str:
    """The page as Markdown."""
    found, runs = document(), training_runs()
    estimates = {run.name: megaplan.estimate(run.spec) for run in runs}
    floors = {run.name: floor_seconds(run.spec) for run in runs if not run.expandable_segments}
    steps = ("run", "step ms", "modelled", "error", "80 % interval", "floor", "GPU busy", "launches", "MFU", "first step s")
    return TEMPLATE.read_text().format(
        file=NEWEST.name,
        copy_percent=100 * found["copy_gb_s"] / COPY_GB_S,
        matmul_percent=100 * found["matmul_bf16_8192_tflop_s"] / MATMUL_TFLOP_S,
        steps=table(steps, step_rows(runs, estimates, floors)),
        allocated=table(("run", "phase", "measured", "estimate", "error"), allocated_rows(reserved_rows(NEWEST))),
        reserved=reserved_table(NEWEST).rstrip(),
        residuals="\n".join(times.step_table(times.steps(found))),
        parts="\n".join(times.table(times.rows(found))),
        operations=table(("case", "kernels", "forward ms", "backward ms", "TFLOP/s"), operation_rows(found["kernel_times"])),
        checks=table(("case", "largest error", "bitwise repeatable"), check_rows(found["checks_at_300_tokens"])),
        **found,
    )


if __name__ == "__main__":
    PAGE.write_text(page())
