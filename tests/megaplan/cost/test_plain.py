"""Operations that megarun runs as plain torch have the time of their intermediates, launches and fp32 products."""

from math import isqrt

import pytest

import megaplan
from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.cost.data import data_times
from megaplan.cost.elements import local_elements
from megaplan.cost.outside_layers import newton_schulz_flops
from megaplan.cost.rates import rates_of
from megaplan.cost.replay import PLAIN, ReplayTimer
from megaplan.cost.times import model_times
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

T, LAUNCH_NS = 8192, 3000


def op_of(spec: Spec, name: str):
    """An operation of the first layer, and its passes in plain torch."""
    block = build_inventory(spec).layers[0]
    load = rank_workload(spec, spec.precision.of(block.family))
    op = next(op for op in layer_works(load, spec.model, block) if op.name == name)
    return op, op.facts.plain(op.work, T)


def test_an_attention_core_by_hand(make_spec):
    """32 heads of 128 that share 8 of keys, over two sequences of 4,096, 64 blocks of queries each."""
    op, plain = op_of(make_spec("A"), "attention")
    found = plain[0]
    keys = 2 * 64 * 64 * 65 // 2  # of all blocks
    pairs = 64 * keys
    elementwise = 8 + 4 + 8 + 8 + 4  # mask, largest, less it, exp, sum
    of_queries = 6 * 128 + 8 * 128 + 8 * 128 + (8 + 4 + 2) * 128 + 44  # in fp32, scaled, copied; out, its sums
    of_keys = T * 8 * 256 * 6 + keys * 8 * 256 * 8  # in fp32, and copied in each block
    assert found.num_bytes == elementwise * 32 * pairs + pairs // 2 * 2 + of_queries * 32 * T + of_keys
    assert found.launches == 64 * 18 + 4
    assert found.flops == 2 * 32 * pairs * 256
    assert op.work.forward * T < found.flops < 1.02 * op.work.forward * T  # blocks on the diagonal
    assert found.is_fp32


