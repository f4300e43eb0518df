"""How long `megaplan estimate` takes against the bare import of its libraries, measured in turn.

python benchmarks/estimate_startup.py [--rounds 15] [--spec plans/nam56r-8xh200.yaml]

Prints the ratio of medians; the bar is 3.5. Timings on shared machines are ratios taken in one run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BAR = 3.5


def seconds(command: list[str]) -> float:
    """Wall time of one run; output discarded."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Alternate both commands, print medians and their ratio; 1 if past the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--spec", default="plans/nam56r-8xh200.yaml")
    arguments = parser.parse_args()
    bare = [sys.executable, "-c", "import typer, rich, pydantic, yaml"]
    estimate = [sys.executable, "-m", "megaplan", "estimate", arguments.spec]
    pairs = [(seconds(bare), seconds(estimate)) for _ in range(arguments.rounds + 1)][1:]  # the first round warms the file cache
    base, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"imports {base * 1e3:.0f} ms, estimate {ours * 1e3:.0f} ms, ratio {ours / base:.2f} (bar {BAR})")
    return 0 if ours <= BAR * base else 1


if __name__ == "__main__":
    sys.exit(main())
