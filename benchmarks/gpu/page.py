"""The results of `run.py` as tables, as one JSON file, and as what is left to run.

python benchmarks/gpu/page.py DIR [DIR …]                    tables, in DIR/page.md; several calls together, later ones last
python benchmarks/gpu/page.py DIR --floors                   also the counted floor of each profiled step, half a minute a run
python benchmarks/gpu/page.py DIR --results FILE.json        what benchmarks/results keeps of a run: runs, kernel times, checks
python benchmarks/gpu/page.py [DIR …] --pending              write benchmarks/pending.md, without what DIR or benchmarks/results has
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]

from gpu import pending  # noqa: E402
from gpu.groups import part_of_operation  # noqa: E402
from gpu.results import lines_of, of_done_jobs, statuses  # noqa: E402
from gpu.tables import (  # noqa: E402
    checks_table,
    device_table,
    failures_table,
    kernel_times,
    memory_table,
    times_table,
    train_tables,
)

PENDING, RESULTS = ROOT / "benchmarks/pending.md", ROOT / "benchmarks/results"
SPECS = ROOT / "benchmarks/gpu/specs"
DRY = "A run without a GPU: no number below measures anything."
KEPT = ("device", "torch", "triton", "python", "driver", "capacity_bytes", "outside_allocator_bytes")
KERNELS_KEPT = 90
"""Kernels of a profile that are kept, the longest; the sum of all is kept too."""
RATES = ("copy_gb_s", "matmul_bf16_8192_tflop_s")


def is_dry(lines: Sequence[dict[str, Any]]) -> bool:
    """True if a call ran on a CPU."""
    return any(line.get("dry") for line in lines)


def page(lines: Sequence[dict[str, Any]], floors: dict[str, dict[str, float]]) -> Iterator[str]:
    """All tables."""
    calls, found = [line for line in lines if "call" in line], of_done_jobs(lines)
    ends = {line["job"]: line for line in lines if line.get("status") not in (None, "started")}
    yield f"# Measured {', '.join(str(call['call'])[:16] for call in calls)}"
    yield ""
    yield DRY if is_dry(lines) else f"Commit {', '.join(sorted({str(call['commit']) for call in calls}))}."
    yield ""
    yield from device_table(found)
    yield from checks_table(found)
    yield from times_table(found)
    yield from train_tables(found, floors)
    yield from memory_table(found)
    yield from failures_table(list(ends.values()))


def as_results(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One file of a measured run, in the form of those in benchmarks/results."""
    found = of_done_jobs(lines)
    calls = [line for line in lines if "call" in line]
    facts = {key: line[key] for line in found if line["kind"] == "facts" for key in (*KEPT, *RATES) if key in line}
    runs: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for line in found:
        if line["kind"] in ("train", "memory") and "run" in line:
            kept = {key: value for key, value in line.items() if key not in ("job", "kind", "estimate")}
            if "gpu" in kept:
                kept["gpu"] = kept["gpu"] | {"by_kernel": kept["gpu"].get("by_kernel", [])[:KERNELS_KEPT]}
            runs[line["kind"], line["job"]].update(kept)
    checks = [line for line in found if line["kind"] == "checks" and "case" in line]
    at_300 = [
        {"case": line["case"], "error300": line.get("error"), "bitwise": line.get("bitwise"), "finite": line.get("finite")}
        | ({"fail300": line["failure"]} if "failure" in line else {})
        for line in checks
        if line.get("num_tokens") == 300 and line.get("dtype") == "bfloat16"
    ]
    return {
        **facts,
        "date": str(calls[-1]["call"])[:10] if calls else None,
        "commit": calls[-1]["commit"] if calls else None,
        "mode": "one process a run" if any(run.get("compiled") for run in runs.values()) else "eager, one process a run",
        "runs": [run for (kind, _), run in runs.items() if "step_s" in run and kind == "train"],
        "memory": [run for (kind, _), run in runs.items() if "step_s" in run and kind == "memory"],
        "kernel_times": kernel_times(found),
        "checks_at_300_tokens": at_300,
        "done": sorted(job for job, status in statuses(lines).items() if status == "done"),
        "checks": [{key: value for key, value in line.items() if key not in ("job", "kind")} for line in checks],
    }


def counted_floors(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Counted milliseconds by part of every profiled run that has a spec."""
    from roofline import counted  # noqa: PLC0415  (loads megarun)

    found: dict[str, dict[str, float]] = {}
    for line in of_done_jobs(lines):
        name = line.get("run", "")
        if "gpu" in line and name not in found and (SPECS / f"{name}.yaml").exists():
            parts: dict[str, float] = defaultdict(float)
            for row in counted(str(SPECS / f"{name}.yaml"), []).rows:
                parts[part_of_operation(row.op)] += row.seconds * 1e3
            found[name] = dict(parts)
    return found


def write_pending(lines: Sequence[dict[str, Any]]) -> None:
    """The page of what is left: neither these lines nor a file of results has it done. Jobs of a dry run count for nothing."""
    from gpu.jobs import jobs  # noqa: PLC0415  (loads torch)

    done = {job: "done" for path in RESULTS.glob("h200-*.json") for job in json.loads(path.read_text()).get("done", ())}
    text = "\n".join(pending.page([job.id for job in jobs("cuda")], done | ({} if is_dry(lines) else statuses(lines))))
    PENDING.write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Write what is asked for; 1 if a dry run is to be kept as a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--pending", action="store_true")
    given = parser.parse_args(words)
    if not given.folders and not given.pending:
        parser.error("name a folder of results, or --pending")
    lines = list(lines_of(given.folders))
    if given.pending:
        write_pending(lines)
    if given.results is not None:
        if is_dry(lines):
            sys.stderr.write(f"{', '.join(map(str, given.folders))}: a run without a GPU; {given.results} was not written\n")
            return 1
        given.results.write_text(json.dumps(as_results(lines), indent=1) + "\n", encoding="utf-8")
    if given.folders:
        text = "\n".join(page(lines, counted_floors(lines) if given.floors else {})) + "\n"
        (given.folders[-1] / "page.md").write_text(text, encoding="utf-8")
        print(given.folders[-1] / "page.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
