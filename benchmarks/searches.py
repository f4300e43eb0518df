"""CPU seconds and exact evaluations of searches.

python benchmarks/searches.py [NAME ...] [--processes N] [--profile]

Names are those of `SEARCHES`; all of them without one. With `--profile` the functions that take the most time of one process are printed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from contextlib import nullcontext
from resource import RUSAGE_CHILDREN, getrusage

import megaplan

SEARCHES = {
    "nam56r-8": ("plans/nam56r-8xh200.yaml", 8),
    "nam56r-64": ("plans/nam56r-8xh200.yaml", 64),
    "llama-64": ("benchmarks/searches/llama-3.1-70b.yaml", 64),
    "deepseek-1024": ("benchmarks/searches/deepseek-v3.yaml", 1024),
    "nemotron-128": ("benchmarks/searches/nemotron-3-super.yaml", 128),
}
SHOWN = 45


def main() -> None:
    """Search, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SEARCHES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
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


def _of_children() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
