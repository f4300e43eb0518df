"""Launch scripts as people write them: shells, sourced files, words of other products, names of earlier releases."""

from pathlib import Path
from typing import Any

import pytest
from recorded_launches import BARE, PLAIN, errors, recorded

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.imported import Imported
from megaplan.importers.megatron.spec import import_megatron, import_recording
from megaplan.importers.structure import Policy


def imported(name: str, **more: Any) -> Imported:
    return import_recording(recorded(name, **more), f"{name}.sh")


SHELLS = {
    "array": 'ARGS=(--num-layers 2  # of them\n  --hidden-size 128)\nARGS+=(--num-attention-heads 4)\ntorchrun x.py "${ARGS[@]}" $REST',
    "text": 'ARGS="\n  --num-layers 2 \\\n  --hidden-size 128 --num-attention-heads 4\n"\ntorchrun x.py $ARGS $REST',
    "sum": "A=1\ntorchrun x.py --num-layers $((A * 2)) --hidden-size $((2 ** 1 * 0 + 64 * (1 + $A))) --num-attention-heads 4 $REST",
    "printf": "printf -v ARGS '%s ' --num-layers 2 --hidden-size 128\ntorchrun x.py ${ARGS} --num-attention-heads 4 $REST",
    "pipe": "FEW='--num-layers 2 --hidden-size 128'\nmkdir -p log && cd log; torchrun x.py $FEW --num-attention-heads 4 $REST"
    " > a.txt 2>&1 | tee \\\n log &",
    "program": "T=$(date +%s)\nexec torchrun x.py --num-layers 2 --hidden-size 128 --num-attention-heads 4 --save run-$T $REST",
}


@pytest.mark.parametrize("name", SHELLS)
def test_straight_lines_of_bash_are_read(name: str) -> None:
    rest = BARE.replace("--num-layers 2 --hidden-size 64 --num-attention-heads 4", "")
    spec = import_megatron(f"REST='{rest}'\n{SHELLS[name]}", "x.sh").loaded.spec
    assert (spec.model.num_layers, spec.model.hidden_size) == (4, 128)


def test_a_sourced_file_is_read_or_named(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(--num-layers 6 --hidden-size 128)", encoding="utf-8")
    rest = BARE.replace("--num-layers 2 --hidden-size 64", "")
    for folder in (
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        "$(dirname $0)",
        '$(cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)',
    ):
        text = f'DIR={folder}\nsource "$DIR/model.sh"\ntorchrun x.py "${{MODEL_ARGS[@]}}" {rest}'
        assert import_megatron(text, str(tmp_path / "launch.sh")).loaded.spec.model.num_layers == 12
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"source absent.sh\ntorchrun x.py $MODEL_ARGS {rest}", "x.sh")
    found = caught.value.diagnostics
    assert found[0].detail == "--num-layers, --hidden-size are missing"
    assert "absent.sh does not exist" in [each.detail for each in found]


def test_an_unknown_argument_is_a_note_unless_its_name_decides_a_tensor() -> None:
    forked = f"{BARE} --use-mpi --trigger-path /x --no-query-key-layer-scaling --no-async-tensor-model-parallel-allreduce"
    (note,) = [found for found in import_megatron(forked, "x.sh").loaded.diagnostics if found.code == "MP913"]
    assert (note.severity, note.detail) == (Severity.NOTE, "--use-mpi\n--trigger-path /x")
    assert [found.detail for found in errors(forked, policy=Policy(strict=True))] == ["--use-mpi", "--trigger-path /x"]
    (found,) = errors(f"{BARE} --num-registers-layers 4")
    assert (found.code, found.hints[0]) == ("MP913", "--ignore num-registers-layers")
    assert import_megatron(f"{BARE} --num-registers-layers 4", "x.sh", policy=Policy(ignored=frozenset({"num_registers_layers"})))


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        ("--hidden-dim 256", "MP913", "--hidden-size 256"),
        ("--qk-norm", "MP913", "--qk-layernorm"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /models/own-100k.model", "MP916", "--set model.vocab_size=…"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file own.json", "MP916", "--set model.vocab_size=…"),
    ],
)
def test_hints_by_meaning(words: str, code: str, hint: str) -> None:
    (found,) = errors(f"{BARE} {words}")
    assert (found.code, found.hints[0]) == (code, hint)


