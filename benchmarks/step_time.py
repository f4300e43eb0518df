"""Step time of `objective: step_time` compared with equal cuts and two published partitioners, on 20 seeded hybrid specs.

python benchmarks/step_time.py [--seed 20260101] [--output docs/reference/step-time.md]

All cuts of a spec are replayed by the same schedule with the same times, the model's own for an H200; memory is ignored, since the other
partitioners do not consider it. The two partitioners are written from their descriptions, and are given the time of every layer, forward
and backward
together, the embedding's counted with the first layer and the head's with the last:

- DeepSpeed's `partition_balanced`: a dynamic programme over (parts, layers) that minimises the largest part less the smallest and keeps one
  (largest, smallest) for each state.
- torchgpipe's block partition (after Bárány and Grinberg, arXiv:1308.2452): times are shifted and scaled to [0, 1]; from equal counts, as
  long as the largest block exceeds the smallest by more than 1, the smallest takes one layer from its neighbour on the largest one's side.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

from megaplan import __version__
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import cuts_of, spans_of
from megaplan.partition.step import Pipeline, step_time_cuts
from megaplan.partition.values import StackCosts, equal_cuts
from megaplan.spec.models import Spec

SEED = 20260101
NUM_SPECS = 20
KINDS = ("interleaved_1f1b", "zbv", "dualpipev")
PATTERNS = ("AEMEAEMEAEMR", "MMMMMMMA", "MEMEMEAE", "AEAEAEME", "MDMDMDAD", "AEMR", "AMDEMD", "RMEMEAME")
SECTIONS: dict[str, dict[str, Any]] = {
    "A": {"attention": {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}},
    "M": {"mamba": {"kind": "mamba2", "head_dim": 64, "state_dim": 128, "num_groups": 8}},
    "E": {"moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 2048}},
    "R": {"recurrent": {"kind": "m2rnn", "num_heads": 32, "key_dim": 64, "value_dim": 16}},
    "D": {"mlp": {"ffn_hidden_size": 8192}},
}


@dataclass(frozen=True)
class Row:
    """One spec, and the step in nanoseconds by each way to cut; None where a slot is left without a layer."""

    spec: Spec
    ours: int
    lower_bound: int
    equal: int | None
    deepspeed: int | None
    torchgpipe: int | None


def random_spec(random: Random, number: int) -> Spec:
    """A hybrid model on 4 to 16 pipeline ranks."""
    kind, pp = KINDS[number % len(KINDS)], random.choice((4, 4, 6, 8, 8, 12, 16))
    pattern = random.choice(PATTERNS)
    num_layers = random.randint(3, 6) * 2 * pp + random.choice((0, 0, random.randint(-pp, pp)))
    model: dict[str, Any] = {
        "pattern": pattern,
        "num_layers": num_layers,
        "hidden_size": 4096,
        "vocab_size": random.choice((32_768, 65_536, 131_072)),
    }
    for letter in set(pattern):
        model |= SECTIONS[letter]
    document = {
        "format": "megaplan.spec/1",
        "name": f"hybrid-{number:02d}",
        "model": model,
        "mesh": {"pp": pp, "vpp": 2, "dp_shard": 8},
        "schedule": {"kind": kind, "num_microbatches": pp * random.choice((2, 3, 4))},
        "batch": {"micro_batch_size": 1, "seq_length": random.choice((4096, 8192))},
        "split": {"mode": "weighted", "objective": "step_time"},
    }
    return Spec.model_validate(document)


def balanced_difference(times: Sequence[int], parts: int) -> tuple[int, ...]:
    """DeepSpeed's, from its description."""
    before, num_layers = [0, *accumulate(times)], len(times)
    best = {stop: (before[stop], before[stop], ()) for stop in range(num_layers + 1)}  # one part: largest, smallest, cuts
    for _ in range(parts - 1):
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in range(num_layers + 1):
            options = []
            for start in range(stop + 1):
                largest, smallest, cuts = best[start]
                size = before[stop] - before[start]
                options.append((max(largest, size), min(smallest, size), (*cuts, start)))
            extended[stop] = min(options, key=lambda option: option[0] - option[1])
        best = extended
    return best[num_layers][2]


