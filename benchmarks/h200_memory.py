"""Allocated, reserved and device bytes of one-GPU plans, phase by phase, beside the estimate.

python benchmarks/h200_memory.py [NAME …]           trains the plans of benchmarks/h200/memory.yaml, three steps each
python benchmarks/h200_memory.py --explain NAME     one plan, with the largest blocks that were alive at its peak
python benchmarks/h200_memory.py --cpu-check        the script itself on a CPU: trains a small plan, measures no memory

Needs one GPU with the estimate's capacity; each plan runs in a process of its own, so that none inherits another's allocator. Writes
benchmarks/results/h200_memory.{csv,json}. Exits 1 if an allocated peak is past 2% or a reserved one past 5%, 2 without a GPU.
Error = (estimate − measured) / measured; negative is under.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels"), str(ROOT / "benchmarks/accuracy")]
PLANS = ROOT / "benchmarks/h200/memory.yaml"
RESULTS = ROOT / "benchmarks/results"
NUM_STEPS = 3
ALLOCATED_PERCENT, RESERVED_PERCENT = 2.0, 5.0
NUMBERS = ("allocated", "reserved", "device")
SHOWN_BLOCKS = 40


def estimate_of(case: Any) -> dict[str, dict[str, int]]:
    """The estimate's three numbers by phase."""
    from megaplan.columns import Column  # noqa: PLC0415

    rank, reserve = case.budget.worst, case.budget.device.reserve_bytes
    return {
        str(phase): {
            "allocated": total - rank.cells[phase][Column.OVERHEAD],
            "reserved": total,
            "device": total + reserve,
        }
        for phase, total in rank.phases.items()
    }


def small_case() -> Any:
    """The bundled hybrid of two million parameters, for a machine without a GPU."""
    from matrix import Case  # noqa: PLC0415

    from megaplan.budget.build import build_budget  # noqa: PLC0415
    from megaplan.plan.make import make_plan  # noqa: PLC0415
    from megaplan.spec.load import load_spec  # noqa: PLC0415
    from megarun.job import Job  # noqa: PLC0415

    job = Job.from_plan(make_plan(load_spec(str(ROOT / "plans/tiny-hybrid.yaml")).spec))
    return Case("tiny-hybrid", job, build_budget(job.spec, job.inventory, job.layout), False)


def measure(case: Any, *, explain: bool) -> dict[str, Any]:
    """Train in this process; the peaks of every phase, null without a GPU."""
    import torch  # noqa: PLC0415

    from megarun.launch import choose_device, process_group, read_launch  # noqa: PLC0415
    from megarun.parallel.mesh import build_mesh  # noqa: PLC0415
    from megarun.phases import PhasedTrainer  # noqa: PLC0415

    launch = read_launch()
    device = choose_device(launch)
    cuda = torch.cuda if device.type == "cuda" else None
    peaks: dict[str, dict[str, int | None]] = {}
    running = ["init"]

    def close_phase() -> None:
        found: dict[str, int | None] = dict.fromkeys(NUMBERS)
        if cuda is not None:
            cuda.synchronize()
            free, total = cuda.mem_get_info()
            found = {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved(), "device": total - free}
            cuda.reset_peak_memory_stats()
        before = peaks.get(running[0], {})
        peaks[running[0]] = {name: _larger(before.get(name), value) for name, value in found.items()}

    class Measured(PhasedTrainer):
        def enter_phase(self, phase: Any) -> None:
            close_phase()
            running[0] = str(phase)

    losses, seconds = [], []
    with process_group(launch, device):
        if explain and cuda is not None:
            cuda.memory._record_memory_history(max_entries=1_000_000)
        trainer = Measured(case.job, build_mesh(case.job.spec.mesh, device))
        spec = case.job.spec
        shape = (spec.batch.micro_batch_size * spec.schedule.num_microbatches, spec.batch.seq_length + 1)
        generator = torch.Generator().manual_seed(0)
        for step in range(NUM_STEPS):
            start = time.perf_counter()
            trainer.start_step()
            rows = torch.randint(spec.model.vocab_size, shape, generator=generator)
            tokens, labels = (part.contiguous().to(device) for part in (rows[:, :-1], rows[:, 1:]))
            losses.append(trainer.step(step, tokens, labels).loss)
            del tokens, labels
            seconds.append(time.perf_counter() - start)
        close_phase()
        blocks = largest_blocks(cuda) if explain and cuda is not None else None
    name = cuda.get_device_name() if cuda is not None else "cpu"
    return {"phases": peaks, "losses": losses, "seconds": seconds, "blocks": blocks, "device": name, "torch": torch.__version__}


