"""Keys that `host: {name: megatron}` refuses, each at the key that names it."""

from collections.abc import Sequence

import pytest
from megatron_hybrid import DENSE_GPT, TEXT, WHOLE, spec_of

from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.spec.load import load_spec_text


def refused(*overrides: str) -> Sequence[Diagnostic]:
    with pytest.raises(MegaplanError) as caught:
        spec_of(*overrides)
    return [item for item in caught.value.diagnostics if item.severity is Severity.ERROR]


REFUSED = {
    "model.attention={kind: mla, num_heads: 8, q_lora_rank: 8, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8, "
    "indexer: {num_heads: 4, head_dim: 8, layers: [3, 11]}}": "model.attention.indexer",
    "model.mamba={kind: mamba3, head_dim: 32}": "model.mamba.kind",
    "model.mamba.conv_kernel=3": "model.mamba.conv_kernel",
    "model.mamba.conv_bias=false": "model.mamba.conv_bias",
    "model.mlp.activation=relu2": "model.mlp.activation",
    "model.features.structure={num_categories: 4, bottleneck: 8}": "model.features.structure",
    "model.features.relation_bias={num_relations: 4}": "model.features.relation_bias",
    "schedule.kind=gpipe": "schedule.kind",
    "schedule.steps_per_update=2": "schedule.steps_per_update",
    "mesh.tp=2": "mesh.vocab_parallel",
    "sharding.reshard_after_forward=true": "sharding.reshard_after_forward",
    "precision.params=fp8": "precision.params",
    "precision.families={M: fp32}": "precision.families.M",
    "precision.grads=fp16": "precision.grads",
    "precision.reduce=bf16": "precision.reduce",
    "precision.master=bf16": "precision.master",
    "precision.moments=bf16": "precision.moments",
    "recompute.blocks={D: selective}": "recompute.blocks.D",
    "host.model=gpt": "model.pattern",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_megatron_cannot_run_is_refused_at_its_key(override: str) -> None:
    found = refused(override)
    assert (found[0].code, found[0].location.key) == ("MP902", REFUSED[override])
    assert {item.code for item in found} == {"MP902"}


@pytest.mark.parametrize(
    "override",
    [
        "mesh.pp=2", "mesh.dp_replicate=2", "optimizer.matrix=muon", "host.distributed_optimizer=false",
        "host.precision_aware_optimizer=true",
    ],
)  # fmt: skip
def test_megatron_fsdp_is_refused_where_its_buffers_are_not_priced(override: str) -> None:
    found = [item for item in refused(*DENSE_GPT, WHOLE, override) if item.location.key == "sharding.reshard_after_forward"]
    key, _, value = override.partition("=")
    said = f"{key} = {value}" if not value.startswith("{") else key
    assert [said in item.detail for item in found] == [True]
    assert found[0].hints[0] == "--set sharding.reshard_after_forward=false"


def test_recurrent_layers_are_refused() -> None:
    found = refused("model.pattern=MEMAMEMR", "model.mlp=null", "model.recurrent={kind: m2rnn, num_heads: 4, key_dim: 8, value_dim: 8}")
    assert [item.location.key for item in found] == ["model.recurrent"]


def test_features_of_unlike_mtp_are_refused() -> None:
    found = refused("model.features.mtp={depth: 1, ffn_hidden_size: 128}")
    assert {item.location.key for item in found} == {"model.mlp.activation", "model.features.mtp.ffn_hidden_size"}


@pytest.mark.parametrize(
    "feature",
    ["distillation", "fsdp", "optimizer_cuda_graph"],
)
def test_what_is_not_priced_is_refused_by_name(feature: str) -> None:
    (found,) = refused(f"host.features=[{feature}]")
    assert found.code == "MP903"
    assert feature in found.detail


def test_a_key_of_another_host_is_refused() -> None:
    assert [item.code for item in refused("host.kernels=triton")] == ["MP901"]
    assert [item.code for item in refused("host={name: megarun, cross_entropy: te}")] == ["MP901"]


@pytest.mark.parametrize(
    "override",
    ["model.mamba.chunk_size=256", "model.mamba.time_step_min=0.001", "model.mamba.time_step_max=0.1", "model.attention.nope_layers=[3]"],
)
def test_what_changes_no_tensor_is_noted(override: str) -> None:
    (found,) = load_spec_text(TEXT, "host.yaml", [override]).diagnostics
    assert (found.code, found.severity, found.location.key) == ("MP904", Severity.NOTE, override.partition("=")[0])


def test_attention_without_any_rotation_is_megatrons_too() -> None:
    assert load_spec_text(TEXT, "host.yaml", ["model.attention.nope_layers=[3, 11]"]).diagnostics == ()


def test_what_megatron_alone_is_priced_with_is_refused_elsewhere() -> None:
    latent = "kind: mla, num_heads: 4, q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16"
    (found,) = refused("host={name: megarun}", f"model.attention={{{latent}, output_bias: true}}")
    assert (found.code, "megarun's estimate has no terms" in found.detail) == ("MP905", True)


def test_recompute_of_experts_whose_communication_is_overlapped_is_refused() -> None:
    (found,) = refused("host.recompute_modules=[moe]", "host.moe_overlap=true")
    assert (found.code, found.location.key) == ("MP902", "host.recompute_modules")
