"""Megatron-Core's measured bytes compared with the ledger's, and each argument's effect."""

from statistics import mean
from typing import Any

import pytest
from accuracy_megatron.launches import changed, graphed, offloaded, refusals, skewed, stage_of_launch, stale, unbalanced
from megatron_goldens import STATED, stage_of

from megaplan.budget.fit import largest_skew
from megaplan.hosts.megatron.away import recomputed
from megaplan.hosts.megatron.peak import MegatronMemory, in_flight, memory
from megaplan.hosts.megatron.run import MegatronStage
from megaplan.hosts.megatron.storage import parameters, storage_bytes

PRICED = [row for row in STATED if not refusals(row["arguments"], row["gpus"], row["padded_vocab_size"])]
COUNTED = [row for row in PRICED if not graphed(row["arguments"]) and not offloaded(row["arguments"])]
BALANCED = [row for row in COUNTED if not unbalanced(row["arguments"])]
COVERED = [row for row in BALANCED if stale(row) is None]
RANGED = [row for row in PRICED if unbalanced(row["arguments"])]
LOW_PRECISION = [row for row in BALANCED if "fp8_format" in row["arguments"]]
MIB = 2**20


def named(part: str) -> dict[str, Any]:
    return next(row for row in PRICED if part in row["name"] and row["platform"] == "dgx_h100")


def errors(found: MegatronMemory, row: dict[str, Any]) -> tuple[float, float]:
    return found.after_step / row["after_step_bytes"] - 1, found.peak / row["peak_bytes"] - 1


def test_enough_runs_are_priced() -> None:
    assert (len(STATED), len(BALANCED), len(COVERED), len(RANGED)) == (57, 45, 37, 6)


def test_runs_of_older_software_are_told_by_date_and_branch_alone() -> None:
    assert [stale(row) is None for row in BALANCED] == [row["measured"] >= "2026" for row in BALANCED]
    assert stale({"measured": "2025-10-21", "branch": "development"}) == "measured on 2025-10-21, on software of October 2025 or older"
    assert stale({"measured": "2026-02-01", "branch": "long-term"}) == "the long-term branch runs older software"
    assert stale({"measured": "2025-11-01", "branch": "development"}) is None


def test_runs_in_fp8_are_within_two_percent() -> None:
    found = [errors(memory(stage_of(row)), row) for row in LOW_PRECISION]
    assert len(found) == 2
    assert max(abs(error) for pair in found for error in pair) < 0.02


def test_mean_errors() -> None:
    found = [errors(memory(stage_of(row)), row) for row in COVERED]
    assert mean(abs(after) for after, _ in found) <= 0.0035
    assert mean(abs(peak) for _, peak in found) <= 0.0045


@pytest.mark.parametrize("row", COVERED, ids=lambda row: f"{row['name'].partition('/')[2]}-{row['platform']}")
def test_no_run_is_past_its_bar(row: dict[str, Any]) -> None:
    after, peak = errors(memory(stage_of(row)), row)
    assert abs(after) <= 0.02
    assert abs(peak) <= 0.035


@pytest.mark.parametrize("key", ["peak_bytes", "run_peak_bytes"])
def test_no_run_is_five_percent_outside_its_quote(key: str) -> None:
    for row in COVERED:
        stage = stage_of(row)
        ends = [memory(each).peak for each in (stage, most_skewed(stage))]
        outside = max(ends[0] - row[key], row[key] - ends[1], 0)
        assert outside <= 0.05 * row[key], row["name"]


def most_skewed(stage: MegatronStage) -> MegatronStage:
    moe = stage.spec.model.moe
    return stage if moe is None else skewed(stage, largest_skew(stage.spec.mesh.ep, moe.num_experts, moe.top_k))


def kept(stage: MegatronStage, letter: str) -> dict[str, int]:
    return stage.run.operator(letter).tensors


