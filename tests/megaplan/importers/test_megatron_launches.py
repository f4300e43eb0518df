"""Launches in the forms that people have: scripts of bash that are recorded, plain scripts, Megatron's own YAML, a log's table."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from accuracy_megatron.launches import launch_text, stages_of_spec
from megatron_goldens import ROWS
from recorded_launches import BARE, SCRIPTS, errors, notes, recorded

from megaplan.cli.main import run
from megaplan.errors import MegaplanError, Severity
from megaplan.exporters.megatron import export_megatron
from megaplan.exporters.values import Source
from megaplan.hosts.megatron.argument import value_at
from megaplan.hosts.megatron.chunks import recomputed_groups
from megaplan.importers.imported import Imported
from megaplan.importers.megatron.spec import import_megatron, import_recording
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.models import Spec

EXPECTED: dict[str, dict[str, Any]] = {
    "dense_arrays": {
        "model.pattern": "|".join(["AD" * 12] * 2),
        "model.norm": "layernorm",
        "model.learned_positions": 2048,
        "model.mlp.bias": True,
        "model.attention.output_bias": True,
        "model.vocab_size": 50688,
        "precision.params": "fp16",
        "precision.grads": "fp16",
        "host.sequence_parallel": False,
        "mesh.world_size": 32,
        "schedule.num_microbatches": 32,
    },
    "llama_fp8": {
        "model.vocab_size": 128256,
        "model.norm": "rmsnorm",
        "precision.recipe.name": "fp8_delayed",
        "precision.recipe.param_gather": True,
        "host.attention_backend": "fused",
        "host.cross_entropy": "native",
        "precision.grads": "bf16",
        "mesh.tp": 2,
        "mesh.world_size": 8,
    },
    "mixtral": {
        "model.moe.balance_loss_coefficient": 0.01,
        "model.vocab_size": 32000,
        "host.moe_load_balancing": "aux_loss",
        "host.moe_dispatcher": "alltoall",
        "mesh.ep": 8,
        "mesh.world_size": 32,
    },
    "hybrid_case": {
        "model.pattern": "MDMDMDMADMDMDMDMADMDMDMD",
        "model.hidden_size": 4096,
        "model.vocab_size": 256000,
        "model.learned_positions": None,
        "model.attention.nope_layers": (7, 16),
        "host.attention_mask": False,
        "mesh.tp": 4,
    },
    "slurm": {"mesh.world_size": 16, "recompute.blocks": {"A": "selective"}, "model.vocab_size": 50432, "host.attention_backend": "flash"},
    "fsdp_here_document": {
        "sharding.reshard_after_forward": True,
        "model.norm": "layernorm",
        "model.mlp.bias": False,
        "host.wgrad_fusion": False,
        "mesh.world_size": 8,
    },
    "functions": {
        "host.transformer_impl": "local",
        "host.attention_backend": "unfused",
        "mesh.world_size": 4,
        "schedule.num_microbatches": 2,
        "precision.params": "bf16",
    },
    "latent_experts": {
        "model.pattern": "|".join(["ADADAD", *["AEAE"] * 6, "AE"]),
        "model.features.mtp.experts": True,
        "model.features.mtp.activation": "swiglu",
        "model.vocab_size": 129280,
        "host.recompute_modules": ("mla_up_proj", "layernorm", "moe_act"),
        "host.moe_router_dtype": "fp32",
        "mesh.vpp": 4,
        "mesh.etp": 1,
    },
    "model_conf": {"model.attention.rotary_dim": 64, "model.vocab_size": 128256, "mesh.world_size": 1},
    "options_loop": {
        "model.pattern": "|".join(["AD" * 4] * 4),
        "model.attention.qk_norm": True,
        "optimizer.matrix": "muon",
        "host.recompute_method": "block",
        "host.recompute_num_layers": 2,
        "mesh.vpp": 2,
    },
}


def imported(name: str, **more: Any) -> Imported:
    return import_recording(recorded(name, **more), f"{name}.sh")


def source_of(spec: Spec) -> Source:
    inventory = build_inventory(spec)
    return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


def test_every_script_is_expected() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_launch_script_is_read_as_bash_runs_it(name: str) -> None:
    spec = imported(name).loaded.spec
    assert {key: value_at(spec, key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_imported_script_survives_export_and_import(name: str) -> None:
    spec = imported(name).loaded.spec
    exported = export_megatron(source_of(spec))
    assert exported.losses == ()
    again = import_megatron(exported.text, f"{name}.sh").loaded.spec
    assert again == spec.model_copy(update={"training": again.training})  # an export writes the warm-up that a spec leaves open


def noted(name: str) -> list[str]:
    return [found.detail for found in imported(name).loaded.diagnostics if found.code == "MP919"]


def test_what_a_script_leaves_open_is_noted() -> None:
    assert "./cluster.env does not exist" in noted("functions")
    assert "no command is launched: the arguments are those of MODEL_ARGS" in noted("model_conf")
    assert "50,257 tokens of GPT2BPETokenizer, Megatron's default" in noted("slurm")
    assert "set nowhere, and empty: TENSORBOARD_DIR" in noted("dense_arrays")


def test_the_environment_and_the_scripts_own_arguments_change_it() -> None:
    assert imported("options_loop", argv=("--layers", "8")).loaded.spec.model.num_layers == 16
    four = imported("llama_fp8", environment=(("TP", "4"), ("SLURM_NNODES", "2"))).loaded.spec
    assert (four.mesh.tp, four.mesh.world_size) == (4, 16)
    passed = imported("functions", argv=("--swiglu",)).loaded.spec
    assert passed.model.mlp is not None
    assert passed.model.mlp.activation == "swiglu"


def test_a_variable_that_an_argument_needs_is_named() -> None:
    (found,) = errors(f"GPUS=8\ntorchrun pretrain_gpt.py {BARE} \\\n  --tensor-model-parallel-size ${{TP}} --save $OUT\n")
    assert (found.code, found.location.line, found.hints[0]) == ("MP918", 3, "--env TP=…")
    assert found.detail == "--tensor-model-parallel-size $TP, and TP is set nowhere"
    spec = import_megatron(f"torchrun pretrain_gpt.py {BARE} --tensor-model-parallel-size $TP", "x.sh", gpus=2, environment={"TP": "2"})
    assert spec.loaded.spec.mesh.tp == 2


def test_gpus_that_are_given_stand_for_nodes_and_processes_that_are_not_known() -> None:
    text = f"torchrun --nnodes $NODES --nproc-per-node $GPUS pretrain_gpt.py {BARE}"
    assert import_megatron(text, "x.sh", gpus=8).loaded.spec.mesh.world_size == 8
    found = import_megatron(text, "x.sh").loaded
    assert found.spec.mesh.world_size == 1
    assert [item.code for item in found.diagnostics if item.code == "MP917"] == ["MP917"]
    assert "the number of GPUs depends on NODES, GPUS" in [item.detail for item in found.diagnostics]


def test_fewer_gpus_than_the_degrees_need_are_an_example() -> None:
    degrees = "--num-layers 16 --pipeline-model-parallel-size 16 --global-batch-size 48"
    text = f"torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py {BARE} {degrees}"
    found = import_megatron(text, "x.sh").loaded
    assert found.spec.mesh.world_size == 16
    assert any(
        each.detail.endswith("need a multiple of 16: planned with 16") for each in found.diagnostics if each.severity is Severity.WARNING
    )
    with pytest.raises(MegaplanError, match="need a multiple of 16"):
        import_megatron(text, "x.sh", gpus=8)
    with pytest.raises(MegaplanError, match="need a multiple of 16"):
        import_megatron(text.replace("--nnodes 1", "--nnodes 3"), "x.sh")


def test_a_setting_of_training_that_is_set_nowhere_is_read_as_absent() -> None:
    found = import_megatron(f"torchrun pretrain_gpt.py {BARE} --train-iters $STEPS", "x.sh").loaded
    (told,) = [each for each in found.diagnostics if "STEPS" in each.detail]
    assert (told.detail, told.hints[0]) == ("--train-iters $STEPS, and STEPS is set nowhere: it is read as absent", "--env STEPS=…")


def test_gpus_that_differ_from_what_the_launch_states_are_noted() -> None:
    text = f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {BARE}"
    found = import_megatron(text, "x.sh", gpus=4).loaded
    assert found.spec.mesh.world_size == 4
    assert "4 GPUs, as --gpus says; the launch states 16" in [item.detail for item in found.diagnostics]
    same = import_megatron(text, "x.sh", gpus=16).loaded
    assert not any("--gpus says" in item.detail for item in same.diagnostics)


@pytest.mark.parametrize("said", ["", " --position-embedding-type rope", " --position-embedding-type learned_absolute"])
def test_the_older_switch_of_rotary_positions_stands_beside_the_newer_argument(said: str) -> None:
    """Megatron's parser replaces the type of positions; scripts that give both are common."""
    model = import_megatron(f"torchrun pretrain_gpt.py {BARE} --use-rotary-position-embeddings{said}", "x.sh").loaded.spec.model
    assert model.learned_positions is None
    assert model.attention is not None
    assert model.attention.nope_layers == ()


