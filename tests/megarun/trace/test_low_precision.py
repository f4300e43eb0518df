"""Linears in eight bits: the trace counts what the estimate does, under every axis, recompute and both recipes."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

from megaplan.spec.local import packed_gather

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
NARROW = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
MLA = {
    "kind": "mla",
    "num_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
}
GATED = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "bias": True, "gate": True}
DELTA = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 4, "value_dim": 8, "save_every": 8}
SELECTIVE = {"recompute": {"default": "selective"}}
EXPERTS = {"model.hidden_size": 32, "model.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 48, "shared_ffn_hidden_size": 16}}
OPTIONS = {
    "model.moe.activation": "swiglu",
    "model.moe.bias": True,
    "model.moe.swiglu_limit": 7.0,
    "model.moe.shared_gate": True,
    "host": {"kernels": "reference"},
}
LATENT = {"model.moe.latent_size": 16, "model.moe.activation": "relu2", "model.moe.balance_loss_coefficient": 0.01}
FULL = {"recompute": {"blocks": {"A": "full", "D": "full"}}}
LOCAL = {"model.hidden_size": 32, "model.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 48}}


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise"])
@pytest.mark.parametrize(
    ("pattern", "settings", "precision", "recipe"),
    [
        ("AMDA", {"mesh": {"tp": 2}}, BF16, {}),
        pytest.param("AMDA", {"mesh": {"tp": 2}, **SELECTIVE}, NARROW, {}, marks=pytest.mark.slow),
        ("AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}}, BF16, {"format": "e4m3"}),
        ("AMDA", {"mesh": {"cp": 2}, "data.packing": "documents", **FULL}, BF16, {"first_last_bf16": (1, 0)}),
        pytest.param(
            "GD", {"mesh": {"tp": 2, "dp_shard": 2}, "model.linear_attention": DELTA, **SELECTIVE}, NARROW, {}, marks=pytest.mark.slow
        ),
        pytest.param("AD", {"mesh": {"tp": 2}, "model.attention": MLA, "data.packing": "documents"}, BF16, {}, marks=pytest.mark.slow),
        pytest.param(
            "AD",
            {"model.attention": GATED, "model.norm_placement": "post", **SELECTIVE},
            BF16,
            {"format": "hybrid"},
            marks=pytest.mark.slow,
        ),
        pytest.param("AED", {"mesh": {"dp_shard": 2, "ep": 2}}, BF16, {"families": ("A", "D")}, marks=pytest.mark.slow),
        ("AEE", {"mesh": {"dp_shard": 2, "ep": 2}, **EXPERTS, "host": {"kernels": "triton"}}, BF16, {}),
        ("AEE", EXPERTS | OPTIONS, NARROW, {"format": "hybrid"}),
        ("AEE", {"mesh": {"tp": 2}, **EXPERTS, **SELECTIVE}, BF16, {}),
        pytest.param("AEE", {"mesh": {"tp": 2, "ep": 2}, **EXPERTS, **LATENT}, BF16, {}, marks=pytest.mark.slow),
        pytest.param(
            "EDEA",
            {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"num_microbatches": 3}, **EXPERTS, **SELECTIVE},
            NARROW,
            {"families": ("E",)},
            marks=pytest.mark.slow,
        ),
        pytest.param("AEE", {"mesh": {"cp": 2, "ep": 2}, **EXPERTS, **OPTIONS}, BF16, {}, marks=pytest.mark.slow),
        ("DED", {**LOCAL, **SELECTIVE, "model.streams": {"count": 3, "mixing": "independent"}}, BF16, {}),
    ],
    ids=[
        *("tp", "tp-selective", "pp-dp", "cp-packed-full", "delta", "latent", "gated-post-norm", "with-experts"),
        *("ep", "experts-options", "experts-tp-selective", "experts-latent", "experts-pp-selective", "experts-cp-options"),
        "experts-streams-selective",
    ],
)
def test_estimate_is_what_the_runtime_allocates(
    job_with: Callable[..., Any], pattern: str, settings: dict[str, Any], precision: dict[str, Any], recipe: dict[str, Any], name: str
) -> None:
    """Traces equal estimates, for every distinct rank, in every column but scalars; a block keeps the storages that its ledger lists."""
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    job = job_with({**model, "precision": {**precision, "recipe": {"name": name, **recipe}}, **settings})
    compare_distinct_ranks(job)


@pytest.mark.parametrize(
    ("name", "pattern", "settings", "precision"),
    [
        ("mxfp8", "AMDA", {"mesh": {"tp": 2}}, BF16),
        ("nvfp4", "AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, **SELECTIVE}, NARROW),
        ("mxfp8", "AEE", EXPERTS | OPTIONS, NARROW),
        ("nvfp4", "AEE", {"mesh": {"dp_shard": 2, "ep": 2}, **EXPERTS}, BF16),
        ("fp8_blockwise", "AMDA", {"mesh": {"tp": 2}}, BF16),
        pytest.param("fp8_blockwise", "AEE", EXPERTS | OPTIONS, NARROW, marks=pytest.mark.slow),
        pytest.param("fp8_blockwise", "AEE", {"mesh": {"dp_shard": 2, "ep": 2}, **EXPERTS}, BF16, marks=pytest.mark.slow),
        pytest.param(
            "fp8_blockwise",
            "AMDR",
            {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, **SELECTIVE},
            NARROW,
            marks=pytest.mark.slow,
        ),
        pytest.param("nvfp4", "AMDA", {"mesh": {"tp": 2}, **SELECTIVE}, BF16, marks=pytest.mark.slow),
        pytest.param("mxfp8", "AEE", {"mesh": {"tp": 2, "ep": 2}, **EXPERTS, **SELECTIVE, **LATENT}, BF16, marks=pytest.mark.slow),
        pytest.param("nvfp4", "AD", {"mesh": {"cp": 2}, "data.packing": "documents", **FULL}, BF16, marks=pytest.mark.slow),
    ],
    ids=[
        *("tp", "pp-dp-selective", "experts-options", "experts-ep"),
        *("blocks-tp", "blocks-experts-options", "blocks-experts-ep", "blocks-pp-dp-selective"),
        *("tp-selective", "experts-tp-ep-selective", "cp-packed-full"),
    ],
)
def test_scales_of_blocks_are_counted(
    job_with: Callable[..., Any], name: str, pattern: str, settings: dict[str, Any], precision: dict[str, Any]
) -> None:
    """Emulated products hold values in fp32; what is kept has the formats' bytes."""
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    compare_distinct_ranks(job_with({**model, "precision": {**precision, "recipe": {"name": name}}, **settings}))


