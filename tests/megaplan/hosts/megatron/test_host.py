"""`host: {name: megatron}`: the same cells as megarun's, for another framework's tensors, and its refusals."""

from collections.abc import Sequence

import pytest
from megatron_hybrid import DENSE_GPT, WHOLE, spec_of

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.hosts.megatron.chunks import backward_excess, chunk, forward_excess
from megaplan.hosts.megatron.peak import in_flight_counts, memory
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage, stages_of
from megaplan.hosts.megatron.storage import parameters
from megaplan.hosts.megatron.workspaces import SMALL_KIB, setting_bytes
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.partition.megatron_bytes import megatron_limits
from megaplan.plan.causes import diff_with_causes
from megaplan.plan.diff import column_totals
from megaplan.plan.diff_document import host_lines
from megaplan.plan.make import make_plan
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses


def planned(spec: Spec) -> tuple[Budget, tuple[MegatronStage, ...]]:
    inventory = build_inventory(spec)
    size = spec.model.num_layers // (spec.mesh.pp * spec.mesh.vpp)
    layout = build_layout(spec, inventory, tuple((start, start + size) for start in range(0, spec.model.num_layers, size)))
    return build_budget(spec, inventory, layout), stages_of(MegatronRun(spec, inventory), layout)


def worst(*overrides: str) -> dict[Column, int]:
    return planned(spec_of(*overrides))[0].worst.columns


@pytest.mark.parametrize(
    "overrides", [(), ("mesh.tp=2", "mesh.vocab_parallel=true"), ("model.attention.qk_norm=true",), ("optimizer.matrix=muon",)]
)
def test_a_rank_has_the_inventorys_parameters(overrides: Sequence[str]) -> None:
    spec = spec_of(*overrides)
    inventory, (budget, stages) = build_inventory(spec), planned(spec)
    mesh = spec.mesh
    expected = [0, 0]
    for name, tensor in inventory.tensors():
        first = name.startswith("embedding.") or (name.startswith("layers.") and int(name.split(".")[1]) < 8)
        sharded = mesh.tp if name.startswith(("embedding.", "head.")) else 1  # the vocabulary is sharded
        expected[not first] += tensor.local_elements(mesh.tp, mesh.ep, mesh.etp) // (sharded if tensor.tp_dim is None else 1)
    assert [sum(one.elements for one in parameters(stage).tensors) for stage in stages] == expected
    assert [budget.of_rank(0).parameters, budget.of_rank(mesh.world_size - 1).parameters] == expected


def test_every_rank_is_budgeted_once_and_columns_sum_to_the_peak() -> None:
    budget, _ = planned(spec_of("optimizer.matrix=muon"))
    assert sorted(rank for each in budget.ranks for rank in each.ranks) == list(range(8))
    for each in budget.ranks:
        assert sum(each.columns.values()) == each.peak_bytes
        assert set(each.cells) == set(Phase)
    assert len(budget.ranks) > 2  # whole matrices do not divide evenly


def test_state_is_sharded_by_the_distributed_optimizer_alone() -> None:
    sharded, whole = worst(), worst("host.distributed_optimizer=false")
    dense = sum(sharded[column] for column in (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS))
    assert sum(whole[column] for column in (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)) == 6 * (
        dense + whole[Column.EXPERT_PARALLEL_PARAMS]
    )
    assert whole[Column.GRADIENTS] == sharded[Column.GRADIENTS]


def test_the_precision_aware_optimizer_keeps_half_a_master() -> None:
    both = (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)
    plain = sum(worst()[column] for column in both)
    aware = sum(worst("host.precision_aware_optimizer=true", "precision.moments=bf16")[column] for column in both)
    assert aware * 2 == plain


def test_the_optimizers_step_copies_bf16_gradients_and_the_next_step_drops_them() -> None:
    plain = worst()
    (budget, _) = planned(spec_of("precision.grads=bf16", "precision.reduce=bf16"))
    gradients = {phase: cells[Column.GRADIENTS] for phase, cells in budget.worst.cells.items()}
    dense = plain[Column.GRADIENTS] // 4
    experts = plain[Column.EXPERT_PARALLEL_PARAMS] // 2
    assert gradients[Phase.FORWARD_BACKWARD] == gradients[Phase.FIRST_FORWARD_BACKWARD] == 2 * dense
    assert gradients[Phase.OPTIMIZER] == gradients[Phase.FIRST_OPTIMIZER] == 2 * dense + 4 * (dense - experts) // 4 + 4 * experts // 2


