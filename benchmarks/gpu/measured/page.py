"""Writes docs/reference/measured.md: a GPU's measurements, the estimate, the modelled step and the counted floor of the same plans.

python benchmarks/gpu/measured/page.py                 of all benchmarks/results/h200-YYYY-MM-DD*.json
python benchmarks/gpu/measured/page.py --keep FILE     add the model of today to a results file, before the runtime changes

It needs no GPU. The counted floors run each spec on tensors without values (`benchmarks/roofline.py`), about half a minute a spec.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]

from gpu.measured import times  # noqa: E402
from gpu.measured.reserved import ReservedRow, reserved_rows, reserved_table  # noqa: E402
from gpu.measured.results import FILES, TrainingRun, document, kept_model, training_runs  # noqa: E402
from gpu.tables import markdown  # noqa: E402

from megaplan.api.profiled import label_of  # noqa: E402

LEAST_GAIN = 0.07
"""Gain of another number of warps or stages from which it is shown."""
PAGE = ROOT / "docs/reference/measured.md"
GIB = 2**30
TEMPLATE = Path(__file__).with_name("page.md")
STEPS = ("run", "step ms", "modelled", "error", "80 % interval", "floor", "GPU busy", "launches", "MFU", "first step s", "compiled ahead")
COUNTERS = ("kernel", "us", "registers", "DRAM", "L2", "L1", "warps", "issued", "memory", "shared memory", "barriers")
COPY_GB_S, MATMUL_TFLOP_S = 4800, 989
"""Rates of the data sheet."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    return "\n".join(markdown(head, rows)).rstrip()


def percent(estimate: float, measured: float) -> str:
    """The error of an estimate, (estimate − measured) / measured."""
    error = 100 * (estimate / measured - 1)
    return f"{error:+.2f} %" if abs(error) < 1 else f"{error:+.1f} %"


def step_rows(path: Path, floors: dict[str, float]) -> Iterator[Sequence[str]]:
    """Step, its model and interval, floor, and the first step with the kernels that it found in the cache."""
    runs = {(run.name, run.expandable_segments): run for run in training_runs(path)}
    ahead = {label_of(row): row.get("kernels") for row in document(path)["runs"]}
    for row in times.steps(document(path)):
        run = runs.get((row.run, False)) or runs[row.run, True]
        kernels = ahead[row.run]
        yield (
            row.run,
            f"{1e3 * row.measured:,.0f}",
            f"{1e3 * row.modelled:,.0f}",
            percent(row.modelled, row.measured),
            f"{1e3 * row.low:,.0f} to {1e3 * row.high:,.0f}",
            f"{1e3 * floors[row.run]:,.0f}" if row.run in floors else "",
            *((f"{run.busy_ms:,.0f}", f"{run.launches:,}") if run.busy_ms is not None else ("", "")),
            f"{100 * run.mfu:.1f} %",
            f"{run.first_step_seconds:.1f}",
            f"{kernels['found'] - kernels['compiled']} of {kernels['found']}" if kernels else "",
        )


def allocated_rows(rows: Iterable[ReservedRow]) -> Iterator[Sequence[str]]:
    """Allocated bytes of every phase, under one of the allocators."""
    seen = set()
    for row in rows:
        if (row.run, row.phase) not in seen:
            seen.add((row.run, row.phase))
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
        backward = f"{row['backward_ns'] / 1e6:.2f}" if row.get("backward_ns") else ""
        yield *key, f"{row['forward_ns'] / 1e6:.2f}", backward, f"{row['tflop_s']:,.0f}" if "tflop_s" in row else ""


def check_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """The largest error of each operation against fp64."""
    for row in rows:
        if "error300" in row:
            yield row["case"], f"{row['error300']:.1e}", "yes" if row["bitwise"] else "no"
        else:
            yield row["case"], "failed", ""


def floor_seconds(run: TrainingRun) -> float:
    """The counted lower bound of a run's step."""
    import roofline  # noqa: PLC0415  (loads torch)

    return float(roofline.counted(str(run.spec), run.overrides).floor.seconds)


def page() -> str:
    """The page as Markdown: a section for each results file, the newest first."""
    sections = "\n\n".join(section(path).rstrip() for path in reversed(FILES))
    return TEMPLATE.read_text().format(sections=sections) + "\n"