@pytest.mark.parametrize("argument", ["--cross-entropy-fusion-impl te", "--mamba-state-dim 64"])
def test_a_known_argument_that_the_launch_gives_no_meaning_is_not_called_unknown(argument: str) -> None:
    (found,) = errors(f"torchrun pretrain_gpt.py {BARE} {argument}")
    assert found.code == "MP914"
    assert found.detail == f"{argument}: a spec cannot express it with the other arguments of the launch"
    (alone,) = errors(f"torchrun pretrain_gpt.py {BARE} {argument} --num-attention-heads=x")
    assert alone.code == "MP916", "what is read after an error is not judged"


def test_a_list_that_is_set_nowhere_is_read_as_empty() -> None:
    text = f"torchrun pretrain_gpt.py {BARE} $EXTRA_ARGS --micro-batch-size 2 ${{MORE}}"
    assert import_megatron(text, "x.sh").loaded.spec.batch.micro_batch_size == 2
    assert "$EXTRA_ARGS, $MORE are set nowhere, and read as empty" in notes(text, "x.sh")
    assert not any("$DATA" in note for note in notes(f"torchrun pretrain_gpt.py {BARE} --data-path $DATA", "x.sh"))  # not read at all


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("torchrun x.py --num-layers 2\nfor N in 1 2; do\necho", 3, "no 'done' at its end"),
        ("if true; then\ntorchrun x.py --num-layers 2\n", 3, "no 'fi' at its end"),
        ('torchrun pretrain_gpt.py "--num-layers 2', 1, "'\"--num-layers 2'"),
        ("torchrun ${NAME --num-layers", 1, "'${NAME --num-layers'"),
        ("A=$((1 +* 2))\ntorchrun x.py --num-layers 2", 1, "$((1 +* 2))"),
        ("while true; do A=1; done", 1, "loops of more than 20,000 commands"),
        ("f() { f; }\nf", 1, "f, a function that calls itself"),
        ("A=aa\nwhile true; do A=$A$A; done", 2, "a value of A with more than 1,048,576 characters"),
    ],
)
def test_a_script_that_bash_alone_can_read_is_refused_with_the_command_that_records_it(text: str, line: int, what: str) -> None:
    (found,) = errors(text, "my launch.sh", environment={"TP": "2"}, argv=["8b"])
    assert (found.code, found.location.line) == ("MP922", line)
    assert found.detail == f"my launch.sh has {what}, which only bash can evaluate"
    assert found.hints[0] == "megaplan import megatron --record --env TP=2 -- bash 'my launch.sh' 8b"