DELTA = {"kind": "gated_delta", "num_key_heads": 3, "num_value_heads": 3, "key_dim": 16, "value_dim": 16, "chunk_size": 8}
WIDE_TOKENS: dict[str, Any] = {
    "model.linear_attention": {**DELTA, "save_every": 32}, "model.hidden_size": 768, "model.vocab_size": 63,
    "mesh": {"tp": 3, "dp_shard": 3}, "batch": {"micro_batch_size": 1, "seq_length": 192}, "sharding": {"wrap": "stage"},
}  # fmt: skip
DELAYED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp-selective": ("AMDA", {"mesh": {"tp": 2}, **SELECTIVE}, NARROW, {}),
    "pp-dp": ("AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}}, BF16, {"format": "e4m3", "amax_history": 3}),
    "cp-packed-full": ("AMDA", {"mesh": {"cp": 2}, "data.packing": "documents", **FULL}, BF16, {"first_last_bf16": (1, 0)}),
    "experts-ep": ("AEE", {"mesh": {"dp_shard": 2, "ep": 2}, **EXPERTS, "host": {"kernels": "triton"}}, BF16, {}),
    "experts-options": ("AEE", EXPERTS | OPTIONS, NARROW, {"format": "hybrid", "amax_compute": "most_recent"}),
    "tp-quantises-most": ("GG", WIDE_TOKENS, BF16, {}),
    "experts-tp-selective": ("AEE", {"mesh": {"tp": 2}, **EXPERTS, **SELECTIVE}, BF16, {"families": ("E",)}),
}


