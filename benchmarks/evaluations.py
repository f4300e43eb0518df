"""Time to evaluate one plan after another in one process: Spec value with fixed cuts → Budget.

python benchmarks/evaluations.py [--count 1000] [--cold] [--search]

52 layers, 64 ranks in 8 pipeline stages (9 distinct: one stage's shards are uneven), another micro-batch each time. Values that depend
only on the model and its sharding (the inventory and FSDP2's storages) are cached between evaluations; `--cold` drops them before each.
The bar is 2 s for 1,000, by the clock; CPU time, printed with it, shows whether the machine had something else to do.

With `--search` layouts of NAM56R on 8 ranks, drawn from those of a search, are evaluated as a search evaluates them; the result is the
number per CPU second.
"""

import argparse
import random
import sys
import time

from megaplan.budget.evaluation import BlockMemo
from megaplan.budget.peaks import build_budget
from megaplan.budget.stored import stored
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.space import DEFAULT_VARIED, Space
from megaplan.inventory.build import build_inventory, inventory_of
from megaplan.layout.build import build_layout, spans_of
from megaplan.partition.choose import choose_cuts
from megaplan.partition.memory import Memory
from megaplan.partition.stack import stack_of
from megaplan.spec.load import load_spec

BAR_SECONDS = 2.0
OVERRIDES = ("mesh.pp=8", "mesh.vpp=1", "mesh.dp_shard=2", "mesh.dp_replicate=4", "schedule.kind=1f1b", "schedule.num_microbatches=16")


def main() -> int:
    """Evaluate, print the time, 1 if past the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    if options.search:
        return of_a_search()
    count = options.count
    spec = load_spec("plans/nam56r-8xh200.yaml", OVERRIDES).spec
    spans = choose_cuts(spec, build_inventory(spec)).spans
    batches = [spec.batch.model_copy(update={"micro_batch_size": 1 + index}) for index in range(count)]
    specs = [spec.model_copy(update={"batch": batch}) for batch in batches]
    peaks, distinct = set(), 0
    start, start_cpu = time.perf_counter(), time.process_time()
    for each in specs:
        if options.cold:
            inventory_of.cache_clear()
            stored.cache_clear()
        inventory = build_inventory(each)
        budget = build_budget(each, inventory, build_layout(each, inventory, spans))
        peaks.add(budget.worst.peak_bytes)
        distinct = len(budget.ranks)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    found = f"{distinct} distinct ranks of {spec.mesh.world_size}, {len(peaks)} peaks"
    print(f"{count} evaluations, {found}: {seconds:.2f} s, of which {cpu_seconds:.2f} s of CPU")
    return 0 if seconds <= BAR_SECONDS * count / 1000 else 1


def of_a_search() -> int:
    """Evaluate layouts with a policy and balanced cuts, and print how many a second of CPU."""
    space = Space(load_spec("plans/nam56r-8xh200.yaml").spec, 8, {}, DEFAULT_VARIED)
    evaluator, draw = Evaluator(space), random.Random(5)
    specs = []
    for mesh in draw.sample([mesh for mesh in space.meshes() if mesh.micro_batch <= 8], 40):
        layouts = space.layouts_of(mesh)
        for layout in draw.sample(layouts, min(3, len(layouts))):
            policies = space.policies(layout)
            for policy in draw.sample(policies, min(4, len(policies))):
                spec = space.spec_of(layout, policy)
                best = stack_of(spec, evaluator.side(spec).clock.costs(spec)).best()
                assert best is not None
                specs.append((spec, spans_of(best.cuts, len(space.letters))))
    memo, inventory = BlockMemo(), build_inventory(space.base)
    start = time.process_time()
    for spec, spans in specs:
        Memory(spec, inventory, memo=memo).excesses(spans)
    seconds = time.process_time() - start
    print(f"{len(specs)} evaluations of a search: {len(specs) / seconds:.0f} a second of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
