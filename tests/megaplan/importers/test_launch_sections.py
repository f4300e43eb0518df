"""YAML that parts Megatron's arguments into sections is the launch that has them as words; Primus's builds on files of its tree."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from recorded_launches import BARE

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.script import Field, read_words
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.structure import Policy
from megaplan.spec.models import Spec

MORE = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --micro-batch-size 2 --lr 3e-4 --bf16"


def spec_of(text: str, name: str = "x.sh", **more: Any) -> Spec:
    return import_megatron(text, name, ("name=same",), 8, **more).loaded.spec


def sectioned(draw: Random, values: dict[str, Any]) -> dict[str, Any]:
    """The values in sections of one or two levels, as a person may part them."""
    found: dict[str, Any] = {"system": {"precision": {}}, "model": {"optimizer": {}}, "data": {}}
    places = [found["system"], found["system"]["precision"], found["model"], found["model"]["optimizer"], found["data"]]
    for key, value in values.items():
        draw.choice(places)[key] = value
    return found


@pytest.mark.parametrize("seed", range(12))
def test_sections_are_read_as_words_are(seed: int) -> None:
    draw = Random(seed)
    words = f"{BARE} {MORE}".split()
    launch = spec_of(" ".join(["torchrun pretrain_gpt.py", *words]))
    values = read_words([Field(word, 0) for word in words[words.index("--num-layers") :]]).values
    off = {"untie_embeddings_and_output_weights": False, "save_interval": None}
    assert spec_of(yaml.safe_dump(sectioned(draw, values | off)), "x.yaml") == launch


@pytest.mark.parametrize("nested", [True, False])
def test_names_of_the_parsers_attributes_are_those_of_the_arguments(nested: bool) -> None:
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "vocab_size": 99,
    }
    own = {"add_bias_linear": False, "num_moe_experts": 4, "gradient_accumulation_fusion": False, "layernorm_epsilon": 1e-4}
    theirs = {"disable_bias_linear": True, "num_experts": 4, "no_gradient_accumulation_fusion": True, "norm_epsilon": 1e-4}

    def read(more: dict[str, Any]) -> Spec:
        return spec_of(yaml.safe_dump({"language_model": sizes | more, "spec": None} if nested else sizes | more), "x.yaml")

    assert read(own) == read(theirs)
    assert read(own).model.attention.bias is False
    assert read({}).model.attention.bias is True


def test_a_variable_of_another_file_is_named_only_where_it_decides() -> None:
    values = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "vocab_size": 99,
    }
    text = yaml.safe_dump({"model": values | {"seed": "${experiment.seed}", "save": "${experiment.dir}"}})
    assert import_megatron(text, "x.yaml").loaded.spec.model.num_layers == 4
    with pytest.raises(MegaplanError) as caught:
        import_megatron(yaml.safe_dump({"model": values | {"hidden_size": "${sizes.hidden}"}}), "x.yaml")
    assert any("sizes.hidden" in each.detail for each in caught.value.diagnostics)


BASE = {
    "model_type": "gpt", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False, "vocab_size": 200,
    "position_embedding_type": "rope", "moe_router_topk": 2, "num_experts": None, "mtp_num_layers": 0, "use_fused_swiglu": True,
}  # fmt: skip


def primus(folder: Path, framework: str = "megatron", model: dict[str, Any] | None = None, **overrides: Any) -> tuple[str, str]:
    """A configuration in a tree of Primus's files of Megatron: its text and its name."""
    models, modules = (folder / "primus/configs" / kind / "megatron" for kind in ("models", "modules"))
    for kind in (models, modules):
        kind.mkdir(parents=True, exist_ok=True)
    (models / "base.yaml").write_text(yaml.safe_dump(BASE), encoding="utf-8")
    (models / "small.yaml").write_text(yaml.safe_dump({"extends": ["base.yaml"], **(model or {"num_layers": 2})}), encoding="utf-8")
    (modules / "pre_trainer.yaml").write_text(yaml.safe_dump({"seq_length": 32, "bf16": True, "sequence_parallel": 0}), encoding="utf-8")
    part = {"framework": framework, "config": "pre_trainer.yaml", "model": "${SMALL_MODEL:small}.yaml", "overrides": overrides}
    (folder / "examples").mkdir(exist_ok=True)
    return yaml.safe_dump({"exp_name": "x", "modules": {"pre_trainer": part}}), str(folder / "examples/x.yaml")


def test_a_configuration_of_primus_builds_on_the_files_that_it_names(tmp_path: Path) -> None:
    text, name = primus(tmp_path, micro_batch_size=2, seq_length="${SEQ:64}")
    spec = spec_of(text, name)
    assert (spec.model.num_layers, spec.model.hidden_size, spec.batch.seq_length, spec.batch.micro_batch_size) == (4, 64, 64, 2)
    assert spec_of(text, name, environment={"SEQ": "128"}).batch.seq_length == 128
    assert spec.model.pattern == "ADAD"


