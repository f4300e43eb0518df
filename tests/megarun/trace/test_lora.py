"""Adapters on a frozen model: the estimate of every column is what the runtime allocates, and no frozen parameter has a gradient."""

from typing import Any

import pytest
import torch
from trace_checks import BF16, SCALARS_BYTES, compare_distinct_ranks

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.devices import load_device
from megaplan.inventory.tensors import Group
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-64")]
LORA = {"precision": BF16, "lora": {"rank": 4, "alpha": 8.0}}
DENSE = {**LORA, "model.pattern": "ADAD", "model.num_layers": 4}
EXPERTS = {**DENSE, "model.pattern": "AEDE"}
TRITON = {"host.kernels": "triton"}
FOUR_GPIPE = {"schedule": {"kind": "gpipe", "num_microbatches": 4}}
TWO, FOUR = {"schedule.num_microbatches": 2}, {"num_microbatches": 4}
MLA = {
    "kind": "mla", "num_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
DELTA = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8, "chunk_size": 8, "save_every": 8}
KDA = {"kind": "kda", "num_heads": 4, "head_dim": 8, "chunk_size": 8, "save_every": 8}
MLSTM = {"kind": "mlstm", "num_heads": 2, "key_dim": 8, "value_dim": 24, "chunk_size": 8}
MAMBA1 = {"kind": "mamba1", "state_dim": 8, "dt_rank": 4}
MAMBA3 = {"kind": "mamba3", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2}
BIASES = {"model.attention.bias": True, "model.attention.output_bias": True, "model.mlp.bias": True}
SHARED = {**DENSE, "model.pattern": "MADMAD", "model.num_layers": 6, "model.parallel_layers": [1, 4]}
LARGE_SHARED = {
    **LORA, "lora.rank": 1, "model.pattern": "E", "model.num_layers": 1, "model.hidden_size": 64, "model.vocab_size": 16,
    "model.moe.ffn_hidden_size": 4, "model.moe.shared_ffn_hidden_size": 96, "batch": {"micro_batch_size": 1, "seq_length": 8},
}  # fmt: skip
FROZEN_FIRST = {
    **LORA, "lora.rank": 24, "lora.families": ["A"], "model.pattern": "DAD", "model.num_layers": 3, "model.norm_placement": "post",
    "model.hidden_size": 512, "model.vocab_size": 64, "model.mlp.ffn_hidden_size": 64, "mesh.pp": 2, **FOUR_GPIPE,
    "split": {"mode": "manual", "spans": [[0, 2], [2, 3]], "reason": "a frozen block first"},
    "batch": {"micro_batch_size": 2, "seq_length": 2048},
}  # fmt: skip
FROZEN_EXPERTS = {
    **LORA, "lora.families": ["C"], "model.pattern": "EEEC", "model.num_layers": 4, "model.hidden_size": 128, "model.vocab_size": 64,
    "model.moe": {"num_experts": 2, "top_k": 2, "ffn_hidden_size": 21, "shared_ffn_hidden_size": 4, "latent_size": 4},
    "model.short_convolution": {"conv_kernel": 2}, "mesh": {"pp": 2, "vpp": 2}, "split": {"mode": "equal"},
    "schedule": {"kind": "zbv", "num_microbatches": 1}, "batch": {"micro_batch_size": 16, "seq_length": 2048}, "host.kernels": "triton",
}  # fmt: skip
NF4, INT8 = {"lora.base": "nf4", "lora.base_block": 8}, {"lora.base": "int8", "lora.base_block": 16, "lora.double_quant": False}
SIDES = {"ngram": {"num_tables": 3, "num_rows": 40, "dim": 4}, "structure": {"num_categories": 7, "bottleneck": 6}}


def of(letter: str, **more: Any) -> dict[str, Any]:
    return {**LORA, "model.pattern": f"{letter}D{letter}", "model.num_layers": 3, **{f"model.{key}": value for key, value in more.items()}}


