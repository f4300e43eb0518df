"""Megatron-Bridge's configuration as a launch."""

from typing import Any

import pytest

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.bridge import ENUMERATIONS
from megaplan.importers.megatron.spec import import_megatron
from megaplan.spec.load import load_spec

BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 4
  hidden_size: 256
  ffn_hidden_size: 768
  num_attention_heads: 8
  num_query_groups: 2
  kv_channels: 32
  seq_length: 512
  vocab_size: 32000
  should_pad_vocab: true
  make_vocab_size_divisible_by: 128
  normalization: RMSNorm
  layernorm_epsilon: 1.0e-06
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  gated_linear_unit: true
  add_bias_linear: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [2], _name_: fused}
  bf16: true
  params_dtype: {_target_: torch.bfloat16, _call_: false}
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  sequence_parallel: true
  cross_entropy_loss_fusion: true
  cross_entropy_fusion_impl: te
  recompute_granularity: full
  recompute_method: block
  recompute_num_layers: 1
  num_moe_experts: null
train: {micro_batch_size: 1, global_batch_size: 32, train_iters: 100}
optimizer: {optimizer: adam, lr: 0.0003, min_lr: 3.0e-05, use_distributed_optimizer: true, weight_decay: 0.1, clip_grad: 1.0}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 10}
ddp: {grad_reduce_in_fp32: true, use_distributed_optimizer: true, overlap_grad_reduce: true}
dataset: {seq_length: 512, skip_getting_attention_mask_from_dataset: true}
mixed_precision: bf16_mixed
rng: {seed: 1234}
env_vars: {CUBLAS_WORKSPACE_CONFIG: ":4096:8"}
"""


@pytest.mark.parametrize(
    ("vocabulary", "size"),
    [
        ("vocab_size: 32010\n  should_pad_vocab: true", 32_256),
        ("vocab_size: 32010\n  should_pad_vocab: false", 32_010),
        ("vocab_size: 32010", 32_010),
        ("vocab_size: null", 50_432),
    ],
)
def test_a_vocabulary_that_is_stated_is_padded_only_where_the_configuration_says_so(vocabulary: str, size: int) -> None:
    """The vocabulary without a stated size is the tokenizer's, here GPT-2's, and padded."""
    text = BRIDGE.replace("vocab_size: 32000\n  should_pad_vocab: true", vocabulary)
    assert import_megatron(text, "run_config.yaml", gpus=8).loaded.spec.model.vocab_size == size


def test_megatron_bridges_configuration_is_a_launch() -> None:
    spec = import_megatron(BRIDGE, "run_config.yaml", gpus=8).loaded.spec
    words = (
        "--num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
        "--kv-channels 32 --seq-length 512 --vocab-size 32000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
        "--attention-backend fused --bf16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 32 --train-iters 100 "
        "--lr 3e-4 --min-lr 3e-5 --use-distributed-optimizer --overlap-grad-reduce "
        "--weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine "
        "--lr-warmup-iters 10 --no-create-attention-mask-in-dataloader --seed 1234"
    )
    same = import_megatron(f"export CUBLAS_WORKSPACE_CONFIG=:4096:8\ntorchrun pretrain_gpt.py {words}", "run_config.sh", gpus=8).loaded.spec
    assert spec == same


@pytest.mark.parametrize(
    ("said", "recipe"),
    [
        ("bf16_with_mxfp8_mixed", {"name": "mxfp8", "param_gather": True}),
        ("bf16-with-nvfp4-mixed", {"name": "nvfp4", "param_gather": True}),
        ("bf16_with_fp8_delayed_scaling_mixed", {"name": "fp8_delayed", "param_gather": True}),
        ("bf16_with_fp8_current_scaling_mixed", {"name": "fp8_current", "param_gather": True, "first_last_bf16": (2, 2)}),
        (
            "nanov2_bf16_with_fp8_current_scaling_mixed",
            {"name": "fp8_blockwise", "format": "hybrid", "param_gather": True, "first_last_bf16": (4, 4)},
        ),
        ("bf16_with_fp8_subchannel_scaling_mixed", {"name": "fp8_blockwise", "format": "hybrid"}),
        ("{bf16: true, fp8: e4m3, fp8_recipe: blockwise}", {"name": "fp8_blockwise"}),
        ("{bf16: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param: true}", {"name": "fp8_current", "param_gather": True}),
        ("bf16_mixed", None),
    ],
)  # fmt: skip
def test_a_mixed_precision_is_a_recipe(said: str, recipe: dict[str, Any] | None) -> None:
    text = BRIDGE.replace("mixed_precision: bf16_mixed", f"mixed_precision: {said}")
    spec = import_megatron(text, "run_config.yaml", ["device.name=b200"], gpus=8).loaded.spec
    found = spec.precision.recipe
    assert recipe == (None if found is None else found.model_dump(exclude_defaults=True))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BRIDGE + "peft: {dim: 16}\n", "MP902"),
        (BRIDGE.replace("  bf16: true\n", "  bf16: true\n  optimizer_cuda_graph: true\n"), "MP903"),
    ],
)
def test_what_else_a_configuration_turns_on_is_refused(text: str, code: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "run_config.yaml", gpus=8)
    assert [found.code for found in caught.value.diagnostics if found.severity is Severity.ERROR] == [code]


@pytest.mark.parametrize(
    ("text", "rank", "alpha"),
    [
        (BRIDGE + "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 16, alpha: 32}\n", 16, 32),
        (BRIDGE + "peft: {_target_: megatron.bridge.peft.lora.LoRA}\n", 32, 32),
        ("torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --lora-rank 8 --lora-alpha 16.0\n", 8, 16.0),
    ],
)
def test_adapters_are_pointed_to_the_host_that_has_them(text: str, rank: int, alpha: float) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "run_config.yaml", gpus=8)
    [found] = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP902", "--lora-rank")
    assert "host megarun has, by the section lora (docs/guides/lora.md)" in found.detail
    assert f"--set lora.rank={rank} --set lora.alpha={alpha}" in found.hints[0]
    overrides = [f"lora.rank={rank}", f"lora.alpha={alpha}"]
    adapted = load_spec("plans/tiny-hybrid.yaml", overrides).spec
    assert adapted.lora is not None
    assert adapted.lora.scale == alpha / rank


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("model: {tensor_model_parallel_size: 4}\ntrain: {train_iters: 20}\n", "model.num_layers, model.hidden_size"),
        ("model: {num_layers: 2, seq_length: 512}\ntrain: {train_iters: 20}\n", "model.hidden_size"),
        ("# an override\ntrain: {train_iters: 20, global_batch_size: 8}\n", "model.num_layers, model.hidden_size"),
        ("checkpoint: {save: /x}\nlogger: {log_interval: 1}\n", "model.num_layers, model.hidden_size"),
        ("model: {seq_length: 512}\npeft: {dim: 8}\n", "model.num_layers, model.hidden_size"),
    ],
)
def test_an_override_of_a_recipe_is_named_in_one_error(text: str, lacks: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "override.yaml", gpus=8, argv=("--num-layers", "4"))
    [found] = caught.value.diagnostics
    assert found.code == "MP926"
    assert f"override.yaml has no {lacks}: it overrides a recipe" in found.detail
    assert "run_config.yaml" in found.hints[0]


@pytest.mark.parametrize("key", ["seq_length", "sequence_length"])
@pytest.mark.parametrize("target", ["", "megatron.bridge.training.config.GPTDatasetConfig", "megatron.bridge.data.FinetuningDatasetConfig"])
def test_a_datasets_other_length_is_refused_as_megatron_bridge_does(key: str, target: str) -> None:
    text = BRIDGE.replace("dataset: {seq_length: 512", f"dataset: {{{key}: 1024{f', _target_: {target}' if target else ''}")
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "run_config.yaml", gpus=8)
    [found] = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP916", f"dataset.{key}")
    assert f"dataset.{key} = 1024, model.seq_length = 512" in found.detail
    mended = text.replace("seq_length: 512", found.hints[1].removeprefix("model."))
    assert import_megatron(mended, "run_config.yaml", gpus=8).loaded.spec.batch.seq_length == 1024


def test_a_dataset_whose_length_is_not_compared_is_noted() -> None:
    """A dataset provider may have any length; the pipeline's buffers have the model's length."""
    text = BRIDGE.replace("dataset: {seq_length: 512", "dataset: {_target_: x.MockConversationProvider, seq_length: 1024")
    loaded = import_megatron(text, "run_config.yaml", gpus=8).loaded
    assert loaded.spec.batch.seq_length == 512
    assert any("dataset.seq_length = 1024, model.seq_length = 512" in found.detail for found in loaded.diagnostics)


def test_a_datasets_length_is_the_models_where_the_model_states_none() -> None:
    text = BRIDGE.replace("  seq_length: 512\n", "").replace("dataset: {seq_length: 512", "dataset: {sequence_length: 1024")
    assert import_megatron(text, "run_config.yaml", gpus=8).loaded.spec.batch.seq_length == 1024


@pytest.mark.parametrize(
    ("number", "word"),
    [(number, word) for number, word in enumerate(ENUMERATIONS["AttnBackend"], start=1) if word != "local"],
)
def test_an_enumeration_is_read_by_its_number_where_no_name_is_given(number: int, word: str) -> None:
    text = BRIDGE.replace("_args_: [2], _name_: fused", f"_args_: [{number}]")
    spec = import_megatron(text, "run_config.yaml", gpus=8).loaded.spec
    named = import_megatron(BRIDGE.replace("_name_: fused", f"_name_: {word}"), "run_config.yaml", gpus=8).loaded.spec
    assert spec == named
    assert spec.host.attention_backend == word


@pytest.mark.parametrize(("enumeration", "number"), [("CudaGraphModule", 1), ("CudaGraphScope", 2)])
@pytest.mark.parametrize("named", [True, False])
def test_a_list_of_enumerations_is_read_by_names_or_numbers(enumeration: str, number: int, named: bool) -> None:
    target = f"_target_: megatron.core.transformer.enums.{enumeration}, _call_: true, _args_: [{number}]{', _name_: attn' if named else ''}"
    graphs = f"  cuda_graph_impl: transformer_engine\n  cuda_graph_scope: [{{{target}}}]\n"
    spec = import_megatron(BRIDGE.replace("  bf16: true\n", f"  bf16: true\n{graphs}"), "run_config.yaml", gpus=8).loaded.spec
    assert spec.host.cuda_graph_modules == ("attn",)


def test_a_number_that_an_enumeration_does_not_have_is_named_with_it() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(BRIDGE.replace("_args_: [2], _name_: fused", "_args_: [9]"), "run_config.yaml", gpus=8)
    assert "AttnBackend(9)" in str(caught.value)


def test_sections_with_sizes_and_without_a_dtype_override_a_recipe() -> None:
    sizes = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, vocab_size: 99"
    override = f"model: {{{sizes}}}\ntrain: {{global_batch_size: 8, micro_batch_size: 1}}\n"
    with pytest.raises(MegaplanError, match="overrides a recipe"):
        import_megatron(override, "x.yaml")
    assert import_megatron(override.replace("{num", "{bf16: true, num"), "x.yaml").loaded.spec.precision.params.value == "bf16"
    assert import_megatron(f"{override}mixed_precision: bf16_mixed\n", "x.yaml").loaded.spec.precision.params.value == "bf16"
