r"""Allocated, reserved and device bytes of one-GPU plans, phase by phase, beside the estimate.

python benchmarks/h200_memory.py [NAME …]           trains the plans of benchmarks/h200/memory.yaml, three steps each
python benchmarks/h200_memory.py --explain NAME     one plan: blocks alive at its peak, by size, beside the trace's storages
python benchmarks/h200_memory.py --scratch [NAME …] no GPU: what the plain-torch operations need inside themselves, by trace
python benchmarks/h200_memory.py --cpu-check        no GPU: the script itself on two small plans; measures no memory

Each plan runs in a process of its own, so that none inherits another's allocator; one that fails, or that finds no time, is a row that
says so. Writes h200-memory.{csv,json} to --out (benchmarks/results) after every plan. Exits 1 if a plan failed, an allocated peak is past
2% or a reserved one past 5%, 2 without a GPU. Error = (estimate − measured) / measured; negative is under. `with_scratch_error` is that of
the estimate plus what h200-scratch.csv says the operations need inside themselves.

On a machine with torch and triton but neither pydantic nor a package index, carry four wheels there, fetched with
    pip download -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d .whl \
        pydantic pydantic-core annotated-types typing-inspection
and start there with
    python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks/accuracy", "benchmarks")]
RESULTS = ROOT / "benchmarks/results"
SCRATCH = RESULTS / "h200-scratch.csv"
ALLOCATED_LIMIT, RESERVED_LIMIT = 0.02, 0.05
PLAN_SECONDS = 120
NUMBERS = ("allocated", "reserved", "device")
HEADS = ["plan", "phase", *(f"{key}_{side}_bytes" for key in NUMBERS for side in ("estimate", "measured"))]
HEADS += ["requested_measured_bytes", *(f"{key}_error" for key in NUMBERS), "with_scratch_error"]
SCRATCH_HEADS = ["plan", "phase", "estimate_bytes", "trace_bytes", "with_scratch_bytes", "operation", "operation_bytes"]
SHOWN_SIZES = 30


def alone(role: str, name: str, *, seconds: float, gpu: bool = True) -> dict[str, Any]:
    """What a fresh process finds of one plan; {"failure": …} if it fails or takes too long."""
    from h200.alone import run_alone  # noqa: PLC0415

    return run_alone(__file__, "--role", role, name, seconds=seconds, gpu=gpu)


def act(role: str, name: str) -> dict[str, Any]:
    """What that process does."""
    from h200.measure import estimate_of, find_case, measure  # noqa: PLC0415

    case = find_case(name)
    if role == "scratch":
        from h200.scratch import phases_with_scratch  # noqa: PLC0415

        from megaplan.spec.device import device_of  # noqa: PLC0415

        found = phases_with_scratch(case.job, device_of(case.job.spec.device).gemm_workspace_bytes)
        inside = {str(phase): [part.trace_bytes, part.with_scratch_bytes, part.op, part.scratch_bytes] for phase, part in found.items()}
        return {"estimate": estimate_of(case), "scratch": inside}
    return {"estimate": estimate_of(case), **measure(case, explain=role == "explain")}


def table(results: dict[str, dict[str, Any]], scratch: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """A row for every phase of every plan that was measured, largest allocated error first."""
    rows = []
    for name, result in results.items():
        for phase, measured in result.get("phases", {}).items():
            row: dict[str, Any] = {"plan": name, "phase": phase, "requested_measured_bytes": measured["requested"]}
            for key in NUMBERS:
                estimate = result["estimate"][phase][key]
                row |= {
                    f"{key}_estimate_bytes": estimate,
                    f"{key}_measured_bytes": measured[key],
                    f"{key}_error": _error(estimate, measured[key]),
                }
            inside = scratch.get((name, phase))
            row["with_scratch_error"] = (
                None if inside is None else _error(result["estimate"][phase]["allocated"] + inside, measured["allocated"])
            )
            rows.append(row)
    return sorted(rows, key=lambda row: -abs(row["allocated_error"]))


def passed(results: dict[str, dict[str, Any]], rows: Iterable[dict[str, Any]]) -> bool:
    """Whether every plan was measured and every phase is within the limits."""
    within = all(abs(row["allocated_error"]) <= ALLOCATED_LIMIT and abs(row["reserved_error"]) <= RESERVED_LIMIT for row in rows)
    return within and not any("failure" in result for result in results.values())


def measure_all(names: Sequence[str], seconds: float, out: Path | None, date: str | None) -> int:
    """Train every plan, compare, record."""
    started, facts, scratch = time.monotonic(), driver_facts(), read_scratch()
    results: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for name in names:
        left = seconds - (time.monotonic() - started)
        results[name] = alone("measure", name, seconds=min(PLAN_SECONDS, left)) if left > 0 else {"failure": "no time was left"}
        note = results[name].get("failure") or f"{sum(results[name]['seconds']):.0f} s in steps"
        print(f"{name}: {note}, {time.monotonic() - started:.0f} s in all", flush=True)
        rows = table(results, scratch)
        if out is not None:
            write(out, rows, results, {**facts, "date": date})
    for row in rows:
        errors = "  ".join(f"{key} {row[f'{key}_error']:+7.2%}" for key in NUMBERS)
        inside = "" if row["with_scratch_error"] is None else f"  with scratch {row['with_scratch_error']:+.2%}"
        print(f"{row['plan']:28} {row['phase']:24} {row['allocated_measured_bytes'] / 2**30:7.2f} GiB  {errors}{inside}")
    for name, result in results.items():
        for phase, found in result.get("phases", {}).items():
            if phase == "optimizer":
                print(f"{name:28} outside the allocator {(found['device'] - found['reserved']) / 2**20:.0f} MiB")
    return 0 if passed(results, rows) else 1


def write(out: Path, rows: list[dict[str, Any]], results: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Every phase as CSV; machine, losses, times and failures as JSON."""
    with (out / "h200-memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    machine: dict[str, Any] = next((result["machine"] for result in results.values() if "machine" in result), {})
    plans = {name: {key: result.get(key) for key in ("losses", "seconds", "failure")} for name, result in results.items()}
    record = {**machine, **facts, "python": platform.python_version(), "plans": plans}
    (out / "h200-memory.json").write_text(json.dumps(record, indent=1) + "\n")


def driver_facts() -> dict[str, Any]:
    """The driver, and what the device holds before the first process starts: others' bytes are in every device number."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"driver": None}
    driver, total, used = (part.strip() for part in text.splitlines()[0].split(","))
    return {"driver": driver, "smi_total_mib": int(total), "smi_used_before_mib": int(used)}


def explain(name: str) -> int:
    """Where one plan's peak differs from the trace of the same phase, size by size."""
    from h200.blocks import compared_with_trace  # noqa: PLC0415
    from h200.measure import find_case  # noqa: PLC0415

    from megaplan.columns import Phase  # noqa: PLC0415
    from megaplan.spec.device import device_of  # noqa: PLC0415
    from megarun.trace.run import trace_alone  # noqa: PLC0415

    found = alone("explain", name, seconds=4 * PLAN_SECONDS)
    if "failure" in found:
        print(f"{name}: {found['failure']}")
        return 1
    phase = max(found["phases"], key=lambda phase: found["phases"][phase]["allocated"])
    job = find_case(name).job
    rows = trace_alone(job, 0, device_of(job.spec.device).gemm_workspace_bytes).rows[Phase(phase)]
    print(
        f"{name}: peak in {phase}, measured {found['phases'][phase]['allocated']:,} B, estimate {found['estimate'][phase]['allocated']:,} B"
    )
    for row in compared_with_trace(found["blocks"], rows)[:SHOWN_SIZES]:
        print(f"{row.excess_bytes:+18,} B: {row.num_measured} measured, {row.num_traced} traced of {row.block_bytes:,} B")
        for text in (*(f"gpu   {place}" for place in row.places[:4]), *(f"trace {text}" for text in row.rows[:4])):
            print(f"    {text}")
    return 0


def write_scratch(names: Sequence[str], known: Sequence[str]) -> int:
    """Trace plans with their operations' insides; each replaces its own lines of the file."""
    for name in names:
        found = alone("scratch", name, seconds=3600, gpu=False)
        if "failure" in found:
            print(f"{name}: {found['failure']}")
            return 1
        lines = [line for line in scratch_lines() if line["plan"] != name and line["plan"] in known]
        for phase, (trace, with_scratch, op, inside) in found["scratch"].items():
            estimate = found["estimate"][phase]["allocated"]
            lines.append(dict(zip(SCRATCH_HEADS, (name, phase, estimate, trace, with_scratch, op, inside), strict=True)))
            print(f"{name:28} {phase:24} {with_scratch / 2**30:7.2f} GiB  estimate {estimate / with_scratch - 1:+7.2%}  {op}", flush=True)
        with SCRATCH.open("w", newline="") as file:
            writer = csv.DictWriter(file, SCRATCH_HEADS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines, key=lambda line: known.index(line["plan"])))
    return 0


