"""Effort of a search for cuts that fit: evaluations and partitions are counted, and a stage is evaluated once for each set of spans."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from megaplan.budget.peaks import StagePeaks, build_budget
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import Spans, build_layout, spans_of
from megaplan.partition import cut_search, fitting, stack
from megaplan.partition.best_cuts import balance
from megaplan.partition.choose import choose_cuts
from megaplan.partition.constraints import Constraints
from megaplan.partition.memory import Memory
from megaplan.partition.stack import stack_of
from megaplan.partition.values import StackCosts, stack_costs
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec

REPOSITORY = Path(__file__).parents[3]


def spec_of(*overrides: str, plan: str = "nam56r-8xh200") -> Spec:
    return load_spec(str(REPOSITORY / f"plans/{plan}.yaml"), ["split.objective=bottleneck", *overrides]).spec


def random_spans(random: Random, num_layers: int, num_slots: int) -> Spans:
    return spans_of(sorted(random.sample(range(1, num_layers), num_slots - 1)), num_layers)


@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh.pp=4", "mesh.vpp=1", "schedule.kind=1f1b"),
        ("mesh.pp=4", "mesh.vpp=2"),
        ("mesh.pp=2", "mesh.vpp=2", "schedule.kind=zbv"),
        ("mesh.pp=2", "mesh.vpp=2", "mesh.dp_shard=24", "mesh.cp=2"),
    ],
    ids=" ".join,
)
def test_the_peak_of_a_stage_is_the_budgets(overrides: tuple[str, ...]) -> None:
    """One rank's budget needs no other rank's slots, so it is the same whether the whole job is budgeted or that stage alone."""
    random, spec = Random(3), spec_of(*overrides, "model.features.relation_bias={num_relations: 7}")
    inventory, pp = build_inventory(spec), spec.mesh.pp
    peaks, per_stage = StagePeaks(spec, inventory), spec.mesh.world_size // spec.mesh.pp
    for _ in range(5):
        layout = build_layout(spec, inventory, random_spans(random, 52, pp * spec.mesh.vpp))
        expected = [0] * pp
        for budget in build_budget(spec, inventory, layout).ranks:
            for rank in budget.ranks:
                expected[rank // per_stage] = max(expected[rank // per_stage], budget.peak_bytes)
        chosen = sorted(random.sample(range(pp), random.randint(1, pp)))
        assert peaks.of(layout, chosen) == [expected[rank] for rank in chosen]
        assert peaks.of(layout, range(pp)) == expected


def test_a_stage_is_evaluated_once_for_its_spans() -> None:
    spec = spec_of("mesh.pp=4", "mesh.vpp=1", "schedule.kind=1f1b")
    memory = Memory(spec, build_inventory(spec))
    before = memory.excesses(spans_of([10, 20, 30], 52))
    assert memory.num_stages == 4
    after = memory.excesses(spans_of([10, 21, 30], 52))
    assert memory.num_stages == 6
    assert (before[0], before[3]) == (after[0], after[3])
    assert memory.excess(1, spans_of([9, 21, 40], 52)) != before[1]
    assert (memory.num_stages, memory.num_budgets) == (7, 3)


def test_what_does_not_fit_takes_few_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once no cuts exist below the best value, the search detects it in one step, not in one for each bit of the bytes between."""
    calls: list[int] = []
    original = stack.balance
    monkeypatch.setattr(stack, "balance", lambda *args, **named: calls.append(1) or original(*args, **named))
    sizes = ("model.num_layers=128", "mesh.pp=4", "schedule.num_microbatches=16", "batch.micro_batch_size=16")
    spec = spec_of(*sizes, "host.kernels=reference", plan="llama-3.1-8b")
    cuts = choose_cuts(spec, build_inventory(spec))
    (note,) = [found for found in cuts.diagnostics if found.code == "MP501"]
    assert "no split needs less" in note.detail
    assert len(calls) <= 24


def test_a_search_that_spent_its_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of chunks per rank branch into more cuts than can be tried: the result then has a bound, not a proof."""
    calls: list[int] = []
    original = stack.balance
    monkeypatch.setattr(stack, "balance", lambda *args, **named: calls.append(1) or original(*args, **named))
    monkeypatch.setattr(fitting, "MAX_WORK", 30_000)
    spec = spec_of("model.num_layers=24", "model.attention.indexer=null", "mesh.vpp=6", "batch.micro_batch_size=32")
    inventory = build_inventory(spec)
    cuts = choose_cuts(spec, inventory)
    (note,) = [found for found in cuts.diagnostics if found.code == "MP501"]
    assert "the least that was found; no split is over by less than " in note.detail
    free = stack_of(spec, stack_costs(spec, inventory))
    work = replace(free, sums=Memory(spec, inventory).sums(cuts.spans)).partition_work
    assert len(calls) <= 1 + 2 * (30_000 // work + 1)


def test_the_mean_of_the_sums_refutes_interleaved_chunks_without_an_evaluation() -> None:
    """A search that excludes spans of one chunk after another evaluates hundreds of stages before its budget is spent."""
    sizes = ("mesh.pp=2", "mesh.vpp=4", "schedule={kind: interleaved_1f1b, num_microbatches: 16}", "batch.micro_batch_size=16")
    spec = spec_of(*sizes, "host.kernels=reference", plan="llama-3.1-8b")
    inventory = build_inventory(spec)
    memory, free = Memory(spec, inventory), stack_of(spec, stack_costs(spec, inventory))
    found = free.best()
    assert found is not None
    limited = replace(free, sums=memory.sums(spans_of(found.cuts, len(inventory.layers))))
    assert limited.least_excess > 0
    assert fitting.best_fitting(limited, memory) is None
    assert memory.num_stages == 0
    overflow = fitting.min_overflow_bytes(limited, memory, found.cuts)
    assert overflow.lower_bound_bytes >= limited.least_excess


def test_equal_layers_of_a_v_leave_few_limits_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two spans have few costs if layers have few: limits between them are the same question."""
    tried: list[int] = []
    original = cut_search.CutSearch.feasible
    monkeypatch.setattr(cut_search.CutSearch, "feasible", lambda self, limit: tried.append(limit) or original(self, limit))
    costs = StackCosts((7_919_000_001, 15_838_000_009) * 20, first=1_000_003, last=9_000_000_007)
    found = balance(costs, 8, folded=True)
    assert found is not None
    assert found.value in {sum(pair) for pair in product(cut_search.CutSearch(costs, 8, Constraints(), folded=True).span_costs, repeat=2)}
    assert len(tried) <= 8


def test_stacks_that_differ_in_memory_alone_share_their_best_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = stack.balance
    monkeypatch.setattr(stack, "balance", lambda *args, **named: calls.append(1) or original(*args, **named))
    specs = [spec_of("model.hidden_size=3072", f"sharding.reshard_after_forward={each}") for each in ("true", "false")]
    cuts = [stack_of(spec, stack_costs(spec, build_inventory(spec))).best_free for spec in specs]
    assert cuts[0] == cuts[1]
    assert len(calls) == 1
