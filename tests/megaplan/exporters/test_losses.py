"""Nothing is dropped in silence: whatever changes in a spec changes the exported file, or is told by its key."""

import json
from collections.abc import Sequence

import pytest
import yaml
from megatron_hybrid import MODEL

from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.exporters.hosts import EXPORTERS
from megaplan.exporters.values import Exported, Source
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec_text

HYBRID = f"""
format: megaplan.spec/1
name: hybrid{MODEL}mesh: {{pp: 2, dp_shard: 4, tp: 2, vocab_parallel: true}}
schedule: {{num_microbatches: 8}}
batch: {{micro_batch_size: 2, seq_length: 512}}
optimizer: {{matrix: adamw}}
split: {{mode: equal}}
training: {{rate_schedule: {{kind: cosine}}}}
"""
DENSE = HYBRID.replace("MEMAMEMD", "AD")
EXPERTS = HYBRID.replace("MEMAMEMD", "AE")
for _letter, _section in (("M", "mamba"), ("E", "moe")):
    DENSE = "\n".join(line for line in DENSE.splitlines() if not line.startswith(f"  {_section}:"))
for _section in ("mamba", "mlp"):
    EXPERTS = "\n".join(line for line in EXPERTS.splitlines() if not line.startswith(f"  {_section}:"))
TEXTS = {"hybrid": HYBRID, "dense": DENSE, "experts": EXPERTS}

CHANGES = [
    "model.hidden_size=512", "model.vocab_size=2048", "model.tie_embeddings=true", "model.norm_eps=1.0e-6",
    "model.attention.num_heads=4", "model.attention.num_kv_heads=2", "model.attention.head_dim=64",
    "model.attention.qk_norm=true", "model.attention.bias=true", "model.attention.window_size=128",
    "model.attention.rope_theta=500000.0", "model.attention.rope_theta=500000.5", "mesh.pp=4", "mesh.dp_shard=2",
    "mesh.dp_replicate=2", "mesh.cp=2", "mesh.tp=4", "mesh.vocab_parallel=false", "sharding.reshard_after_forward=true",
    "schedule.kind=gpipe", "schedule.num_microbatches=16", "schedule.steps_per_update=2", "batch.micro_batch_size=4",
    "batch.seq_length=1024", "data.packing=documents", "precision.params=fp32", "precision.grads=bf16", "precision.master=bf16",
    "precision.moments=bf16", "precision.reduce=bf16", "optimizer.matrix=muon",
    "optimizer.matrix=muon>>optimizer.newton_schulz_dtype=fp32", "optimizer.matrix=muon>>optimizer.newton_schulz_steps=6",
    "recompute.default=selective", "recompute.blocks={A: full}", "host.kernels=reference", "training.steps=2000", "training.seed=1",
    "training.learning_rate=1.0e-3", "training.weight_decay=0.2", "training.gradient_clip=null", "training.gradient_clip=0.5",
    "training.muon_learning_rate=1.0e-2", "training.rate_schedule.warmup_steps=7", "training.rate_schedule.final_fraction=0.5",
    "training.rate_schedule={kind: wsd, decay_steps: 100, decay: sqrt}", "training.rate_schedule={kind: constant}",
    "mesh={pp: 2, vpp: 2, dp_shard: 4, tp: 2, vocab_parallel: true}|schedule.kind=interleaved_1f1b",
    "mesh.vpp=2|schedule.kind=zbv", "split={mode: manual, spans: [[0, 6], [6, 16]], reason: test}",
]  # fmt: skip
OF_HYBRID = [
    "model.mamba.expand=4", "model.mamba.num_heads=32", "model.mamba.head_dim=64", "model.mamba.state_dim=32",
    "model.mamba.num_groups=2", "model.mamba.conv_kernel=3", "model.mamba.conv_bias=false", "model.mamba.chunk_size=64",
    "model.mamba.time_step_min=0.001", "model.mamba.time_step_max=0.2",
    "model.mamba={kind: mamba3, head_dim: 32, num_groups: 4}", "model.moe.num_experts=16", "model.moe.top_k=4",
    "model.moe.ffn_hidden_size=512", "model.moe.shared_ffn_hidden_size=0", "model.moe.activation=relu2",
    "model.moe.normalize_top_k=false", "model.moe.capacity_factor=1.5",
    "model.moe.capacity_factor=1.5>>model.moe.capacity_drop=position", "model.moe.balance_loss_coefficient=0.01",
    "model.moe.z_loss_coefficient=0.01", "model.mlp.ffn_hidden_size=512", "model.mlp.activation=gelu",
    "model.attention.nope_layers=[3]", "model.features.mtp={depth: 1, ffn_hidden_size: 640}",
    "model.features.ngram={num_tables: 2, num_rows: 64, dim: 8}", "model.features.structure={num_categories: 4, bottleneck: 8}",
    "model.features.relation_bias={num_relations: 4}", "mesh.ep=2", "mesh.etp=2", "precision.families={M: fp32}",
    "model.pattern=MEMAMEDM",
]  # fmt: skip
TRANSFORMERS = ("nanotron", "maxtext")
LOOPS = ("verl", "nemo-rl")
OF_LOOPS = "\npost_training: {kind: rl, prompts: 64, samples: 8, rollout: {prompt: 100, response: 200}}\n"


