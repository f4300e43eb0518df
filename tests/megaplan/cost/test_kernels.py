"""Operations of several kernels have the time of their intermediates, repeated products and launches."""

import pytest

from megakernels.facts import Pass
from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.cost.times import model_times
from megaplan.inventory.build import build_inventory
from megaplan.measured.constants import measured
from megaplan.spec.models import Spec

T = 8192
TRITON = {"kernels": "triton"}
MAMBA3 = {"mamba": {"kind": "mamba3", "expand": 2, "head_dim": 64, "state_dim": 128, "num_groups": 8, "mimo_rank": 4, "num_angles": 32}}


def passes_of(spec: Spec, name: str) -> tuple[Pass, Pass] | None:
    block = build_inventory(spec).layers[0]
    load = rank_workload(spec, spec.precision.of(block.family))
    op = next(op for op in layer_works(load, spec.model, block) if op.name == name)
    return None if op.facts is None else op.facts.kernels(op.work, load.num_tokens)


def test_a_mimo_scan_by_hand(make_spec):
    """128 heads of 64 over a state of 128, rank 4: tiles of 16 positions, whose states are written by one kernel and read by the next."""
    found = passes_of(make_spec("M", model=MAMBA3, host=TRITON), "scan")
    assert found is not None
    tiles = T // 16 * 128
    states = 2 * tiles * 64 * 128
    x, shared = 2 * T * 128 * 64, 2 * T * 8 * 4 * 128
    kept, tables = 2 * (T // 256) * 128 * 64 * 128, T * 128 * (4 * 4 + 2 * 32 * 2)
    assert found[0].num_bytes == 4 * x + 3 * shared + 2 * states + kept + 5 * tables
    product = 2 * 64 * 64 * 128
    assert found[0].flops == tiles * (product + product // 2 + 2 * product)
    assert found[1].flops == tiles * (5 * product + 3 * product // 2 + 6 * product)
    stored = 2 * states + 4 * tiles * 64 * 128 + 2 * tiles * 64 * 64  # of all 16 segments a sequence: 1 GiB at once
    parts = -(-16 // ((1 << 30) * 16 // stored))
    assert (found[0].launches, found[1].launches) == (3 + 2 * parts, 16 + 7 * parts)


def test_backward_of_attention_makes_scores_twice(make_spec):
    """Seven products of the size of forward's two: four of keys' width and three of values'."""
    found = passes_of(make_spec("A", host=TRITON), "attention")
    assert found is not None
    assert found[1].flops == found[0].flops * 7 // 2
    assert (found[0].launches, found[1].launches) == (1, 2)


@pytest.mark.parametrize("window", [None, 300, 50])
def test_products_with_keys_that_are_not_chosen_are_those_of_visible_pairs(make_spec, window):
    """Kernels make the scores of all keys in a query's window; of these it attends to the 100 that it chooses."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    indexer = {"num_heads": 8, "head_dim": 64, "top_k": 100, "layers": [0], "shared_layers": [1]}
    attention = {"kind": "mla", "num_heads": 16, **sizes, "window_size": window, "indexer": indexer}
    spec = make_spec("AA", model={"attention": attention}, host=TRITON)
    load, block = rank_workload(spec, spec.precision.params), build_inventory(spec).layers[1]
    passes = {op.name: op.facts.kernels(op.work, load.num_tokens) for op in layer_works(load, spec.model, block) if op.facts is not None}
    widest = window or load.seq_length
    unchosen = 2 * sum(min(at, widest) - min(at, widest, 100) for at in range(1, load.seq_length + 1))  # of two sequences
    assert passes["masked"][0].flops == 2 * unchosen * 16 * (96 + 64)
    assert passes["masked"][1].flops == 2 * unchosen * 16 * (4 * 96 + 3 * 64)
    core = passes["attention"][0].flops + passes["masked"][0].flops
    visible = 2 * sum(min(at, widest) for at in range(1, load.seq_length + 1))
    assert core == pytest.approx(2 * visible * 16 * (96 + 64), rel=1e-6)


@pytest.mark.parametrize("sizes", [{"mimo_rank": 128, "chunk_size": 1}, {"head_dim": 128}, {"state_dim": 256}])
def test_a_scan_beyond_the_kernels_sizes_is_the_references(make_spec, sizes):
    model = {"mamba": MAMBA3["mamba"] | sizes}
    assert passes_of(make_spec("M", model=model, host=TRITON), "scan") is None


def test_an_activation_is_one_ideal_kernel(make_spec):
    spec = make_spec("D", host=TRITON)
    forward, backward = passes_of(spec, "activation")
    assert (forward.num_bytes, backward.num_bytes) == (3 * 14336 * 2 * T, 5 * 14336 * 2 * T)
    assert (forward.launches, backward.launches) == (1, 1)


@pytest.mark.parametrize(("device", "gigabytes", "share"), [("h100-sxm", 3_350, 8_500), ("h200", 4_800, None)])
def test_a_layer_takes_what_its_kernels_take(make_spec, device, gigabytes, share):
    """Backward of the MIMO scan is bound by its bytes: at 85 % of the memory's rate, or at the share that was measured."""
    spec = make_spec("M", model=MAMBA3, host=TRITON, device={"name": device})
    found, constants = passes_of(spec, "scan"), measured(device)
    assert found is not None
    assert (constants is None) == (share is not None)
    reached = share if constants is None else constants.shares["mamba3"]
    least = found[1].num_bytes * 10**13 // (gigabytes * 10**9 * reached)
    time = model_times(spec, build_inventory(spec)).layers[0]
    assert least < time.input_ns < 2 * least
