"""Saved tensors of transformer blocks and of the loss under torchtitan, tensor by tensor, by hand."""

import pytest

from megaplan.blocks.ops import OUTPUT
from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.hosts.torchtitan.blocks import in_blocks, transformer_blocks
from megaplan.hosts.torchtitan.ledger import block_bytes, block_ledger, policy_of
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.load import load_spec_text
from megaplan.spec.local import local_dims

SPEC = """
format: megaplan.spec/1
name: small
model:
  pattern: AD
  num_layers: 8
  hidden_size: 256
  vocab_size: 4096
  tie_embeddings: false
  attention: {kind: gqa, num_heads: 8, num_kv_heads: 4, head_dim: 32}
  mlp: {ffn_hidden_size: 640, activation: swiglu}
mesh: {dp_shard: 4}
sharding: {reshard_after_forward: true}
batch: {micro_batch_size: 2, seq_length: 128}
optimizer: {matrix: adamw}
host: {name: torchtitan}
device: {name: h200}
"""
STREAM = 2 * 128 * 256 * 2  # bytes of the residual stream
GROUPS, FFN = STREAM // 2, 2 * 128 * 640 * 2
LSE, RSTD = 2 * 8 * 128 * 4, 2 * 128 * 4


def spec_of(*overrides):
    return load_spec_text(SPEC, "small.yaml", overrides).spec


def saved(*overrides):
    spec = spec_of(*overrides)
    blocks = transformer_blocks(build_inventory(spec))
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, "layers.0", blocks.layers[0]).saved}


def budget(*overrides, spans=((0, 8),)):
    spec = spec_of(*overrides)
    inventory = build_inventory(spec)
    return build_budget(spec, inventory, build_layout(spec, inventory, spans))


def test_without_checkpoints_autograd_saves_what_operations_read():
    found = saved()
    assert found == {
        **dict.fromkeys(("normed", "q", "heads", "h", "mlp.normed"), STREAM),
        **dict.fromkeys(("k", "v"), GROUPS),
        **dict.fromkeys(("gate", "silu", "up", "product"), FFN),
        "lse": LSE,
        "rstd": RSTD,
        "mlp.rstd": RSTD,
    }


def test_compiled_blocks_keep_no_result_of_cheap_operations():
    found = saved("host.compile_model=true")
    assert not {"normed", "mlp.normed", "silu", "product", "q", "k"} & found.keys()
    assert {"q_proj", "k_proj", "v", "heads", "gate", "up"} <= found.keys()


def test_selective_checkpoints_save_attention_and_every_other_product():
    assert saved("recompute.default=selective") == {
        **dict.fromkeys(("q_proj", "heads", "mlp.o"), STREAM),
        "v": GROUPS,
        "gate": FFN,
        "lse": LSE,
    }


def test_compiled_selective_checkpoints_drop_what_backward_never_reads():
    eager, compiled = saved("recompute.default=selective"), saved("recompute.default=selective", "host.compile_model=true")
    assert eager.keys() - compiled.keys() == {"mlp.o"}


HALVES = "recompute.default=selective", "host.checkpoints=halves"


def test_checkpoints_of_halves_keep_what_is_between_them_and_every_other_product_of_the_second():
    between = {**dict.fromkeys(("normed", "h", "mlp.normed"), STREAM), "rstd": RSTD, "mlp.rstd": RSTD}
    assert saved(*HALVES) == {**between, "gate": FFN, "mlp.o": STREAM}


def test_a_compiled_dense_block_is_one_checkpoint():
    assert saved(*HALVES, "host.compile_model=true") == saved(HALVES[0], "host.compile_model=true")


def test_halves_run_again_one_after_the_other():
    spec = spec_of(*HALVES)
    blocks = transformer_blocks(build_inventory(spec))
    points = block_bytes(spec, local_dims(spec), "layers.0", blocks.layers[0]).part.replay.backward
    first = next(index for index, point in enumerate(points) if point.op == "recompute attention.q_proj")
    of_mlp = {"mlp.normed", "silu", "up", "product", "gate"}
    assert any(of_mlp <= set(point.storages) for point in points[:first])
    assert not any(set(point.storages) & {"q", "k", "v", "heads"} for point in points[:first])
    assert not any(set(point.storages) & of_mlp for point in points[first:])


