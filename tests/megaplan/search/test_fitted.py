"""Host megatron, whose step-time model has fitted constants: times are those of an estimate, and no bound is above one."""

import random
from itertools import permutations

import pytest

import megaplan
from megaplan.budget.megatron import megatron_kept_bytes
from megaplan.budget.peaks import build_budget
from megaplan.exploration.clocks import clock_of
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.fitted import FittedClock
from megaplan.exploration.megatron_floors import MegatronFloors
from megaplan.exploration.policies import keeps_more
from megaplan.exploration.space import Space
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout, spans_of
from megaplan.layout.step_time import planned_time

LLAMA = {
    "format": "megaplan.spec/1",
    "name": "llama-3.1-70b",
    "model": {
        **{"pattern": "AD", "num_layers": 160, "hidden_size": 8192, "vocab_size": 128256},
        "attention": {"kind": "gqa", "num_heads": 64, "num_kv_heads": 8, "head_dim": 128},
        "mlp": {"ffn_hidden_size": 28672},
    },
    "mesh": {"pp": 4, "tp": 4, "dp_shard": 4, "vocab_parallel": True},
    "schedule": {"num_microbatches": 32},
    "batch": {"micro_batch_size": 1, "seq_length": 8192},
    "optimizer": {"matrix": "adamw"},
    "host": {"name": "megatron", "model": "gpt"},
    "device": {"name": "h100-sxm"},
}
HYBRID = LLAMA | {
    "name": "hybrid",
    "model": {
        **{"pattern": "MEMEA", "num_layers": 50, "hidden_size": 4096, "vocab_size": 131072},
        "attention": {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        "mamba": {"kind": "mamba2", "head_dim": 64, "state_dim": 128, "num_groups": 8},
        "moe": {"num_experts": 64, "top_k": 4, "ffn_hidden_size": 1024, "activation": "relu2"},
    },
    "host": {"name": "megatron", "model": "hybrid", "moe_dispatcher": "alltoall"},
}


@pytest.mark.parametrize("document", [LLAMA, HYBRID], ids=["dense", "hybrid"])
def test_times_are_an_estimates_and_within_their_bounds(document):
    draw, spec = random.Random(1), megaplan.load(document).spec
    space = Space(spec, 64, {}, ("recompute", "schedule", "batch"))
    evaluator = Evaluator(space)
    clock = clock_of(space.base, build_inventory(space.base))
    assert isinstance(clock, FittedClock)
    cuts = space.allowed_cuts
    for mesh in draw.sample(space.meshes(), 12):
        least = evaluator.bound_ns(mesh)
        for layout in space.layouts_of(mesh):
            one = space.spec_of(layout, draw.choice(space.policies(layout)))
            slots = layout.pp * layout.vpp
            spans = spans_of(sorted(draw.sample(cuts, slots - 1)), spec.model.num_layers)
            timed = planned_time(one, spans)
            assert round(timed.seconds * 1e9) == clock.step_ns(one, spans)
            assert least <= clock.bound_ns(one) <= clock.step_ns(one, spans)


@pytest.mark.parametrize("document", [LLAMA, HYBRID], ids=["dense", "hybrid"])
def test_no_floor_of_memory_is_above_a_peak(document):
    """The floor holds for any policy and cuts; without a pipeline it is of the same order as the peak."""
    draw, spec = random.Random(2), megaplan.load(document).spec
    space = Space(spec, 64, {}, ("recompute", "schedule", "batch"))
    inventory = build_inventory(space.base)
    floors, cuts = MegatronFloors(inventory, space.base), space.allowed_cuts
    layouts = [layout for mesh in draw.sample(space.meshes(), 60) for layout in space.layouts_of(mesh)]
    for layout in draw.sample(layouts, 30):
        one = space.spec_of(layout, draw.choice(space.policies(layout)))
        spans = spans_of(sorted(draw.sample(cuts, layout.pp * layout.vpp - 1)), spec.model.num_layers)
        peak = build_budget(one, inventory, build_layout(one, inventory, spans)).worst.peak_bytes
        assert 0 < floors.shared_bytes(one) <= floors.peak_bytes(one) <= peak
        policy = next(each for each in space.policies(layout) if space.spec_of(layout, each) == one)
        assert floors.peak_on(layout, policy, space.spec_of) == floors.peak_bytes(one)
        if layout.pp == 1:
            assert floors.peak_bytes(one) > 0.3 * peak


@pytest.mark.parametrize("changes", [("mesh.pp=1",), ("schedule.kind=interleaved_1f1b", "mesh.vpp=4"), ("model.tie_embeddings=true",)])
def test_a_floor_of_memory_grows_with_the_micro_batch(changes):
    found = []
    for size in (1, 2):
        spec = megaplan.load(LLAMA, *changes, f"batch.micro_batch_size={size}").spec
        found.append(MegatronFloors(build_inventory(spec), spec).peak_bytes(spec))
    assert 0 < found[0] < found[1]


def test_every_constant_that_a_step_uses_is_changed():
    spec = megaplan.load(LLAMA).spec
    clock = clock_of(spec, build_inventory(spec))
    variants = dict(clock.variants([spec]))
    spans = ((0, 40), (40, 80), (80, 120), (120, 160))
    own = clock.step_ns(spec, spans)
    assert variants["gemm.h100-sxm.bf16 -10 %"](spec, spans) > own > variants["gemm.h100-sxm.bf16 +10 %"](spec, spans)
    assert len(variants) == 2 * len({name.rpartition(" -")[0] or name.rpartition(" +")[0] for name in variants})


@pytest.mark.parametrize("document", [LLAMA, HYBRID], ids=["dense", "hybrid"])
def test_what_is_not_searched_is_never_better(document):
    """Copies of the optimizer's shards, and an optimizer that is not distributed: not faster, and more bytes, with the same cuts."""
    draw, spec = random.Random(3), megaplan.load(document).spec
    space = Space(spec, 64, {}, ("recompute", "schedule", "batch"))
    inventory = build_inventory(space.base)
    clock = clock_of(space.base, inventory)
    layouts = [layout for mesh in space.meshes() if mesh.dp_shard > 1 for layout in space.layouts_of(mesh)]
    for layout in draw.sample(layouts, 12):
        policy = draw.choice(space.policies(layout))
        assert policy.distributed
        assert layout.dp_replicate == 1
        spans = spans_of(sorted(draw.sample(space.allowed_cuts, layout.pp * layout.vpp - 1)), spec.model.num_layers)

        def values(layout, policy, spans=spans):
            one = space.spec_of(layout, policy)
            peak = build_budget(one, inventory, build_layout(one, inventory, spans)).worst.peak_bytes
            return clock.step_ns(one, spans), peak

        step, peak = values(layout, policy)
        others = [(layout, policy._replace(distributed=False))]
        if layout.dp_shard % 2 == 0 and layout.dp_shard // 2 * layout.cp * layout.tp % (layout.ep * layout.etp) == 0:
            others.append((layout._replace(dp_replicate=2, dp_shard=layout.dp_shard // 2), policy))
        for other in others:
            other_step, other_peak = values(*other)
            assert step <= other_step
            assert peak <= other_peak


@pytest.mark.parametrize("document", [LLAMA, HYBRID], ids=["dense", "hybrid"])
def test_a_policy_that_keeps_more_needs_more(document):
    draw, spec = random.Random(4), megaplan.load(document).spec
    space = Space(spec, 64, {}, ("recompute", "schedule", "batch"))
    inventory, num_found = build_inventory(space.base), 0
    layouts = [layout for mesh in draw.sample(space.meshes(), 40) for layout in space.layouts_of(mesh)]
    for layout in draw.sample(layouts, 12):
        spans = spans_of(sorted(draw.sample(space.allowed_cuts, layout.pp * layout.vpp - 1)), spec.model.num_layers)
        kept = {}
        for policy in space.policies(layout):
            one = space.spec_of(layout, policy)
            kept[policy] = megatron_kept_bytes(one, inventory, build_layout(one, inventory, spans))
        for one, other in permutations(kept, 2):
            if keeps_more(one, other):
                num_found += 1
                assert all(more >= less for more, less in zip(kept[one], kept[other], strict=True))
    assert num_found > 100


@pytest.mark.parametrize("document", [LLAMA, HYBRID], ids=["dense", "hybrid"])
def test_a_limit_leaves_out_nothing_that_is_faster(document):
    draw, spec = random.Random(5), megaplan.load(document).spec
    space = Space(spec, 64, {}, ("recompute", "schedule", "batch"))
    evaluator = Evaluator(space, -(1 << 50))  # everything fits
    num_left_out = 0
    for mesh in draw.sample(space.meshes(), 12):
        least, outcomes = evaluator.refined(mesh)
        assert outcomes == []
        for layout in space.layouts_of(mesh):
            policy = draw.choice(space.policies(layout))
            exact = evaluator.exact(layout, policy)
            assert least <= exact.step_ns
            assert evaluator.exact(layout, policy, exact.step_ns) == exact
            num_left_out += evaluator.exact(layout, policy, exact.step_ns * 2 // 3) is None
    assert num_left_out > 3
