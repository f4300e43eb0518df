"""Times of the partitioner for slots and for ranks of a V, and of `scipy.optimize.milp` (HiGHS) on the same stacks.

python benchmarks/partition.py [--seconds 60] [--output benchmarks/results/partition.md]

Stacks are synthetic: costs uniform in [1e8, 1e9], a head of 2e9, every tenth cut forbidden; with caps, layer bytes uniform in [1, 10] and
caps that differ by slot and bind. The linear programme decides for every slot and allowed cut whether the slot ends there. Best of three
for the partitioners, one run for the programme, which is given up after `--seconds` a stack.
"""

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megaplan.partition.best_cuts import balance
from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import SpanSum, Weight, layer_weight
from megaplan.partition.values import Balance, StackCosts

SLOT_SIZES = ((64, 16), (128, 16), (256, 16), (512, 8), (1024, 8), (1024, 64))
RANK_SIZES = ((64, 8), (128, 8), (128, 16), (256, 16), (1024, 32))
PROGRAMMES = ((64, 4), (64, 8), (64, 16), (128, 8), (128, 16))


@dataclass(frozen=True)
class Instance:
    """A stack, its constraints, and bytes of its layers."""

    costs: StackCosts
    rules: Constraints
    memory: tuple[int, ...]


def instance(num_layers: int) -> Instance:
    """The stack of a size."""
    random = Random(num_layers)
    layers = tuple(random.randint(10**8, 10**9) for _ in range(num_layers))
    memory = tuple(random.randint(1, 10) for _ in range(num_layers))
    return Instance(StackCosts(layers, last=2 * 10**9), Constraints(forbid=tuple(range(10, num_layers, 10))), memory)