def test_a_reduce_scatter_is_saved_beside_the_products_of_tensor_parallelism():
    found = saved("recompute.default=selective", "mesh.tp=2", "mesh.vocab_parallel=true")
    assert found["o"] == found["mlp.o"] == STREAM // 2
    assert found["mlp.o_partial"] == STREAM  # the seventh product, all tokens


def test_a_full_checkpoint_keeps_the_input_alone():
    spec = spec_of("recompute.default=full")
    blocks = transformer_blocks(build_inventory(spec))
    found = block_bytes(spec, local_dims(spec), "layers.1", blocks.layers[1])
    assert (found.saved_bytes, found.keeps_input) == (0, True)


def test_every_second_block_is_checkpointed():
    spec = spec_of("recompute.default=full", "host.checkpoint_every=2")
    assert [policy_of(spec, index) for index in range(4)] == ["none", "full", "none", "full"]


def test_repeated_keys_are_as_wide_as_queries():
    found = saved("host.repeat_kv=true")
    assert found["k_repeated"] == found["v_repeated"] == STREAM
    assert "k" not in found


def test_a_float8_product_keeps_its_input_in_sixteen_bits():
    assert saved("precision.recipe={name: fp8_current, param_gather: true}") == saved()


def loss(*overrides):
    spec = spec_of(*overrides)
    inventory = transformer_blocks(build_inventory(spec))
    found = block_bytes(spec, local_dims(spec), "head", inventory.block("head"))
    return found, 2 * 128 * 4096 // spec.mesh.tp


def test_the_loss_of_each_kind_at_its_highest():
    plain, elements = loss()
    names = plain.backward.tensors
    assert sorted(name for name in names if name not in (OUTPUT, "last_block")) == ["log_probs", "nll_gradient", "wide"]
    assert plain.saved_bytes == 4 * elements
    cut, part = loss("mesh.tp=2", "mesh.vocab_parallel=true")
    wide = [name for name in cut.backward.tensors if cut.part.tensors[name][0] == 4 * part]
    assert len(wide) == 4
    compiled, elements = loss("host.compile_loss=true")
    moment = next(moment for moment in compiled.part.replay.backward if moment.op == "cross_entropy")
    assert [name for name in moment.tensors if compiled.part.tensors[name][0] == 2 * elements] == ["logits", "logits"]


def test_shards_are_over_data_and_context_ranks_and_the_reductions_pool_stays():
    inventory = build_inventory(spec_of())
    parameters = inventory.parameters
    for mesh in ("{dp_shard: 4}", "{dp_shard: 2, cp: 2}"):
        cells = budget(f"mesh={mesh}").worst.cells[Phase.FORWARD_BACKWARD]
        resident = cells[Column.REPLICATED_PARAMS] + cells[Column.TENSOR_PARALLEL_PARAMS]
        assert resident == parameters  # 4 bytes over 4 ranks
        assert cells[Column.GRADIENTS] >= parameters
        moments = cells[Column.MATRIX_OPTIMIZER] + cells[Column.OTHER_OPTIMIZER]
        assert 2 * parameters < moments < 2 * parameters + 4 * 100


STATE = ("precision.master=bf16", "precision.grads=bf16", "precision.moments=bf16")


def test_sums_of_replicas_stay_in_the_reductions_dtype_and_their_casts_are_the_gradients():
    def gradients(*overrides):
        return budget("mesh={dp_shard: 2, dp_replicate: 2}", *overrides).worst.cells[Phase.OPTIMIZER][Column.GRADIENTS]

    shard = build_inventory(spec_of()).parameters // 2
    assert gradients() == 4 * shard
    assert gradients(*STATE) == (2 + 4) * shard
    assert gradients(*STATE, "precision.reduce=bf16") == 2 * shard
    assert gradients("precision.reduce=bf16") == (4 + 2) * shard


