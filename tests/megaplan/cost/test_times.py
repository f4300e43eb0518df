"""Times by hand: one layer per family, and parts outside the layers."""

from pathlib import Path

import pytest
import yaml
from by_hand import (
    FAMILIES,
    HALF_SPEED,
    LAUNCH_NS,
    SEQ,
    STEP_NS,
    H,
    T,
    bf16,
    elementwise,
    executed_flops,
    fp32,
    linears,
    op_ns,
    residual_norm,
)

from megaplan.cost.blocks import end_works, layer_works, rank_workload
from megaplan.cost.model import model_costs
from megaplan.cost.times import model_times
from megaplan.cost.values import LayerTime
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

pytestmark = pytest.mark.usefixtures("one_kernel_an_op")
PLANS = Path(__file__).parents[3] / "plans"


def by_hand_a() -> LayerTime:
    """32 heads and 8 key-value heads of 128: projections, rotation, causal core, output."""
    query, key = 4096, 1024
    pairs = 2 * 32 * SEQ * (SEQ + 1) // 2  # two sequences, 32 heads
    core = LayerTime(
        op_ns(2 * pairs * 256, bf16(2 * query + 2 * key) + fp32(32)),
        op_ns(2 * pairs * (2 * 256 + 128), bf16(4 * query + 4 * key) + fp32(32)),
    )
    rotation = elementwise(bf16(2 * (query + key)), bf16(2 * (query + key)))
    return residual_norm() + linears((H, query), (H, key), (H, key), (query, H)) + rotation + core