def test_a_vocabulary_of_the_usual_name_is_that_of_gpt2_with_a_warning() -> None:
    found = import_megatron(f"{BARE} --tokenizer-type GPT2BPETokenizer --vocab-file /data/gpt/vocab.json", "x.sh").loaded
    assert found.spec.model.vocab_size == import_megatron(BARE, "x.sh").loaded.spec.model.vocab_size
    assert [note.code for note in found.diagnostics if "as its type has as a rule" in note.detail] == ["MP919"]
    (refused,) = errors(f"{BARE} --tokenizer-type GPT2BPETokenizer --vocab-file /own-tokenizer/vocab.json")
    assert refused.code == "MP916"


def test_adapters_of_a_rank_are_no_training_of_the_whole_model() -> None:
    (found,) = errors(f"{BARE} --use-fused-rmsnorm --lora-r 16 --lora-alpha 32")
    assert (found.code, found.hints[0]) == ("MP902", "megaplan import hf CONFIG.json --set lora.rank=16 --set lora.alpha=32 -o spec.yaml")


def test_mindspeeds_launches_with_sizes_are_read_as_megatrons() -> None:
    forked = import_megatron(f"{BARE} --use-fused-rmsnorm --use-fused-swiglu", "x.sh").loaded
    assert forked.spec == import_megatron(BARE, "x.sh").loaded.spec


@pytest.mark.parametrize("word", ["rmsnorm", "RMS_norm"])
def test_words_in_other_letters_are_read(word: str) -> None:
    found = import_megatron(f"{BARE} --normalization {word}", "x.sh").loaded
    assert found.spec.model.norm == "rmsnorm"
    assert f"--normalization {word} is read as RMSNorm" in [each.detail for each in found.diagnostics]


def test_arguments_of_earlier_releases() -> None:
    spec = import_megatron(f"{BARE} --num-experts 8 --moe-token-dispatcher-type alltoall_seq --fp8-hybrid", "x.sh").loaded.spec
    assert spec.host.moe_dispatcher == "alltoall"
    assert spec.precision.recipe is not None


_AFTER = "and the launch's own arguments, after --"


@pytest.mark.parametrize("text", ["python3 -m MaxText.train base.yml\n", "python3 src/maxtext/train.py x=1\n", "base_emb_dim: 64\n"])
def test_a_run_of_maxtext_has_its_own_command(text: str) -> None:
    (found,) = errors(text)
    assert (found.code, found.hints[0]) == ("MP926", "megaplan import maxtext launch.sh")