def test_a_pipeline_accumulates_whole_gradients_in_the_reductions_dtype():
    def gradients(*overrides):
        found = budget("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=4", *overrides, spans=((0, 4), (4, 8)))
        return found.of_rank(2).cells[Phase.FORWARD_BACKWARD][Column.GRADIENTS]

    inventory = build_inventory(spec_of())
    stage = (
        sum(block.elements for block in inventory.layers[4:]) + inventory.block("head").elements + inventory.block("final_norm").elements
    )
    wide, low = gradients(*STATE), gradients(*STATE, "precision.reduce=bf16")
    largest = inventory.block("head").elements // 2
    assert wide - low == 2 * stage + 4 * largest  # the sums of two dtypes, and one reduced block before its cast
    assert gradients("precision.reduce=bf16") - low == (4 - 2) * stage // 2 + 2 * largest


def test_uneven_shards_differ_between_ranks():
    found = budget("model.vocab_size=4098", "host.reserved_percent=0")
    assert sorted(rank for group in found.ranks for rank in group.ranks) == [0, 1, 2, 3]
    assert len(found.ranks) == 2


def test_gathered_bytes_halve_with_float8_gathers():
    def gathered(*overrides):
        kinds = ("host.compile_loss=true", "sharding.reshard_after_forward=false", *overrides)
        return budget(*kinds).worst.cells[Phase.FORWARD_BACKWARD][Column.COMMUNICATION]

    layers = sum(block.elements for block in build_inventory(spec_of()).layers)
    one = layers // 4
    assert (
        gathered() - gathered("precision.recipe={name: fp8_current, param_gather: true}") == layers + one
    )  # the other gather is of embedding and head


def test_the_last_block_stays_gathered_with_the_root_group():
    separate, root = (budget(f"host.fsdp_ends={ends}", "host.reserved_percent=0").worst for ends in ("separate", "root"))
    inventory = build_inventory(spec_of())
    last = 2 * sum(block.elements for block in inventory.layers[-2:])
    assert "head" in root.peak_places[Phase.FORWARD_BACKWARD]
    assert root.peak_bytes - separate.peak_bytes == last + 2 * inventory.block("embedding").elements


def test_reserved_percent_is_of_all_else():
    with_none, with_some = budget("host.reserved_percent=0").worst, budget("host.reserved_percent=20").worst
    assert with_some.peak_bytes == with_none.peak_bytes * 120 // 100
    assert with_some.allocated_bytes == with_none.peak_bytes


def test_the_last_stage_keeps_outputs_until_the_step_has_ended():
    pipeline = ("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=8", "host.reserved_percent=0")
    spans = ((0, 4), (4, 8))
    logits = 2 * 128 * 4096 * 2
    before = budget(*pipeline, spans=spans).of_rank(2).peak_bytes
    kept = budget(*pipeline, "host.keep_pipeline_outputs=true", spans=spans).of_rank(2)
    assert kept.peak_bytes == before + 7 * logits


def test_a_foreach_update_has_roots_of_exp_avg_sq_dtype():
    fused, foreach = budget().worst.cells[Phase.OPTIMIZER], budget("host.foreach_optimizer=true").worst.cells[Phase.OPTIMIZER]
    moments = fused[Column.MATRIX_OPTIMIZER] + fused[Column.OTHER_OPTIMIZER]
    assert foreach[Column.WORKSPACE] - fused[Column.WORKSPACE] == moments // 2


@pytest.mark.parametrize("kind", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "looped_bfs"])
def test_every_schedule_is_priced(kind):
    pipeline = ("mesh={pp: 2, vpp: 2, dp_shard: 2}", "schedule.num_microbatches=4", f"schedule.kind={kind}", "recompute.default=selective")
    found = budget(*pipeline, spans=((0, 2), (2, 4), (4, 6), (6, 8)))
    assert len(found.stages) == 4
    assert all(rank.peak_bytes > 0 for rank in found.ranks)


def test_slots_of_letters_are_slots_of_blocks():
    spec = spec_of("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=2")
    slots = build_layout(spec, build_inventory(spec), ((0, 4), (4, 8))).slots
    assert [in_blocks(slot).blocks for slot in slots] == [
        ("embedding", "layers.0", "layers.1"),
        ("layers.2", "layers.3", "final_norm", "head"),
    ]