def test_a_plain_script_has_variables_defaults_and_quotations() -> None:
    text = f"""#!/bin/bash
set -euo pipefail
export GPUS=8 NAME='a b'  # of a node
SIZE="$GPUS"0
torchrun --nproc_per_node ${{GPUS}} --nnodes "${{NODES:-2}}" pretrain_gpt.py {BARE} \\
  --global-batch-size $SIZE --micro-batch-size=${{MBS:-5}} --save "out/$NAME" \\
  --swiglu # the end
"""
    spec = import_megatron(text, "x.sh").loaded.spec
    assert (spec.mesh.world_size, spec.batch.micro_batch_size, spec.schedule.num_microbatches) == (16, 5, 1)
    assert spec.model.mlp is not None
    assert spec.model.mlp.activation == "swiglu"
    assert import_megatron(text, "x.sh", argv=["--micro-batch-size", "1"]).loaded.spec.schedule.num_microbatches == 5


def test_a_yaml_key_that_stands_twice_is_taken_the_last_time_and_noted() -> None:
    words = {word.split()[0]: word.partition(" ")[2] or "true" for word in BARE.split("--")[1:] for word in [word.strip()]}
    lines = [f"  --{key}: {value}" for key, value in words.items()]
    text = "MODEL_ARGS:\n" + "\n".join([*lines, "  --micro-batch-size: 1", "  --micro-batch-size: 2"])
    assert import_megatron(text, "x.yaml").loaded.spec.batch.micro_batch_size == 2
    assert any("is already on line" in note and note.endswith("the last is taken") for note in notes(text, "x.yaml"))