@pytest.mark.parametrize(
    ("text", "name", "command"),
    [
        (
            "NPROC_PER_NODE=8 \\\nmegatron sft --model ORG/M --tensor_model_parallel_size 4 --global_batch_size 16 --max_length 8192",
            "ms-swift",
            "megaplan estimate ORG/M --gpus 8 --global-batch 16 --seq 8192 --set mesh.tp=4",
        ),
        (
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=ORG/M trainer.n_gpus_per_node=4",
            "verl",
            "megaplan estimate ORG/M --gpus 4",
        ),
        ("ray job submit -- python3 slime/train.py --hf-checkpoint a/b --rollout-num-gpus 8", "slime", "megaplan estimate a/b --gpus 8"),
        (
            "trainer:\n  devices: 8\n  num_nodes: 2\nmodel:\n  tensor_model_parallel_size: 2",
            "NeMo 1",
            "megaplan estimate MODEL --gpus 16 --set mesh.tp=2",
        ),
        (
            "MODEL=ORG/M\nN=${N:-2}\npython3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=3072 "
            'data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.model.path="${MODEL}" '
            "actor.megatron.tensor_model_parallel_size=4 rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=8 trainer.nnodes=$N",
            "verl",
            "megaplan estimate ORG/M --gpus 16 --seq 4096 --global-batch 128 --set mesh.tp=4",
        ),
        (
            ': "${MODEL:=ORG/M}"\nmegatron sft --model "${MODEL}" --global_batch_size 16\n# megatron export --model x/y\n'
            "swift infer --model out/z",
            "ms-swift",
            "megaplan estimate ORG/M --gpus 8 --global-batch 16",
        ),
        ("export EXP=a/b.yaml\nbash run_pretrain.sh", "Primus", f"megaplan import megatron a/b.yaml   # {_AFTER}"),
        ("./primus-cli direct -- train pretrain --config c.yaml --lr 1", "Primus", f"megaplan import megatron c.yaml   # {_AFTER}"),
        ("torchrun scripts/training/run_recipe.py --recipe llama3_8b", "a Megatron-Bridge recipe", "megaplan estimate MODEL --gpus 8"),
        (
            "torchrun --nproc_per_node 16 --nnodes 4 train_fsdp2.py x.yaml --model.model_name_or_path ORG/M --parallel.ep_size 8",
            "MindSpeed FSDP2",
            "megaplan estimate ORG/M --gpus 64 --set mesh.ep=8",
        ),
        ("import mindspeed_llm", "MindSpeed", "megaplan estimate MODEL --gpus 8"),
        (
            "base_model: ORG/M\nsequence_len: 4096\nmicro_batch_size: 2\n",
            "axolotl",
            "megaplan estimate ORG/M --gpus 8 --seq 4096 --set batch.micro_batch_size=2",
        ),
        ("model_name_or_path: ORG/M\nstage: sft\ncutoff_len: 2048\n", "LLaMA-Factory", "megaplan estimate ORG/M --gpus 8 --seq 2048"),
        ("model:\n  _component_: torchtune.models.llama3.llama3_8b\n", "torchtune", "megaplan estimate MODEL --gpus 8"),
        ("parallelism:\n  tp: 2\nmodel:\n  model_config:\n    hidden_size: 16\n", "nanotron", "megaplan estimate MODEL --gpus 8"),
        ("from megatron.bridge.recipes.llama import llama3_8b", "a Megatron-Bridge recipe", "megaplan estimate MODEL --gpus 8"),
        ('{"zero_optimization": {"stage": 3}}', "DeepSpeed", "megaplan estimate MODEL --gpus 8"),
        (
            "judge:\n  model_name: other/judge\n  nodes: 9\ngrpo:\n  steps: 1\npolicy:\n  model_name: ORG/M\n"
            "  train_global_batch_size: 64\n  max_total_sequence_length: 512\n  megatron_cfg:\n    tensor_model_parallel_size: 2\n"
            "cluster:\n  gpus_per_node: 4\n  num_nodes: 2\n",
            "NeMo-RL",
            "megaplan estimate ORG/M --gpus 8 --global-batch 64 --seq 512 --set mesh.tp=2",
        ),
        (
            "python chatlearn/entrypoint.py grpo runtime_args.train_micro_batch_size=4 models.policy_trainer.load=ORG/M",
            "ChatLearn",
            "megaplan estimate ORG/M --gpus 8 --set batch.micro_batch_size=4",
        ),
        (
            "sequence_length: 512\nnum_gpus_per_node: 8\npretrain: ORG/M\nactor_train:\n  training_args:\n"
            "    per_device_train_batch_size: 2\n"
            "  strategy_args:\n    strategy_name: megatron_train\n    strategy_config:\n      pipeline_model_parallel_size: 2\n",
            "ROLL",
            "megaplan estimate ORG/M --gpus 8 --seq 512 --set mesh.pp=2 --set batch.micro_batch_size=2",
        ),
        (
            "megatron_training:\n  model: m\n  seq_length: 512\nactor_config:\n  micro_batch_size: 2\nrl_config:\n  epochs: 1\n",
            "MindSpeed-RL",
            "megaplan estimate MODEL --gpus 8 --seq 512 --set batch.micro_batch_size=2",
        ),
        (
            "recipe:\n  _target_: megatron.bridge.recipes.x.y\ncheckpoint:\n  save: /nemo_run/x\n",
            "a Megatron-Bridge recipe",
            "megaplan estimate MODEL --gpus 8",
        ),
        (
            "cluster:\n  n_gpus_per_node: 4\nactor:\n  backend: megatron:d4p1t1\n  path: ORG/M\n",
            "AReaL",
            "megaplan estimate ORG/M --gpus 4",
        ),
        (
            "runtime:\n  parallel:\n    pp_deg: 1\n    default_dp_type: zero2\n  train:\n    seq_length: 512\n",
            "Hetu-Galvatron",
            "megaplan estimate MODEL --gpus 8 --seq 512",
        ),
    ],
)
def test_another_front_end_is_named_in_one_error(text: str, name: str, command: str) -> None:
    (found,) = errors(text)
    assert (found.code, found.hints[0]) == ("MP926", command)
    assert f"belongs to {name}, which takes the model" in found.detail


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x = build(64)\n", "recipe.py"),
        ("#!/usr/bin/env python3\nprint(1)\n", "recipe"),
        ('"""Recipe."""\n\nimport torch\n', "recipe.txt"),
        ("# Copyright\nimport torch.nn as nn\n", "recipe.txt"),
        ("from pathlib import Path\n", "recipe.txt"),
        ("def recipe():\n    return 1\n", "recipe.txt"),
        ("@dataclass\nclass Config:\n    tp: int = 4\n", "recipe.txt"),
        ("class Config(Base):\n    tp: int = 4\n", "recipe.txt"),
        ("ARGS = '--num-layers 4 --hidden-size 64'\nrun(f'pretrain_gpt.py {ARGS}')\n", "launch.py"),
    ],
)
def test_a_program_in_python_is_named_in_one_error(text: str, name: str) -> None:
    (found,) = errors(text, name)
    assert (found.code, found.location.line) == ("MP926", None)
    assert f"{name} is a Python program" in found.detail
    assert found.hints[0].startswith("megaplan import megatron LAUNCH.sh")
    assert found.hints[1].startswith("megaplan import megatron run_config.yaml")


