"""Times follow the mesh, recompute, precision and the device's rates."""

from typing import get_args

import pytest
from by_hand import (
    FAMILIES,
    HALF_SPEED,
    LAUNCH_NS,
    PERCENT,
    SEQ,
    STEP_NS,
    H,
    T,
    bf16,
    executed_flops,
    fp32,
    linears,
    op_ns,
    residual_norm,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernels.ops.packed_weight.facts import Packing
from megaplan.columns import Basis
from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.cost.rates import rates_of
from megaplan.cost.times import model_times
from megaplan.cost.transfers import RankGroup, exchange_ns
from megaplan.cost.values import ModelTimes
from megaplan.devices import device_names, load_device
from megaplan.families import registry
from megaplan.families.registry import Rated
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

pytestmark = pytest.mark.usefixtures("one_kernel_an_op")


def rank_flops(spec: Spec) -> int:
    """FLOPs of one rank's microbatch in the first layer."""
    block = build_inventory(spec).layers[0]
    load = rank_workload(spec, spec.precision.of(block.family))
    ops = layer_works(load, spec.model, block)
    return sum(executed_flops(op) * load.num_tokens // (load.tp if op.own_tokens else 1) for op in ops)


@pytest.mark.requirement("R-17")
@pytest.mark.parametrize("letter", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_share_the_work(make_spec, letter, tp):
    """tp 2 halves the products of every family; only M²RNN's q and k, which serve all heads, are projected by every rank."""
    whole, part = rank_flops(make_spec(letter)), rank_flops(make_spec(letter, mesh={"tp": tp}))
    shared = 3 * (2 * H * 128 + 2 * 128 * 4) * T if letter == "R" else 0
    assert tp * part == whole + (tp - 1) * shared


def test_tensor_ranks_halve_a_product_s_time(times_of):
    """Compute-bound products without launches or transfers: half, rounded up."""
    fast = {"efficiency_percent": {"D": 1, "head": 1}, "launch_ns": 0, "collective_latency_ns": 0}
    whole, half = (times_of("D", device=fast, mesh={"tp": tp}).layers[0] for tp in (1, 2))
    assert 0 <= 2 * half.weight_ns - whole.weight_ns <= 6  # three products, each rounded up twice


@pytest.mark.requirement("R-31")
@pytest.mark.parametrize("mesh", [{"ep": 4, "dp_shard": 4}, {"etp": 2, "dp_shard": 2}, {"ep": 2, "etp": 2, "dp_shard": 4}])
def test_expert_ranks_compute_as_much_and_hold_less(make_spec, mesh):
    """Balanced rows that arrive replace those that leave; each rank reads its own experts' weights only."""
    assert rank_flops(make_spec("E", mesh=mesh)) == rank_flops(make_spec("E"))
    spec = make_spec("E", mesh=mesh)
    ops = layer_works(rank_workload(spec, spec.precision.params), spec.model, build_inventory(spec).layers[0])
    (experts,) = (op for op in ops if op.name == "experts")
    assert experts.weights == 16 * 2 * H * 1024 // (mesh.get("ep", 1) * mesh.get("etp", 1))


def test_context_ranks_share_the_tokens(make_spec):
    assert 2 * rank_flops(make_spec("A", mesh={"cp": 2})) == rank_flops(make_spec("A"))
    assert 2 * rank_flops(make_spec("D", mesh={"cp": 2})) == rank_flops(make_spec("D"))


def test_skewed_routing_slows_the_busiest_rank(times_of, make_spec):
    """Twice the share: twice the experts' rows, twice the rows on their way; never more than there are, and never above the capacity."""
    slow = {"efficiency_percent": {"experts": 1}, "launch_ns": 0, "collective_latency_ns": 0}

    def time(skew: float, ep: int, capacity: float | None = None) -> int:
        moe = {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "routing_skew": skew, "capacity_factor": capacity}
        return times_of("E", device=slow, mesh={"ep": ep, "dp_shard": ep}, model={"moe": moe}).layers[0].forward_ns

    extra = time(2.0, 4) - time(1.0, 4)
    rows = 4 * 3 * 2 * H * 1024 * T * 10**9 * 100 // (989 * 10**12)
    sorting = 2 * bf16(2 * 4 * H) * 10**9 * 100 // (4_800 * 10**9 * 85)
    spec = make_spec("E", device=slow, mesh={"ep": 4, "dp_shard": 4})
    once, twice = (exchange_ns(rates_of(spec), spec, RankGroup(4, 1), share * 4 * bf16(H)) for share in (1, 2))
    assert abs(extra - rows - sorting - 2 * (twice - once)) <= 4
    assert time(4.0, 2) == time(2.0, 2)
    assert time(2.0, 4, 1.25) < time(2.0, 4)
    assert time(3.0, 1) == time(1.0, 1)


def recompute(letter: str, policy: str) -> dict[str, object]:
    return {"recompute": {"blocks": {letter: policy}}, "device": HALF_SPEED}


@pytest.mark.requirement("R-67")
@pytest.mark.parametrize(
    ("letter", "policy"),
    [
        ("A", "selective"),
        ("A", "full"),
        ("M", "selective"),
        ("E", "selective"),
        ("R", "selective"),
        ("R", "full"),
        ("D", "selective"),
        ("D", "full"),
    ],
)
def test_recompute_raises_the_input_part_alone(times_of, letter, policy):
    """F and W stay; I grows by recomputation; the model's last layer and everything else do not change."""
    base = times_of(letter, num_layers=3, device=HALF_SPEED)
    again = times_of(letter, num_layers=3, **recompute(letter, policy))
    assert again.layers[0] == again.layers[1]
    assert again.layers[2] == base.layers[2]
    assert (again.first, again.last, again.boundary_ns) == (base.first, base.last, base.boundary_ns)
    first, before = again.layers[0], base.layers[0]
    assert (first.forward_ns, first.weight_ns) == (before.forward_ns, before.weight_ns)
    assert 0 < first.input_ns - before.input_ns < before.forward_ns


@pytest.mark.requirement("R-67")
def test_recompute_repeats_the_ops_it_names(times_of):
    def extra(letter: str, policy: str) -> int:
        base = times_of(letter, num_layers=2, device=HALF_SPEED).layers[0]
        return times_of(letter, num_layers=2, **recompute(letter, policy)).layers[0].input_ns - base.input_ns

    swiglu = op_ns(moved=bf16(3 * 14336))
    assert extra("D", "selective") == swiglu
    assert extra("D", "full") == residual_norm().forward_ns + linears((H, 14336), (H, 14336)).forward_ns + swiglu
    in_proj = linears((H, 2 * 8192 + 2 * 1024 + 128)).forward_ns
    assert extra("M", "selective") == in_proj + op_ns(2 * 4 * 10240 * T, bf16(2 * 10240))
    assert extra("R", "selective") == SEQ * STEP_NS + LAUNCH_NS + op_ns(moved=bf16(3 * 1024) + fp32(1))


UNMEASURED = {**HALF_SPEED, "name": "h100-sxm", "memory_bytes_per_second": 4_800 * 10**9}
LATENT = {"kind": "mla", "num_heads": 32, "q_lora_rank": 512, "kv_lora_rank": 256}
LATENT |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
INDEXER = {"num_heads": 8, "head_dim": 64, "top_k": 128, "layers": [0], "shared_layers": [1]}


@pytest.mark.requirement("R-67")
@pytest.mark.parametrize(("layer", "others"), [(0, {"indexer.k_norm", "indexer"}), (1, {"masked"}), (2, set())])
@pytest.mark.parametrize("sections", [{}, {"mesh": {"tp": 2}}, {"host": {"kernels": "triton"}, "device": UNMEASURED}])
def test_selective_recompute_of_attention_chooses_its_keys_again(times_of, make_spec, layer, others, sections):
    """The operation that attends makes index scores and their norm; a layer that is given the choice attends to it again."""
    model = {"attention": LATENT | {"indexer": INDEXER}}
    sections = {"model": model, "device": HALF_SPEED, **sections}
    spec = make_spec("A", num_layers=4, **sections)
    load, block = rank_workload(spec, spec.precision.params), build_inventory(spec).layers[layer]
    again = [op for op in layer_works(load, spec.model, block) if op.runs_in(frozenset({"attention"}))]
    assert {op.name for op in again} == {"attention"} | others
    base, more = (times_of("A", num_layers=4, recompute={"default": policy}, **sections).layers[layer] for policy in ("none", "selective"))
    assert more.input_ns - base.input_ns == sum(
        op_ns(op.work.forward * load.num_tokens, op.work.moved_forward * load.num_tokens) for op in again
    )


def test_every_tensor_rank_makes_all_index_scores(make_spec):
    """All choose the same keys for all tokens: tensor parallelism divides the indexer's projections alone."""

    def indexers(tp: int) -> list[int]:
        spec = make_spec("A", num_layers=2, model={"attention": LATENT | {"indexer": INDEXER}}, mesh={"tp": tp})
        load = rank_workload(spec, spec.precision.params)
        ops = layer_works(load, spec.model, build_inventory(spec).layers[0])
        return [op.work.forward * load.num_tokens // (tp if op.own_tokens else 1) for op in ops if op.name.startswith("indexer")]

    *projections, norm, scores = indexers(1)
    assert indexers(2) == [*(each // 2 for each in projections), norm, scores]


@pytest.mark.requirement("R-50")
def test_the_ops_that_run_again_are_the_saved_tensor_ledger_s(make_spec):
    """Selective recompute as the host's programs have it; views cost nothing, what ranks exchange is a transfer: no ops here."""
    views = {"split", "split conv", "exchange conv1d"}
    factors = {"mamba": {"kind": "mamba2", "part_multipliers": [0.5] * 5}}
    factors["mlp"] = {"ffn_hidden_size": 14336, "activation": "swiglu", "gate_multiplier": 0.5, "inner_norm": True}
    spec = make_spec(FAMILIES, model=factors)
    for block in build_inventory(spec).layers:
        ops = layer_works(rank_workload(spec, spec.precision.of(block.family)), spec.model, block)
        family = registry.FAMILIES[block.family]
        reruns = family.selective(family.section_of(spec.model), block.variant).reruns
        assert {name for op in ops if op.runs_in(reruns) for name in op.counts or (op.name,)} == reruns - views


def test_precision_chooses_the_peak(times_of):
    """fp32 products run at fp32's peak, fp8 weights at fp8's; a family's own dtype moves its layers alone."""
    only = {"efficiency_percent": dict.fromkeys(get_args(Rated), PERCENT), "launch_ns": 0}

    def weight_ns(**precision: object) -> list[int]:
        return [layer.weight_ns for layer in times_of("DA", device=only, precision=precision).layers]

    base, wide, narrow = weight_ns(), weight_ns(params="fp32"), weight_ns(params="fp8")
    for other, peak in ((wide, 67), (narrow, 1979)):
        for before, after in zip(base, other, strict=True):
            assert abs(after * peak - before * 989) < 4 * 2000
    mixed = weight_ns(families={"D": "fp32"})
    assert mixed == [wide[0], base[1]]


@pytest.mark.parametrize(
    ("part", "moved"), [("A", "A"), ("M", "M"), ("E", "E"), ("R", "R"), ("D", "D"), ("attention", "A"), ("scan", "M"), ("experts", "E")]
)
def test_an_efficiency_of_the_spec_moves_its_own_family(times_of, part, moved):
    base, slow = times_of(FAMILIES), times_of(FAMILIES, device={"efficiency_percent": {part: 5}})
    for letter, before, after in zip(FAMILIES, base.layers, slow.layers, strict=True):
        assert (after.total_ns > before.total_ns) == (letter == moved), letter
    assert slow.last == base.last


def test_every_rate_can_be_replaced(times_of):
    base = times_of(FAMILIES, mesh={"tp": 2})
    for device in (
        *({"efficiency_percent": {part: 1}} for part in ("head", "memory", "node")),
        *({key: 10**6} for key in ("launch_ns", "collective_latency_ns", "recurrence_step_ns")),
    ):
        slow = times_of(FAMILIES, mesh={"tp": 2}, device=device)
        assert sum(t.total_ns for t in (*slow.layers, slow.last)) > sum(t.total_ns for t in (*base.layers, base.last)), device


def test_boundaries_use_the_fabric_they_cross(times_of):
    """8192 tokens of 4096 in bf16: over NVLink while the job stays in a node, else through one adapter; SP sends a slice."""
    sent = 2 * T * H

    def boundary_ns(**sections: object) -> int:
        return times_of("DD", schedule={"num_microbatches": 2}, **sections).boundary_ns

    assert boundary_ns(mesh={"pp": 2}) == 15_000 + -(-sent * 10**9 * 100 // (450 * 10**9 * 82))
    assert boundary_ns(mesh={"pp": 2, "dp_shard": 4}) == boundary_ns(mesh={"pp": 2})
    far = boundary_ns(mesh={"pp": 2, "dp_shard": 8})
    assert far == 15_000 + -(-sent * 10**9 * 100 // (50 * 10**9 * 96))
    assert boundary_ns(mesh={"pp": 2, "dp_shard": 4}, device={"per_node": 4}) == far
    sliced = boundary_ns(mesh={"pp": 2, "dp_shard": 4, "tp": 2})
    assert sliced == 15_000 + -(-(sent // 2) * 10**9 * 100 // (50 * 10**9 * 96))


def test_tensor_groups_wait_for_their_transfers(times_of):
    """Forward gathers and scatters; backward does both in reverse and gathers once more: 15 µs each and half the payload."""
    busy, free = (times_of("D", mesh={"tp": 2}, device={"collective_latency_ns": ns}).layers[0] for ns in (15_000, 0))
    assert (busy.forward_ns - free.forward_ns, busy.input_ns - free.input_ns, busy.weight_ns) == (30_000, 45_000, free.weight_ns)
    slow, fast = (times_of("D", mesh={"tp": 2}, device={"efficiency_percent": {"node": p}}).layers[0] for p in (50, 100))
    once = -(-2 * T * H // 2 * 10**9 // (450 * 10**9))
    assert abs((slow.forward_ns - fast.forward_ns) - 2 * once) <= 4


def test_expert_groups_across_nodes_are_bound_by_one_adapter(times_of):
    """16 experts over 16 ranks of two nodes: half of the rows leave the node."""
    moe = {"moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024}}
    inside = times_of("E", mesh={"ep": 8, "dp_shard": 8}, model=moe).layers[0]
    across = times_of("E", mesh={"ep": 16, "dp_shard": 16}, model=moe).layers[0]
    rows = 2 * T * 4 * H
    near, far = rows * 7 // 8 * 10**9 * 100 // (450 * 10**9 * 82), rows // 2 * 10**9 * 100 // (50 * 10**9 * 96)
    weights = 16 * 3 * H * 1024 * 2 * (1 / 8 - 1 / 16) * 100 / 85 / 4800
    assert abs(across.forward_ns - inside.forward_ns - 2 * (far - near)) <= weights + 8


def totals(times: ModelTimes) -> tuple[int, ...]:
    parts = (*times.layers, times.first, times.last)
    return (
        *(part.forward_ns for part in parts),
        *(part.input_ns for part in parts),
        *(part.weight_ns for part in parts),
        times.boundary_ns,
    )


@settings(max_examples=40)
@given(
    letter=st.sampled_from(FAMILIES),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 8)),
    more=st.sampled_from(["micro_batch_size", "seq_length", "hidden_size", "vocab_size"]),
    tp=st.sampled_from([1, 2]),
)
def test_more_work_never_takes_less_time(make_spec, letter, sizes, more, tp):
    """A larger microbatch, sequence, hidden width or vocabulary: no part of the model is faster."""
    values = {"micro_batch_size": sizes[0], "seq_length": 256 * sizes[1], "hidden_size": 512 * sizes[0], "vocab_size": 1024 * sizes[1]}

    def times(values: dict[str, int]) -> ModelTimes:
        batch = {key: values[key] for key in ("micro_batch_size", "seq_length")}
        model = {key: values[key] for key in ("hidden_size", "vocab_size")}
        spec = make_spec(letter, 2, mesh={"pp": 2, "tp": tp}, schedule={"num_microbatches": 2}, batch=batch, model=model)
        return model_times(spec, build_inventory(spec))

    small, large = totals(times(values)), totals(times({**values, more: 2 * values[more]}))
    assert all(after >= before for before, after in zip(small, large, strict=True))
    assert large != small


def test_slots_hold_their_layers_and_the_ends(times_of):
    times = times_of("DDA")
    first, last = times.of_slots([(0, 1), (1, 3)])
    assert first == times.layers[0] + times.first
    assert last == times.layers[1] + times.layers[2] + times.last
    assert last.total_ns == last.forward_ns + last.backward_ns


@pytest.mark.requirement("R-51")
def test_every_rate_has_a_basis_and_a_source():
    for name in device_names():
        device = load_device(name)
        assert set(device.efficiency) == set(get_args(Rated))
        figures = (*device.efficiency.values(), device.launch, device.collective_latency, device.recurrence_step)
        assert all(figure.source and figure.basis in {Basis.MODELLED, Basis.MEASURED, "published"} for figure in figures)
        assert all(0 < figure.value <= 100 for figure in device.efficiency.values())


@pytest.mark.parametrize(("letter", "policy"), [("D", "none"), ("D", "full")])
def test_packed_matrices_are_made_before_each_product(times_of, letter, policy):
    """A pass over memory in forward, in the input's gradient, and in a forward that runs again; it hides behind nothing."""
    given = {"rank": 2, "alpha": 2.0, "families": ["up_proj"]}
    base, packed = (
        times_of(letter, num_layers=2, lora=lora, host={"kernels": "triton"}, **recompute(letter, policy)).layers[0]
        for lora in (given, given | {"base": "int8"})
    )
    packing = Packing("int8", 64, nested=True)
    up, down = (op_ns(moved=packing.unpacking(*shape, 2, fused=True).num_bytes) for shape in ((14336, H), (H, 14336)))
    again = 2 * up if policy == "full" else 0  # not the last product, which nothing reads
    assert packed.forward_ns - base.forward_ns == pytest.approx(2 * up + down, rel=0.005)  # copies reach a measured share
    assert packed.input_ns - base.input_ns == pytest.approx(2 * up + down + again, rel=0.005)
    assert packed.weight_ns == base.weight_ns