def source_of(text: str, *overrides: str) -> Source:
    spec = load_spec_text(text, "spec.yaml", overrides).spec
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def exported(host: str, text: str, *overrides: str) -> Exported:
    return EXPORTERS[host](source_of(text + (OF_LOOPS if host in LOOPS else ""), *overrides))


def silent(host: str, text: str, changes: Sequence[str]) -> list[str]:
    """Changes that neither the file nor the losses show; settings before `>>` are given on both sides."""
    found = []
    for change in changes:
        before, _, after = change.rpartition(">>")
        shared, overrides = (before.split("|") if before else []), after.split("|")
        plain, other = exported(host, text, *shared), exported(host, text, *shared, *overrides)
        keys = [override.partition("=")[0] for override in overrides]
        covered = any(
            key == loss.key or key.startswith(f"{loss.key}.") or loss.key.startswith(f"{key}.") for key in keys for loss in other.losses
        )
        if other.text == plain.text and other.losses == plain.losses and not covered:
            found.append(change)
    return found


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("host", EXPORTERS)
def test_a_change_of_a_dense_model_is_written_or_told(host: str) -> None:
    assert (
        silent(host, DENSE, [*CHANGES, "model.mlp.ffn_hidden_size=512", "model.mlp.activation=relu2", "model.attention.nope_layers=[2]"])
        == []
    )


@pytest.mark.parametrize("host", [host for host in EXPORTERS if host not in TRANSFORMERS])
def test_a_change_of_a_hybrid_is_written_or_told(host: str) -> None:
    assert silent(host, HYBRID, [*CHANGES, *OF_HYBRID]) == []


@pytest.mark.parametrize("host", ["megatron", "torchtitan", "maxtext"])
def test_a_change_of_experts_is_written_or_told(host: str) -> None:
    assert (
        silent(host, EXPERTS, [*CHANGES, *(change for change in OF_HYBRID if change.startswith("model.moe")), "mesh.ep=2", "mesh.etp=2"])
        == []
    )


def test_every_key_of_torchtitans_host_is_written_or_told() -> None:
    text = DENSE + "\nhost: {name: torchtitan}\n"
    changes = [
        "host.compile_model=true", "host.compile_loss=true", "host.repeat_kv=true", "host.fsdp_ends=root",
        "host.async_tensor_parallel=true", "host.keep_pipeline_outputs=true", "host.foreach_optimizer=true",
        "recompute.default=full>>host.checkpoint_every=2", "recompute.default=selective", "host.checkpoints=halves",
        "precision.recipe={name: fp8_rowwise}",
        "precision.recipe={name: fp8_current}>>precision.recipe.param_gather=true",
    ]  # fmt: skip
    assert silent("torchtitan", text, changes) == []