def test_microbatches_in_flight_fall_towards_the_last_rank() -> None:
    _, stages = planned(spec_of("mesh.pp=4", "mesh.dp_shard=2"))
    assert [in_flight_counts(stage) for stage in stages] == [(4,), (3,), (2,), (1,)]


def test_interleaving_holds_a_group_of_each_chunk_and_two_for_each_hop() -> None:
    _, stages = planned(spec_of("mesh.vpp=2", "schedule.kind=interleaved_1f1b"))
    assert [sum(in_flight_counts(stage)) for stage in stages] == [2 + 2 + 1, 2 + 1]
    _, grouped = planned(spec_of("mesh.vpp=2", "schedule.kind=interleaved_1f1b", "host.microbatch_group_size=4"))
    assert [sum(in_flight_counts(stage)) for stage in grouped] == [4 + 2 + 1, 4 + 1]


def test_full_recompute_keeps_the_input_of_a_group() -> None:
    none, full = worst(), worst("host.recompute_num_layers=1")
    assert full[Column.ACTIVATIONS] < none[Column.ACTIVATIONS] // 2
    _, (stage, _) = planned(spec_of("host.recompute_num_layers=2"))
    run = stage.run
    kept = {pair: chunk(run, pair, recomputes=False) for pair in ("ME", "M*", "M-")}
    peaks = [size + max(forward_excess(run, pair), backward_excess(run, pair)) for pair, size in kept.items()]
    assert kept["ME"] == run.operator("M").kept + run.operator("E").kept
    assert memory(stage).phases["layer backward"] == max(peaks) > kept["ME"]


def test_recompute_of_attention_drops_the_log_sum_exp() -> None:
    _, (stage, _) = planned(spec_of("recompute.blocks={A: selective}"))
    assert "lse" not in stage.run.operator("*").tensors


def test_normed_queries_and_keys_are_kept() -> None:
    _, (stage, _) = planned(spec_of("model.attention.qk_norm=true"))
    assert stage.run.operator("*").tensors["qk.normed"] == 2 * 1024 * (8 + 4) * 32


def test_the_logits_gradient_of_a_newer_transformer_engine_is_wider() -> None:
    old, new = (worst(f"host.cross_entropy={kind}", "model.vocab_size=65536") for kind in ("te", "te_fp32"))
    assert new[Column.ACTIVATIONS] > old[Column.ACTIVATIONS]


def test_capacity_bounds_skewed_rows() -> None:
    free = worst("model.moe.routing_skew=3.0")
    bound = worst("model.moe.routing_skew=3.0", "model.moe.capacity_factor=1.5")
    assert worst()[Column.ROUTING] < bound[Column.ROUTING] < free[Column.ROUTING]


def test_megatron_fsdp_shards_parameters_and_gathers_them_at_the_loss() -> None:
    budget, (stage,) = planned(spec_of(*DENSE_GPT, WHOLE))
    apart = planned(spec_of(*DENSE_GPT))[0].worst.cells
    cells = budget.worst.cells
    owners = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.GRADIENTS)
    for column in owners:
        assert cells[Phase.INIT][column] == apart[Phase.INIT][column] // 4
    elements = parameters(stage).elements(experts=False)
    during = Phase.FORWARD_BACKWARD
    assert cells[during][Column.COMMUNICATION] - apart[during][Column.COMMUNICATION] == 2 * elements
    assert cells[during][Column.ACTIVATIONS] == apart[during][Column.ACTIVATIONS]
    assert sum(cells[during].values()) - cells[during][Column.OVERHEAD] == memory(stage).peak