EXPERTS = (
    "model.pattern=AE",
    "model.mlp=null",
    "model.moe={num_experts: 16, top_k: 2, ffn_hidden_size: 96, activation: swiglu, shared_ffn_hidden_size: 192}",
)
TOKENS, ROWS = 2 * 128, 2 * 2 * 128
OUTER, INNER, SHARED = ROWS * 256 * 2, ROWS * 96 * 2, TOKENS * 192 * 2


def test_experts_keep_what_the_router_and_their_products_read():
    found = saved(*EXPERTS)
    attention = set(saved()) - {"gate", "silu", "up", "product"}
    assert attention < set(found)
    assert {name: size for name, size in found.items() if name not in attention} == {
        "router.wide": 2 * STREAM,
        "router.scores": TOKENS * 16 * 4,
        "router.indices": ROWS * 8,
        "rows.order": 2 * ROWS * 8,
        "rows": OUTER,
        **dict.fromkeys(("experts.gate", "experts.silu", "experts.up", "experts.product"), INNER),
        "rows.wide": 2 * OUTER,
        "rows.scores": ROWS * 4,
        **dict.fromkeys(("shared.gate", "shared.silu", "shared.up", "shared.product"), SHARED),
    }


@pytest.mark.parametrize("ep", [(), ("mesh.ep=4",)])
def test_outputs_of_experts_that_are_scaled_outside_the_compiler_stay_in_fp32(ep):
    compiled = (*EXPERTS, *ep, "host.compile_model=true")
    whole, parts = saved(*compiled), saved(*compiled, "host.eager_combine=true")
    output = "rows.returned" if ep else "experts.o"
    assert {name: whole.get(name, 0) - parts.get(name, 0) for name in whole.keys() | parts if whole.get(name) != parts.get(name)} == {
        output: OUTER,
        "rows.wide": -2 * OUTER,
    }
    assert saved(*EXPERTS, *ep, "host.eager_combine=true") == saved(*EXPERTS, *ep)


def test_rows_that_travel_are_sorted_again_and_selective_keeps_both_exchanges():
    whole, selective = saved(*EXPERTS, "mesh.ep=4"), saved(*EXPERTS, "mesh.ep=4", "recompute.default=selective")
    assert set(whole) - set(saved(*EXPERTS)) == {"rows.places"}
    assert {name: size for name, size in selective.items() if name.startswith("rows")} == {
        "rows.received": OUTER,
        "rows.returned": OUTER,
    }
    skewed = saved(*EXPERTS, "mesh.ep=4", "recompute.default=selective", "model.moe.routing_skew=1.5")
    assert (skewed["rows.received"], skewed["rows.returned"]) == (OUTER * 3 // 2, OUTER)


def test_full_checkpoints_of_experts_keep_no_tensor_but_the_stream():
    assert saved(*EXPERTS, "recompute.default=full") == saved("recompute.default=full") == {}


def test_latent_attention_keeps_values_with_the_part_of_keys_that_came_with_them():
    attention = "{kind: mla, num_heads: 8, q_lora_rank: null, kv_lora_rank: 64, qk_nope_head_dim: 32, qk_rope_head_dim: 16, v_head_dim: 32}"
    found = saved(f"model.attention={attention}")
    heads = TOKENS * 8 * 2
    assert (found["q"], found["k"], found["kv_up"], found["heads"]) == (48 * heads, 48 * heads, 64 * heads, 32 * heads)
    assert (found["kv_latent"], found["kv_latent_normed"]) == (TOKENS * 80 * 2, TOKENS * 64 * 2)


def test_experts_are_sharded_over_the_ranks_that_expert_parallelism_leaves():
    local, spread = (budget(*EXPERTS, *more).worst.cells[Phase.INIT] for more in ((), ("mesh.ep=4",)))
    bank = 4 * 3 * 16 * 96 * 256 * 4 // 4  # four layers of three matrices per bank, in fp32, over four ranks
    assert local[Column.EXPERT_PARALLEL_PARAMS] == spread[Column.EXPERT_PARALLEL_PARAMS] == bank