def test_hybrid_models_of_primus_are_read_by_their_shares(tmp_path: Path) -> None:
    hybrid = {"model_type": "mamba", "num_layers": 4, "hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25, "mamba_num_groups": 1}
    text, name = primus(tmp_path, model=hybrid)
    assert sorted(spec_of(text, name).model.pattern) == sorted("MMAD")


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"framework": "torchtitan"}, "MP926", "framework = torchtitan"),
        ({"model": {"model_type": "diffusion"}}, "MP926", "model_type = diffusion"),
        ({"model": {"num_joint_layers": 3}}, "MP913", "--num-joint-layers 3"),
        ({"model": {"own_layer_types": ["conv", "full_attention"]}}, "MP913", "--own-layer-types"),
        ({"model": {"spec": ["own.layers", "gdn"]}}, "MP914", "--spec own.layers gdn"),
    ],
)
def test_what_decides_a_tensor_elsewhere_is_an_error(tmp_path: Path, change: dict[str, Any], code: str, named: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        spec_of(*primus(tmp_path, **change))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert named in found.detail


def test_a_file_that_is_in_no_folder_above_is_named(tmp_path: Path) -> None:
    text, name = primus(tmp_path)
    (tmp_path / "primus/configs/models/megatron/small.yaml").unlink()
    with pytest.raises(MegaplanError) as caught:
        spec_of(text, name)
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP926", "modules.pre_trainer.model")
    assert "small.yaml" in found.detail


def test_modules_of_ones_own_are_refused_and_may_be_ignored() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{BARE} --spec own.layers stack", "x.sh")
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP914", "--ignore spec")
    assert import_megatron(f"{BARE} --spec own.layers stack", "x.sh", policy=Policy(ignored=frozenset({"spec"}))).loaded.spec.model
    assert import_megatron(f"{BARE} --spec megatron.core.models.x mamba_stack_spec", "x.sh").loaded.spec.model
    mindspeed = import_megatron(f"{BARE} --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec", "x.sh").loaded.diagnostics
    assert [each.severity for each in mindspeed if "layer_spec" in each.detail] == [Severity.WARNING]


def test_a_refused_switch_says_how_to_plan_without_it() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{BARE} --use-torch-fsdp2", "x.sh")
    (found,) = caught.value.diagnostics
    assert found.hints[0] == "--ignore use-torch-fsdp2"


SLIME = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-gpu 4096)
ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 \\
  ${MODEL_ARGS[@]} ${PERF_ARGS[@]} --rollout-batch-size 8
"""
SOURCED = """
layers=()
for ((i=0; i<4; i++)); do
  if ((i < 1)); then layers+=(0); else layers+=(1); fi
done
printf -v FREQUENCY "[%s]" "$(IFS=', '; echo "${layers[*]}")"
MODEL_ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --ffn-hidden-size 96 --vocab-size 200
  --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq $FREQUENCY)
