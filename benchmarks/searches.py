"""CPU seconds and exact evaluations of searches.

python benchmarks/searches.py [NAME ...] [--processes N] [--profile]
python benchmarks/searches.py --first [MODEL ...] [-o benchmarks/results/first_rows.json]

Names are those of `SEARCHES`; all of them without one. With `--profile` the functions that take the most time of one process are printed.

With `--first`, the CPU seconds of a new process until a search has its first row, or the answer that nothing fits, start-up included:
models of docs/reference/models.md with more than 20 billion parameters on 64 and 256 devices, a sequence for each device.
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import megaplan

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

SEARCHES = {
    "nam56r-8": ("plans/nam56r-8xh200.yaml", 8),
    "nam56r-64": ("plans/nam56r-8xh200.yaml", 64),
    "llama-64": ("benchmarks/searches/llama-3.1-70b.yaml", 64),
    "deepseek-1024": ("benchmarks/searches/deepseek-v3.yaml", 1024),
    "nemotron-128": ("benchmarks/searches/nemotron-3-super.yaml", 128),
}
SHOWN = 45
LARGE, NUMBERS = 20e9, (64, 256)
"""Parameters of a model of `--first`, and its numbers of devices."""
FIRST = """
import os, sys, time
import megaplan, megaplan.cli.main
def say(now):
    if now.best is not None:
        print(time.process_time(), now.best.step_ns / 1e9, now.best.peak_bytes, flush=True)
        os._exit(0)
source, devices = sys.argv[1], int(sys.argv[2])
found = megaplan.search(source, f"schedule.num_microbatches={devices}", devices=devices, processes=1, report=say)
print(time.process_time(), "nothing" if found.best is None else found.best.step_seconds, 0)
"""
"""A process that ends with its first row."""


def main() -> None:
    """Search, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SEARCHES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("-o", "--output", metavar="FILE")
    given = parser.parse_args()
    if given.first:
        first_rows(given.names, given.output)
        return
    for name in given.names or SEARCHES:
        path, devices = SEARCHES[name]
        job = megaplan.load(path)
        start, children, clock = time.process_time(), _of_children(), time.perf_counter()
        with cProfile.Profile() if given.profile else nullcontext() as profile:
            found = megaplan.search(job, devices=devices, processes=given.processes, seconds=None)
        spent, waited = time.process_time() - start + _of_children() - children, time.perf_counter() - clock
        meshes, decided = found.num_layouts, found.num_evaluated
        best = "nothing fits" if found.best is None else f"{found.best.step_seconds:.6f} s, gap {100 * (found.gap or 0):.2f} %"
        reason = f"\n  {found.gap_reason}" if found.gap_reason else ""
        print(f"{name}: {spent:.1f} s of CPU, {waited:.1f} s, {meshes:,} meshes, {decided:,} evaluated, best {best}{reason}", flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


def first_rows(names: list[str], output: str | None) -> None:
    """Start a search of each model on each number of devices, and print the CPU seconds until its first row."""
    from models_page import MODELS  # noqa: PLC0415 (a script, with its own imports)

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, _) in MODELS.items():
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            parameters = megaplan.estimate(path).parameters if not names or name in names else 0
            for devices in NUMBERS if parameters > LARGE else ():
                said = subprocess.run([sys.executable, "-c", FIRST, path, str(devices)], capture_output=True, text=True, check=True)
                spent, step, _ = said.stdout.split()
                found.append({"model": name, "devices": devices, "cpu_seconds": round(float(spent), 2), "step_seconds": step})
                print(f"{name} on {devices}: {float(spent):.2f} s of CPU, {step}", flush=True)
    if output is not None:
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _of_children() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
