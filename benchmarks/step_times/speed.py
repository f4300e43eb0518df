"""CPU time of 1,000 step times of one model under different meshes, and of their memory evaluations.

python benchmarks/step_times/speed.py [SPEC.yaml]
"""

import sys
import time
from itertools import islice, product
from pathlib import Path

from megaplan.budget.peaks import build_budget
from megaplan.cost.step.from_spec import step_of, timed_step
from megaplan.cost.step.predict import StepTimer
from megaplan.cost.step.workload import BatchShape
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.load import load_spec

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_STEPS, NUM_BUDGETS = 1000, 10


def main() -> None:
    """Print both times and their ratio."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "plans" / "mixtral-8x7b.yaml"
    spec = load_spec(str(path), ["host={name: megatron}", "mesh.pp=1", "mesh.vpp=1", "schedule={kind: 1f1b, num_microbatches: 16}"]).spec
    spans = ((0, spec.model.num_layers),)
    inventory = build_inventory(spec)
    base = timed_step(spec, inventory, spans, [0], step_of(spec))
    sizes = product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2, 4), range(4, 16))
    meshes = [
        (base.mesh._replace(tp=tp, ep=ep, cp=cp, dp=8, world=8 * tp * cp), BatchShape(micro, base.batch.seq, count))
        for tp, ep, cp, micro, count in islice(sizes, NUM_STEPS)
    ]
    start = time.process_time()
    timer = StepTimer(base)
    for mesh, batch in meshes:
        timer.time(mesh, batch, base.stages)
    steps = (time.process_time() - start) / len(meshes)
    layout = build_layout(spec, inventory, spans)
    start = time.process_time()
    for _ in range(NUM_BUDGETS):
        build_budget(spec, inventory, layout)
    budgets = (time.process_time() - start) / NUM_BUDGETS
    print(f"{len(meshes)} step times: {1000 * steps * len(meshes):.0f} ms, {1e6 * steps:.0f} µs each")
    print(f"a memory evaluation: {1e6 * budgets:.0f} µs, {budgets / steps:.1f} times a step time")


if __name__ == "__main__":
    main()