def test_every_key_of_megatrons_host_is_written_or_told() -> None:
    text = HYBRID + "host: {name: megatron}\n"
    changes = [
        "attention_backend=unfused", "cross_entropy=te", "cross_entropy=te_fp32", "wgrad_fusion=false", "attention_mask=false",
        "hidden_dropout=0.0", "attention_dropout=0.0", "cublas_workspace_kib=8320", "distributed_optimizer=false",
        "precision_aware_optimizer=true", "recompute_modules=[moe_act]", "recompute_num_layers=2", "moe_dispatcher=alltoall",
        "moe_grouped_gemm=true", "moe_overlap=true", "fused_squared_relu=true", "tp_comm_overlap=true", "microbatch_group_size=4",
        "mtp_repeated=true", "moe_permute_fusion=true", "deterministic_mode=true", "moe_dispatcher=flex>>host.moe_flex_backend=hybridep",
    ]  # fmt: skip
    for host in ("megatron", *LOOPS):
        assert silent(host, text, ["recompute.blocks={A: selective}", *(f"host.{change}" for change in changes)]) == []


LOST = {
    "megatron": {
        "model.pattern=MEMAMEMR|model.mlp=null|model.recurrent={kind: m2rnn, num_heads: 4, key_dim: 8, value_dim: 8}": "model.recurrent",
        "mesh.vpp=2|schedule.kind=zbv": "schedule.kind",
        "recompute.blocks={M: selective}": "recompute.blocks.M",
        "sharding.reshard_after_forward=true": "sharding.reshard_after_forward",
        "precision.families={M: fp32}": "precision.families.M",
        "mesh.vocab_parallel=false": "mesh.vocab_parallel",
        "data.packing=documents": "data.packing",
        "training.muon_learning_rate=0.1": "training.muon_learning_rate",
        "optimizer.newton_schulz_dtype=fp32": "optimizer.newton_schulz_dtype",
    },
    "torchtitan": {
        "optimizer.matrix=muon": "optimizer.matrix",
        "recompute.blocks={A: full}": "recompute",
        "mesh.etp=2": "mesh.etp",
        "precision.moments=bf16": "precision.moments",
        "mesh.tp=2": "model.pattern",
    },
    "fsdp2": {"precision.moments=bf16": "precision.moments", "precision.reduce=bf16": "precision.reduce", "host={name: megatron}": "host"},
    "deepspeed": {
        "split={mode: manual, spans: [[0, 6], [6, 16]], reason: test}": "split",
        "mesh.vpp=2|schedule.kind=interleaved_1f1b": "mesh.vpp",
        "schedule.kind=gpipe": "schedule.kind",
        "recompute.blocks={A: full}": "recompute",
        "mesh.cp=2": "mesh.cp",
        "mesh.tp=2": "mesh.tp",
        "mesh.dp_replicate=2": "mesh.dp_replicate",
        "optimizer.matrix=muon": "optimizer.matrix",
        "precision.master=bf16": "precision.master",
        "sharding.reshard_after_forward=true": "sharding.reshard_after_forward",
        "training.rate_schedule={kind: wsd, decay_steps: 100}": "training.rate_schedule",
        "mesh.etp=2": "mesh.etp",
    },
}
LOST_OF_DENSE = {
    "nanotron": {
        "mesh.pp=2": "split",
        "mesh.vpp=2|schedule.kind=interleaved_1f1b": "mesh.vpp",
        "schedule.kind=looped_bfs|mesh.vpp=2": "schedule.kind",
        "mesh.dp_replicate=2": "mesh.dp_replicate",
        "mesh.dp_shard=4": "sharding",
        "optimizer.matrix=muon": "optimizer.matrix",
        "recompute.default=full": "recompute",
        "model.mlp.activation=relu2": "model.mlp.activation",
        "model.attention.head_dim=64": "model.attention.head_dim",
        "model.attention.rope_theta=500000.0": "model.attention.rope_theta",
        "model.attention.qk_norm=true": "model.attention.qk_norm",
        "mesh.vocab_parallel=false": "mesh.vocab_parallel",
        "precision.moments=bf16": "precision.moments",
        "mesh.cp=2": "mesh.cp",
        "training.rate_schedule={kind: wsd, decay_steps: 100, decay: sqrt}": "training.rate_schedule.decay",
    },
    "maxtext": {
        "split={mode: manual, spans: [[0, 6], [6, 16]], reason: test}": "split",
        "mesh.pp=2": "schedule.kind",
        "model.mlp.activation=relu2": "model.mlp.activation",
        "optimizer.matrix=muon": "optimizer.matrix",
        "recompute.default=selective": "recompute",
        "mesh.vocab_parallel=false": "mesh.vocab_parallel",
        "training.rate_schedule={kind: wsd, decay_steps: 100, decay: sqrt}": "training.rate_schedule.decay",
        "mesh.dp_shard=4": "sharding.reshard_after_forward",
        "data.packing=documents": "data.packing",
    },
    "torchtitan": {
        "mesh.vocab_parallel=false": "mesh.vocab_parallel",
    },
}
CASES = [(host, HYBRID, change, key) for host, cases in LOST.items() for change, key in cases.items()]
CASES += [(host, DENSE, change, key) for host, cases in LOST_OF_DENSE.items() for change, key in cases.items()]