def _larger(before: int | None, now: int | None) -> int | None:
    return now if before is None or (now is not None and now > before) else before


def largest_blocks(cuda: Any) -> list[dict[str, int]]:
    """Allocations alive at the highest moment of the recorded run, by size: what to hold against the ledger's rows."""
    events = [event for trace in cuda.memory._snapshot()["device_traces"] for event in trace]
    live: dict[int, int] = {}
    total = highest = 0
    at_peak: Counter[int] = Counter()
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= live.pop(event["addr"], 0)
        if total > highest:
            highest, at_peak = total, Counter(live.values())
    ordered = sorted(at_peak.items(), key=lambda item: -item[0] * item[1])
    return [{"block_bytes": size, "count": count} for size, count in ordered[:SHOWN_BLOCKS]]


def one(name: str, *, explain: bool, cpu: bool) -> dict[str, Any]:
    """One plan in a fresh process."""
    flags = [*(["--explain-here"] if explain else []), *(["--cpu-check"] if cpu else [])]
    done = subprocess.run([sys.executable, __file__, "--worker", name, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"{name}: the run failed with exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, dict[str, Any]]) -> list[list[Any]]:
    """A row for every plan and phase, largest allocated error first."""
    rows = []
    for name, result in results.items():
        for phase, estimate in result["estimate"].items():
            measured = result["measured"]["phases"][phase]
            errors = [None if measured[key] is None else estimate[key] / measured[key] - 1 for key in NUMBERS]
            pairs = [value for key in NUMBERS for value in (estimate[key], measured[key])]
            rows.append([name, phase, *pairs, *errors])
    return sorted(rows, key=lambda row: -abs(row[8] or 0.0))


def write(results: dict[str, dict[str, Any]], rows: list[list[Any]]) -> None:
    """Every phase as CSV; versions, losses and times as JSON."""
    heads = [f"{key}_{side}_bytes" for key in NUMBERS for side in ("estimate", "measured")]
    with (RESULTS / "h200_memory.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["plan", "phase", *heads, *(f"{key}_error" for key in NUMBERS)])
        writer.writerows(rows)
    first = next(iter(results.values()))["measured"]
    record = {
        "device": first["device"],
        "torch": first["torch"],
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "plans": {name: {key: result["measured"][key] for key in ("losses", "seconds")} for name, result in results.items()},
    }
    (RESULTS / "h200_memory.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Train, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--explain", metavar="NAME")
    parser.add_argument("--cpu-check", action="store_true")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--explain-here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    from matrix import cases, names  # noqa: PLC0415  (after the arguments, which answer at once)

    if given.worker:
        case = small_case() if given.cpu_check else next(cases(frozenset([given.worker]), PLANS))
        print(json.dumps({"estimate": estimate_of(case), "measured": measure(case, explain=given.explain_here)}))
        return 0
    if given.cpu_check:
        result = one("tiny-hybrid", explain=False, cpu=True)
        losses = ", ".join(f"{loss:.3f}" for loss in result["measured"]["losses"])
        print(f"phases {', '.join(result['measured']['phases'])}; losses {losses}; no memory is measured without a GPU")
        return 0
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    chosen = [given.explain] if given.explain else given.names or names(matrix=PLANS)
    if unknown := set(chosen) - set(names(matrix=PLANS)):
        parser.error(f"no plan {', '.join(sorted(unknown))} in {PLANS.name}")
    results = {}
    for name in chosen:
        results[name] = one(name, explain=bool(given.explain), cpu=False)
        print(f"{name}: {sum(results[name]['measured']['seconds']):.0f} s", flush=True)
    rows = table(results)
    for row in rows:
        print(f"{row[0]:28} {row[1]:24} " + "  ".join(f"{key} {error:+.2%}" for key, error in zip(NUMBERS, row[8:], strict=True)))
    for block in results[chosen[0]]["measured"]["blocks"] or ():
        print(f"  {block['count']:5} × {block['block_bytes']:,} B")
    if not given.names and not given.explain:
        write(results, rows)
    worst = [(max(abs(row[8 + index]) for row in rows)) for index in (0, 1)]
    return 0 if 100 * worst[0] <= ALLOCATED_PERCENT and 100 * worst[1] <= RESERVED_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
