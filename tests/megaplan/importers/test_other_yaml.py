"""YAML of gpt-neox and of NeMo 1 that states the model: totals are those of their own modules, and defaults are theirs."""

from random import Random
from typing import Any

import pytest
import yaml

from megaplan.errors import MegaplanError
from megaplan.importers.megatron.front_ends import refuse_file
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

NEOX: dict[str, Any] = {
    "pipe-parallel-size": 1, "model-parallel-size": 1, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128,
    "max-position-embeddings": 128, "train_micro_batch_size_per_gpu": 2, "tokenizer_type": "HFTokenizer",
    "vocab_file": "data/20B_tokenizer.json", "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
}  # fmt: skip
NEMO: dict[str, Any] = {
    "mcore_gpt": True, "encoder_seq_length": 128, "max_position_embeddings": 128, "num_layers": 4, "hidden_size": 64,
    "num_attention_heads": 4, "micro_batch_size": 1, "global_batch_size": 16,
    "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
    "optim": {"name": "mcore_distributed_optim", "lr": 1e-4},
}  # fmt: skip
PADDED = 50_304
PUBLISHED = {
    "70M": (6, 512, 70_426_624), "160M": (12, 768, 162_322_944), "410M": (24, 1024, 405_334_016), "1B": (16, 2048, 1_011_781_632),
    "1.4B": (24, 2048, 1_414_647_808), "2.8B": (32, 2560, 2_775_208_960),
}  # fmt: skip
"""Layers, width and parameters of Pythia models: arXiv:2304.01373, table 1, and their model cards."""


def spec_of(document: dict[str, Any], gpus: int = 1) -> Spec:
    return import_megatron(yaml.safe_dump(document), "job.yml", (), gpus).loaded.spec


def total(spec: Spec) -> int:
    return build_inventory(spec).parameters


def nemo(**model: Any) -> dict[str, Any]:
    return {"trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16", "max_steps": 10}, "model": NEMO | model}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pythia_has_its_published_parameters(name: str) -> None:
    layers, hidden, parameters = PUBLISHED[name]
    given = {"num-layers": layers, "hidden-size": hidden, "num-attention-heads": 8, "pos-emb": "rotary", "rotary-pct": 0.25}
    assert total(spec_of(NEOX | given | {"no-weight-tying": True, "gpt-j-residual": True})) == parameters


@pytest.mark.parametrize("seed", range(12))
def test_parameters_of_gpt_neox_are_those_of_its_modules(seed: int) -> None:
    draw = Random(seed)
    hidden, layers, multiple = 64 * draw.randint(1, 4), draw.randint(1, 5), draw.choice([1, 32])
    gated, untied, rotary, rms, bias = (draw.random() < 0.5 for _ in range(5))
    width, heads, groups = draw.choice([None, 300]), 8, draw.choice([None, 4])
    given = {
        "num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads, "no-weight-tying": untied, "mlp-multiple-of": multiple,
        "pos-emb": "rotary" if rotary else "learned", "norm": "rmsnorm" if rms else "layernorm", "use-bias-in-attn-linear": bias,
        "use-bias-in-mlp": bias, "activation": draw.choice(["swiglu", "geglu"] if gated else ["gelu", "silu"]), "intermediate-size": width,
        **({"num-kv-heads": groups} if groups else {}),
    }  # fmt: skip
    wide = width or 4 * hidden
    if gated:
        wide = int(wide * 2 / 3) // 2
    wide = -(-wide // multiple) * multiple
    keys = hidden * (groups or heads) // heads
    linears = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden), (hidden, wide * (2 if gated else 1)), (wide, hidden)]
    norm = hidden if rms else 2 * hidden
    layer = sum(rows * columns + columns * bias for rows, columns in linears) + 2 * norm
    tables = PADDED * hidden * (2 if untied else 1) + (0 if rotary else 128 * hidden)
    assert total(spec_of(NEOX | given)) == layers * layer + norm + tables


def test_a_run_of_gpt_neox_is_cut_as_it_says() -> None:
    given = {"pipe-parallel-size": 2, "model-parallel-size": 2, "num-layers": 4, "checkpoint-activations": True, "checkpoint-num-layers": 1}
    spec = spec_of(NEOX | given, 8)
    assert (spec.mesh.pp, spec.mesh.tp, spec.mesh.dp_shard, spec.batch.micro_batch_size) == (2, 2, 2, 2)
    assert spec.host.recompute_method == "uniform"
    assert spec.precision.params == "bf16"


