"""Peaks of jobs whose rows travel: the estimate's words, and every column of every phase."""

from typing import Any

import pytest
from trace_checks import BF16, SCALARS_BYTES, compare_passes

from megaplan.columns import Column, Phase
from megaplan.inventory.tensors import Owner

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
MODEL = {
    "num_layers": 8,
    "hidden_size": 128,
    "vocab_size": 128,
    "mlp": {"ffn_hidden_size": 1024},
    "moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 96},
}
V = {"pp": 2, "vpp": 2, "dp_shard": 4, "ep": 2}
RESHARDED = {
    "precision": BF16,
    "batch": {"micro_batch_size": 1, "seq_length": 64},
    "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 8},
    "recompute": {"default": "selective"},
    "sharding": {"reshard_after_forward": True},
}


@pytest.mark.parametrize(("pattern", "peak"), [("EDDD", "gathering of layers.1"), ("DEDD", "forward of layers.0")])
def test_a_layer_gathered_ahead_is_there_while_the_one_before_runs(job_with: Any, pattern: str, peak: str) -> None:
    """Wide D layers next to E: the peak of the forward includes their all-gather's output, copied out next to the bank's or not yet."""
    job = job_with({"model": {"pattern": pattern, **MODEL}, **RESHARDED, "mesh": V})
    found = compare_passes(job)
    assert found.budget.peak_places[Phase.FORWARD_BACKWARD].startswith(peak)


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("pattern", ["DD", "DE", "ED"])
def test_a_layer_is_copied_out_next_to_the_previous_gathered_output(job_with: Any, pattern: str, reshard: bool) -> None:
    """Few tokens and wide layers: the all-gather's outputs decide the forward's peak, without EP too."""
    sizes = {"batch": {"micro_batch_size": 1, "seq_length": 16}, "schedule.num_microbatches": 4, "recompute": {"default": "selective"}}
    model = {**MODEL, "pattern": pattern, "num_layers": 4, "mlp": {"ffn_hidden_size": 2048}}
    mesh = {"mesh": {"pp": 2, "dp_shard": 4}, "sharding.reshard_after_forward": reshard}
    job = job_with({"model": model, "precision": BF16, **sizes, **mesh})
    compare_passes(job)


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize(
    ("mesh", "rank"), [({"pp": 2, "dp_shard": 32}, 31), ({"dp_shard": 50}, 49), ({"dp_shard": 64, "ep": 2}, 0)], ids=str
)
def test_a_bank_cut_between_rows(job_with: Any, mesh: dict[str, int], rank: int, reshard: bool) -> None:
    """More ranks than experts, 16 of 96 rows up and 128 down; of fifty, the last has less than a share."""
    model = {**MODEL, "pattern": "DE", "num_layers": 4}
    sizes = {"batch": {"micro_batch_size": 1, "seq_length": 16}, "schedule.num_microbatches": 4}
    found = compare_passes(
        job_with({"model": model, "precision": BF16, **sizes, "mesh": mesh, "sharding.reshard_after_forward": reshard}), rank
    )
    up, down = (-(-16 * rows // mesh["dp_shard"]) for rows in (96, 128))  # ep divides the experts and the ranks that share them
    elements = (2 * up * 128 + down * 96) * (1 if "pp" in mesh else 2)
    assert found.columns(Phase.OPTIMIZER)[Column.EXPERT_PARALLEL_PARAMS].trace == 4 * elements


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize(("skew", "reshard"), [(1.0, True), (2.5, False)])
def test_received_rows_are_what_the_skew_states(job_with: Any, skew: float, reshard: bool, kernels: str) -> None:
    """Experts alone on four EP ranks, two microbatches: rows are most of the live bytes."""
    model = {**MODEL, "pattern": "E", "num_layers": 3, "moe": {**MODEL["moe"], "routing_skew": skew}}  # type: ignore[dict-item]
    del model["mlp"]
    sizes = {"batch": {"micro_batch_size": 2, "seq_length": 512}, "schedule.num_microbatches": 2}
    sizes |= {"mesh": {"dp_shard": 4, "ep": 4}, "sharding.reshard_after_forward": reshard, "host.kernels": kernels}
    found = compare_passes(job_with({"model": model, "precision": BF16, **sizes}), 3)
    assert found.columns(Phase.FORWARD_BACKWARD)[Column.ROUTING].trace > 3 * skew * 2 * 512 * 2 * 128 * 2


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_experts_that_gather_keep_no_dispatched_rows(job_with: Any, policy: str) -> None:
    """On one rank what is routed are indices alone and the sums of the last layer that runs; k rows per token otherwise."""
    model = {**MODEL, "pattern": "DE", "num_layers": 4}
    sizes = {"batch": {"micro_batch_size": 2, "seq_length": 128}, "recompute": {"default": policy}}
    found = {
        kernels: compare_passes(job_with({"model": model, "precision": BF16, **sizes, "mesh": {"dp_shard": 2}, "host.kernels": kernels}))
        for kernels in ("reference", "triton")
    }
    routed = {kernels: each.columns(Phase.FORWARD_BACKWARD)[Column.ROUTING].trace for kernels, each in found.items()}
    num_tokens, num_layers, row_bytes = 2 * 128, 2, 128 * 2
    assert routed["triton"] <= routed["reference"] - num_layers * num_tokens * 2 * row_bytes


def test_a_routers_gradients_are_freed_when_muon_runs(job_with: Any) -> None:
    """A layer's group without shared experts is norm and router, which AdamW updates first; the banks are a separate group."""
    model = {**MODEL, "pattern": "E", "num_layers": 2, "hidden_size": 512, "moe": {"num_experts": 64, "top_k": 2, "ffn_hidden_size": 16}}
    del model["mlp"]
    job = job_with({"model": model, "precision": BF16, "optimizer.matrix": "muon", "mesh": {"dp_shard": 2}})
    found = compare_passes(job)
    for phase in (Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER):
        assert found.columns(phase)[Column.GRADIENTS].difference == 0
    held = sum(tensor.elements for block in job.inventory.layers for tensor in block.tensors if tensor.owner is Owner.EXPERT_PARALLEL)
    assert found.columns(Phase.OPTIMIZER)[Column.GRADIENTS].trace == 4 * held // 2


@pytest.mark.parametrize(
    ("moe", "precision"),
    [
        ({"num_experts": 512, "top_k": 1}, BF16),
        ({"num_experts": 96, "top_k": 2, "score": "sigmoid", "router_bias": True, "z_loss_coefficient": 0.01}, BF16),
        pytest.param({"num_experts": 256, "top_k": 1}, {}, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_of_a_router_hold_the_gradient_of_its_logits(job_with: Any, moe: dict[str, Any], precision: dict[str, str]) -> None:
    """Many and narrow experts: the peak of backward is the router's."""
    model = {"pattern": "E", "num_layers": 1, "hidden_size": 64, "vocab_size": 64, "moe": {"ffn_hidden_size": 8, **moe}}
    sizes = {"batch": {"micro_batch_size": 1, "seq_length": 1024}, "host.kernels": "triton"} | (
        {"precision": precision} if precision else {}
    )
    found = compare_passes(job_with({"model": model, **sizes}))
    assert found.columns(Phase.FORWARD_BACKWARD)[Column.WORKSPACE].trace >= 1024 * moe["num_experts"] * 4


@pytest.mark.parametrize(
    ("mesh", "more", "kernels"),
    [
        ({"dp_shard": 2, "etp": 2}, {"bias": True}, "triton"),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {"routing_skew": 1.7}, "reference"),
        ({"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, {"capacity_factor": 1.5, "bias": True}, "triton"),
    ],
    ids=str,
)
def test_slices_of_experts_gather_rows_and_sum_parts(job_with: Any, mesh: dict[str, int], more: dict[str, Any], kernels: str) -> None:
    """Rows of every rank with a slice, and what each sends of their sums: the last rank's peak, and Muon's on matrices that are cut."""
    model = {**MODEL, "pattern": "E", "num_layers": 2, "moe": {**MODEL["moe"], **more}}  # type: ignore[dict-item]
    del model["mlp"]
    sizes = {"batch": {"micro_batch_size": 2, "seq_length": 128}, "schedule.num_microbatches": 2, "host.kernels": kernels}
    job = job_with({"model": model, "precision": BF16, "optimizer.matrix": "muon", **sizes, "mesh": mesh})
    found = compare_passes(job, job.spec.mesh.world_size - 1)
    assert found.columns(Phase.FORWARD_BACKWARD)[Column.ROUTING].trace > 2 * (2 * 128 // job.spec.mesh.tp) * 2 * 2 * 128 * 2
    assert abs(found.columns(Phase.OPTIMIZER)[Column.WORKSPACE].difference) <= SCALARS_BYTES


@pytest.mark.parametrize(
    ("mesh", "more", "kernels"),
    [
        ({"dp_shard": 4, "ep": 4}, {"routing_skew": 1.7}, "triton"),
        ({"dp_shard": 4, "ep": 4}, {"latent_size": 64, "shared_ffn_hidden_size": 64}, "reference"),
        ({"tp": 2, "dp_shard": 2, "ep": 4}, {"null_experts": 4}, "reference"),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {"bias": True}, "reference"),
        ({"dp_shard": 4, "ep": 2, "etp": 2}, {"capacity_factor": 1.5}, "triton"),
    ],
    ids=str,
)
def test_gathered_tokens_and_sums_are_communication(job_with: Any, mesh: dict[str, int], more: dict[str, Any], kernels: str) -> None:
    """Tokens of all ranks with whole or cut experts, the rows copied from them, and the sums that are scattered."""
    model = {**MODEL, "pattern": "E", "num_layers": 2, "moe": {**MODEL["moe"], **more}}  # type: ignore[dict-item]
    del model["mlp"]
    sizes = {"batch": {"micro_batch_size": 2, "seq_length": 256}, "schedule.num_microbatches": 2, "host.kernels": kernels}
    job = job_with({"model": model, "precision": BF16, **sizes, "mesh": mesh, "host.moe_dispatcher": "allgather"})
    found = compare_passes(job, job.spec.mesh.world_size - 1)
    tokens, width = 2 * 256 // job.spec.mesh.tp, more.get("latent_size", 128)
    assert found.columns(Phase.FORWARD_BACKWARD)[Column.COMMUNICATION].trace >= 4 * tokens * width * 2


def test_rows_of_buffers_on_one_rank_are_routing(job_with: Any) -> None:
    model = {**MODEL, "pattern": "E", "num_layers": 2, "moe": {**MODEL["moe"], "capacity_factor": 1.5}}  # type: ignore[dict-item]
    del model["mlp"]
    compare_passes(job_with({"model": model, "precision": BF16, "mesh": {"dp_shard": 2}, "host.kernels": "triton"}))
