"""Two copies of the model in opposite directions: cuts, memory, time, traffic, checkpoints and refusals."""

from itertools import combinations
from random import Random
from typing import Any

import pytest

import megaplan
from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.exporters.hosts import EXPORTERS
from megaplan.exporters.values import Source
from megaplan.goodput.checkpoints import checkpoint_sizes
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout, spans_of
from megaplan.layout.planned_step import planned_step
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.layout.traffic import traffic_of
from megaplan.partition.choose import choose_cuts
from megaplan.partition.memory import Memory
from megaplan.spec.models import Spec

STATE = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)


def spec_of(num_layers: int, mesh: dict[str, int], kind: str = "dualpipe", count: int = 8, **more: Any) -> Spec:
    document = {
        "format": "megaplan.spec/1",
        "name": "mirrored",
        "model": {
            "pattern": "AD",
            "num_layers": num_layers,
            "hidden_size": 64,
            "vocab_size": 512,
            "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16},
            "mlp": {"ffn_hidden_size": 256},
        },
        "mesh": mesh,
        "schedule": {"kind": kind, "num_microbatches": count},
        "batch": {"micro_batch_size": 1, "seq_length": 64},
        "device": {"name": "h200"},
        **more,
    }
    return megaplan.load(document).spec


@pytest.mark.parametrize(("pp", "num_layers", "count"), [(2, 5, 4), (2, 7, 10), (4, 6, 8), (4, 7, 12)])
def test_the_certificate_bounds_every_cut_and_the_cuts_are_of_both_copies(pp: int, num_layers: int, count: int) -> None:
    spec = spec_of(num_layers, {"pp": pp}, count=count)
    inventory = build_inventory(spec)
    steps = {
        spans_of(cuts, num_layers): planned_step(spec, inventory, spans_of(cuts, num_layers)).makespan
        for cuts in combinations(range(1, num_layers), pp - 1)
    }
    found = choose_cuts(spec, inventory)
    assert found.certificate.value == steps[found.spans]
    assert found.certificate.lower_bound <= min(steps.values()) <= found.certificate.value
    assert found.certificate.value == min(steps.values())
    layout = build_layout(spec, inventory, found.spans)
    assert layout.spans == found.spans
    assert [(slot.start, slot.stop) for slot in layout.slots] == [*found.spans, *found.spans]
    assert all(slot.copies == slot.blocks for slot in layout.slots[pp:])


@pytest.mark.parametrize("seed", range(4))
def test_mirrored_ranks_hold_the_same_and_memory_lists_one_of_them(seed: int) -> None:
    random = Random(seed)
    pp, num_layers = random.choice([2, 4, 6]), random.randint(6, 12)
    spec = spec_of(num_layers, {"pp": pp, "dp_shard": random.choice([1, 2])}, count=2 * pp + 2 * random.randint(0, 3))
    inventory = build_inventory(spec)
    spans = spans_of(sorted(random.sample(range(1, num_layers), pp - 1)), num_layers)
    budget = build_budget(spec, inventory, build_layout(spec, inventory, spans))
    each = spec.mesh.world_size // pp
    peaks = [budget.of_rank(rank * each).peak_bytes for rank in range(pp)]
    assert peaks == peaks[::-1]
    assert [peak for peak, _ in Memory(spec, inventory).peaks(spans)] == peaks[: pp // 2]


def test_a_rank_holds_the_state_of_the_v_on_half_as_many_ranks() -> None:
    """The parameters and moments of rank i are those of rank i of DualPipeV on half of the ranks, whose replicas are twice as many."""
    whole, half = spec_of(8, {"pp": 4, "dp_shard": 2}), spec_of(8, {"pp": 2, "vpp": 2, "dp_shard": 2, "dp_replicate": 2}, "dualpipev", 4)
    inventory, spans = build_inventory(whole), ((0, 1), (1, 4), (4, 6), (6, 8))
    found, folded = (build_budget(spec, inventory, build_layout(spec, inventory, spans)) for spec in (whole, half))
    for rank in (0, 1):
        cells = [budget.of_rank(rank * each).cells[Phase.FORWARD_BACKWARD] for budget, each in ((found, 2), (folded, 4))]
        assert [cells[0][column] for column in STATE] == [cells[1][column] for column in STATE]
        assert sum(cells[0][column] for column in STATE) > 0
    assert found.parameters == folded.parameters == inventory.parameters


def test_the_copies_gradients_are_summed_in_time_and_traffic() -> None:
    """A rank sends both its parts' gradients once; the same layout of one copy sends none."""
    mesh = {"pp": 4, "dp_shard": 2}
    spec, single = spec_of(8, mesh), spec_of(8, mesh, "1f1b")
    inventory, spans = build_inventory(spec), ((0, 2), (2, 4), (4, 6), (6, 8))
    rows = {row.what: row for row in traffic_of(spec, inventory, spans)}
    row = rows["gradients of the mirrored copy"]
    assert (row.axis, row.ranks, row.rank_bytes) == ("pp", 2, 2 * inventory.parameters // 4 // 2 * spec.precision.grads.bytes)
    assert row.total_bytes == 8 * row.rank_bytes
    assert "gradients of the mirrored copy" not in {each.what for each in traffic_of(single, inventory, spans)}
    twice, once = planned_time(spec, spans, inventory), planned_time(single, spans, inventory)
    assert isinstance(twice, PlannedTime)
    assert isinstance(once, PlannedTime)
    assert twice.terms["exposed data"] > once.terms["exposed data"]
    assert twice.terms["bubble"] < once.terms["bubble"]
    assert [2 * each for each in once.traffic] == list(twice.traffic)


def test_a_checkpoint_has_one_copy() -> None:
    sizes = []
    for kind in ("dualpipe", "1f1b"):
        spec = spec_of(8, {"pp": 4}, kind)
        inventory = build_inventory(spec)
        layout = build_layout(spec, inventory, ((0, 2), (2, 4), (4, 6), (6, 8)))
        sizes.append(checkpoint_sizes(spec, inventory, layout, build_budget(spec, inventory, layout)).whole_bytes)
    assert sizes[0] == sizes[1]


def test_pools_and_other_hosts_refuse_it_by_name() -> None:
    pools = {"pools": [{"count": 2, "device": {"name": "a100-80gb"}}]}
    for more, code in ((pools, "MP510"), ({"host": {"name": "megatron"}}, "MP902"), ({"host": {"name": "torchtitan"}}, "MP902")):
        with pytest.raises(MegaplanError) as refused:
            spec_of(8, {"pp": 4}, **more)
        assert any(found.code == code and "schedule.kind = dualpipe" in found.detail for found in refused.value.diagnostics)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "fsdp2", "deepspeed", "nanotron", "maxtext"])
def test_an_export_says_that_the_host_runs_another_schedule(target: str) -> None:
    """One copy of the stages is written."""
    spec = spec_of(8, {"pp": 4})
    inventory = build_inventory(spec)
    source = Source(spec, inventory, build_layout(spec, inventory, ((0, 2), (2, 4), (4, 6), (6, 8))))
    assert source.stages == ("AD",) * 4
    losses = EXPORTERS[target](source).losses
    assert any(loss.key == "schedule.kind" and "schedule.kind = dualpipe" in loss.detail for loss in losses)