@pytest.mark.parametrize("kind", ["rwkv", "mamba", "gmlp"])
def test_layers_of_gpt_neox_without_a_letter_are_named(kind: str) -> None:
    with pytest.raises(MegaplanError, match="MP926") as caught:
        spec_of(NEOX | {"attention_config": [[[kind], 4]]})
    assert f"layers of {kind}" in caught.value.diagnostics[0].detail
    assert total(spec_of(NEOX | {"attention_config": [[["flash"], 4]]})) == total(spec_of(NEOX))


def test_experts_of_gpt_neox_are_not_passed_over() -> None:
    with pytest.raises(MegaplanError, match="moe-num-experts"):
        spec_of(NEOX | {"moe_num_experts": 8})


@pytest.mark.parametrize("seed", range(12))
def test_parameters_of_nemo_are_those_of_its_model(seed: int) -> None:
    draw = Random(seed)
    hidden, layers, heads = 64 * draw.randint(1, 4), draw.randint(1, 5), 8
    gated, tied, rope, rms, bias, routed = (draw.random() < 0.5 for _ in range(6))
    groups, width = draw.choice([None, 4]), draw.choice([96, 256])
    bias = bias and not routed
    given = {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": groups, "ffn_hidden_size": width,
        "bias": bias, "share_embeddings_and_output_weights": tied, "position_embedding_type": "rope" if rope else "learned_absolute",
        "normalization": "rmsnorm" if rms else "layernorm", "activation": draw.choice(["fast-swiglu", "swiglu"]) if gated else "gelu",
        "kv_channels": "${divide:${model.hidden_size}, ${model.num_attention_heads}}",
        **({"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True} if routed else {}),
    }  # fmt: skip
    keys = hidden * (groups or heads) // heads
    attention = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    mlp = [(hidden, width * (2 if gated else 1)), (width, hidden)]
    norm = hidden if rms else 2 * hidden
    layer = sum(rows * columns + columns * bias for rows, columns in attention) + 2 * norm
    layer += (4 if routed else 1) * sum(rows * columns + columns * bias for rows, columns in mlp) + (4 * hidden if routed else 0)
    tables = PADDED * hidden * (1 if tied else 2) + (0 if rope else 128 * hidden)
    assert total(spec_of(nemo(**given), 16)) == layers * layer + norm + tables


def test_a_run_of_nemo_is_cut_as_it_says() -> None:
    given = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform", "activations_checkpoint_num_layers": 1,
        "ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
    }  # fmt: skip
    spec = import_megatron(yaml.safe_dump(nemo(**given)), "job.yaml").loaded.spec
    assert (spec.mesh.pp, spec.mesh.vpp, spec.mesh.tp, spec.mesh.dp_shard) == (2, 2, 2, 4)
    assert spec.model.mlp.ffn_hidden_size == 256
    assert spec.host.recompute_method == "uniform"
    assert spec.host.distributed_optimizer
    assert spec.precision.grads == "fp32"
    reduced = nemo(optim={"name": "mcore_distributed_optim", "grad_sync_dtype": "bf16"})
    assert spec_of(reduced, 16).precision.grads == "bf16"


def test_the_vocabulary_and_biases_of_nemo_have_names_of_their_own() -> None:
    model = spec_of(nemo(override_vocab_size=1280, qkv_bias=True, bias=False), 16).model
    assert (model.vocab_size, model.attention.bias, model.attention.output_bias, model.mlp.bias) == (1280, True, False, False)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("kind", ["fp8_hybrid", "fp8_e4m3"])
def test_settings_of_fp8_count_where_fp8_is_on(kind: str, *, on: bool) -> None:
    """NeMo's published files hold the settings of FP8 next to `fp8: False`."""
    idle = {kind: True, "fp8_margin": 0, "fp8_amax_history_len": 64, "fp8_amax_compute_algo": "max", "fp8_params": True}
    spec = spec_of(nemo(**idle, fp8=on, transformer_engine=True), 16)
    assert (spec.precision.recipe is not None) == on
    assert spec == spec_of(nemo(), 16) or on


@pytest.mark.parametrize("more", [{"peft": {"peft_scheme": "lora"}}, {"bert_binary_head": True}])
def test_nemo_beyond_a_whole_decoder_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(MegaplanError, match="MP926"):
        spec_of(nemo(**more), 16)


def test_where_a_spec_is_read_the_command_that_reads_the_file_is_named() -> None:
    for document in (NEOX, nemo()):
        with pytest.raises(MegaplanError) as caught:
            refuse_file(yaml.safe_dump(document), "job.yaml")
        assert caught.value.diagnostics[0].hints[0] == "megaplan import megatron job.yaml -o spec.yaml"