C2 = {"mesh.cp": 2}
SHORT = {"short_convolution": {"conv_kernel": 3, "bias": True}}
LATE = {
    **LORA, "model.pattern": "A", "model.num_layers": 3, "model.attention": MLA, "model.vocab_size": 32,
    "mesh": {"cp": 2, "context_exchange": "latents"}, "batch": {"micro_batch_size": 2, "seq_length": 128},
}  # fmt: skip
IN_CI: dict[str, dict[str, Any]] = {
    "latents, cp 2": LATE,
    "nf4, latents, cp 4, tp 2, selective": {
        **LATE, **NF4, "mesh": {"cp": 4, "tp": 2, "context_exchange": "latents"}, "recompute": {"default": "selective"},
    },
    "one rank": DENSE,
    "dp_shard 3, odd rank": {**DENSE, "mesh.dp_shard": 3, "lora.rank": 5},
    "tp 2, pp 2": {**DENSE, "mesh": {"tp": 2, "pp": 2}, **TWO},
    "ep 2": {**EXPERTS, "mesh": {"dp_shard": 2, "ep": 2}, **TWO},
    "selective": {**DENSE, "recompute": {"default": "selective"}, **TWO},
    "a shared expert larger than the bank, cp 2, ep 2": {**LARGE_SHARED, "mesh": {"dp_shard": 2, "cp": 2, "ep": 2}},
    "M, cp 2": {**of("M"), **C2, "recompute": {"default": "selective"}},
    "mlstm, whose heads' scale is frozen": of("G", linear_attention=MLSTM),
    "shared norms of D alone, which keeps none": {**SHARED, "lora.families": ["D"]},
    "nf4, tp 2, pp 2": {**DENSE, **NF4, "mesh": {"tp": 2, "pp": 2}, **TWO},
    "int8, dp_shard 3, resharded, some": {
        **DENSE, **INT8, "mesh.dp_shard": 3, "sharding.reshard_after_forward": True, "lora.families": ["q_proj", "o_proj"], **TWO,
    },
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "latents, a wide rank, cp 2, selective": {**LATE, "lora.rank": 40, "recompute": {"default": "selective"}},
    "latents, others adapted, cp 2, tp 2": {
        **LATE, "lora.families": ["q_up", "o_proj"], "mesh": {"cp": 2, "tp": 2, "context_exchange": "latents"},
    },
    "latents, fp32, cp 2": {**LATE, "precision": dict.fromkeys(BF16, "fp32")},
    "latents, kernels, cp 2, full": {**LATE, **TRITON, "recompute": {"default": "full"}},
    "int8, latents, wide, cp 2": {**LATE, **INT8, "model.attention": {**MLA, "kv_lora_rank": 64}, "lora.families": ["o_proj"]},
    "fp32": {**DENSE, "precision": dict.fromkeys(BF16, "fp32")},
    "dp_shard 2, resharded": {**DENSE, "mesh.dp_shard": 2, "sharding.reshard_after_forward": True, **TWO},
    "pp 2": {**DENSE, "mesh.pp": 2, "schedule.num_microbatches": 3},
    "pp 2, tied": {**DENSE, "mesh.pp": 2, **TWO, "model.tie_embeddings": True},
    "queries and values": {**DENSE, "lora.families": ["q_proj", "v_proj"]},
    "A alone, replicas": {**DENSE, "lora.families": ["A"], "mesh": {"dp_shard": 2, "dp_replicate": 2}, **TWO},
    "a stage without adapters": {**DENSE, "model.pattern": "ADMD", "lora.families": ["M"], "mesh.pp": 2, **TWO},
    "frozen in fp32": {**DENSE, "lora.dtype": "fp32"},
    "frozen in fp32, dp_shard 2": {**DENSE, "lora.dtype": "fp32", "mesh.dp_shard": 2},
    "gradients in bf16": {**DENSE, "precision.grads": "bf16", "mesh.dp_shard": 2, **TWO},
    "full recompute": {**DENSE, "recompute": {"default": "full"}, **TWO},
    "selective, some": {**DENSE, "recompute": {"default": "selective"}, "lora.families": ["q_proj", "up_proj"]},
    "tp 2, full recompute": {**DENSE, "mesh.tp": 2, "recompute": {"default": "full"}},
    "tp 4, full recompute of layers that end with a frozen product": {
        **DENSE, "model.pattern": "DDA", "model.num_layers": 3, "model.hidden_size": 512, "model.vocab_size": 64, "mesh.tp": 4,
        "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 8},
        "model.mlp": {"ffn_hidden_size": 32, "activation": "gelu"}, "batch": {"micro_batch_size": 1, "seq_length": 96},
        "recompute": {"blocks": {"D": "full"}}, "lora.families": ["o_proj"],
    },
    "tp 2, some": {**DENSE, "mesh.tp": 2, "recompute": {"default": "selective"}, "lora.families": ["q_proj", "o_proj"]},
    "tp 2, vocabulary": {**DENSE, "mesh.tp": 2, "mesh.vocab_parallel": True, "model.vocab_size": 62},
    "cp 2, tp 2": {**DENSE, "mesh": {"cp": 2, "tp": 2}},
    "two gathers ahead, the second larger, in a stage without the head": {
        **DENSE, "lora.dtype": "fp32", "lora.families": ["q_proj"], "model.mlp.ffn_hidden_size": 512, "model.vocab_size": 2039,
        "mesh": {"pp": 2, "dp_shard": 3}, "sharding.prefetch": 2, **TWO, "batch": {"micro_batch_size": 1, "seq_length": 16},
    },
    "interleaved": {**DENSE, "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", **FOUR}},
    "zbv": {**DENSE, "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", **FOUR}},
    "interleaved zero bubble": {**DENSE, "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_zero_bubble", **FOUR}},
    "experts, dp_shard 4, ep 2, resharded": {
        **EXPERTS, "mesh": {"dp_shard": 4, "ep": 2}, "sharding.reshard_after_forward": True, **TWO,
    },
    "experts, gated, losses": {
        **EXPERTS, "model.moe.shared_gate": True, "model.moe.balance_loss_coefficient": 0.1, "model.moe.z_loss_coefficient": 0.1,
    },
    "a shared expert larger than the bank, dp_shard 2": {**LARGE_SHARED, "mesh.dp_shard": 2},
    "a shared expert larger than the bank, resharded": {
        **LARGE_SHARED, "mesh": {"dp_shard": 2, "ep": 2}, "sharding.reshard_after_forward": True,
    },
    "a shared expert larger than the bank, M, cp 2, ep 2": {
        **LARGE_SHARED, "model.pattern": "MEEM", "model.num_layers": 4, "batch.seq_length": 16, "mesh": {"dp_shard": 2, "cp": 2, "ep": 2},
    },
    "kernels, a frozen bank gathered again": {
        **DENSE, "model.pattern": "AEEA", "model.moe.num_experts": 8, "model.moe.ffn_hidden_size": 96,
        "mesh.dp_shard": 2, "sharding.reshard_after_forward": True, **TRITON,
    },
    "experts of latents": {**EXPERTS, "model.moe.latent_size": 12},
    "kernels, experts of latents, ep 2": {**EXPERTS, **TRITON, "model.moe.latent_size": 12, "mesh": {"dp_shard": 2, "ep": 2}},
    "experts, pp 2, ep 2, selective": {
        **EXPERTS, "mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, **TWO, "recompute": {"default": "selective"},
    },
    "latent attention, tp 2, cp 2": {**DENSE, "model.attention": MLA, "mesh": {"tp": 2, "cp": 2}, "recompute": {"default": "selective"}},
    "norms of queries, gate": {
        **DENSE, "model.attention.qk_norm": True, "model.attention.gate": True, "recompute": {"default": "selective"},
    },
    "norms of all heads, tp 2": {**DENSE, "model.attention.qk_norm": True, "model.attention.qk_norm_width": "all_heads", "mesh.tp": 2},
    "biases, tp 2, pp 2": {**DENSE, **BIASES, "mesh": {"tp": 2, "pp": 2}, **TWO, "lora.families": ["k_proj", "down_proj"]},
    "norms behind, zbv": {
        **DENSE, "model.norm_placement": "post", "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", **FOUR},
    },
    "norms on both sides, full recompute": {**DENSE, "model.norm_placement": "both", "recompute": {"default": "full"}},
    "shared norms, pp 2": {**SHARED, "mesh.pp": 2, **TWO},
    "shared norms, recompute": {
        **SHARED, "mesh.pp": 2, **TWO, "recompute": {"blocks": {"A": "full", "D": "selective"}}, "lora.families": ["M"],
    },
    "shared norms, tp 2, selective": {**SHARED, "mesh.tp": 2, "recompute": {"default": "selective"}, "lora.families": ["A"]},
    "a norm of three": {**EXPERTS, "model.pattern": "MADE", "model.parallel_layers": [1, 2, 3], "mesh": {"dp_shard": 2, "ep": 2}},
    "a norm of three, E alone": {**EXPERTS, "model.pattern": "MADE", "model.parallel_layers": [1, 2, 3], "lora.families": ["E"]},
    "shared with one linear": {
        **DENSE, "model.parallel_layers": [1, 3], "model.mlp": {"ffn_hidden_size": 48, "activation": "relu2"},
        "lora.families": ["down_proj"],
    },
    "side embeddings, pp 2": {**DENSE, "model.features": SIDES, "mesh.pp": 2, **TWO},
    "M, tp 2": {**of("M"), "mesh.tp": 2},
    "M, selective": {**of("M"), "recompute": {"default": "selective"}},
    "M frozen, selective, whose gated norm's output the checkpoint keeps": {
        **of("M"), "lora.families": ["D"], "recompute": {"default": "selective"},
    },
    "kda frozen, selective": {**of("G", linear_attention=KDA), "lora.families": ["D"], "recompute": {"default": "selective"}},
    "mlstm, selective, tp 2": {**of("G", linear_attention=MLSTM), "recompute": {"default": "selective"}, "mesh.tp": 2},
    "mlstm frozen, selective": {**of("G", linear_attention=MLSTM), "lora.families": ["D"], "recompute": {"default": "selective"}},
    "mamba1 frozen, selective": {**of("M", mamba=MAMBA1), "lora.families": ["D"], "recompute": {"default": "selective"}},
    "mamba3 frozen, selective": {**of("M", mamba=MAMBA3), "lora.families": ["D"], "recompute": {"default": "selective"}},
    "mamba3, tp 2, selective": {**of("M", mamba=MAMBA3), "mesh.tp": 2, "recompute": {"default": "selective"}},
    "M, cp 2, no recompute": {**of("M"), **C2},
    "M frozen, cp 2": {**of("M"), **C2, "lora.families": ["D"]},
    "kernels, M, cp 2": {**of("M"), **C2, **TRITON},
    "mamba1, cp 2": {**of("M", mamba=MAMBA1), **C2},
    "kernels, mamba1, cp 2": {**of("M", mamba=MAMBA1), **C2, **TRITON},
    "mamba3, cp 2": {**of("M", mamba=MAMBA3), **C2},
    "kernels, mamba3, cp 2": {**of("M", mamba=MAMBA3), **C2, **TRITON},
    "R, cp 2": {**of("R"), **C2},
    "kernels, R, cp 2": {**of("R"), **C2, **TRITON},
    "gated delta, cp 2": {**of("G", linear_attention=DELTA), **C2},
    "kernels, gated delta, cp 2": {**of("G", linear_attention=DELTA), **C2, **TRITON},
    "kda, cp 2": {**of("G", linear_attention=KDA), **C2},
    "kernels, kda, cp 2": {**of("G", linear_attention=KDA), **C2, **TRITON},
    "C, cp 2": {**of("C", **SHORT), **C2},
    "kernels, C, cp 2": {**of("C", **SHORT), **C2, **TRITON},
    "R, tp 2": {**of("R"), "model.recurrent.num_heads": 4, "mesh.tp": 2},
    "R, tp 2, pp 2, full recompute": {
        **of("R"), "model.recurrent.num_heads": 4, "model.hidden_size": 256, "mesh": {"tp": 2, "pp": 2}, "recompute": {"default": "full"},
        "batch.seq_length": 256, "schedule.num_microbatches": 3,
    },
    "R, full recompute": {**of("R"), "recompute": {"default": "full"}},
    "gated delta, tp 2": {**of("G", linear_attention=DELTA), "mesh.tp": 2, "recompute": {"default": "selective"}},
    "kda, tp 2": {**of("G", linear_attention=KDA), "mesh.tp": 2},
    "kernels, dp_shard 2": {**DENSE, **TRITON, "mesh.dp_shard": 2, **TWO},
    "kernels, tp 2, vocabulary": {**DENSE, **TRITON, "mesh.tp": 2, "mesh.vocab_parallel": True, "model.vocab_size": 62},
    "kernels, experts": {**EXPERTS, **TRITON},
    "kernels, experts, ep 2": {**EXPERTS, **TRITON, "mesh": {"dp_shard": 2, "ep": 2}},
    "kernels, M": {**of("M"), **TRITON},
    "kernels, mamba3": {**of("M", mamba=MAMBA3), **TRITON},
    "nf4, one rank": {**DENSE, **NF4},
    "nf4, one of two ranks": {**DENSE, **NF4, "mesh.dp_replicate": 2},
    "nf4, frozen in fp32, dp_shard 2": {**DENSE, **NF4, "lora.dtype": "fp32", "mesh.dp_shard": 2},
    "nf4, fp32": {**DENSE, **NF4, "precision": dict.fromkeys(BF16, "fp32"), "mesh.dp_shard": 2},
    "nf4, dp_shard 3, kept on 2 of 4": {
        **DENSE, **NF4, "mesh.dp_shard": 4, "sharding.reshard_after_forward": True, "sharding.reshard_size": 2, **TWO,
    },
    "nf4, selective, some": {**DENSE, **NF4, "recompute": {"default": "selective"}, "lora.families": ["q_proj", "up_proj"]},
    "nf4, full recompute": {**DENSE, **NF4, "recompute": {"default": "full"}, **TWO},
    "nf4, tp 2, some, selective": {
        **DENSE, **NF4, "mesh.tp": 2, "recompute": {"default": "selective"}, "lora.families": ["k_proj", "o_proj"],
    },
    "int8, zbv": {**DENSE, **INT8, "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", **FOUR}},
    "nf4, experts, dp_shard 4, ep 2, resharded": {
        **EXPERTS, **NF4, "mesh": {"dp_shard": 4, "ep": 2}, "sharding.reshard_after_forward": True, **TWO,
    },
    "nf4, experts of latents": {**EXPERTS, **NF4, "lora.base_block": 4, "model.moe.latent_size": 12, "lora.families": ["A"]},
    "nf4, latent attention, tp 2": {**DENSE, **NF4, "model.attention": MLA, "mesh": {"tp": 2}, "recompute": {"default": "selective"}},
    "nf4, biases, tp 2": {**DENSE, **NF4, **BIASES, "mesh": {"tp": 2}, **TWO, "lora.families": ["k_proj", "down_proj"]},
    "nf4, shared norms, tp 2": {**SHARED, **NF4, "mesh.tp": 2, "lora.families": ["A"]},
    "nf4, M, tp 2": {**of("M"), **NF4, "mesh.tp": 2},
    "nf4, mamba1": {**of("M", mamba=MAMBA1), **NF4},
    "nf4, kda, selective": {**of("G", linear_attention=KDA), **NF4, "lora.families": ["D"], "recompute": {"default": "selective"}},
    "nf4, R, full recompute": {**of("R"), **NF4, "recompute": {"default": "full"}},
    "nf4, C, cp 2": {**of("C", **SHORT), **NF4, **C2},
    "kernels, nf4, experts, ep 2": {**EXPERTS, **NF4, **TRITON, "mesh": {"dp_shard": 2, "ep": 2}},
    "kernels, R, tp 2": {**of("R"), **TRITON, "model.recurrent.num_heads": 4, "mesh.tp": 2},
}  # fmt: skip
CASES = [*(pytest.param(case, id=name) for name, case in IN_CI.items())]
CASES += [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()]