def by_hand_m() -> LayerTime:
    """128 heads of 64 in 8 groups with a state of 128: in_proj, convolution over x, B, C, scan in chunks of 256, gated norm, out_proj."""
    inner, shared, heads = 8192, 1024, 128
    taps = 2 * 4 * (inner + 2 * shared) * T
    convolution = LayerTime(op_ns(taps, bf16(2 * (inner + 2 * shared))), op_ns(2 * taps, bf16(3 * (inner + 2 * shared))))
    scores = 2 * 256 * 128 * 8
    scan = scores + heads * (2 * 256 * 64 + 4 * 64 * 128)
    inputs, states = inner + 2 * shared + heads, 2 * 2 * (SEQ // 256) * inner * 128  # bf16, both sequences, one state a chunk
    core = LayerTime(
        op_ns(scan * T, bf16(inputs + inner) + 2 * states),
        op_ns((2 * scan + scores) * T, bf16(2 * inputs + inner) + 3 * states),
    )
    gated = elementwise(bf16(3 * inner) + fp32(8), bf16(5 * inner) + fp32(8))
    return residual_norm() + linears((H, 2 * inner + 2 * shared + heads), (inner, H)) + convolution + core + gated


def by_hand_e() -> LayerTime:
    """16 experts of 1024, four a token, all on this rank, and a shared one of 2048: router and experts leave nothing to W."""
    route = LayerTime(
        op_ns(2 * H * 16 * T, bf16(H + 16) + fp32(16) + 2 * H * 16),
        op_ns(2 * 2 * H * 16 * T, 2 * bf16(H + 16) + fp32(16) + (2 + 8) * H * 16),
    )
    dispatch = elementwise(bf16(2 * 4 * H), bf16((4 + 1) * H))
    combine = elementwise(bf16((4 + 1) * H), bf16((4 + 1) * H))
    flops, operands, weights = 4 * 2 * 2 * H * 1024 * T, bf16(4 * 2 * (H + 1024)), 16 * 2 * H * 1024
    experts = LayerTime(
        op_ns(flops, operands + bf16(4 * 2 * 1024) + 2 * weights),
        op_ns(2 * flops, 2 * operands + bf16(4 * 3 * 1024) + (2 + 8) * weights),
    )
    shared = linears((H, 2048), (2048, H)) + elementwise(bf16(2 * 2048), bf16(3 * 2048))
    return residual_norm() + route + dispatch + combine + experts + shared


def by_hand_r() -> LayerTime:
    """64 heads of 64 by 16: the recurrence takes 4096 steps forward and twice as many backward, whatever its FLOPs."""
    inner, heads, key, value = 1024, 64, 64, 16

    def convolved(channels: int) -> LayerTime:
        taps = 2 * 4 * channels * T
        return LayerTime(op_ns(taps, bf16(2 * channels)), op_ns(2 * taps, bf16(3 * channels)))

    mapped, outer = 2 * key * value * value * heads, 2 * key * value * heads
    states = 2 * (SEQ // 64 + 1) * heads * key * value * 4  # both sequences
    inputs = 2 * key + inner + heads
    core = LayerTime(
        op_ns((mapped + 2 * outer) * T, bf16(inputs + inner) + states, SEQ),
        op_ns((3 * mapped + 5 * outer) * T, bf16(2 * inputs + inner) + states, 2 * SEQ),
    )
    assert core.forward_ns == SEQ * STEP_NS + LAUNCH_NS
    projections = linears((H, 2 * key), (H, inner), (H, heads), (H, inner), (inner, H))
    gated = elementwise(bf16(3 * inner) + fp32(1), bf16(5 * inner) + fp32(1))
    return residual_norm() + projections + convolved(2 * key) + convolved(inner) + core + gated


def by_hand_d() -> LayerTime:
    """Gate, up and down of 14336, and swiglu between them."""
    return residual_norm() + linears((H, 14336), (H, 14336), (14336, H)) + elementwise(bf16(3 * 14336), bf16(5 * 14336))


@pytest.mark.requirement("R-5")
@pytest.mark.parametrize(("letter", "by_hand"), [("A", by_hand_a), ("M", by_hand_m), ("E", by_hand_e), ("R", by_hand_r), ("D", by_hand_d)])
def test_a_layer_by_hand(times_of, letter, by_hand):
    assert times_of(letter, device=HALF_SPEED).layers == (by_hand(),)


def test_the_ends_by_hand(times_of):
    """Embedding: rows read and written, their gradients added into fp32. Head: final norm, logits, and a loss that reads them."""
    times, vocab = times_of("D", device=HALF_SPEED), 32768
    assert times.first == elementwise(bf16(2 * H), bf16(H) + 2 * fp32(H))
    assert times.last == residual_norm() + linears((H, vocab)) + elementwise(bf16(vocab) + fp32(1), bf16(2 * vocab) + fp32(1))
    assert times.boundary_ns == 0


def test_side_embeddings_and_mtp_stand_at_their_ends(times_of):
    """A depth repeats the embedding's lookup and the head, and adds an A block, an MLP, two norms and a projection of twice hidden."""
    plain = times_of("A", device=HALF_SPEED)
    features = {"structure": {"num_categories": 9, "bottleneck": 64}, "mtp": {"depth": 2, "ffn_hidden_size": 8192}}
    full = times_of("A", device=HALF_SPEED, model={"features": features})
    assert full.layers == plain.layers
    assert full.first == plain.first + linears((64, H)) + elementwise(bf16(2 * 64), bf16(64) + 2 * fp32(64))
    norms = elementwise(2 * (bf16(2 * H) + fp32(1)), 2 * (bf16(3 * H) + fp32(1)))
    mlp = residual_norm() + linears((H, 8192), (8192, H)) + elementwise(bf16(2 * 8192), bf16(3 * 8192))
    depth = plain.first + norms + linears((2 * H, H)) + by_hand_a() + mlp + plain.last
    assert full.last == plain.last + depth + depth


def test_what_has_no_weights_leaves_nothing_to_w(make_spec):
    """Attention cores, scans, the recurrence, routed experts and norms: only linears split their backward."""
    spec = make_spec(FAMILIES)
    for block in build_inventory(spec).layers:
        for op in layer_works(rank_workload(spec, spec.precision.of(block.family)), spec.model, block):
            assert op.is_linear == (op.work.moved_weight > 0 and op.name not in {"route", "experts"})
    times = model_times(spec, build_inventory(spec)).layers
    assert all(time.weight_ns < time.input_ns for time in times)


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_times_count_the_flops_that_costs_count(name):
    """F + I + W of the ops of an unsharded rank are the layer's FLOPs per token, and so are the ends'."""
    document = yaml.safe_load((PLANS / f"{name}.yaml").read_text())
    document["mesh"] = {}
    document["schedule"] = {"num_microbatches": 1}
    spec = Spec.model_validate(document)
    inventory = build_inventory(spec)
    costs = model_costs(spec, inventory)
    for block, cost in zip(inventory.layers, costs.layers, strict=True):
        ops = layer_works(rank_workload(spec, spec.precision.of(block.family)), spec.model, block)
        assert sum(map(executed_flops, ops)) == cost.total_flops
    ends = end_works(rank_workload(spec, spec.precision.params), spec)
    assert sum(map(executed_flops, ends.side_embeddings)) == costs.side_embeddings.total_flops
    assert sum(map(executed_flops, ends.head)) == costs.head.total_flops
    assert sum(map(executed_flops, ends.mtp)) * ends.mtp_depth == sum(depth.total_flops for depth in costs.mtp)
