"""Files of other programs given as a spec: one error that names the kind of file and the fix."""

import json
import shlex

import pytest

DEEPSPEED = json.dumps(
    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, indent=1
)
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
AUTOMODEL = """
step_scheduler:
  global_batch_size: 64
  local_batch_size: 8
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
distributed:
  dp_size: none
  tp_size: 2
"""
BRIDGE = "_target_: megatron.bridge.training.config.ConfigContainer\nmodel:\n  num_layers: 2\ntrain:\n  train_iters: 1\n"
LAUNCH = "#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64\n"
FILES = [
    ("zero3.json", DEEPSPEED, "DeepSpeed", "megaplan estimate MODEL --gpus 8 --global-batch 64 --set batch.micro_batch_size=2"),
    ("accelerate.yaml", ACCELERATE, "Accelerate", "megaplan estimate MODEL --gpus 16"),
    (
        "automodel.yaml",
        AUTOMODEL,
        "NeMo Automodel",
        "megaplan estimate meta-llama/Llama-3.2-1B --gpus 8 --global-batch 64 --set mesh.tp=2 --set batch.micro_batch_size=8",
    ),
    ("run_config.yaml", BRIDGE, "Megatron-Bridge", "megaplan import megatron FILE -o spec.yaml"),
    ("launch.sh", LAUNCH, "Megatron", "megaplan import megatron FILE -o spec.yaml"),
    ("recipe.py", "from nemo.collections import llm\n", "Python", "megaplan import megatron LAUNCH.sh"),
    ("axolotl.yaml", "base_model: a/b\nsequence_len: 4096\n", "axolotl", "megaplan estimate a/b --gpus 8 --seq 4096"),
    ("job.toml", '[model]\nname = "llama3"\n[training]\nsteps = 1\n', "torchtitan", "megaplan import torchtitan FILE"),
]


@pytest.mark.parametrize("command", ["estimate", "search", "split"])
@pytest.mark.parametrize(("name", "text", "what", "hint"), FILES, ids=[each[0] for each in FILES])
def test_a_file_of_another_program_is_named(megaplan, tmp_path, command, name, text, what, hint):
    path = tmp_path / name
    path.write_text(text)
    ran = megaplan(command, str(path))
    assert ran.status == 2
    assert "error[MP926]" in ran.err
    assert what in ran.err
    assert f"hint: {hint.replace('FILE', shlex.quote(str(path)))}" in ran.err
    assert "format: megaplan.spec/1" not in ran.err


def test_what_no_program_is_known_for_is_still_no_spec(megaplan, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("name: a\nmodel: {hidden_size: 8}\n")
    assert "error[MP115]" in megaplan("estimate", str(path)).err


@pytest.mark.parametrize(("name", "text", "what", "hint"), FILES[:3], ids=[each[0] for each in FILES[:3]])
def test_an_import_names_it_with_the_same_hint(megaplan, tmp_path, name, text, what, hint):
    path = tmp_path / name
    path.write_text(text)
    ran = megaplan("import", "megatron", str(path))
    assert f"belongs to {what}" in ran.err
    assert f"hint: {hint}\n" in ran.err