@pytest.mark.parametrize("case", CASES)
def test_every_column_of_every_phase_is_what_the_runtime_allocates(job_with: Any, case: dict[str, Any]) -> None:
    """To the byte except scalars and the gradient norms of single tensors, on every distinct rank; blocks keep exactly their ledger."""
    job = job_with(case)
    norms = 16 * sum(1 for _ in job.inventory.tensors())  # a norm in fp64, and its copy in the stack of all
    for budget in build_budget(job.spec, job.inventory, job.layout).ranks:
        trace = trace_rank(job, budget.ranks[0], workspace_bytes=load_device("h200").gemm_workspace.value)
        assert trace.differences == ()
        found = RankComparison(budget, trace)
        for phase in Phase:
            allowed = SCALARS_BYTES + norms * (phase in {Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER})
            wrong = {column: pair for column, pair in found.columns(phase).items() if abs(pair.difference) > allowed}
            assert wrong == {}, (budget.ranks, phase)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(FROZEN_FIRST, id="a first block keeps nothing of its input"),
        pytest.param(FROZEN_EXPERTS, id="frozen linears are not split"),
    ],
)
def test_peaks_of_frozen_blocks_between_others(job_with: Any, case: dict[str, Any]) -> None:
    """The stage held its first block's input to the end of its forward; sums of frozen linears' gradients were planned in place."""
    compare_distinct_ranks(job_with(case))


