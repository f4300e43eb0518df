"""Time of `megaplan estimate` under each host against the bare import of its libraries, measured in turn.

python benchmarks/estimate_startup.py [--rounds 15]

Prints ratios of medians; the bar is 3.5. Timings on shared machines are ratios taken in one run. The sources must be compiled, as an
install leaves them: with PYTHONDONTWRITEBYTECODE set, run `python -m compileall src` first.
"""

import argparse
import statistics
import subprocess
import sys
import time

BAR = 3.5
CASES = {
    "megarun, nam56r": ["plans/nam56r-8xh200.yaml"],
    "megarun, mixtral": ["plans/mixtral-8x7b.yaml"],
    "megatron, mixtral": ["plans/mixtral-8x7b.yaml", "--set", "host={name: megatron}"],
    "megatron, codestral": ["plans/mamba-codestral-7b.yaml", "--set", "host={name: megatron}"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run; output discarded."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Time all commands in turn and print medians and ratios; return 1 if a ratio exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    bare = [sys.executable, "-c", "import typer, rich, pydantic, yaml"]
    commands = [bare, *([sys.executable, "-m", "megaplan", "estimate", *words] for words in CASES.values())]
    taken = [[seconds(command) for command in commands] for _ in range(rounds + 1)][1:]  # the first round warms the file cache
    base, *estimates = (statistics.median(column) for column in zip(*taken, strict=True))
    print(f"imports {base * 1e3:.0f} ms (bar {BAR})")
    for name, ours in zip(CASES, estimates, strict=True):
        print(f"{name}: {ours * 1e3:.0f} ms, ratio {ours / base:.2f}")
    return int(max(estimates) > BAR * base)


if __name__ == "__main__":
    sys.exit(main())