def caps(memory: Sequence[int], number: int) -> list[int]:
    """Caps that bind and differ."""
    return [sum(memory) // number + 16 + index % 7 for index in range(number)]


def limited(weights: tuple[Weight, ...], caps_bytes: Sequence[int]) -> list[list[SpanSum]]:
    """Limits of slots, or ranks, whose layers weigh the same on each."""
    return [[SpanSum(weights, cap)] for cap in caps_bytes]


def largest_slot(stack: Instance, num_slots: int, *, capped: bool) -> Balance | None:
    """Single and loop placement."""
    limits = limited((layer_weight(stack.memory),), caps(stack.memory, num_slots)) if capped else None
    return balance(stack.costs, num_slots, stack.rules, limits=limits)


def largest_rank(stack: Instance, num_ranks: int, *, capped: bool) -> Balance | None:
    """V placement; a rank's second slot keeps a third of what its first does."""
    weights = layer_weight([3 * size for size in stack.memory]), layer_weight(stack.memory)
    limits = limited(weights, [2 * cap for cap in caps(stack.memory, num_ranks)]) if capped else None
    return balance(stack.costs, 2 * num_ranks, stack.rules, folded=True, limits=limits)


def seconds(run: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Best wall time, and what it gave."""
    best, found = float("inf"), None
    for _ in range(times):
        begin = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - begin)
    return best, found


def programme(stack: Instance, num_slots: int, limit_s: float) -> tuple[float, int | None, bool]:
    """The largest slot by mixed-integer programming: seconds, value, whether it is proven.

    x[s, j] = 1 iff slot s ends at allowed cut j; ends rise with s; T bounds every slot's cost, which is the difference of two prefix sums.
    """
    import numpy as np  # noqa: PLC0415  (only the comparison needs it)
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
    from scipy.sparse import lil_matrix  # noqa: PLC0415

    edges = [*stack.rules.allowed_cuts(len(stack.costs.layers)), len(stack.costs.layers)]
    before = layer_weight(stack.costs.layers, stack.costs.first, stack.costs.last).up
    bytes_before = layer_weight(stack.memory).up
    scale, most = 10**9, caps(stack.memory, num_slots)
    width, number = len(edges), num_slots * len(edges) + 1
    rows, low, high = [], [], []

    def add(terms: dict[int, float], least: float, largest: float) -> None:
        rows.append(terms)
        low.append(least)
        high.append(largest)

    for slot in range(num_slots):
        ends = range(slot * width, (slot + 1) * width)
        add(dict.fromkeys(ends, 1.0), 1, 1)
        previous = range((slot - 1) * width, slot * width) if slot else range(0)
        cost, held = [before[edge] / scale for edge in edges], [float(bytes_before[edge]) for edge in edges]
        cost, held = [before[edge] / scale for edge in edges], [float(bytes_before[edge]) for edge in edges]
        for values, bound, extra in ((cost, 0.0, -1.0), (held, float(most[slot]), 0.0)):
            terms = dict(zip(ends, values, strict=True)) | dict(zip(previous, [-value for value in values], strict=False))
            add(terms | ({number - 1: extra} if extra else {}), -np.inf, bound)
        if slot:
            terms = {index: float(at) for at, index in enumerate(ends)} | {index: -float(at) for at, index in enumerate(previous)}
            add(terms, 1, np.inf)
    add({(num_slots - 1) * width + width - 1: 1.0}, 1, 1)
    matrix = lil_matrix((len(rows), number))
    for row, terms in enumerate(rows):
        for column, value in terms.items():
            matrix[row, column] = value
    objective, integral, upper = np.zeros(number), np.ones(number), np.ones(number)
    objective[-1], integral[-1], upper[-1] = 1, 0, np.inf
    begin = time.perf_counter()
    found = milp(
        objective,
        integrality=integral,
        bounds=Bounds(np.zeros(number), upper),
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 0},
    )
    return time.perf_counter() - begin, None if found.x is None else round(found.fun * scale), found.status == 0


def tables(limit_s: float) -> list[str]:
    """Every line of the report."""
    import scipy  # noqa: PLC0415

    lines = ["# Partitioners, measured", "", (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip(), ""]
    lines += [
        f"{datetime.date.today()}; Python {platform.python_version()}, scipy {scipy.__version__}; "
        f"{platform.machine()}, one core of a shared machine.",
        "",
        "## Largest slot (single and loop placement)",
        "",
        "| layers | slots | ms | ms with caps |",
        "|---:|---:|---:|---:|",
    ]
    for num_layers, num_slots in SLOT_SIZES:
        stack = instance(num_layers)
        free, capped = (seconds(lambda c=c: largest_slot(stack, num_slots, capped=c))[0] for c in (False, True))  # noqa: B023
        lines.append(f"| {num_layers} | {num_slots} | {free * 1e3:.1f} | {capped * 1e3:.1f} |")
    lines += ["", "## Largest rank (V placement)", "", "| layers | ranks | s | s with caps |", "|---:|---:|---:|---:|"]
    for num_layers, num_ranks in RANK_SIZES:
        stack = instance(num_layers)
        free, capped = (seconds(lambda c=c: largest_rank(stack, num_ranks, capped=c), 1)[0] for c in (False, True))  # noqa: B023
        lines.append(f"| {num_layers} | {num_ranks} | {free:.3f} | {capped:.3f} |")
    lines += ["", "## The same largest slot by `scipy.optimize.milp`, with caps", ""]
    lines += ["| layers | slots | ours, ms | milp, s | milp proven | values |", "|---:|---:|---:|---:|---|---|"]
    for num_layers, num_slots in PROGRAMMES:
        stack = instance(num_layers)
        ours, best = seconds(lambda: largest_slot(stack, num_slots, capped=True))  # noqa: B023
        theirs, value, proven = programme(stack, num_slots, limit_s)
        if best is None:
            raise AssertionError("the caps leave a split")
        # The programme works in floating point, in units of 1e9.
        same = value is not None and abs(value - best.value) <= best.value * 1e-6
        words = "equal" if same else "none found" if value is None else f"its own is {100 * (value - best.value) / best.value:+.2f}%"
        lines.append(f"| {num_layers} | {num_slots} | {ours * 1e3:.1f} | {theirs:.1f} | {'yes' if proven else 'no'} | {words} |")
    return lines


def main() -> int:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = "\n".join(tables(arguments.seconds)) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