LATE = {"model.vocab_size": 32, "batch": {"micro_batch_size": 2, "seq_length": 128}}
WIDE_HEADS = MLA | {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32}
LATENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rows": ("fp8_rowwise", {}, BF16),
    "rows-wide": ("fp8_rowwise", {"model.attention": WIDE_HEADS | {"kv_lora_rank": 256}}, NARROW),
    "current-tp-selective": ("fp8_current", {"mesh": {"tp": 2}, **SELECTIVE}, BF16),
    "current-dp-packed": ("fp8_current", {"mesh": {"dp_shard": 2}, "precision.recipe.param_gather": True}, BF16),
    "rows-dp-packed": ("fp8_rowwise", {"mesh": {"dp_shard": 2}, "precision.recipe.param_gather": True}, BF16),
    "delayed-full": ("fp8_delayed", {"recompute": {"default": "full"}}, BF16),
    "mx-tp": ("mxfp8", {"mesh": {"tp": 2}}, BF16),
    "blocks": ("fp8_blockwise", {"model.attention": WIDE_HEADS, "batch.seq_length": 256}, BF16),
    "blocks-narrow-tp": ("fp8_blockwise", {"mesh": {"tp": 2}, "batch.seq_length": 256}, BF16),
    "blocks-narrow-packed": (
        "fp8_blockwise",
        {"model.attention": WIDE_HEADS | {"v_head_dim": 16, "num_heads": 8}, "precision.recipe.param_gather": True},
        BF16,
    ),
    "nv-selective": ("nvfp4", SELECTIVE, BF16),
    "nv-dp-packed": (
        "nvfp4",
        {"model.attention": WIDE_HEADS, "mesh": {"dp_shard": 2}, "precision.recipe.param_gather": True},
        BF16,
    ),
    "nv-odd-heads": ("nvfp4", {"model.attention": MLA | {"qk_nope_head_dim": 6, "v_head_dim": 5}, "data.packing": "documents"}, NARROW),
    "mx-wide": ("mxfp8", {"model.attention": MLA | {"kv_lora_rank": 256}}, BF16),
    "blocks-dp-packed": (
        "fp8_blockwise",
        {"model.attention": WIDE_HEADS, "mesh": {"dp_shard": 2}, "precision.recipe.param_gather": True},
        BF16,
    ),
    "rows-kernels": ("fp8_rowwise", {"host": {"kernels": "triton"}}, BF16),
    "rows-first": ("fp8_rowwise", {"precision.recipe.first_last_bf16": (1, 1), "data.packing": "documents"}, BF16),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name == "rows" else pytest.mark.slow) for name in LATENTS])
def test_gathered_latents_that_expand_in_eight_bits_are_counted(job_with: Callable[..., Any], case: str) -> None:
    """The gradients of all heads' keys and values are there for the rank's own tokens, and multiply when the last group is done."""
    name, settings, precision = LATENTS[case]
    mesh = {"cp": 2, "context_exchange": "latents", **settings.get("mesh", {})}
    model = {"model.pattern": "A", "model.num_layers": 3, "model.attention": MLA, "precision": {**precision, "recipe": {"name": name}}}
    job = job_with({**model, **LATE, **settings, "mesh": mesh})
    compare_distinct_ranks(job)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("experts-options", "tp-quantises-most") else pytest.mark.slow) for name in DELAYED]
)
def test_histories_and_given_scales_are_counted(job_with: Callable[..., Any], case: str) -> None:
    """Numbers and histories of every product's operands stay; a copy needs no maximum."""
    pattern, settings, precision, recipe = DELAYED[case]
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    compare_distinct_ranks(job_with({**model, "precision": {**precision, "recipe": {"name": "fp8_delayed", **recipe}}, **settings}))