def test_wider_keys_are_added_in_every_block(make_spec):
    """Backward reads and writes the gradients of a block's keys and values: bytes per score grow with widths."""

    def by_score(width: int) -> float:
        attention = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 16, "head_dim": width}
        _, plain = op_of(make_spec("A", model={"attention": attention}), "attention")
        return plain[1].num_bytes / (16 * T * (4096 + 64) // 2)

    assert by_score(256) - by_score(128) == pytest.approx(128 * (2 * 12 + 3 * 8) / 64, rel=0.08)


def test_a_layer_of_plain_torch_takes_its_parts(make_spec):
    """The core's time is the norm of launches, and of bytes at 85 % of 3.35 TB/s with FLOPs at 65 % of 67 TFLOP/s."""
    device = {"name": "h100-sxm"}
    specs = make_spec("A", device=device), make_spec("A", device=device, host={"kernels": "triton"})
    plain, fused = (model_times(spec, build_inventory(spec)).layers[0] for spec in specs)
    _, passes = op_of(make_spec("A"), "attention")
    core = passes[0]
    work = -(-core.num_bytes * 10**11 // (3_350 * 10**9 * 85)) - (-core.flops * 10**11 // (67 * 10**12 * 65))
    least = isqrt((core.launches * LAUNCH_NS) ** 2 + work**2)
    assert least < plain.forward_ns < 1.2 * least
    assert plain.forward_ns > 5 * fused.forward_ns
    assert plain.weight_ns == fused.weight_ns


@pytest.mark.parametrize("letter", "AMERD")
def test_triton_is_faster_in_every_family(make_spec, letter):
    plain, fused = (
        model_times(spec, build_inventory(spec)).layers[0] for spec in (make_spec(letter), make_spec(letter, host={"kernels": "triton"}))
    )
    assert fused.forward_ns < plain.forward_ns
    assert fused.input_ns < plain.input_ns


GQA = {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    "model",
    [
        {"attention": GQA | {"head_dim": 512}},
        {"attention": GQA | {"head_dim": 256, "score_cap": 50.0}, "features": {"relation_bias": {"num_relations": 8}}},
    ],
    ids=["wide heads", "cap and relation bias of wide heads"],
)
def test_attention_that_no_kernel_takes_is_plain_torch_under_triton_too(make_spec, model):
    triton, reference = make_spec("A", model=model, host={"kernels": "triton"}), make_spec("A", model=model)
    op, passes = op_of(triton, "attention")
    assert op.facts.kernels(op.work, T) is None
    assert passes == op_of(reference, "attention")[1]
    own, other = (model_times(spec, build_inventory(spec)).layers[0] for spec in (triton, reference))
    assert own.forward_ns > 0.2 * other.forward_ns


@pytest.mark.parametrize(
    "model",
    [
        {"attention": GQA},
        {"attention": GQA | {"score_cap": 50.0}},
        {"attention": GQA, "features": {"relation_bias": {"num_relations": 8}}},
    ],
    ids=["plain", "cap", "relation bias"],
)
def test_attention_that_kernels_take_is_not_plain_torch(make_spec, model):
    op, _ = op_of(make_spec("A", model=model, host={"kernels": "triton"}), "attention")
    assert op.facts.kernels(op.work, T) is not None


def test_gated_and_other_activations_move_their_own_operands(make_spec):
    _, gated = op_of(make_spec("D"), "activation")
    assert gated[0].num_bytes == 830 * 3 * 14336 * 2 // 100 * T
    _, ungated = op_of(make_spec("D", model={"mlp": {"ffn_hidden_size": 14336, "activation": "relu2"}}), "activation")
    assert ungated[0].num_bytes == 700 * 2 * 14336 * 2 // 100 * T


def test_megatron_runs_its_own_kernels():
    """`host.kernels` is megarun's alone."""
    own = megaplan.load("plans/mixtral-8x7b.yaml", "host.kernels=reference").spec
    other = megaplan.load("plans/mixtral-8x7b.yaml", "host={name: megatron}").spec
    inventory = build_inventory(own)
    assert model_times(other, inventory).layers[0].forward_ns < model_times(own, inventory).layers[0].forward_ns


def test_every_op_of_a_block_that_is_no_product_has_facts_of_plain_torch(make_spec):
    for letter in "AMERD":
        spec = make_spec(letter)
        for block in build_inventory(spec).layers:
            load = rank_workload(spec, spec.precision.of(block.family))
            for op in layer_works(load, spec.model, block):
                assert op.is_linear or op.facts.plain(op.work, T) is not None, op.name


def test_a_step_says_what_plain_torch_takes_more():
    """The terms add up, and without that term they are those of `triton` where every op has a kernel."""
    own, triton = (ReplayTimer(job.inventory, job.spec).terms(job.spec, job.spans) for job in map(_llama, ("reference", "triton")))
    job = _llama("reference")
    assert sum(own.values()) == ReplayTimer(job.inventory, job.spec).step_ns(job.spec, job.spans)
    assert own[PLAIN] > own["layers"]
    assert PLAIN not in triton
    fused = own["layers"] + own["recompute"]
    assert 0.9 < fused / (triton["layers"] + triton["recompute"]) < 1.1


def _llama(kernels: str) -> megaplan.LoadedJob:
    return megaplan.load("plans/llama-3.1-8b.yaml", f"host.kernels={kernels}")


def test_muon_deals_whole_matrices_out_to_data_ranks():
    """A step is 3 n² m + n³ FLOPs, two and three in segments 6 n² m + 14 n³, at 65 % of 989 TFLOP/s; of four ranks each has a fourth."""
    assert newton_schulz_flops(4, 12, 5) == 6 * 16 * 12 + 14 * 64
    assert newton_schulz_flops(6, 4, 1) == 3 * 16 * 6 + 64
    products, exchanges = [], []
    for ranks in (1, 4):
        job = megaplan.load("plans/tiny-hybrid.yaml", "device.name=h100-sxm", "mesh={}", f"mesh.dp_shard={ranks}")
        local = local_elements(job.inventory, 1, 1, 1)
        found = data_times(job.spec, rates_of(job.spec), local).optimizer_ns
        adamw = job.spec.model_copy(update={"optimizer": job.spec.optimizer.model_copy(update={"matrix": "adamw"})})
        flops = sum(-(-each.num_tensors * each.stack // ranks) * newton_schulz_flops(each.rows, each.columns, 5) for each in local.matrices)
        seconds = flops / (67e12 * 0.65 if job.spec.precision.params == "fp32" else 989e12 * 0.65)
        products.append(flops)
        exchanges.append(found - data_times(adamw, rates_of(adamw), local).optimizer_ns - seconds * 1e9)
    assert exchanges[0] == pytest.approx(0, abs=1)
    assert exchanges[1] > 0
    assert products[1] < products[0] / 3