def test_a_script_with_python_in_it_is_a_script() -> None:
    text = f"#!/bin/bash\npython3 - <<'END'\nimport torch\nfrom os import environ\nEND\ntorchrun pretrain_gpt.py {BARE}\n"
    assert import_megatron(text, "x.sh").loaded.spec.model.num_layers


@pytest.mark.parametrize("text", ['{"zero_optimization": {}}', "base_model: a/b\nsequence_len: 8\n", "megatron sft --model a/b"])
def test_hints_name_no_file_that_is_not_there(text: str) -> None:
    (found,) = errors(text, "zero3.json")
    assert not any("zero3.json." in hint for hint in found.hints)
    assert any("TRAINING.log" in hint for hint in found.hints) is ("megatron sft" in text)


@pytest.mark.parametrize(
    ("text", "name", "command"),
    [
        ('[model]\nname = "llama3"\n[training]\nsteps = 1\n', "job.toml", "megaplan import torchtitan job.toml"),
        ('{"model_type": "llama", "hidden_size": 64}', "config.json", "megaplan import hf config.json"),
    ],
)
def test_a_file_of_another_importer_is_named_with_its_command(text: str, name: str, command: str) -> None:
    (found,) = errors(text, name)
    assert (found.code, found.hints[0]) == ("MP926", command)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("--checkpoint-activations", "--recompute-granularity full --recompute-method uniform"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --transformer-impl local",
        ),
        (
            "--model-parallel-size 2 --batch-size 4 --DDP-impl local",
            "--tensor-model-parallel-size 2 --micro-batch-size 4 --transformer-impl local",
        ),
    ],
)
def test_names_of_earlier_releases_are_read_as_todays(older: str, newer: str) -> None:
    specs = [import_megatron(f"{BARE} {words}", "x.sh").loaded for words in (older, newer)]
    assert specs[0].spec == specs[1].spec
    assert any("is of earlier releases" in found.detail for found in specs[0].diagnostics)