@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "dp_shard": 2}, {"cp": 2}])
def test_no_frozen_parameter_has_a_gradient_or_state(job_with: Any, mesh: dict[str, Any]) -> None:
    """Bytes are equal by name, in every phase's peak; the adapters have both."""
    job = job_with({**EXPERTS, "model.pattern": "AEMR", "model.recurrent.num_heads": 4, "mesh": mesh})
    frozen = {name for name, tensor in job.inventory.tensors() if tensor.group is Group.FROZEN}
    trained = {name for name, _ in job.inventory.tensors()} - frozen
    rows = [row for of_phase in trace_rank(job, 0).rows.values() for row in of_phase]
    with_gradients = {row.name for row in rows if row.column is Column.GRADIENTS}
    with_state = {row.name for row in rows if row.column in (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)}
    assert with_gradients & frozen == with_state & frozen == set()
    assert with_state == trained
    sizes = {name: tensor.local_elements(mesh.get("tp", 1), 1, 1) for name, tensor in job.inventory.tensors()}
    whole = sum(sizes[name] for name in trained) * torch.float32.itemsize
    update = trace_rank(job, 0).cells[Phase.OPTIMIZER]
    assert update[Column.GRADIENTS] * mesh.get("dp_shard", 1) == whole
    assert update[Column.MATRIX_OPTIMIZER] == 0