@pytest.mark.parametrize("model", ["hybrid", "gpt"])
def test_megatron_fsdp_of_experts_and_hybrids(model: str) -> None:
    pattern = {"hybrid": (), "gpt": ("model.pattern=ADAEADAE", "host.model=gpt", "model.mamba=null")}[model]
    overrides = (*pattern, "mesh.pp=1", "mesh.vpp=1", "mesh.dp_shard=8", "mesh.ep=4", "mesh.tp=1", WHOLE)
    budget, (stage,) = planned(spec_of(*overrides))
    found, cells = parameters(stage), budget.worst.cells
    dense, experts = found.elements(experts=False), found.elements(experts=True)
    assert cells[Phase.INIT][Column.EXPERT_PARALLEL_PARAMS] == 2 * experts // 2
    params = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS)
    assert sum(cells[Phase.INIT][column] for column in params) == 2 * (dense // 8 + experts // 2)
    assert cells[Phase.INIT][Column.GRADIENTS] == 4 * (dense // 8 + experts // 2)
    during = Phase.FORWARD_BACKWARD
    assert sum(cells[during].values()) - cells[during][Column.OVERHEAD] == memory(stage).peak
    assert cells[during][Column.COMMUNICATION] >= 2 * (dense + experts)  # a small model is gathered whole


def test_layer_norms_biases_and_learned_positions_are_parameters_of_a_rank() -> None:
    biases = ("model.attention.bias=true", "model.attention.output_bias=true", "model.mlp.bias=true", "model.moe.bias=true")
    learned = ("model.learned_positions=4096", "model.attention.nope_layers=[3, 11]")
    for overrides in (("model.norm=layernorm",), biases, learned, ("mesh.pp=1", "mesh.dp_shard=8", *biases, *learned)):
        spec = spec_of(*overrides)
        inventory, (budget, stages) = build_inventory(spec), planned(spec)
        counted = [sum(one.elements for one in parameters(stage).tensors) for stage in stages]
        assert [budget.of_rank(rank * spec.mesh.world_size // len(stages)).parameters for rank in range(len(stages))] == counted
        if spec.mesh.ep == 1:
            assert sum(counted) == inventory.parameters


def test_without_sequence_parallelism_every_tensor_rank_keeps_the_whole_stream() -> None:
    dense = ("mesh={tp: 2, pp: 2, dp_shard: 2, vocab_parallel: true}", "model.pattern=MDMA", "model.moe=null")
    _, (split, _) = planned(spec_of(*dense))
    _, (whole, _) = planned(spec_of(*dense, "host.sequence_parallel=false"))
    assert whole.run.operator("-").tensors["norm.input"] == 2 * split.run.operator("-").tensors["norm.input"]
    assert whole.run.operator("-").tensors["fc1.output"] == split.run.operator("-").tensors["fc1.output"]


def test_copies_of_weights_in_low_precision_stay_beside_sixteen_bit_ones() -> None:
    current = "precision.recipe={name: fp8_current}"
    plain, copied = worst(), worst(current)
    gathered = worst("precision.recipe={name: fp8_current, param_gather: true}")
    assert copied[Column.WORKSPACE] > plain[Column.WORKSPACE] == gathered[Column.WORKSPACE]


def test_block_recompute_keeps_the_layers_behind_the_first() -> None:
    kept = {key: worst(*more)[Column.ACTIVATIONS] for key, more in {
        "none": (),
        "two": ("host.recompute_num_layers=2", "host.recompute_method=block"),
        "all": ("host.recompute_num_layers=8", "host.recompute_method=block"),
        "uniform": ("host.recompute_num_layers=1",),
    }.items()}  # fmt: skip
    assert kept["none"] > kept["two"] > kept["all"]
    assert kept["all"] == kept["uniform"]  # eight layers per rank, each alone


def test_megarun_does_not_train_it() -> None:
    assert "host.name = megatron; megarun trains with megarun" in megarun_refuses(spec_of())[0].detail


def test_megaruns_plans_have_no_key_of_megatron() -> None:
    assert spec_of("host={name: megarun}").as_document()["host"] == {"name": "megarun", "kernels": "triton"}


def test_a_diff_between_hosts_names_every_column_and_its_cause() -> None:
    ours, theirs = (make_plan(spec_of(*overrides)) for overrides in (("host={name: megarun}",), ()))
    diff = diff_with_causes(ours, theirs)
    assert {item.column for item in diff.growth} > {Column.ACTIVATIONS, Column.OTHER_OPTIMIZER, Column.WORKSPACE, Column.COMMUNICATION}
    assert all([name for name, _ in item.causes] == ["host"] for item in diff.growth)
    totals = [column_totals(plan.estimates) for plan in (ours, theirs)]
    unlike = {str(column) for column in Column if totals[0][column] != totals[1][column]}
    assert {column for column, *_ in host_lines(diff)} == unlike
    assert all(before.startswith("megarun: ") and after.startswith("megatron: ") for _, before, after in host_lines(diff))
    assert host_lines(diff_with_causes(theirs, theirs)) == []


def test_a_diff_within_megatron_names_the_key() -> None:
    plain, unfused = (make_plan(spec_of(*overrides)) for overrides in ((), ("host.attention_backend=unfused", "batch.seq_length=1024")))
    causes = {item.column: dict(item.causes) for item in diff_with_causes(plain, unfused).growth}
    assert set(causes[Column.ACTIVATIONS]) == {"host.attention_backend", "batch.seq_length"}


def test_the_limits_of_a_split_never_exceed_its_budget() -> None:
    for overrides in ((), ("optimizer.matrix=muon",), ("mesh.vpp=2", "schedule.kind=interleaved_1f1b"), ("host.recompute_num_layers=3",)):
        spec = spec_of(*overrides)
        inventory, size = build_inventory(spec), 16 // (spec.mesh.pp * spec.mesh.vpp)
        spans = tuple((start, start + size) for start in range(0, 16, size))
        layout, usable = build_layout(spec, inventory, spans), 10**12
        budget = build_budget(spec, inventory, layout)
        for rank, (limit,) in enumerate(megatron_limits(spec, inventory, layout, usable)):
            held = limit.most + limit.excess([(slot.start, slot.stop) for slot in layout.of_rank(rank)])
            least = min(one.peak_bytes for one in budget.ranks if one.coordinate["pp"] == rank)
            assert least // 6 < held <= least * 100 // 105


def test_a_split_too_large_for_memory_is_judged_by_megatrons_bytes() -> None:
    spec = spec_of("split.mode=weighted", "batch.micro_batch_size=1048576")
    assert [item.code for item in choose_cuts(spec, build_inventory(spec)).diagnostics] == ["MP501"]


def test_a_workspace_is_the_launchs_or_torchs_own() -> None:
    for override, size in (("host.cublas_workspace_kib=8320", 8320 * 1024), ("host.cublas_workspace_kib=null", 32 * 2**20)):
        _, stages = planned(spec_of(override))
        assert {memory(stage).static["cuBLAS workspaces"] for stage in stages} == {2 * size}


def test_a_workspace_setting_lists_sizes_and_counts_of_buffers() -> None:
    assert setting_bytes(":4096:2:16:8") == SMALL_KIB * 1024
    assert setting_bytes(":16:8") == 16 * 8 * 1024


@pytest.mark.parametrize("percent", [0, 5, 7])
def test_the_limits_of_a_split_leave_out_nothing_that_fits(percent: int) -> None:
    """Bytes that torch's allocator loses are rounded down: of the bytes that fit with it none is past the limit."""
    spec = spec_of(f"host.fragmentation_percent={percent}")
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, ((0, 8), (8, 16)))
    for usable in range(1, 60):
        most = max(size for size in range(usable + 1) if size + size * percent // 100 <= usable)
        assert most <= megatron_limits(spec, inventory, layout, usable)[0][0].most <= most + 1


def test_rotary_angles_are_of_the_layers_that_turn() -> None:
    _, (turned, _) = planned(spec_of())
    _, (still, _) = planned(spec_of("model.attention.nope_layers=[3, 11]"))
    assert memory(turned).static["rotary cache"] == 4 * 512 * 32
    assert "rotary cache" not in memory(still).static


def test_overlapped_experts_keep_no_combined_rows() -> None:
    _, (kept, _) = planned(spec_of("host.deterministic_mode=true"))
    _, (overlapped, _) = planned(spec_of("host.deterministic_mode=true", "host.moe_overlap=true"))
    assert "combine.rows" in kept.run.operator("E").tensors
    assert "combine.rows" not in overlapped.run.operator("E").tensors