SPLIT: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rows-zbv-tp": ("fp8_rowwise", "AMDA", {"mesh": {"pp": 2, "vpp": 2, "tp": 2}, "schedule": {"kind": "zbv"}}, BF16, {}),
    "current-zero-bubble": (
        "fp8_current",
        "AMDR",
        {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_zero_bubble"}},
        NARROW,
        {},
    ),
    "current-dualpipev-tp-selective": (
        "fp8_current",
        "AMDA",
        {"mesh": {"pp": 2, "vpp": 2, "tp": 2}, "schedule": {"kind": "dualpipev"}, **SELECTIVE},
        BF16,
        {"format": "hybrid"},
    ),
    "rows-dualpipe-experts": (
        "fp8_rowwise",
        "AEED",
        {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"kind": "dualpipe"}, **EXPERTS},
        BF16,
        {},
    ),
    "blocks-zbv-full-biased": (
        "fp8_blockwise",
        "ADAD",
        {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv"}, "model.attention": GATED, "model.mlp.bias": True, **FULL},
        BF16,
        {},
    ),
    "current-zbv-weights": (
        "fp8_current",
        "DD",
        {
            "mesh": {"pp": 2, "vpp": 2},
            "schedule": {"kind": "zbv", "num_microbatches": 1},
            "model.num_layers": 4,
            "model.hidden_size": 256,
            "model.vocab_size": 64,
            "model.mlp": {"ffn_hidden_size": 1024, "activation": "swiglu"},
            "batch": {"micro_batch_size": 1, "seq_length": 16},
        },
        BF16,
        {},
    ),
    "mx-zbv-ends-packed": (
        "mxfp8",
        "AMDADD",
        {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}, "schedule": {"kind": "zbv"}},
        BF16,
        {"first_last_bf16": (1, 2), "param_gather": True},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("rows-zbv-tp", "current-zbv-weights") else pytest.mark.slow) for name in SPLIT]
)
def test_a_split_backward_keeps_copies_for_w(job_with: Callable[..., Any], case: str) -> None:
    """W keeps each linear's copy of its input with the scales, gathers it under TP, and makes all gradients of a call at once."""
    name, pattern, settings, precision, recipe = SPLIT[case]
    model = {**WIDE, "model.pattern": pattern, "model.num_layers": len(pattern)}
    settings = {**settings, "schedule": {"num_microbatches": 4, **settings["schedule"]}}
    compare_distinct_ranks(job_with({**model, "precision": {**precision, "recipe": {"name": name, **recipe}}, **settings}))