@pytest.mark.parametrize("row", RANGED, ids=lambda row: f"{row['name'].partition('/')[2]}-{row['platform']}")
def test_a_run_that_nothing_balances_lies_in_its_range(row: dict[str, Any]) -> None:
    stage = stage_of(row)
    least = memory(skewed(stage, 0.0)).peak
    assert least < row["peak_bytes"] <= row["run_peak_bytes"] < memory(most_skewed(stage)).peak
    assert abs(errors(memory(stage), row)[0]) <= 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_aux_loss_coeff": 0.01},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_enable_expert_bias": True},
        {"moe_expert_capacity_factor": 1.0},
        {"expert_model_parallel_size": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_balances_routing(changes: dict[str, Any]) -> None:
    arguments = RANGED[0]["arguments"]
    assert unbalanced({**arguments, **changes}) is None
    without = {key: value for key, value in arguments.items() if not key.startswith("moe_router_load")}
    assert unbalanced(without) == "moe_router_load_balancing_type = aux_loss with moe_aux_loss_coeff = 0: nothing balances routing"


def test_what_balanced_routing_misses_is_no_tensor_of_an_optimizer() -> None:
    misses: dict[tuple[str, int], list[float]] = {}
    for row in RANGED:
        if "te_ep8_resume" in row["name"]:
            found = memory(stage_of(row))
            missed = (row["peak_bytes"] - row["after_step_bytes"]) - (found.peak - found.after_step)
            misses.setdefault((row["platform"], row["gpus"]), []).append(missed / MIB)
    assert sorted(len(each) for each in misses.values()) == [1, 2, 2]  # Adam and Muon, Muon in its two deals, and one alone
    assert all(max(each) - min(each) < 12 for each in misses.values())
    assert min(misses.values())[0] < -180 < 40 < max(misses.values())[0]  # the first weights differ by device and by layout


def test_deterministic_addition_of_rows_keeps_them() -> None:
    fixed = named("4experts_groupedGEMM_op_fuser")  # one rank has all experts: no routing can explain a miss
    assert abs(errors(memory(stage_of(fixed)), fixed)[1]) < 0.002
    rows = 4 * 2 * 4096 * 512
    for changes in ({"deterministic_mode": False}, {"moe_permute_fusion": True}, {"overlap_moe_expert_parallel_comm": True}):
        assert memory(stage_of(fixed)).activations - memory(stage_of(fixed, **changes)).activations == rows


def test_an_all_to_all_brings_rows_back_before_they_are_added() -> None:
    row = next(row for row in RANGED if "etp2" in row["name"])
    stage = stage_of(row)
    more, tokens = skewed(stage, 1.5), stage.run.at.stream_tokens
    assert kept(stage, "E")["combine.rows"] == kept(more, "E")["combine.rows"] == 2 * 512 * 2 * tokens
    for each, shares in ((stage, 2), (more, 3)):  # of rows, etp times as many reach the rank
        own = kept(changed(each, host__moe_dispatcher="allgather"), "E")
        assert own["combine.rows"] == shares * 512 * 2 * 2 * tokens


def test_skewed_routing_keeps_more() -> None:
    stage = stage_of(named("te_ep8_resume_torch_dist_dist_optimizer"))
    assert kept(skewed(stage, 2.0), "E")["routed.fc1.input"] == 2 * kept(stage, "E")["routed.fc1.input"]


def test_one_rank_without_parallelism_is_exact_to_a_mebibyte() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    found = memory(stage_of(row))
    assert abs(found.after_step - row["after_step_bytes"]) < MIB
    assert abs(found.peak - row["peak_bytes"]) < MIB


def test_flash_attention_keeps_no_scores() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    unfused, flash = kept(stage_of(row), "*"), kept(stage_of(row, attention_backend="flash"), "*")
    scores = 4 * 8 * 1024 * 1024
    assert (unfused["softmax"], unfused["softmax.mask"], unfused["softmax.dropped"]) == (2 * scores, scores, 2 * scores)
    assert flash["lse"] == 4 * 4096 * 8
    assert not set(flash) & {"softmax", "softmax.mask", "softmax.dropped"}


def test_dropout_masks_go_with_their_rates() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    without = kept(stage_of(row, hidden_dropout=0.0, attention_dropout=0.0), "*")
    assert not set(without) & {"dropout.mask", "softmax.mask", "softmax.dropped"}


def test_interleaving_holds_a_group_of_every_chunk_but_the_last() -> None:
    row = named("tunable_overlap")
    stage = stage_of(row)
    assert stage.spec.host.microbatch_group_size == 5
    assert in_flight(stage) - in_flight(changed(stage, host__microbatch_group_size=4)) == sum(
        stage.run.operator(letter).kept for chunk in stage.chunks[:-1] for letter in chunk
    )


@pytest.mark.parametrize("changes", [{"grad_reduce_in_bf16": True}, {"bf16": False, "fp16": True}], ids=["bf16", "fp16"])
def test_sixteen_bit_gradients_leave_fp32_copies_after_the_step_alone(changes: dict[str, Any]) -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    wide, halved = memory(stage_of(row)), memory(stage_of(row, **changes))
    dense = parameters(stage_of(row)).elements(experts=False)
    assert wide.static["gradients"] - halved.static["gradients"] == 2 * dense
    assert halved.gradient_copies == 4 * dense // 8
    assert (wide.after_step - halved.after_step, wide.peak - halved.peak) == (2 * dense - 4 * dense // 8, 2 * dense)
    assert memory(stage_of(row, **changes, use_precision_aware_optimizer=True)).gradient_copies == 0


def test_the_local_implementation_multiplies_scores_into_a_buffer_that_stays() -> None:
    row = named("gpt3_mcore_tp1_pp2")
    own, theirs = memory(stage_of(row)), memory(stage_of(row, transformer_impl="transformer_engine", attention_backend="unfused"))
    scores = 4 * 8 * 1024 * 1024
    assert own.static["attention buffer"] == 2 * scores
    assert own.after_step - theirs.after_step == 2 * scores - theirs.static["Transformer Engine workspace"]
    assert own.activations == theirs.activations


def test_a_router_multiplies_by_transformer_engine_in_a_local_model_too() -> None:
    row = named("gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel")
    found, dense = memory(stage_of(row)), memory(stage_of(row, num_experts=None))
    assert found.static["Transformer Engine workspace"] == 32 * MIB
    assert "Transformer Engine workspace" not in dense.static
    assert abs(found.after_step - row["after_step_bytes"]) < MIB
    grouped = stage_of(row, moe_grouped_gemm=True)  # Megatron's own experts run one after another, whatever is given
    assert (grouped.spec.host.moe_grouped_gemm, memory(grouped)) == (False, found)


def test_the_all_gather_dispatcher_keeps_its_rows_places() -> None:
    row = named("te_ep8_resume_torch_dist_dist_optimizer")
    rows = 12 * 4096 * 2
    assert memory(stage_of(row)).leftover == rows * (8 + 4) + 12 * 4096 * 8
    places, scores = 12 * 4096 * 2 * 8, 12 * 4096 * 8 * (4 + 1)
    assert memory(stage_of(row, moe_token_dispatcher_type="alltoall")).leftover == places + scores


def test_layer_wise_muon_deals_the_embedding_to_one_rank() -> None:
    stage = stage_of(named("ep8_resume_torch_dist_dist_muon"))
    found = parameters(stage)
    last_of_eight = storage_bytes(stage, found)["optimizer"]
    last_of_four = storage_bytes(changed(stage, mesh__dp_shard=4, mesh__ep=4), found)["optimizer"]  # the first of four has it
    assert last_of_eight - last_of_four > 12 * 50304 * 512 // 2


def test_recompute_drops_what_its_module_made() -> None:
    row = named("selective_recompute")
    attention, experts = kept(stage_of(row), "*"), kept(stage_of(row), "E")
    assert not set(attention) & {"norm.output", "q", "k", "v"}
    assert not set(experts) & {"norm.output", "routed.activation.output"}


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], feature: str) -> None:
    (why,) = refusals({**named("tp1_pp1_dist_optimizer_no_mmap")["arguments"], **changes})
    assert why.startswith(f"host.features has {feature}: ")