TABLE = """[rank0]: using world size: 16, data-parallel size: 8
------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. True
  add_bias_linear ................................. False
  attention_backend ............................... AttnBackend.fused
  attention_dropout ............................... 0.0
  bf16 ............................................ True
  create_attention_mask_in_dataloader ............. False
  encoder_num_layers .............................. 4
  exp_avg_dtype ................................... torch.float32
  expert_tensor_parallel_size ..................... 1
  ffn_hidden_size ................................. 1024
  fp8 ............................................. hybrid
  fp8_recipe ...................................... tensorwise
  global_batch_size ............................... 64
  gradient_accumulation_fusion .................... True
  group_query_attention ........................... True
  hidden_dropout .................................. 0.0
  hidden_size ..................................... 256
  kv_channels ..................................... 32
  max_position_embeddings ......................... 4096
  micro_batch_size ................................ 1
  moe_layer_freq .................................. [0, 1, 1, 1]
  moe_aux_loss_coeff .............................. 0.01
  moe_router_load_balancing_type .................. seq_aux_loss
  normalization ................................... RMSNorm
  norm_epsilon .................................... 1e-06
  num_attention_heads ............................. 8
  num_experts ..................................... 8
  num_layers ...................................... 4
  num_query_groups ................................ 2
  padded_vocab_size ............................... 32768
  pipeline_model_parallel_size .................... 1
  position_embedding_type ......................... rope
  recompute_granularity ........................... None
  seq_length ...................................... 512
  sequence_parallel ............................... True
  some_newer_argument ............................. 3
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  vocab_size ...................................... 32001
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 iteration        1/    1000 | consumed samples:           64 |
"""


@pytest.mark.parametrize("prefix", ["", "0: ", "[2026-08-01 10:00:00] "])
def test_a_training_logs_table_is_a_launch(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in TABLE.splitlines())
    imported = import_megatron(text, "train.log").loaded
    spec = imported.spec
    assert spec.model.pattern == "ADAEAEAE"
    assert (spec.model.vocab_size, spec.model.norm, spec.model.norm_eps, spec.model.tie_embeddings) == (32768, "rmsnorm", 1e-6, False)
    assert (spec.mesh.world_size, spec.mesh.tp, spec.mesh.etp, spec.schedule.num_microbatches) == (16, 2, 1, 8)
    assert spec.precision.recipe is not None
    assert (spec.precision.recipe.name, spec.host.attention_mask, spec.host.wgrad_fusion) == ("fp8_current", False, True)
    assert (spec.host.moe_load_balancing, spec.host.attention_backend) == ("seq_aux_loss", "fused")
    assert spec.model.moe is not None
    assert not spec.model.moe.bias
    assert "MP917" not in {found.code for found in imported.diagnostics}


@pytest.mark.parametrize(
    "launcher", ["deepspeed --num_nodes 1 --num_gpus 4 --no_python", "torchrun --nnodes 1 --nproc_per_node 4 --no-python"]
)
@pytest.mark.parametrize("line", ["{}", "source activate ; X=1 {}", "cd there && {} | tee log"])
def test_a_launcher_may_start_a_shell_with_a_command_line(launcher: str, line: str) -> None:
    program = f"python3 -u pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2"
    text = f'CMD="{line.format(program)}"\n{launcher} /usr/bin/bash -c "$CMD"'
    spec = import_megatron(text, "launch.sh").loaded.spec
    assert (spec.mesh.world_size, spec.mesh.tp, spec.model.num_layers) == (4, 2, 4)