def test_a_run_that_ends_within_its_warm_up_has_none() -> None:
    text = f"{BARE} --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 333 --train-iters 20"
    imported = import_megatron(text, "x.sh").loaded
    assert imported.spec.training.steps == 20
    (told,) = [found.detail for found in imported.diagnostics if found.code == "MP915"]
    assert told == "--lr-warmup-iters 333: the run ends before, after 20 steps"


def test_a_vocabulary_is_the_tokenizers_or_is_asked_for() -> None:
    known = import_megatron(f"{BARE} --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model x/nemotron_2_256k.model", "x.sh")
    assert known.loaded.spec.model.vocab_size == 256_000
    unknown = f"{BARE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/new"
    (found,) = errors(unknown)
    assert (found.code, found.hints[0]) == ("MP916", "--set model.vocab_size=…")
    assert "HuggingFaceTokenizer org/new" in found.detail
    given = import_megatron(unknown, "x.sh", ["model.vocab_size=5120"])
    assert given.loaded.spec.model.vocab_size == 5120


def as_script(row: dict[str, Any]) -> str:
    words = []
    for key, value in row["arguments"].items():
        if value is not False:
            words.append(f"  --{key.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}"))
    if row["padded_vocab_size"]:
        words.append(f"  --padded-vocab-size {row['padded_vocab_size']}")
    exports = "".join(f"export {key}={value}\n" for key, value in row["environment"].items())
    arguments = " \\\n".join(words)
    launcher = f"torchrun --nproc_per_node ${{GPUS:-{row['gpus']}}}" if row["gpus"] else "python"
    return f"#!/bin/bash\n{exports}{launcher} pretrain_gpt.py \\\n{arguments}\n"


def imported_row(row: dict[str, Any], text: str, name: str, gpus: int | None) -> dict[str, Any] | None:
    given = {} if row["padded_vocab_size"] else {"overrides": ["model.vocab_size=32000"]}
    try:
        return import_megatron(text, name, gpus=gpus, **given).document
    except MegaplanError:
        return None


def test_megatrons_own_runs_import_from_their_yaml_and_from_a_script() -> None:
    taken = 0
    for row in ROWS:
        known = {"padded_vocab_size": row["padded_vocab_size"]} if row["padded_vocab_size"] else {}
        found = imported_row(row, launch_text({**row["arguments"], **known}, row["environment"]), "launch.yaml", row["gpus"])
        assert imported_row(row, as_script(row), "launch.sh", None) == found, row["name"]
        taken += found is not None
    assert (taken, len(ROWS)) == (67, 69)


def test_the_block_method_recomputes_the_first_layers_of_a_stage() -> None:
    text = BARE.replace("--num-layers 2", "--num-layers 8") + "--recompute-granularity full --recompute-num-layers 3 --recompute-method "
    (block,) = stages_of_spec(import_megatron(text + "block", "x.sh").loaded.spec)
    (uniform,) = stages_of_spec(import_megatron(text + "uniform", "x.sh").loaded.spec)
    assert recomputed_groups(block.run, "*-" * 8) == (("*-",) * 3, "*-" * 5)
    assert recomputed_groups(uniform.run, "*-" * 8) == (("*-" * 3, "*-" * 3, "*-" * 2), "")


def test_the_command_takes_variables_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {BARE} --micro-batch-size $MBS\n")
    assert run(["import", "megatron", "launch.sh", "--env", "MBS=2", "-o", "a.yaml", "--", "--swiglu"]) == 0
    assert "activation: swiglu" in (tmp_path / "a.yaml").read_text(encoding="utf-8")
    assert run(["import", "megatron", "-o", "b.yaml", "--gpus", "8", "--", *BARE.split(), "--swiglu", "--micro-batch-size", "2"]) == 0
    body = [(tmp_path / name).read_text(encoding="utf-8").splitlines() for name in ("a.yaml", "b.yaml")]
    different = [pair for pair in zip(*body, strict=True) if pair[0] != pair[1] and not pair[0].startswith("#")]
    assert different == [("name: launch", "name: arguments")]
    assert run(["import", "megatron", "launch.sh", "--env", "MBS"]) == 2
    capsys.readouterr()
