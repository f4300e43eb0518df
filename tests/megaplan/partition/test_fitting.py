"""Weighted cuts under memory: they fit by the budget itself, no better ones fit, and if none fits the excess is reported."""

from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.errors import Severity
from megaplan.hosts.megarun.embedding import boundary_bytes
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import Spans, build_layout, cuts_of, spans_of
from megaplan.partition import fitting, weigh
from megaplan.partition.choose import choose_cuts
from megaplan.partition.memory import Memory
from megaplan.partition.stack import stack_of
from megaplan.partition.values import Cuts, stack_costs
from megaplan.spec.load import load_spec
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megaplan.units import format_bytes

REPOSITORY = Path(__file__).parents[3]
KINDS = ("1f1b", "gpipe", "interleaved_1f1b", "zbv", "dualpipev", "interleaved_zero_bubble", "looped_bfs")


def spec_of(*overrides: str, plan: str = "nam56r-8xh200") -> Spec:
    return load_spec(str(REPOSITORY / f"plans/{plan}.yaml"), ["split.objective=bottleneck", *overrides]).spec


def small(kind: str, micro_batch_size: int, *overrides: str) -> Spec:
    """Twelve layers, few enough to try every split."""
    vpp = 1 if kind in ("1f1b", "gpipe") else 2
    sizes = ("model.num_layers=12", "model.attention.indexer=null", f"mesh.vpp={vpp}", "mesh.dp_shard=1", "schedule.num_microbatches=8")
    return spec_of(*sizes, "host.kernels=reference", f"schedule.kind={kind}", f"batch.micro_batch_size={micro_batch_size}", *overrides)


def chosen(spec: Spec) -> Cuts:
    return choose_cuts(spec, build_inventory(spec))


def peaks_fit(spec: Spec, spans: Spans) -> bool:
    inventory = build_inventory(spec)
    return build_budget(spec, inventory, build_layout(spec, inventory, spans)).fits


def codes(cuts: Cuts) -> list[str]:
    return [found.code for found in cuts.diagnostics if found.code in ("MP334", "MP501")]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_below_the_budget(kind: str) -> None:
    """The bytes that layers are certain to need are never more than the budget says, whatever the cuts."""
    random = Random(11)
    vpp = 1 if kind in ("1f1b", "gpipe") else 2
    for reshard in ("false", "true"):
        spec = spec_of(f"schedule.kind={kind}", f"mesh.vpp={vpp}", "mesh.pp=4", f"sharding.reshard_after_forward={reshard}")
        memory = Memory(spec, build_inventory(spec))
        for _ in range(6):
            spans = spans_of(sorted(random.sample(range(1, 52), 4 * vpp - 1)), 52)
            layout = build_layout(spec, build_inventory(spec), spans)
            sums, excesses = memory.sums(spans), memory.excesses(spans)
            for rank in range(4):
                owned = [(slot.start, slot.stop) for slot in layout.of_rank(rank)]
                assert max(point.excess(owned) for point in sums[rank]) <= excesses[rank]


@pytest.mark.parametrize("kind", KINDS)
def test_taking_layers_away_never_takes_memory(kind: str) -> None:
    """The proof of optimality rests on it: a rank that fits still fits when a slot gives an end layer to a slot of another rank."""
    random = Random(5)
    vpp = 1 if kind in ("1f1b", "gpipe") else 2
    spec = spec_of(f"schedule.kind={kind}", f"mesh.vpp={vpp}", "mesh.pp=4", "recompute.blocks={M: selective, E: selective}")
    memory, inventory = Memory(spec, build_inventory(spec)), build_inventory(spec)
    for _ in range(8):
        cuts = sorted(random.sample(range(1, 52), 4 * vpp - 1))
        layout = build_layout(spec, inventory, spans_of(cuts, 52))
        before = memory.excesses(spans_of(cuts, 52))
        for index in range(len(cuts)):
            left, right = layout.slots[index], layout.slots[index + 1]
            if left.pp_rank == right.pp_rank or right.stop - right.start == 1:
                continue
            moved = [cut + (at == index) for at, cut in enumerate(cuts)]
            assert memory.excesses(spans_of(moved, 52))[right.pp_rank] <= before[right.pp_rank], (cuts, index)


