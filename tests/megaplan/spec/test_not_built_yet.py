"""Planned features that are not built are reported in one note, at their key."""

import pytest
from spec_samples import Accepted

from megaplan.errors import Severity
from megaplan.spec.not_built_yet import megarun_refuses

MLA = "{kind: mla, num_heads: 4, q_lora_rank: null, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8}"
BUILT = [
    "mesh.pp=5", "mesh.tp=2", "mesh.ep=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "precision.params=fp32", "optimizer.matrix=adamw",
    "model.attention.window_size=64", "model.attention.nope_layers=[5]", "sharding.reshard_after_forward=true", "host.kernels=triton",
    f"model.attention={MLA}", "model.mamba={kind: mamba3, head_dim: 16}", "recompute.default=selective", "recompute.blocks={A: full}",
    "model.features.mtp={depth: 1, ffn_hidden_size: 64}", "model.features.mtp={depth: 1, ffn_hidden_size: 8, activation: gelu, bias: true}",
    "model.features.ngram={num_tables: 2, num_rows: 64, dim: 4}",
    "model.features.platform={num_categories: 4, bottleneck: 8}",
    "precision.recipe={name: fp8_rowwise, families: [A, M, D]}", "precision.recipe={name: fp8_current}",
    "precision.recipe={name: fp8_delayed, families: [A], param_gather: true, head: true, first_last_bf16: [0, 1]}",
    "precision.recipe={name: fp8_current, families: [A], first_last_bf16: [0, 1]}",
    "model.features.structure={num_categories: 25, bottleneck: 8}", "model.moe.balance_loss_coefficient=0.01", "mesh.cp=2",
    "mesh.etp=2",
    "sharding.mode=ddp", "model.moe.bias=true", "model.moe.swiglu_limit=7.0", "model.mlp.activation=geglu", "model.attention.sinks=true",
    "model.mlp.activation=relu2glu",
    "model.moe.score=sigmoid", "model.moe.score_correction=true", "model.moe.capacity_factor=0.9",
    "model.moe.router_bias=true", "model.moe.latent_size=32",
    "precision.params=fp16", "precision.families={M: fp32, E: fp16}",
]  # fmt: skip
NOT_BUILT = {
    "precision.params=fp8": "precision.params = fp8; megarun trains with fp32, bf16 or, without a recipe, fp16",
    "precision.grads=fp16": "precision.grads = fp16; megarun trains with fp32 or bf16",
    "precision.families={E: fp8}": "precision.families = E: fp8; megarun trains with fp32, bf16 or fp16",
}


@pytest.mark.parametrize("override", BUILT)
def test_what_is_built_is_silent(accepted: Accepted, override: str) -> None:
    assert accepted(overrides=[override, "schedule.num_microbatches=5"]).diagnostics == ()


def test_every_family_is_built_over_a_context_group(accepted: Accepted) -> None:
    for mamba in (
        "kind: mamba1, bias: true, inner_norm: scaled",
        "kind: mamba1, inner_norm: plain, inner_norm_eps: 1e-6",
        "kind: mamba2, head_dim: 16",
        "kind: mamba3, head_dim: 16",
    ):
        overrides = ["mesh.cp=2", "recompute.default=selective", f"model.mamba={{{mamba}}}"]
        assert megarun_refuses(accepted(overrides=overrides).spec) == ()


def test_interleaved_stages_are_built(accepted: Accepted) -> None:
    overrides = ["mesh.vpp=2", "schedule.kind=interleaved_1f1b"]
    assert megarun_refuses(accepted(overrides=overrides).spec) == ()


@pytest.mark.parametrize("override", NOT_BUILT)
def test_what_is_not_built_is_noted_at_its_key(accepted: Accepted, override: str) -> None:
    (found,) = accepted(overrides=[override]).diagnostics
    assert (found.code, found.severity, found.detail) == ("MP790", Severity.NOTE, NOT_BUILT[override])
    assert found.location.file == f"--set {override}"


def test_a_recipe_is_built_under_every_schedule(accepted: Accepted) -> None:
    recipe = "precision.recipe={name: fp8_current, families: [A]}"
    assert megarun_refuses(accepted(overrides=[recipe, "mesh.vpp=2", "schedule.kind=zbv"]).spec) == ()