def test_queries_and_keys_are_normed_where_the_launch_says_so() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    plain, normed = stage_of(row), stage_of(row, qk_layernorm=True)
    assert parameters(normed).elements(experts=False) - parameters(plain).elements(experts=False) == 12 * 2 * 2 * 64
    assert kept(normed, "*")["qk.normed"] == 2 * 4096 * 16 * 64
    latent = named("selective_recompute")
    names = {"q_latent.norm", "kv_latent.norm"}
    assert names <= recomputed(stage_of(latent).spec, "*", names)
    assert not names & set(kept(stage_of(latent, qk_layernorm=False, recompute_granularity=None), "*"))


def test_a_batch_that_does_not_divide_over_the_data_ranks_is_refused() -> None:
    arguments = named("tp1_pp1_dist_optimizer_no_mmap")["arguments"]
    few = {**arguments, "global_batch_size": 2, "micro_batch_size": 1}
    assert refusals(few, 8) == ("--global-batch-size 2: micro_batch_size = 1, 8 data ranks, and 2 % 8 = 2",)
    assert refusals(few, 2) == ()
    uneven = {**arguments, "tensor_model_parallel_size": 4}
    assert refusals(uneven, 6) == ("--world-size 6: 6 GPUs, and tp · pp · cp = 4 · 1 · 1, ep · etp = 1 · 1 need a multiple of 4",)
    assert refusals(arguments, 8) == ()