WIDE = {"model.hidden_size": 64, "model.mlp": {"ffn_hidden_size": 192}}
RESHARD = {"sharding.reshard_after_forward": True}
PARTS = RESHARD | {"sharding.reshard_size": 2}
BANKS = {"model.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}}
GATHERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "current": ("fp8_current", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, BF16, {}),
    "current-kept-narrow": ("fp8_current", "AMDA", {"mesh": {"dp_shard": 2, "tp": 2}}, NARROW, {"first_last_bf16": (1, 0)}),
    "current-uneven": ("fp8_current", "ADDA", {"mesh": {"dp_shard": 5}, **RESHARD}, BF16, {}),
    "rows": ("fp8_rowwise", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, BF16, {}),
    "rows-kept-narrow": ("fp8_rowwise", "AMDA", {"mesh": {"dp_shard": 2, "tp": 2}}, NARROW, {"first_last_bf16": (1, 0)}),
    "rows-uneven": ("fp8_rowwise", "ADDA", {"mesh": {"dp_shard": 5}, **RESHARD}, BF16, {}),
    "rows-full": ("fp8_rowwise", "ADAD", {"mesh": {"dp_shard": 2}, **RESHARD, **FULL}, BF16, {"families": ("A",)}),
    "rows-parts": ("fp8_rowwise", "DDAD", {"mesh": {"dp_shard": 4}, **PARTS}, BF16, {}),
    "rows-pp": ("fp8_rowwise", "AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, **RESHARD}, BF16, {}),
    "rows-wide": ("fp8_rowwise", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, dict.fromkeys(NARROW, "fp32"), {}),
    "mx-ends": ("mxfp8", "AMDADD", {"mesh": {"dp_shard": 2}, **RESHARD}, BF16, {"first_last_bf16": (1, 2)}),
    "mx-kept": ("mxfp8", "AMDA", {"mesh": {"dp_shard": 2}}, BF16, {}),
    "mx-full": ("mxfp8", "ADAD", {"mesh": {"dp_shard": 2}, **RESHARD, **FULL}, BF16, {"families": ("A",)}),
    "mx-parts": ("mxfp8", "DDAD", {"mesh": {"dp_shard": 4}, **PARTS, "model.mlp": {"ffn_hidden_size": 256}}, BF16, {}),
    "mx-pp": ("mxfp8", "AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, **RESHARD}, BF16, {}),
    "nv": ("nvfp4", "AMDR", {"mesh": {"dp_shard": 2}, **RESHARD, "schedule.num_microbatches": 2}, BF16, {}),
    "nv-parts": ("nvfp4", "AMDA", {"mesh": {"dp_shard": 4}, **PARTS}, NARROW, {}),
    "delayed": ("fp8_delayed", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, BF16, {}),
    "delayed-uneven": ("fp8_delayed", "ADDA", {"mesh": {"dp_shard": 5}, **RESHARD}, BF16, {"amax_history": 7}),
    "delayed-banks-narrow": ("fp8_delayed", "EDE", {"mesh": {"dp_shard": 4, "ep": 2}, **BANKS}, NARROW, {}),
    "nv-experts": ("nvfp4", "AED", {"mesh": {"dp_shard": 2, "ep": 2}, "model.moe": EXPERTS["model.moe"], **RESHARD}, BF16, {}),
    "current-banks": ("fp8_current", "AED", {"mesh": {"dp_shard": 4, "ep": 2}, **BANKS, **RESHARD}, BF16, {}),
    "rows-banks": ("fp8_rowwise", "AED", {"mesh": {"dp_shard": 2}, **BANKS, **RESHARD}, BF16, {}),
    "rows-banks-parts": ("fp8_rowwise", "EDE", {"mesh": {"dp_shard": 8, "ep": 2}, **BANKS, **PARTS}, BF16, {}),
    "rows-banks-narrow": ("fp8_rowwise", "EDE", {"mesh": {"dp_shard": 4, "ep": 2}, **BANKS}, NARROW, {}),
    "mx-banks": ("mxfp8", "AED", {"mesh": {"dp_shard": 4, "ep": 2}, **BANKS, **RESHARD}, BF16, {}),
    "nv-banks-pp": ("nvfp4", "AEDE", {"mesh": {"pp": 2, "dp_shard": 4, "ep": 2}, "schedule.num_microbatches": 4, **BANKS}, BF16, {}),
    "blocks": ("fp8_blockwise", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, BF16, {"first_last_bf16": (1, 0)}),
    "blocks-kept-narrow": ("fp8_blockwise", "AMDA", {"mesh": {"dp_shard": 2, "tp": 2}}, NARROW, {}),
    "blocks-uneven": ("fp8_blockwise", "ADDA", {"mesh": {"dp_shard": 5}, **RESHARD}, BF16, {}),
    "blocks-parts": ("fp8_blockwise", "DDAD", {"mesh": {"dp_shard": 4}, **PARTS}, BF16, {}),
    "blocks-banks-pp": (
        "fp8_blockwise",
        "AEDE",
        {"mesh": {"pp": 2, "dp_shard": 4, "ep": 2}, "schedule.num_microbatches": 4, **BANKS},
        BF16,
        {},
    ),
    "blocks-wide": ("fp8_blockwise", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, dict.fromkeys(NARROW, "fp32"), {}),
    "nv-wide": ("nvfp4", "AMDA", {"mesh": {"dp_shard": 2}, **RESHARD}, dict.fromkeys(NARROW, "fp32"), {}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in ("mx-ends", "nv-parts", "rows", "blocks-uneven", "delayed") else pytest.mark.slow)
        for name in GATHERS
    ],
)
def test_packed_gathers_are_counted(job_with: Callable[..., Any], case: str) -> None:
    """Weights of layers that a recipe covers, if shards have whole blocks; the bytes that are packed, and those while they are."""
    name, pattern, settings, precision, recipe = GATHERS[case]
    model = {**WIDE, "model.pattern": pattern, "model.num_layers": len(pattern)}
    job = job_with({**model, "precision": {**precision, "recipe": {"name": name, "param_gather": True, **recipe}}, **settings})
    assert packed_gather(job.spec) is not None
    compare_distinct_ranks(job)


HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "joined": ("fp8_current", {"host": {"kernels": "triton"}}, BF16),
    "rows-tp-vocabulary": ("fp8_rowwise", {"mesh": {"tp": 2, "vocab_parallel": True}}, BF16),
    "delayed-joined": ("fp8_delayed", {"host": {"kernels": "triton"}}, BF16),
    "delayed-joined-tied": ("fp8_delayed", {"host": {"kernels": "triton"}, "model.tie_embeddings": True}, NARROW),
    "delayed-tp-vocabulary": ("fp8_delayed", {"mesh": {"tp": 2, "vocab_parallel": True}}, BF16),
    "separate-rows": ("fp8_rowwise", {"host": {"kernels": "reference"}}, BF16),
    "separate-tp-vocabulary": ("fp8_current", {"mesh": {"tp": 2, "vocab_parallel": True}, "host": {"kernels": "reference"}}, BF16),
    "separate-capped-tp": ("mxfp8", {"mesh": {"tp": 2}, "model.logits_cap": 30.0}, NARROW),
    "mx-tied-pp": ("mxfp8", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}, "model.tie_embeddings": True}, BF16),
    "blocks-wide": ("fp8_blockwise", {"mesh": {"dp_shard": 2}}, dict.fromkeys(NARROW, "fp32")),
    "nv-depths": ("nvfp4", {"model.features": {"mtp": {"depth": 2, "ffn_hidden_size": 48}}}, BF16),
    "rows-depths-separate": (
        "fp8_rowwise",
        {"model.features": {"mtp": {"depth": 2, "ffn_hidden_size": 48}}, "host": {"kernels": "reference"}},
        BF16,
    ),
    "depths-vocabulary-separate": (
        "fp8_current",
        {
            "model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 48, "normed_input": True}},
            "mesh": {"tp": 2, "vocab_parallel": True},
            "host": {"kernels": "reference"},
        },
        NARROW,
    ),
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("pattern", ["AD"])
def test_heads_are_counted(job_with: Callable[..., Any], case: str, pattern: str) -> None:
    name, settings, precision = HEADS[case]
    model = {"model.pattern": pattern, "model.num_layers": 2}
    compare_distinct_ranks(job_with({**model, "precision": {**precision, "recipe": {"name": name, "head": True}}, **settings}))