WIDTHS = "kv_lora_rank: 64, qk_nope_head_dim: 32, qk_rope_head_dim: 16, v_head_dim: 32"
LATENT = f"model.attention={{kind: mla, num_heads: 8, q_lora_rank: null, {WIDTHS}}}"


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("host", ["megatron", "fsdp2", "deepspeed"])
def test_an_exchange_of_latents_is_lost(host: str) -> None:
    found = [exported(host, DENSE, LATENT, "mesh.cp=2", f"mesh.context_exchange={exchange}") for exchange in ("heads", "latents")]
    assert [[loss.key for loss in each.losses].count("mesh.context_exchange") for each in found] == [0, 1]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(("host", "text", "change", "key"), CASES, ids=lambda value: value if len(value) < 100 else "")
def test_a_loss_is_told_by_its_key(host: str, text: str, change: str, key: str) -> None:
    found = exported(host, text, *change.split("|"))
    assert key in {loss.key for loss in found.losses}
    assert all(loss.detail for loss in found.losses)


@pytest.mark.parametrize("host", TRANSFORMERS)
def test_a_hybrid_is_refused_by_hosts_of_transformers(host: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        exported(host, HYBRID)
    assert [item.code for item in caught.value.diagnostics] == ["MP921"]
    if host == "maxtext":  # it has latent attention
        return
    ranks = "q_lora_rank: null, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8"
    latent = f"model.attention={{kind: mla, num_heads: 8, {ranks}}}"
    with pytest.raises(MegaplanError) as caught:
        exported(host, DENSE, latent)
    assert "mla" in caught.value.diagnostics[0].detail


def test_a_pattern_that_begins_with_a_dense_layer_is_no_option() -> None:
    text = exported("megatron", DENSE, "model.pattern=DA").text
    assert "--hybrid-layer-pattern=-*-*" in text.replace("'", "")


def test_stages_of_the_plan_are_the_stages_of_the_file() -> None:
    cut = "split={mode: manual, spans: [[0, 6], [6, 16]], reason: test}"
    assert "--hybrid-layer-pattern '*-*-*-|*-*-*-*-*-'" in exported("megatron", DENSE, cut).text
    gpt = exported("megatron", DENSE + "\nhost: {name: megatron, model: gpt}", cut).text
    assert "--num-layers 8" in gpt
    assert "--pipeline-model-parallel-layout 'Et*3|t*5L'" in gpt
    titan = json.loads(exported("torchtitan", DENSE, cut).text)["parallelism"]["module_fqns_per_model_part"]
    assert titan == [
        ["tok_embeddings", *(f"layers.{index}" for index in range(3))],
        [*(f"layers.{index}" for index in range(3, 8)), "norm", "output"],
    ]
    stages = json.loads(exported("fsdp2", DENSE, cut).text)["stages"]
    assert [len(stage["modules"]) for stage in stages] == [7, 12]
    assert yaml.safe_load(exported("maxtext", DENSE, "mesh.pp=4").text)["num_layers_per_pipeline_stage"] == 2


MAXTEXT_KEYS = frozenset({
    "adam_weight_decay", "attention", "attention_bias", "attention_sink", "attention_type", "attn_logits_soft_cap", "base_emb_dim",
    "base_mlp_dim", "base_moe_mlp_dim", "base_num_decoder_layers", "base_num_kv_heads", "base_num_query_heads", "capacity_factor",
    "context", "data_shuffle_seed", "dcn_context_parallelism", "dcn_data_parallelism", "dcn_expert_parallelism", "dcn_fsdp_parallelism",
    "dcn_fsdp_transpose_parallelism", "dcn_pipeline_parallelism", "dcn_tensor_parallelism", "decoder_block", "decoder_layer_input",
    "dtype", "final_logits_soft_cap", "first_num_dense_layers", "gdn_conv_kernel_dim", "gdn_key_head_dim", "gdn_num_key_heads",
    "gdn_num_value_heads", "gdn_value_head_dim", "grad_dtype", "gradient_accumulation_steps", "gradient_clipping_threshold", "head_dim",
    "ici_context_parallelism", "ici_data_parallelism", "ici_expert_parallelism", "ici_fsdp_parallelism", "ici_fsdp_transpose_parallelism",
    "ici_pipeline_parallelism", "ici_tensor_parallelism", "indexer_head_dim", "indexer_n_heads", "indexer_topk",
    "inhomogeneous_layer_cycle_interval", "init_weights_seed", "kv_lora_rank", "learning_rate", "learning_rate_final_fraction",
    "learning_rate_schedule_steps", "load_balance_loss_weight", "local_rope_max_timescale", "logits_via_embedding", "lr_schedule_type",
    "max_target_length", "mlp_activations", "mu_dtype", "n_routing_groups", "norm_topk_prob", "normalization_layer_epsilon",
    "num_experts", "num_experts_per_tok", "num_layers_per_pipeline_stage", "num_pipeline_microbatches", "num_vocab_tiling", "opt_type",
    "optimizer_memory_host_offload", "partial_rotary_factor", "per_device_batch_size", "pipeline_fsdp_ag_once", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "quantization", "remat_policy", "rope_max_timescale", "routed_bias", "routed_scaling_factor",
    "routed_score_func", "run_name", "scan_layers", "shared_experts", "sliding_window_size", "steps", "topk_routing_group",
    "trainable_position_size", "use_indexer", "use_qk_norm", "v_head_dim", "vocab_size", "warmup_steps_fraction", "weight_dtype",
    "wsd_decay_steps_fraction", "wsd_decay_style",
})  # fmt: skip
"""Keys of base.yml at AI-Hypercomputer/maxtext, e591f30c, that an export has."""


OF_MAXTEXT = [
    "training.rate_schedule={kind: constant}",
    "training.rate_schedule={kind: wsd, decay_steps: 100}",
    "mesh={dp_shard: 8}",
    "mesh={dp_replicate: 2, dp_shard: 4}",
    "mesh={pp: 4}",
    "mesh={cp: 2, dp_shard: 2}",
    "model.attention.qk_norm=true",
    "model.attention.window_size=128",
    "optimizer.matrix=muon",
    "training.gradient_clip=null",
]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("text", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("change", OF_MAXTEXT)
def test_a_maxtext_file_has_keys_of_the_published_schema_alone(text: str, change: str) -> None:
    assert set(yaml.safe_load(exported("maxtext", text, change).text)) <= MAXTEXT_KEYS


def test_strict_writes_nothing_where_something_is_lost(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(DENSE, encoding="utf-8")
    assert run(["export", "spec.yaml", "--to", "nanotron", "--strict", "-o", "out.yaml"]) == 1
    assert "warning[MP920]" in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()
    assert run(["export", "spec.yaml", "--to", "nanotron", "-o", "out.yaml"]) == 0
    assert (tmp_path / "out.yaml").read_text(encoding="utf-8").startswith("general:")
    assert run(["export", "spec.yaml", "--to", "megatron", "--strict", "-o", "launch.sh"]) == 0
    assert run(["export", "spec.yaml", "--to", "torchtitan", "--strict", "-o", "titan.json"]) == 0  # its model is the reader's code: a note
    assert run(["export", "spec.yaml", "--to", "nowhere"]) == 2
