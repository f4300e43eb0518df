"""Estimate NAM56R's published Mamba-2 runs on eight H200, which nothing was fitted to.

python benchmarks/nam56r/run.py ROWS.json [--page docs/reference/accuracy-nam56r.md]

Each run is its launch, imported and estimated as a user would. The rows stay outside the repository.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megaplan
from megaplan.cost.step.constants import intervals
from megaplan.layout.step_time import PlannedTime
from nam56r.launches import Row, imported, is_launch

HEAD = Path(__file__).with_name("page.md")
GIB = 1 << 30


class Found(NamedTuple):
    """A run with its estimate: bytes that torch's allocator reserves on the worst rank, and seconds of a step."""

    row: Row
    peak_bytes: int
    fits: bool
    seconds: float


def main() -> None:
    """Read the rows, estimate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--page", type=Path, help="write the tables here")
    chosen = parser.parse_args()
    rows = json.loads(chosen.rows.read_text(encoding="utf-8"))
    text = page([found(row) for row in rows if is_launch(row)], sum(not is_launch(row) for row in rows))
    print(text)
    if chosen.page:
        chosen.page.write_text(text, encoding="utf-8")


def found(row: Row) -> Found:
    """The estimate of a run.

    Raises:
        TypeError: The step has no time.
    """
    estimate = megaplan.estimate(imported(row))
    if not isinstance(estimate.step_time, PlannedTime):
        raise TypeError(f"{row['id']}: {estimate.step_time}")
    return Found(row, estimate.peak_bytes, estimate.fits, estimate.step_time.seconds)


def page(runs: list[Found], others: int) -> str:
    """The page: its head, the peaks, and the times."""
    peaks = [(run, run.peak_bytes / GIB / run.row["peak_gib_reported"] - 1) for run in runs if run.row["peak_gib_reported"]]
    lost = [run for run in runs if "oom" in run.row["status"]]
    times = [(run, run.seconds * 1000 / run.row["iter_ms"]) for run in runs if run.row["iter_ms"] and run.row["status"] == "ok"]
    low, high = intervals()["far hybrid"]
    narrow = [ratio for run, ratio in times if run.row["tp"] == 1]
    factor = median(narrow)
    head = HEAD.read_text(encoding="utf-8").format(
        runs=len(runs),
        others=others,
        peaks=len(peaks),
        mean=100 * mean(abs(error) for _, error in peaks),
        worst=100 * max((error for _, error in peaks), key=abs),
        lost=len(lost),
        refused=sum(not run.fits for run in lost),
        times=len(times),
        median=100 * median(abs(ratio - 1) for _, ratio in times),
        bias=100 * (median(ratio for _, ratio in times) - 1),
        covered=sum(low <= 1 / ratio <= high for _, ratio in times),
        factor=1 / factor,
        left=100 * median(abs(ratio / factor - 1) for ratio in narrow),
    )
    about = ("run", "dtype", "CUDA graphs", "routing", "tp", "microbatch", "sequences")
    memory = [
        (*_cells(run.row), run.row["peak_gib_reported"], f"{run.peak_bytes / GIB:.1f}", f"{100 * error:+.1f}") for run, error in peaks
    ]
    memory += [(*_cells(run.row), "out of memory", f"{run.peak_bytes / GIB:.1f}", "fits" if run.fits else "does not fit") for run in lost]
    ordered = sorted(times, key=lambda pair: -abs(pair[1] - 1))
    steps = [(*_cells(run.row), run.row["iter_ms"], f"{run.seconds * 1000:.0f}", f"{100 * (ratio - 1):+.1f}") for run, ratio in ordered]
    tables = (
        "## Peaks",
        _table((*about, "measured GiB", "estimated GiB", "error %"), memory),
        "## Steps",
        _table((*about, "measured ms", "modelled ms", "error %"), steps),
    )
    return head + "\n" + "\n\n".join(tables) + "\n"


def _cells(row: Row) -> tuple[object, ...]:
    return (row["id"], row["precision"], row["cuda_graph"], row["moe_mode"], row["tp"], row["mbs"], row["gbs"])


def _table(names: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines: list[tuple[object, ...]] = [names, ("---",) * 4 + ("---:",) * 6, *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


if __name__ == "__main__":
    main()