@pytest.mark.requirement("R-29")
def test_what_fits_pays_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of()
    budgets = []
    monkeypatch.setattr(weigh.Memory, "sums", lambda *_: pytest.fail("limits were made for cuts that fit"))
    original = weigh.Memory.excesses
    monkeypatch.setattr(weigh.Memory, "excesses", lambda self, spans: budgets.append(spans) or original(self, spans))
    assert chosen(spec).certificate.optimal
    assert len(budgets) == 1


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize(("kind", "sizes"), [("1f1b", (24, 28, 32, 48)), ("gpipe", (4, 7, 8, 12)), ("zbv", (28, 30, 32, 40))])
def test_memory_moves_the_cuts_to_the_best_that_fit(kind: str, sizes: tuple[int, ...]) -> None:
    """Every split of twelve layers, by the budget itself, at sizes between one at which the smallest fits and one at which none does."""
    outcomes = set()
    for size in sizes:
        spec = small(kind, size)
        inventory = build_inventory(spec)
        num_layers, num_slots = len(inventory.layers), spec.mesh.pp * spec.mesh.vpp
        stack, cuts = stack_of(spec, stack_costs(spec, inventory)), chosen(spec)
        every = [spans_of(each, num_layers) for each in combinations(range(1, num_layers), num_slots - 1)]
        fitting = [stack.bottleneck(spans) for spans in every if peaks_fit(spec, spans)]
        outcomes.add(tuple(codes(cuts)))
        if not fitting:
            assert codes(cuts) == ["MP501"], size
            continue
        assert peaks_fit(spec, cuts.spans), size
        assert cuts.certificate.value == min(fitting), size
        assert cuts.certificate.optimal == (cuts.certificate.value == cuts.certificate.lower_bound)
    assert outcomes == {(), ("MP334",), ("MP501",)}


@pytest.mark.requirement("R-29")
def test_coupled_chunks_are_never_called_optimal_without_proof() -> None:
    """Loop placement: the bound holds for every split that fits, and cuts that fit are found where there are some."""
    found = 0
    for size in (24, 28, 32):
        spec = small("interleaved_1f1b", size)
        inventory, cuts = build_inventory(spec), chosen(spec)
        stack = stack_of(spec, stack_costs(spec, inventory))
        every = [spans_of(each, 12) for each in combinations(range(1, 12), 3)]
        fitting = [stack.bottleneck(spans) for spans in every if peaks_fit(spec, spans)]
        if not fitting:
            assert codes(cuts) == ["MP501"]
            continue
        found += 1
        assert peaks_fit(spec, cuts.spans)
        assert cuts.certificate.lower_bound <= min(fitting) <= cuts.certificate.value
    assert found


@pytest.mark.requirement("R-46")
@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zbv"])
def test_what_cannot_fit_says_which_stage_and_by_how_much(kind: str) -> None:
    spec = small(kind, 140)
    inventory, cuts = build_inventory(spec), chosen(spec)
    memory = Memory(spec, inventory)
    num_slots = spec.mesh.pp * spec.mesh.vpp
    least = min(max(memory.excesses(spans_of(each, 12))) for each in combinations(range(1, 12), num_slots - 1))
    (note,) = [found for found in cuts.diagnostics if found.code == "MP501"]
    assert note.severity is Severity.WARNING
    assert max(memory.excesses(cuts.spans)) == least
    assert f"is over by {format_bytes(least)}; no split needs less" in note.detail
    worst = max(range(spec.mesh.pp), key=lambda rank: memory.excesses(cuts.spans)[rank])
    assert note.detail.startswith(f"pp rank {worst}, slot ")


def test_one_stage_that_does_not_fit_has_nothing_to_move() -> None:
    spec = spec_of("batch.micro_batch_size=16", "mesh.pp=1", "schedule.num_microbatches=1", plan="llama-3.1-8b")
    cuts = chosen(spec)
    assert codes(cuts) == ["MP501"]
    assert cuts_of(cuts.spans) == ()