"""


def test_a_launch_that_sources_the_model_s_arguments_is_read_where_the_file_is(tmp_path: Path) -> None:
    """slime's scripts, with what slime itself sets; elsewhere they are another front end's."""
    launch = str(tmp_path / "run.sh")
    with pytest.raises(MegaplanError) as caught:
        spec_of(SLIME, launch)
    assert caught.value.diagnostics[0].code == "MP926"
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text(SOURCED, encoding="utf-8")
    imported = import_megatron(SLIME, launch, ("batch.seq_length=128",), 8)
    spec = imported.loaded.spec
    assert (spec.model.pattern, spec.mesh.tp, spec.batch.seq_length, spec.precision.params) == ("ADAEAEAE", 2, 128, "bf16")
    assert any("rollouts" in each.detail for each in imported.loaded.diagnostics)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_slime_states_its_gpus_and_the_tokens_of_a_packed_microbatch(tmp_path: Path, cp: int, *, packed: bool) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text(SOURCED, encoding="utf-8")
    more = f" --context-parallel-size {cp}" + (" --use-dynamic-batch-size" if packed else "")
    launch = SLIME.replace("--max-tokens-per-gpu 4096", f"--max-tokens-per-gpu 512{more}").replace("num-nodes 1", "num-nodes 2")
    spec = import_megatron(launch, str(tmp_path / "run.sh")).loaded.spec
    assert spec.mesh.world_size == 16
    assert spec.batch.seq_length == (512 * cp if packed else 4096)


@pytest.mark.parametrize(("steps", "batch"), [("", 64), ("--num-steps-per-rollout 2", 32), ("--global-batch-size 16", 16)])
def test_slime_makes_the_batch_of_its_rollouts(tmp_path: Path, steps: str, batch: int) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text(SOURCED, encoding="utf-8")
    launch = SLIME.replace("batch-size 8", f"batch-size 16 --n-samples-per-prompt 4 {steps}")
    assert import_megatron(launch, str(tmp_path / "run.sh")).loaded.spec.global_batch_size == batch


@pytest.mark.parametrize("path", ["conf/args.yaml", "/of/another/machine/conf/args.yaml"])
def test_a_file_in_the_place_of_arguments_is_read_where_it_is(tmp_path: Path, path: str) -> None:
    words = f"{BARE} {MORE}".split()
    values = read_words([Field(word, 0) for word in words[words.index("--num-layers") :]]).values
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg {path} --recompute-granularity full"
    with pytest.raises(MegaplanError, match=r"args\.yaml"):
        spec_of(run, str(tmp_path / "x.sh"))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/args.yaml").write_text(yaml.safe_dump(sectioned(Random(1), values)), encoding="utf-8")
    assert spec_of(run, str(tmp_path / "x.sh")) == spec_of(" ".join(["torchrun pretrain_gpt.py", *words]))


def test_a_length_may_be_stated_where_a_launch_has_none() -> None:
    short = BARE.replace("--seq-length 128", "")
    with pytest.raises(MegaplanError) as caught:
        import_megatron(short, "x.sh")
    (found,) = caught.value.diagnostics
    assert found.hints[0] == "--set batch.seq_length=N"
    assert import_megatron(short, "x.sh", ("batch.seq_length=64",)).loaded.spec.batch.seq_length == 64


def test_a_value_that_is_empty_is_said_to_be_none() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{BARE} --num-layers --bf16", "x.sh")
    assert "--num-layers has no value" in caught.value.diagnostics[0].detail


def test_a_spec_is_no_launch() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron("format: megaplan.spec/1\nmodel: {num_layers: 4, hidden_size: 64}\n", "spec.yaml")
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP926", "megaplan estimate spec.yaml")


SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32, "bf16": True}


def experiment(folder: Path, entrypoint: str, kind: str = "train", **more: Any) -> Path:
    """FlagScale's two files: an experiment, and the sizes that it trains with."""
    (folder / "train").mkdir(parents=True)
    (folder / "train/tiny.yaml").write_text(yaml.safe_dump({"system": {}, "model": {**SIZES, "vocab_size": 99}}), encoding="utf-8")
    whole = {
        "defaults": ["_self_", {"train": "tiny"}],
        "experiment": {"task": {"type": kind, "entrypoint": entrypoint}, "runner": {"nnodes": 2, "nproc_per_node": 4}},
        **more,
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return path


def of_file(path: Path) -> Spec:
    return import_megatron(path.read_text(encoding="utf-8"), str(path)).loaded.spec


def test_an_experiment_of_flagscale_names_its_sizes_and_its_processes(tmp_path: Path) -> None:
    path = experiment(tmp_path / "conf", "./flagscale/train/train_gpt.py", train={"model": {"hidden_size": 128}})
    spec = of_file(path)
    assert (spec.model.hidden_size, spec.mesh.world_size) == (128, 8)
    assert of_file(path.parent / "train/tiny.yaml").model.hidden_size == 64
    (path.parent / "train/tiny.yaml").unlink()
    with pytest.raises(MegaplanError, match=r"train/tiny\.yaml"):
        of_file(path)


@pytest.mark.parametrize(("entrypoint", "kind"), [("./flagscale/train/train_rwkv.py", "train"), ("flagscale/serve/run.py", "serve")])
def test_an_experiment_of_another_program_is_refused(tmp_path: Path, entrypoint: str, kind: str) -> None:
    path = experiment(tmp_path / "conf", entrypoint, kind)
    with pytest.raises(MegaplanError, match="MP926"):
        of_file(path)
    if kind == "train":
        for name in ("tiny", "another"):  # which no experiment names
            (path.parent / f"train/{name}.yaml").write_text(yaml.safe_dump({"model": {**SIZES, "vocab_size": 99}}), encoding="utf-8")
            with pytest.raises(MegaplanError, match="RWKV"):
                of_file(path.parent / f"train/{name}.yaml")


def test_a_place_that_a_template_leaves_is_a_variable_that_is_set_nowhere() -> None:
    text = yaml.safe_dump({"model": SIZES | {"vocab_size": "${size:??}"}})
    with pytest.raises(MegaplanError, match="size"):
        import_megatron(text, "x.yaml")


@pytest.mark.parametrize(
    ("key", "value", "kind"), [("crossattn_emb_size", 64, "a model of diffusion"), ("bert_no_binary_head", True, "BERT")]
)
def test_sizes_of_a_model_that_is_no_decoder_are_refused(key: str, value: object, kind: str) -> None:
    with pytest.raises(MegaplanError, match=kind):
        import_megatron(yaml.safe_dump({"model": SIZES | {"vocab_size": 99, key: value}}), "x.yaml")


def test_a_layout_may_have_escaped_bars() -> None:
    arguments = SIZES | {"vocab_size": 99, "pipeline_model_parallel_size": 2, "num_layers": 4}
    plain, escaped = (
        import_megatron(yaml.safe_dump({"MODEL_ARGS": arguments | {"pipeline_model_parallel_layout": layout}}), "x.yaml").loaded.spec
        for layout in ("Et*2|t*2L", "Et*2\\|t*2L")
    )
    assert plain == escaped
