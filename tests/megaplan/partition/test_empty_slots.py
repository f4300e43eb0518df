"""Cuts of a host that may leave slots empty: their certificate counts the cuts with those slots empty too."""

from itertools import combinations_with_replacement, pairwise
from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.layout.build import Spans
from megaplan.partition.constraints import Constraints
from megaplan.partition.gain import gain_of_optimum
from megaplan.partition.stack import Stack, certify
from megaplan.partition.values import StackCosts

DOCUMENT: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "t",
    "model": {
        "pattern": "AD",
        "num_layers": 4,
        "hidden_size": 64,
        "vocab_size": 4096,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16},
        "mlp": {"ffn_hidden_size": 256},
    },
    "schedule": {"kind": "1f1b", "num_microbatches": 8},
    "batch": {"micro_batch_size": 1, "seq_length": 32},
    "host": {"name": "megatron"},
}


def least(stack: Stack, spans: Spans) -> int:
    """The best of all legal cuts that leave only those slots empty that are empty in `spans`."""
    num_layers, may_be_empty = stack.num_layers, [start == stop for start, stop in spans]
    found = []
    for cuts in combinations_with_replacement(range(num_layers + 1), len(spans) - 1):
        edges = (0, *cuts, num_layers)
        slots = tuple(pairwise(edges))
        if all(stop > start or empty for (start, stop), empty in zip(slots, may_be_empty, strict=True)):
            parting = {cut for cut in cuts if 0 < cut < num_layers}
            if not stack.rules.broken_by(sorted(parting)):
                found.append(stack.bottleneck(slots))
    return min(found)


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("seed", range(60))
def test_the_bound_is_that_of_all_cuts_with_the_same_slots_empty(seed: int) -> None:
    draw = Random(seed)
    num_layers, num_slots = draw.randint(2, 7), draw.randint(2, 5)
    edges = (0, *sorted(draw.choices(range(num_layers + 1), k=num_slots - 1)), num_layers)
    spans = tuple(pairwise(edges))
    free = [cut for cut in range(1, num_layers) if cut not in edges]
    rules = Constraints(forbid=tuple(draw.sample(free, draw.randint(0, len(free)))))
    costs = StackCosts(tuple(draw.randint(1, 9) for _ in range(num_layers)), draw.choice((0, 20)), draw.choice((0, 15, 30)))
    stack = Stack(costs, rules, "loop", num_slots, 1)
    certificate = certify(stack, spans)
    assert certificate.lower_bound == least(stack, spans)
    assert certificate.gap >= 0


@pytest.mark.parametrize(("pp", "pattern"), [(2, "ADAD|"), (4, "|AD|AD|"), (6, "|A|D|A|D|"), (8, "|A|D|A|D|||")])
def test_a_head_alone_can_be_planned(pp: int, pattern: str) -> None:
    """The large head alone on the last slot beats all cuts with a layer there."""
    plan = megaplan.split(
        {**DOCUMENT, "model": {**DOCUMENT["model"], "pattern": pattern}, "mesh": {"pp": pp}, "split": {"reason": "t"}}
    ).plan
    certificate = plan.decisions.split.certificate
    assert certificate.gap == 0
    assert certificate.value == certificate.lower_bound == max(certificate.costs)
    assert plan.spans[-1] == (4, 4)
    megaplan.check(plan)


@pytest.mark.parametrize(("vocab_size", "cuts"), [(64, (2,)), (4096, (4,))])
def test_the_optimum_fills_a_slot_unless_it_is_better_empty(vocab_size: int, cuts: tuple[int, ...]) -> None:
    """The head alone on the last slot: too little work for a stage, or more than a stage should have beside it."""
    model = {**DOCUMENT["model"], "pattern": "ADAD|", "vocab_size": vocab_size}
    job = megaplan.load({**DOCUMENT, "model": model, "mesh": {"pp": 2}, "split": {"reason": "t"}})
    gain = gain_of_optimum(job.spec, job.inventory, ((0, 4), (4, 4)))
    assert gain.cuts == cuts
    assert gain.bottleneck[1] < gain.bottleneck[0] or cuts == (4,)