def block_partition(times: Sequence[int], parts: int) -> tuple[int, ...]:
    """torchgpipe's, from its description."""
    least = min(times)
    spread = max(times) - least or 1
    before = [0.0, *accumulate((time - least) / spread for time in times)]
    edges = [len(times) // parts * part for part in range(parts)] + [len(times)]
    while True:
        sizes = [before[stop] - before[start] for start, stop in pairwise(edges)]
        smallest = min(range(parts), key=lambda part: (sizes[part], part))
        largest = max(range(parts), key=lambda part: (sizes[part], part))
        if sizes[largest] <= sizes[smallest] + 1:
            return tuple(edges[1:-1])
        if largest < smallest:
            edges[smallest] -= 1
        else:
            edges[smallest + 1] += 1


def measured(spec: Spec) -> Row:
    """Every way to cut one spec, replayed."""
    inventory = build_inventory(spec)
    pipeline = Pipeline(spec, inventory)
    num_layers, num_slots = len(inventory.layers), spec.mesh.pp * spec.mesh.vpp
    times = _with_ends(pipeline.costs)

    def step(cuts: Sequence[int]) -> int | None:
        edges = (0, *cuts, num_layers)
        return pipeline.step.of(tuple(cuts)) if all(start < stop for start, stop in pairwise(edges)) else None

    ours = step_time_cuts(spec, inventory, None, None)
    value = step(cuts_of(spans_of(ours.cuts, num_layers)))
    if value != ours.certificate.value:
        raise AssertionError("the certificate states the replayed step")
    return Row(
        spec=spec,
        ours=ours.certificate.value,
        lower_bound=ours.certificate.lower_bound,
        equal=step(equal_cuts(num_layers, num_slots)),
        deepspeed=step(balanced_difference(times, num_slots)),
        torchgpipe=step(block_partition(times, num_slots)),
    )


def _with_ends(costs: StackCosts) -> list[int]:
    times = list(costs.layers)
    times[0] += costs.first
    times[-1] += costs.last
    return times


def table(rows: Sequence[Row], seed: int) -> list[str]:
    """The page."""
    lines = [
        "# Step time of cuts",
        "",
        f"Written by `python benchmarks/step_time.py --output docs/reference/step-time.md`: megaplan {__version__}, seed {seed}.",
        "Milliseconds of a replayed step on H200s, with the model's own layer times (`docs/reference/costs.md`); the other",
        "partitioners are in percent above megaplan's. `bound` is the lower bound of the certificate for all cuts under the same",
        "schedule, in percent below megaplan's step.",
        "",
        *_about(),
        "",
        "| spec | pattern | layers | pp | schedule | microbatches | ours, ms | bound | equal | DeepSpeed | torchgpipe |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        spec = row.spec
        cells = [spec.name, spec.model.pattern, str(spec.model.num_layers), str(spec.mesh.pp), spec.schedule.kind]
        cells += [str(spec.schedule.num_microbatches), f"{row.ours / 1e6:.1f}", f"−{100 * (row.ours - row.lower_bound) / row.ours:.1f}%"]
        cells += [_above(other, row.ours) for other in (row.equal, row.deepspeed, row.torchgpipe)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_summary(rows)]


def _about() -> list[str]:
    found = (__doc__ or "").split("\n\n")
    return "\n\n".join(part.strip() for part in found[2:]).splitlines()


def _above(other: int | None, ours: int) -> str:
    return "empty slot" if other is None else f"{100 * (other - ours) / ours:+.1f}%"


def _summary(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name in ("equal", "deepspeed", "torchgpipe"):
        found = [(getattr(row, name) - row.ours) / row.ours for row in rows if getattr(row, name) is not None]
        label = {"equal": "Equal cuts", "deepspeed": "DeepSpeed's", "torchgpipe": "torchgpipe's"}[name]
        empty = len(rows) - len(found)
        text = f"{label}: {100 * sum(found) / len(found):.1f}% above ours in the mean, {100 * max(found):.1f}% at most"
        lines.append(f"- {text}{f'; a slot without a layer in {empty}' if empty else ''}.")
    worse = [
        row.spec.name for row in rows for other in (row.equal, row.deepspeed, row.torchgpipe) if other is not None and other < row.ours
    ]
    lines.append(f"- Rows in which another partitioner's step is shorter: {', '.join(worse) if worse else 'none'}.")
    return lines


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    random = Random(arguments.seed)
    rows = [measured(random_spec(random, number)) for number in range(NUM_SPECS)]
    text = "\n".join(table(rows, arguments.seed)) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
