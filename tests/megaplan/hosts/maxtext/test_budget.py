"""Bytes of a MaxText program, counted by hand from the sizes of a small model."""

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.hosts.maxtext.software import step_of
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec_text

H, FFN, VOCAB, HEADS, KV, HEAD, TOKENS, LAYERS = 256, 512, 1024, 8, 4, 32, 2 * 128, 4
SPEC = f"""
format: megaplan.spec/1
name: small
model:
  {{pattern: AD, num_layers: {2 * LAYERS}, hidden_size: {H}, vocab_size: {VOCAB}, mlp: {{ffn_hidden_size: {FFN}}},
   attention: {{kind: gqa, num_heads: {HEADS}, num_kv_heads: {KV}, head_dim: {HEAD}}}}}
mesh: {{dp_shard: 4}}
batch: {{micro_batch_size: 2, seq_length: 128}}
optimizer: {{matrix: adamw}}
precision: {{reduce: bf16}}
recompute: {{default: selective}}
device: {{name: tpu-v6e, domain: 4}}
host: {{name: maxtext, remat_policy: custom, remat_tensors: {{decoder_layer_input: device}}}}
"""
NORMS = (2 * LAYERS + 1) * H
MATRICES = 2 * VOCAB * H + LAYERS * (2 * HEADS * HEAD * H + 2 * KV * HEAD * H + 3 * FFN * H)


def rank(*overrides: str) -> RankBudget:
    spec = load_spec_text(SPEC, "spec.yaml", overrides).spec
    inventory = build_inventory(spec)
    found = build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))
    assert len(found.ranks) == 1, "one program for all devices"
    assert found.ranks[0].ranks == tuple(range(spec.mesh.world_size))
    return found.ranks[0]


def state(found: RankBudget, *columns: Column) -> int:
    return sum(found.cells[Phase.INIT][column] for column in columns)


PARAMETERS = Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS
OPTIMIZER = Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER


def test_state_is_sharded_but_for_norms() -> None:
    found = rank()
    assert state(found, *PARAMETERS) == 4 * (MATRICES // 4 + NORMS)
    assert state(found, *OPTIMIZER) == 8 * (MATRICES // 4 + NORMS)
    assert found.cells[Phase.OPTIMIZER][Column.GRADIENTS] == 4 * (MATRICES // 4 + NORMS)


def test_the_second_moment_has_the_dtype_of_the_parameters() -> None:
    elements = MATRICES // 4 + NORMS
    assert state(rank("precision.moments=bf16"), *OPTIMIZER) == (2 + 4) * elements
    assert state(rank("precision.moments=bf16", "precision.master=bf16"), *OPTIMIZER) == (2 + 2) * elements


def test_offloaded_moments_are_in_host_memory_until_the_update() -> None:
    found = rank("host.optimizer_offload=1.0")
    assert state(found, *OPTIMIZER) == 0
    assert found.host.pinned == found.cells[Phase.OPTIMIZER][Column.MATRIX_OPTIMIZER] + found.cells[Phase.OPTIMIZER][Column.OTHER_OPTIMIZER]


@pytest.mark.parametrize(
    ("tensors", "of_a_token"),
    [
        ("{decoder_layer_input: device}", H),
        ("{decoder_layer_input: device, query_proj: device}", H + HEADS * HEAD),
        ("{decoder_layer_input: device, key_proj: device, value_proj: device}", H + 2 * KV * HEAD),
        ("{decoder_layer_input: device, mlpwi_0: device, mlpwi_1: device, mlpwo: device}", H + 2 * FFN + H),
        ("{decoder_layer_input: offload, out_proj: device}", H),
    ],
)
def test_a_custom_policy_keeps_what_it_names(tensors: str, of_a_token: int) -> None:
    """At the loss are the kept tensors of all layers, and logits with their gradient."""
    found = rank(f"host.remat_tensors={tensors}", "model.vocab_size=200000")
    assert found.peak_places[Phase.FORWARD_BACKWARD] == "the loss of all tokens"
    logits = 2 * 2 * TOKENS * 200_000
    assert found.cells[Phase.FORWARD_BACKWARD][Column.ACTIVATIONS] == logits + 2 * TOKENS * LAYERS * of_a_token
    assert found.host.pinned == (2 * TOKENS * LAYERS * H if "offload" in tensors else 0)


def test_tiles_of_the_vocabulary_divide_the_logits() -> None:
    whole, tiled = (rank("model.vocab_size=200000", f"host.num_vocab_tiling={tiles}") for tiles in (1, 2))
    before, after = (found.cells[Phase.FORWARD_BACKWARD][Column.ACTIVATIONS] for found in (whole, tiled))
    assert before - after == 2 * TOKENS * 200_000


def test_a_scanned_block_of_two_layers_keeps_one_input_and_runs_both_again() -> None:
    """Under policy full; where the input of every layer is saved, each runs again from its own."""
    full = ("recompute.default=full", "host={name: maxtext}"), ("recompute.default=full", "host={name: maxtext, layers_per_block: 2}")
    one, two = (rank(*given) for given in full)
    kept = 2 * TOKENS * H
    saved, again = 4 * kept - 2 * kept, two.peak_bytes - one.peak_bytes
    assert again > 0
    assert again + saved > kept
    assert rank("host.layers_per_block=2").peak_bytes == rank().peak_bytes


def test_accumulation_has_sums_and_gradients() -> None:
    once, twice = (rank(f"schedule.num_microbatches={count}") for count in (1, 2))
    gradients = once.cells[Phase.OPTIMIZER][Column.GRADIENTS]
    both = [found.cells[Phase.FORWARD_BACKWARD][Column.GRADIENTS] for found in (once, twice)]
    assert both[1] - both[0] == gradients


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (("precision.reduce=fp32",), "precision.reduce"),
        (("optimizer.matrix=muon",), "optimizer.matrix"),
        (("host.int8=true", "device={name: tpu-v7}"), "host.int8"),
        (("recompute.default=full",), "host.remat_policy"),
        (("sharding.reshard_after_forward=false",), "sharding.reshard_after_forward"),
        (("data.packing=documents",), "data.packing"),
        (("mesh.dp_shard=2", "mesh.tp=8", "mesh.vocab_parallel=true"), "mesh.tp"),
    ],
)
def test_what_maxtext_lacks_is_refused_by_name(changes: tuple[str, ...], key: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        load_spec_text(SPEC, "spec.yaml", changes)
    assert any(each.code == "MP902" and each.location is not None and each.location.key == key for each in caught.value.diagnostics)


@pytest.mark.parametrize("host", ["megarun", "megatron", "torchtitan"])
@pytest.mark.parametrize("device", ["tpu-v5p", "trillium", "ironwood"])
def test_a_host_of_gpus_refuses_a_tpu_by_name(host: str, device: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        load_spec_text(SPEC, "spec.yaml", [f"host={{name: {host}}}", f"device={{name: {device}}}", "recompute.default=full"])
    assert any(each.code == "MP902" and f"host.name = {host}: it runs on GPUs" in each.detail for each in caught.value.diagnostics)


def test_products_that_are_saved_do_not_run_again() -> None:
    spec = load_spec_text(SPEC, "spec.yaml", ["host.remat_tensors={query_proj: device, mlpwi_0: offload}"]).spec
    assert step_of(spec)[1].kept == {("A", "q_proj"), ("A", "q_up"), ("D", "gate_proj"), ("D", "down_proj"), ("experts", "experts")}
    assert step_of(load_spec_text(SPEC, "spec.yaml", ["recompute.default=none", "host={name: maxtext}"]).spec)[1].full == 0