@pytest.mark.parametrize(
    ("platform", "setting", "month", "mebibytes"),
    [
        ("dgx_a100", None, "2026-08", 8.125),
        ("dgx_a100", ":4096:8", "2026-08", 32),
        ("dgx_h100", None, "2025-10", 32),
        ("dgx_gb200", None, "2026-04", 8.125),
        ("dgx_gb200", None, "2026-05", 32),
        ("dgx_gb200", None, None, 32),
        ("b200", ":4096:2:16:8", "2026-06", 8.125),
    ],
)
def test_a_handles_workspace_goes_by_device_setting_and_image(
    platform: str, setting: str | None, month: str | None, mebibytes: float
) -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    environment = {} if setting is None else {"CUBLAS_WORKSPACE_CONFIG": setting}
    stage = stage_of_launch(row["arguments"], 8, row["padded_vocab_size"], platform, environment=environment, month=month)
    assert memory(stage).static["cuBLAS workspaces"] == 2 * mebibytes * MIB


def test_a_head_leaves_one_dummy_weight_gradient() -> None:
    row = named("selective_recompute")
    found = memory(stage_of(row))
    without = memory(stage_of(row, no_gradient_accumulation_fusion=True))
    assert found.static["dummy weight gradients"] - sum(2 * a * b for a, b in parameters(stage_of(row)).shapes) == 0
    assert (row["padded_vocab_size"] // 2, 1024) in parameters(stage_of(row)).shapes
    assert without.phases["LM-head backward"] - found.phases["LM-head backward"] == 2 * row["padded_vocab_size"] // 2 * 1024


def test_a_schedule_still_names_the_previous_microbatchs_ends() -> None:
    stage, boundary = stage_of(named("gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope")), 2 * 4096 * 512
    last, first = memory(stage).received, memory(changed(stage, schedule__num_microbatches=4)._replace(pp_rank=0)).received
    assert {name: size // boundary for name, size in last.items()} == {
        "loss": 2, "LM-head backward": 1, "layer forward": 2, "layer backward": 1
    }  # fmt: skip
    assert (first["layer forward"], first["layer backward"]) == (boundary, 0)
    assert set(memory(changed(stage, schedule__num_microbatches=1)).received.values()) == {0}
    assert set(memory(stage_of(named("tp1_pp1_dist_optimizer_no_mmap"))).received.values()) == {0}


def test_a_mask_that_no_loader_makes_is_not_there() -> None:
    with_masks, without = named("te_tp2_pp2_resume_torch_dist"), named("no_create_attention_mask")
    assert memory(stage_of(with_masks)).peak - memory(stage_of(without)).peak == 2 * 4 * 1024 * 1024
