"""Megatron-Core's measured bytes against the ledger's, and what each argument changes."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from megaplan.budget.skew import largest_skew
from megaplan.hosts.megatron.arguments import job_from_arguments, refusals
from megaplan.hosts.megatron.job import MegatronJob
from megaplan.hosts.megatron.peak import MegatronMemory, in_flight, memory
from megaplan.hosts.megatron.saved import operator
from megaplan.hosts.megatron.storage import parameters, storage_bytes

ROWS = json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))["rows"]
STATED = [row for row in ROWS if row["gpus"] and row["padded_vocab_size"]]
COVERED = [row for row in STATED if not refusals(row["arguments"])]
MIB = 2**20


def job_of(row: dict[str, Any], **changes: Any) -> MegatronJob:
    return job_from_arguments({**row["arguments"], **changes}, row["gpus"], row["padded_vocab_size"], row["platform"])


def named(part: str) -> dict[str, Any]:
    return next(row for row in COVERED if part in row["name"] and row["platform"] == "dgx_h100")


def errors(found: MegatronMemory, row: dict[str, Any]) -> tuple[float, float]:
    return found.after_step / row["after_step_bytes"] - 1, found.peak / row["peak_bytes"] - 1


def test_enough_runs_are_priced() -> None:
    assert (len(STATED), len(COVERED)) == (57, 49)


def test_mean_errors() -> None:
    found = [errors(memory(job_of(row)), row) for row in COVERED]
    assert mean(abs(after) for after, _ in found) <= 0.01
    assert mean(abs(peak) for _, peak in found) <= 0.015


KNOWN_MISS = pytest.mark.xfail(strict=True, reason="5.6 % under with balanced routing: more rows reached the measured rank")


def run_of(row: dict[str, Any]) -> Any:
    name = f"{row['name'].partition('/')[2]}-{row['platform']}"
    return pytest.param(row, id=name, marks=KNOWN_MISS if "dist_dist_muon_1node" in name else ())


@pytest.mark.parametrize("row", [run_of(row) for row in COVERED])
def test_no_run_is_past_five_percent(row: dict[str, Any]) -> None:
    after, peak = errors(memory(job_of(row)), row)
    assert abs(after) <= 0.05
    assert abs(peak) <= 0.05


@pytest.mark.parametrize("key", ["peak_bytes", "run_peak_bytes"])
def test_no_run_is_five_percent_outside_its_quote(key: str) -> None:
    for row in COVERED:
        job = job_of(row)
        ends = [memory(each).peak for each in (job, most_skewed(job))]
        outside = max(ends[0] - row[key], row[key] - ends[1], 0)
        assert outside <= 0.05 * row[key], row["name"]


def most_skewed(job: MegatronJob) -> MegatronJob:
    if job.moe is None:
        return job
    return replace(job, moe=replace(job.moe, routing_skew=largest_skew(job.ep, job.moe.num_experts, job.moe.top_k)))


def test_the_known_miss_is_routing_and_no_tensor_of_an_optimizer() -> None:
    misses: dict[tuple[str, int], list[float]] = {}
    for row in COVERED:
        if "te_ep8_resume" in row["name"]:
            found = memory(job_of(row))
            kept = (row["peak_bytes"] - row["after_step_bytes"]) - (found.peak - found.after_step)
            misses.setdefault((row["platform"], row["gpus"]), []).append(kept / MIB)
    assert sorted(len(each) for each in misses.values()) == [1, 2, 2]  # Adam and Muon, Muon in its two deals, and one alone
    assert all(max(each) - min(each) < 12 for each in misses.values())
    assert min(misses.values())[0] < -80 < 180 < max(misses.values())[0]  # the first weights differ by device and by layout


def test_skewed_routing_keeps_more() -> None:
    job = job_of(named("te_ep8_resume_torch_dist_dist_optimizer"))
    assert job.moe is not None
    skewed = replace(job, moe=replace(job.moe, routing_skew=2.0))
    assert operator(skewed, "E")["routed.fc1.input"] == 2 * operator(job, "E")["routed.fc1.input"]


def test_one_rank_without_parallelism_is_exact_to_a_mebibyte() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    found = memory(job_of(row))
    assert abs(found.after_step - row["after_step_bytes"]) < MIB
    assert abs(found.peak - row["peak_bytes"]) < MIB


def test_flash_attention_keeps_no_scores() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    unfused, flash = operator(job_of(row), "*"), operator(job_of(row, attention_backend="flash"), "*")
    scores = 4 * 8 * 1024 * 1024
    assert (unfused["softmax"], unfused["softmax.mask"], unfused["softmax.dropped"]) == (2 * scores, scores, 2 * scores)
    assert flash["lse"] == 4 * 4096 * 8
    assert not set(flash) & {"softmax", "softmax.mask", "softmax.dropped"}


def test_dropout_masks_go_with_their_rates() -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    kept = operator(job_of(row, hidden_dropout=0.0, attention_dropout=0.0), "*")
    assert not set(kept) & {"dropout.mask", "softmax.mask", "softmax.dropped"}


def test_interleaving_holds_a_group_of_every_chunk_but_the_last() -> None:
    row = named("tunable_overlap")
    job = job_of(row)
    assert job.inflight_group == 5
    assert in_flight(job) - in_flight(replace(job, inflight_group=4)) == sum(
        sum(operator(job, letter).values()) for chunk in job.chunks[:-1] for letter in chunk
    )


@pytest.mark.parametrize("changes", [{"grad_reduce_in_bf16": True}, {"bf16": False, "fp16": True}], ids=["bf16", "fp16"])
def test_sixteen_bit_gradients_leave_fp32_copies_after_the_step_alone(changes: dict[str, Any]) -> None:
    row = named("tp1_pp1_dist_optimizer_no_mmap")
    wide, halved = memory(job_of(row)), memory(job_of(row, **changes))
    dense = parameters(job_of(row)).elements(experts=False)
    assert wide.static["gradients"] - halved.static["gradients"] == 2 * dense
    assert halved.gradient_copies == 4 * dense // 8
    assert (wide.after_step - halved.after_step, wide.peak - halved.peak) == (2 * dense - 4 * dense // 8, 2 * dense)
    assert memory(job_of(row, **changes, use_precision_aware_optimizer=True)).gradient_copies == 0


def test_the_local_implementation_multiplies_scores_into_a_buffer_that_stays() -> None:
    row = named("gpt3_mcore_tp1_pp2")
    own, theirs = memory(job_of(row)), memory(job_of(row, transformer_impl="transformer_engine", attention_backend="unfused"))
    scores = 4 * 8 * 1024 * 1024
    assert own.static["attention buffer"] == 2 * scores
    assert own.after_step - theirs.after_step == 2 * scores - theirs.static["Transformer Engine workspace"]
    assert own.activations == theirs.activations
    assert refusals({**row["arguments"], "num_experts": 8}) == ("transformer_impl = local with num_experts: tensors of the local experts",)


def test_the_all_gather_dispatcher_keeps_its_rows_places() -> None:
    row = named("te_ep8_resume_torch_dist_dist_optimizer")
    rows = 12 * 4096 * 2
    assert memory(job_of(row)).leftover == rows * (8 + 4) + 12 * 4096 * 8
    assert memory(job_of(row, moe_token_dispatcher_type="alltoall")).leftover == 0


def test_layer_wise_muon_deals_the_embedding_to_one_rank() -> None:
    job = job_of(named("ep8_resume_torch_dist_dist_muon"))
    found = parameters(job)
    last_of_eight = storage_bytes(job, found)["optimizer"]
    last_of_four = storage_bytes(replace(job, data_parallel=4), found)["optimizer"]  # the first of four has it
    assert last_of_eight - last_of_four > 12 * 50304 * 512 // 2


def test_recompute_drops_what_its_module_made() -> None:
    row = named("selective_recompute")
    attention, experts = operator(job_of(row), "*"), operator(job_of(row), "E")
    assert not set(attention) & {"norm.output", "q", "k", "v"}
    assert not set(experts) & {"norm.output", "routed.activation.output"}


@pytest.mark.parametrize(
    "changes",
    [
        {"fine_grained_activation_offloading": True},
        {"cuda_graph_impl": "local"},
        {"delay_wgrad_compute": True},
        {"use_megatron_fsdp": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any]) -> None:
    arguments = {**named("tp1_pp1_dist_optimizer_no_mmap")["arguments"], **changes}
    (why,) = refusals(arguments)
    assert why.startswith(f"{next(iter(changes))}: ")