def section(path: Path) -> str:
    """The section of a results file; its text is the file of this folder with the name of the results."""
    found, rows = document(path), times.rows(document(path))
    kept = kept_model(found)
    floors = kept["floors"] if kept else {run.name: floor_seconds(run) for run in training_runs(path)}
    far = [row for row in rows if row.share > times.LEAST and (row.error is None or abs(row.error) > times.FAR)]
    cases = [line for line in found.get("checks", ()) if "num_tokens" in line]
    return (
        TEMPLATE.with_name(f"{path.stem}.md")
        .read_text()
        .format(
            file=path.name,
            copy_percent=100 * found["copy_gb_s"] / COPY_GB_S,
            matmul_percent=100 * found["matmul_bf16_8192_tflop_s"] / MATMUL_TFLOP_S,
            steps=table(STEPS, step_rows(path, floors)),
            residuals="\n".join(times.step_table(times.steps(found))),
            parts="\n".join(times.table(rows)),
            far_parts="\n".join(times.table(far)),
            allocated=table(("run", "phase", "measured", "estimate", "error"), allocated_rows(reserved_rows(path))),
            reserved=reserved_table(path).rstrip(),
            operations=table(("case", "kernels", "forward ms", "backward ms", "TFLOP/s"), operation_rows(found.get("kernel_times", ()))),
            checks_at_300=table(("case", "largest error", "bitwise repeatable"), check_rows(found.get("checks_at_300_tokens", ()))),
            rates=table(("operation", "us", "TFLOP/s", "GB/s"), rate_rows(found.get("rates", ()))),
            above=table(("case", "tokens", "dtype", "error"), above_rows(cases)),
            num_plans=len([*found["runs"], *found.get("memory", ())]),
            num_checks=len(cases),
            num_cases=len({line["case"] for line in cases}),
            num_bitwise=sum(bool(line["bitwise"]) for line in cases),
            counters=table(COUNTERS, counter_rows(found.get("counters", ()))),
            **(variants_of(found["variants"]) if "variants" in found else {}),
            **(m2rnn_of(found) if "m2rnn_forward" in found else {}),
            **{key: value for key, value in found.items() if isinstance(value, (str, float))},
        )
    )


def variants_of(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The table of kernels that other warps, stages or limits of registers make faster."""
    rows = []
    for row in found:
        best = min([row, *(each for each in row["others"] if each.get("right", True))], key=lambda each: float(each["us"]))
        if best["us"] <= (1 - LEAST_GAIN) * row["us"]:
            sizes = (f"{row['us']:,.0f}", f"{best['us']:,.0f}", f"{100 * (best['us'] / row['us'] - 1):.0f} %")
            rows.append((row["case"], row["kernel"], str(row["launches"]), _setting(row), _setting(best), *sizes))
    head = ("case", "kernel", "launches", "now", "faster", "us", "us", "change")
    return {"variants": table(head, rows), "num_variants": len({row["kernel"] for row in found})}


def _setting(row: dict[str, Any]) -> str:
    stages = f", {row['stages']} stages" if row["stages"] else ""
    return f"{row['warps']} warps{stages}" + (f", {row['registers']} registers" if row.get("registers") else "")


def m2rnn_of(found: dict[str, Any]) -> dict[str, Any]:
    """The experiments with the recurrence's forward."""
    tried = [row for row in found["m2rnn_forward"] if row["kind"] == "tf32x3"]
    best = min(tried, key=lambda row: float(row["ms"]))
    late = next(row for row in tried if (row["R"], row["warps"], row["ahead"]) == (best["R"], best["warps"], False))
    now = next(row for row in found["kernel_times"] if row["case"] == "m2rnn 44x64x16" and row["kernels"] == "triton")
    times_of = {"m2rnn_now": now["forward_ns"] / 1e6, "m2rnn_best": best["ms"], "m2rnn_late": late["ms"]}
    return {**times_of, "m2rnn_rows": best["R"], "m2rnn_warps": best["warps"]}


def counter_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Hardware counters of a kernel: shares of a device's rates, and cycles in which a warp waits, for each instruction that it issues."""
    for row in rows:
        shares = (f"{row[key]:.0f} %" for key in ("dram_percent", "l2_percent", "l1_percent", "occupancy_percent"))
        waits = (f"{row[key]:.1f}" for key in ("waits_for_memory", "waits_for_shared_memory", "waits_at_barriers"))
        yield row["kernel"], f"{row['us']:,.0f}", f"{row['registers']:.0f}", *shares, f"{row['issued']:.2f}", *waits


def rate_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Time and rate of each operation."""
    for row in rows:
        rates = (f"{row[key]:,.0f}" if key in row else "" for key in ("tflop_s", "gb_s"))
        yield row["name"], f"{row['us']:,.1f}", *rates


def above_rows(cases: Iterable[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Checks whose largest error is above the tolerance."""
    for line in cases:
        if not line["right"]:
            yield line["case"], str(line["num_tokens"]), line["dtype"], f"{line['error']:.1e}"


def keep(path: Path) -> None:
    """Add what today's code models for the runs of a results file to the file, as its key `modelled`."""
    found = document(path)
    kept = {
        "steps": times.steps(found),
        "parts": times.rows(found),
        "reserved": list(reserved_rows(path)),
        "floors": {run.name: floor_seconds(run) for run in training_runs(path)},
    }
    lines = ",\n".join(f' "{key}": {_rows_text(value)}' for key, value in kept.items())
    path.write_text(path.read_text().rstrip().removesuffix("}").rstrip() + f',\n"modelled": {{\n{lines}}}\n}}\n')


def _rows_text(value: Any) -> str:
    """JSON with a line for each row of a table."""
    if isinstance(value, dict):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "]"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        keep(Path(sys.argv[2]).resolve())
    else:
        PAGE.write_text(page())