def test_constraints_hold_under_memory() -> None:
    spec = small("1f1b", 24, "split.forbid=[4,5,6]")
    free = small("1f1b", 24)
    assert not set(cuts_of(chosen(spec).spans)) & {4, 5, 6}
    assert chosen(spec).certificate.value >= chosen(free).certificate.value


def sum_and_budget(spec: Spec, cuts: list[int], rank: int) -> tuple[int, int]:
    """Bytes by which a pp rank exceeds its largest sum, and its allocated bytes."""
    inventory, spans = build_inventory(spec), spans_of(cuts, spec.model.num_layers)
    memory, layout = Memory(spec, inventory), build_layout(spec, inventory, spans)
    owned = [(slot.start, slot.stop) for slot in layout.of_rank(rank)]
    of_rank = build_budget(spec, inventory, layout).of_rank(rank * spec.mesh.world_size // spec.mesh.pp)
    largest = max(point.excess(owned) for point in memory.sums(spans)[rank])
    assert largest <= memory.excesses(spans)[rank]
    return largest, of_rank.allocated_bytes


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("schedule.kind=gpipe",),
        ("schedule.steps_per_update=3",),
        ("optimizer.matrix=adamw",),
        ("mesh.dp_shard=3",),
        ("mesh.tp=2",),
        ("mesh.dp_replicate=2",),
        ("sharding.reshard_after_forward=true",),
        ("recompute.default=selective",),
        ("recompute.default=full",),
        ("precision.grads=bf16",),
    ],
    ids=" ".join,
)
def test_layers_weigh_in_the_sums_what_they_add_to_the_budget(overrides: tuple[str, ...]) -> None:
    """More layers of the same kind inside a middle stage: the peak stays at the same point of the same block, and grows by the sums."""
    spec = spec_of("mesh.pp=4", "schedule.num_microbatches=8", *overrides, plan="llama-3.1-8b")
    (few, least), (many, most) = (sum_and_budget(spec, cuts, 1) for cuts in ([16, 32, 48], [16, 40, 48]))
    assert many - few == most - least > 0


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize("kind", ["interleaved_1f1b", "zbv"])
def test_layers_of_a_chunk_weigh_in_the_sums_what_they_add_to_the_budget(kind: str) -> None:
    spec = spec_of("mesh.pp=4", "mesh.vpp=2", f"schedule.kind={kind}", "schedule.num_microbatches=8", plan="llama-3.1-8b")
    rest = [24, 32, 40, 48, 56]
    (few, least), (many, most) = (sum_and_budget(spec, [8, cut, *rest], 1) for cut in (16, 20))
    assert many - few == most - least > 0


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("kind", "outputs", "received"), [("1f1b", 0, 0), ("gpipe", 1, 1)])
def test_microbatches_weigh_in_the_sums_what_they_add_to_the_budget(kind: str, outputs: int, received: int) -> None:
    """Nothing under 1f1b, whose microbatches share receive buffers.

    Under gpipe a receive buffer, and what a microbatch keeps; the stage's own output, which is not a layer's, is in the budget alone.
    """
    specs = [spec_of("mesh.pp=4", "mesh.vpp=1", f"schedule.kind={kind}", f"schedule.num_microbatches={m}") for m in (8, 9)]
    boundary = boundary_bytes(local_dims(specs[0]))
    for rank in (1, 2):
        (few, least), (many, most) = (sum_and_budget(spec, [9, 20, 40], rank) for spec in specs)
        assert (most - least) - (many - few) == outputs * boundary
        assert many - few >= received * boundary
        assert (many > few) is bool(received)


def test_cuts_that_a_descent_brought_to_the_limit_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An excess of 0 bytes counts as fitting: the last byte of a device is usable."""
    spec = small("interleaved_1f1b", 160)
    cuts = cuts_of(chosen(spec).spans)
    for excess, code in ((-1, "MP334"), (0, "MP334"), (1, "MP501")):
        monkeypatch.setattr(fitting, "best_fitting", lambda *_: None)
        monkeypatch.setattr(fitting, "min_overflow_bytes", lambda *_, excess=excess: fitting.Overflow(cuts, excess, min(excess, 0)))
        assert codes(chosen(spec)) == [code]