WINDOWED = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window_size": 6, "score_cap": 20.0, "gate": True}
ATTENTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp": ("AMDA", {"mesh": {"tp": 2}}, BF16, {}),
    "selective-narrow": ("ADAD", SELECTIVE, NARROW, {"format": "e4m3"}),
    "packed-pp-full": ("ADAD", {"mesh": {"pp": 2}, "schedule": {"num_microbatches": 4}, "data.packing": "documents", **FULL}, BF16, {}),
    "latent": ("ADA", {"model.attention": MLA, "data.packing": "documents"}, BF16, {}),
    "latent-tp-selective": ("ADA", {"model.attention": MLA, "mesh": {"tp": 2}, **SELECTIVE}, BF16, {}),
    "window-gate": ("ADA", {"model.attention": WINDOWED, "host": {"kernels": "triton"}}, BF16, {"first_last_bf16": (1, 0)}),
    "window-gate-reference-selective": ("ADA", {"model.attention": WINDOWED, "host": {"kernels": "reference"}, **SELECTIVE}, BF16, {}),
    "gather-wide": ("ADA", {"mesh": {"dp_shard": 2}, **RESHARD}, dict.fromkeys(NARROW, "fp32"), {"param_gather": True}),
    "norms": ("ADA", {"model.attention": GATED | {"qk_norm": True}, "host": {"kernels": "triton"}}, BF16, {"families": ("A",)}),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_in_eight_bits_is_counted(job_with: Callable[..., Any], case: str) -> None:
    """Queries, keys and values are kept in eight bits, the output where another operation keeps it."""
    pattern, settings, precision, recipe = ATTENTIONS[case]
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    given = {"name": "fp8_current", "attention": True, **recipe}
    compare_distinct_ranks(job_with({**model, "precision": {**precision, "recipe": given}, **settings}))