DTYPES = {
    "precision.reduce=bf16": ("MP602", "precision.reduce = bf16, precision.grads = fp32, mesh.pp = 5"),
    "precision.master=bf16": ("MP603", "precision.moments = fp32, precision.master = bf16"),
}


def test_short_convolutions_are_built(accepted: Accepted) -> None:
    overrides = ["model.num_layers=6", "mesh.pp=1", "model.short_convolution={conv_kernel: 3, bias: true}"]
    assert megarun_refuses(accepted(("AMERD", "AMERDC"), overrides=overrides).spec) == ()


@pytest.mark.parametrize(
    "section",
    ["{kind: kda, num_heads: 4, head_dim: 8}", "{kind: gated_delta, num_key_heads: 2, num_value_heads: 4, key_dim: 8, value_dim: 8}"],
)
def test_linear_attention_is_built(accepted: Accepted, section: str) -> None:
    overrides = ["model.num_layers=6", "mesh.pp=1", f"model.linear_attention={section}"]
    assert megarun_refuses(accepted(("AMERD", "AMERDG"), overrides=overrides).spec) == ()


def test_a_relation_bias_is_built_where_no_layer_chooses_keys(accepted: Accepted) -> None:
    relations = "model.features.relation_bias={num_relations: 4}"
    assert megarun_refuses(accepted(overrides=[relations]).spec) == ()
    widths = "q_lora_rank: 8, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8"
    attention = f"model.attention={{kind: mla, num_heads: 4, {widths}, indexer: {{num_heads: 2, head_dim: 6, layers: [0], top_k: 5}}}}"
    (found,) = megarun_refuses(accepted(overrides=[relations, attention]).spec)
    assert found.detail == (
        "model.features.relation_bias = given, with model.attention.indexer; megarun trains with null, or no model.attention.indexer"
    )


LATE = "{kind: mla, num_heads: 4, q_lora_rank: 32, kv_lora_rank: 32, qk_nope_head_dim: %d, qk_rope_head_dim: 8, v_head_dim: %d}"


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_delayed", "mxfp8", "fp8_blockwise", "nvfp4"])
def test_latents_are_gathered_with_every_recipe(accepted: Accepted, name: str) -> None:
    device = "device.name=b200" if name in ("mxfp8", "nvfp4") else "device.name=h200"
    late = [f"model.attention={LATE % (8, 8)}", "mesh.cp=2", "mesh.context_exchange=latents", device]
    assert megarun_refuses(accepted(overrides=[*late, f"precision.recipe={{name: {name}, families: [A]}}"]).spec) == ()


def test_sinks_are_built_where_layers_choose_keys(accepted: Accepted) -> None:
    chooses = "indexer: {num_heads: 2, head_dim: 8, layers: [0], top_k: 4}"
    assert megarun_refuses(accepted(overrides=[f"model.attention={LATE[:-1] % (8, 8)}, sinks: true, {chooses}}}"]).spec) == ()


def test_latents_are_gathered_with_adapters_packed_bases_and_sinks(accepted: Accepted) -> None:
    late = [f"model.attention={LATE[:-1] % (8, 8)}, sinks: true}}", "mesh.cp=2", "mesh.context_exchange=latents"]
    for lora in ("{rank: 2, alpha: 2.0}", "{rank: 2, alpha: 2.0, base: nf4, base_block: 4, families: [o_proj]}"):
        assert megarun_refuses(accepted(overrides=[*late, f"lora={lora}"]).spec) == ()


@pytest.mark.parametrize("override", DTYPES)
def test_dtypes_that_torch_would_not_keep_are_noted(accepted: Accepted, override: str) -> None:
    """Keys that megarun refuses at launch are known when the spec is planned."""
    (found,) = accepted(overrides=["mesh.pp=5", "schedule.num_microbatches=5", override]).diagnostics
    assert (found.code, found.detail) == DTYPES[override]
    assert found.severity is Severity.NOTE
    assert found.hints[0].startswith("megaplan split SPEC --set precision.")


def test_all_of_it_is_one_note(accepted: Accepted) -> None:
    overrides = ["precision.grads=fp16", "precision.families={M: fp8}"]
    (found,) = megarun_refuses(accepted(overrides=overrides).spec)
    assert found.detail.splitlines() == [
        "precision.grads = fp16; megarun trains with fp32 or bf16",
        "precision.families = M: fp8; megarun trains with fp32, bf16 or fp16",
    ]