def scratch_lines() -> list[dict[str, Any]]:
    """The lines of the file, none if there is none yet."""
    if not SCRATCH.exists():
        return []
    with SCRATCH.open() as file:
        return list(csv.DictReader(file))


def read_scratch() -> dict[tuple[str, str], int]:
    """What operations add to the peak of each plan and phase, as far as it has been traced."""
    return {(line["plan"], line["phase"]): int(line["with_scratch_bytes"]) - int(line["trace_bytes"]) for line in scratch_lines()}


def check_on_cpu() -> int:
    """Two small plans through all but the measuring; says that nothing was measured."""
    from h200.measure import SMALL  # noqa: PLC0415

    for name in SMALL:
        result = alone("measure", name, seconds=10 * PLAN_SECONDS, gpu=False)
        if "failure" in result:
            print(f"{name}: {result['failure']}")
            return 1
        losses = ", ".join(f"{loss:.3f}" for loss in result["losses"])
        print(f"{name}: phases {', '.join(result['phases'])}; losses {losses}; no memory is measured without a GPU")
    return 0


def _error(estimate: int, measured: int) -> float:
    return estimate / measured - 1


def main() -> int:
    """Train, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--explain", metavar="NAME")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--cpu-check", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", help="recorded beside the numbers, YYYY-MM-DD")
    parser.add_argument("--seconds", type=float, default=540, help="no plan runs past this; the default fits a limit of ten minutes")
    parser.add_argument("--role", choices=("measure", "explain", "scratch"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        print(json.dumps(act(given.role, given.names[0])))
        return 0
    if given.cpu_check:
        return check_on_cpu()
    from h200.measure import PLANS  # noqa: PLC0415  (after the arguments, which answer at once)
    from matrix import names as names_of  # noqa: PLC0415

    known = names_of(matrix=PLANS)
    chosen = [given.explain] if given.explain else given.names or known
    if unknown := set(chosen) - set(known):
        parser.error(f"no plan {', '.join(sorted(unknown))} in {PLANS.name}; it has {', '.join(known)}")
    if given.scratch:
        return write_scratch(chosen, known)
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    if given.explain:
        return explain(given.explain)
    return measure_all(chosen, given.seconds, None if given.names else given.out, given.date)


if __name__ == "__main__":
    sys.exit(main())
