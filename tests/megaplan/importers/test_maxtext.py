"""Runs of MaxText: files, recipes and arguments give the model, degrees and policies that they state."""

from pathlib import Path

import pytest
from hf_samples import MODELS, config, text

from megaplan.cli.main import run
from megaplan.errors import MegaplanError, Severity
from megaplan.importers.hf import import_hf
from megaplan.importers.maxtext.model import DEFAULTS, models, section_of
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

PUBLISHED = {  # parameters of the published weights, with the vocabulary of MaxText's file
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800, "gemma-2b": 2_506_172_416 + 128 * 2048, "gemma-7b": 8_537_680_896 + 128 * 3072,
    "gemma2-2b": 2_614_341_888 + 128 * 2304, "gemma2-9b": 9_241_705_984 + 128 * 3584, "gemma2-27b": 27_227_128_320 + 128 * 4608,
    "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "deepseek2-16b": 15_706_484_224,
    "deepseek3-671b": 671_026_404_352, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "qwen3-next-80b-a3b": 79_674_391_296, "kimi-k2-1t": 1_026_408_209_408, "olmo3-7b": 7_298_011_136,
}  # fmt: skip
SAME = {"Llama-3.1-8B": "llama3.1-8b", "Mixtral-8x7B-v0.1": "mixtral-8x7b", "Qwen3-8B": "qwen3-8b", "Qwen3-235B-A22B": "qwen3-235b-a22b",
        "DeepSeek-V2-Lite": "deepseek2-16b"}  # fmt: skip
RECIPE = """
export WORKLOAD_NAME="mine"
MAXTEXT_ARGS="\\
model_name=llama3.1-70b \\
per_device_batch_size=2 \\
remat_policy=custom \\
context=device \\
ici_fsdp_parallelism=-1 \\
mu_dtype=bfloat16 \\
max_target_length=8192 \\
run_name=${WORKLOAD_NAME}"
xpk workload create --device-type=tpu7x-4x4x4 --num-slices=1 --command="python3 -m MaxText.train MaxText/configs/base.yml ${MAXTEXT_ARGS}"
"""


def spec_of(*inputs: str) -> Spec:
    return import_maxtext(inputs).loaded.spec


def parameters(name: str) -> int:
    section = section_of({**DEFAULTS, **models()[name]})
    document = {"format": "megaplan.spec/1", "name": "m", "model": section, "batch": {"micro_batch_size": 1, "seq_length": 128}}
    return build_inventory(spec_from_document(document)).parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_parameters(name: str) -> None:
    assert parameters(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", models())
def test_every_model_of_the_file_is_a_spec(name: str) -> None:
    assert parameters(name) > 0


@pytest.mark.parametrize("name", SAME)
def test_a_model_is_that_of_its_transformers_configuration(name: str) -> None:
    own = import_hf(text(config(name)), "config.json").loaded.spec
    assert parameters(SAME[name]) == build_inventory(own).parameters == MODELS[name]["total_params"]


def test_a_recipe_is_read_from_its_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(RECIPE, encoding="utf-8")
    spec = spec_of(str(tmp_path / "run.sh"))
    assert (spec.device.name, spec.mesh.dp_shard, spec.device.domain) == ("tpu-v7", 128, 128)
    assert spec.batch.micro_batch_size == 2
    assert (str(spec.precision.moments), str(spec.precision.master)) == ("bf16", "fp32")
    assert spec.host.remat_tensors == {"decoder_layer_input": "device", "context": "device"}
    assert spec_of(str(tmp_path / "run.sh"), "per_device_batch_size=1").batch.micro_batch_size == 1


def test_a_file_of_a_model_and_arguments_over_it(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text("base_emb_dim: 512\nbase_num_decoder_layers: 2\nvocab_size: 1000\n", encoding="utf-8")
    spec = spec_of(str(tmp_path / "base.yml"), "vocab_size=2000", "ici_fsdp_parallelism=4")
    assert (spec.model.hidden_size, spec.model.num_layers, spec.model.vocab_size, spec.mesh.world_size) == (512, 4, 2000, 4)


def test_a_script_that_reads_another_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 train.py configs/gpu/models/llama2_7b.yml per_device_batch_size=4\n", encoding="utf-8")
    with pytest.raises(MegaplanError) as caught:
        spec_of(str(tmp_path / "run.sh"))
    assert "llama2_7b.yml" in caught.value.diagnostics[0].detail
    (tmp_path / "llama2_7b.yml").write_text("base_config: base.yml\nmodel_name: llama2-7b\nhardware: gpu\n", encoding="utf-8")
    spec = spec_of(str(tmp_path / "llama2_7b.yml"), str(tmp_path / "run.sh"), "ici_fsdp_parallelism=8")
    assert (spec.device.name, spec.batch.micro_batch_size, spec.model.num_layers) == ("h100-sxm", 4, 64)


@pytest.mark.parametrize(
    ("arguments", "device", "size", "degrees"),
    [
        ("compile_topology=v5p-128", "tpu-v5p", 64, {"dp_shard": 64}),
        ("compile_topology=v6e-256 ici_tensor_parallelism=4", "tpu-v6e", 256, {"dp_shard": 64, "tp": 4}),
        ("compile_topology=tpu7x-4x4x8 ici_context_parallelism=8", "tpu-v7", 256, {"dp_shard": 32, "cp": 8}),
        ("compile_topology=v6e-256 compile_topology_num_slices=2", "tpu-v6e", 256, {"dp_replicate": 2, "dp_shard": 256}),
        (
            "compile_topology=v6e-256 compile_topology_num_slices=2 dcn_data_parallelism=1 dcn_fsdp_parallelism=2",
            *("tpu-v6e", 256, {"dp_replicate": 1, "dp_shard": 512}),
        ),
    ],
)
def test_degrees_are_those_of_slices(arguments: str, device: str, size: int, degrees: dict[str, int]) -> None:
    spec = spec_of("model_name=llama3.1-8b", *arguments.split())
    assert (spec.device.name, spec.device.domain) == (device, size)
    assert {axis: getattr(spec.mesh, axis) for axis in degrees} == degrees


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("model_name=llama9", "MP916", "model_name = llama9"),
        ("model_name=llama3.1-8b mtp_num_layers=1", "MP914", "mtp_num_layers = 1"),
        ("model_name=llama3.1-8b ici_tensor_sequence_parallelism=2", "MP914", "the axis is not priced"),
        ("model_name=llama3.1-8b per_device_batchsize=2", "MP913", "per_device_batchsize = 2"),
        ("model_name=llama3.1-8b per_device_batch_size=0.3", "MP914", "sequences per microbatch on a data rank"),
        ("model_name=llama3.1-8b quantization=int4", "MP916", "quantization"),
        ("model_name=llama3.1-8b opt_type=sgd", "MP916", "adamw or adam_pax"),
        ("per_device_batch_size=2", "MP916", "neither model_name nor a size"),
        ("decoder_block=deepseek4", "MP914", "decoder_block"),
        ("model_name=llama3.1-8b exp_class=Own", "MP914", "a fork's own layers"),
        ("model_name=llama3.1-8b ici_expert_parallelism=2", "MP914", "no experts"),
        ("model_name=llama3.1-8b compile_topology=v6e-16 dcn_tensor_parallelism=2", "MP914", "over"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(arguments: str, code: str, said: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_maxtext(arguments.split())
    assert any(each.code == code and said in each.detail for each in caught.value.diagnostics), caught.value


@pytest.mark.parametrize("key", DEFAULTS)
@pytest.mark.parametrize("value", ["7", "true", "words", "[1]", "1.5"])
def test_a_value_of_another_type_is_named(key: str, value: str) -> None:
    """Any of them is planned or refused by the key; none is taken for what it is not."""
    default, found = DEFAULTS[key], ()
    try:
        import_maxtext(["decoder_block=llama2", f"{key}={value}"])
    except MegaplanError as error:
        found = error.diagnostics
    if isinstance(default, int) and not isinstance(default, bool) and value in ("true", "words", "[1]"):
        assert any(f"{key} = " in each.detail and each.code == "MP916" for each in found)


SCRIPT = """
# model_name=llama2-7b
export MODEL='qwen3-8b'
SIZE=${SIZE:-2}
LENGTH="${LENGTH:-4096}"
python3 -m maxtext.checkpoint_conversion.to_maxtext base.yml model_name=llama2-7b per_device_batch_size=9 max_target_length=11
python3 -m maxtext.trainers.pre_train.train base.yml \\
  model_name=${MODEL} per_device_batch_size=$SIZE max_target_length=${LENGTH} steps=$1 run_name=$NAME
python3 -m maxtext.inference.decode base.yml model_name=llama2-7b per_device_batch_size=7
"""


def test_a_script_s_variables_and_its_training_command_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    imported = import_maxtext([str(tmp_path / "run.sh")])
    spec = imported.loaded.spec
    assert (spec.model.num_layers, spec.batch.micro_batch_size, spec.batch.seq_length) == (72, 2, 4096)
    assert any("steps = $1" in each.detail for each in imported.loaded.diagnostics)
    assert spec_of(str(tmp_path / "run.sh"), "max_target_length=512").batch.seq_length == 512


def test_a_variable_that_a_script_takes_from_outside_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m MaxText.train base.yml model_name=$MODEL per_device_batch_size=2\n", encoding="utf-8")
    with pytest.raises(MegaplanError) as caught:
        spec_of(str(tmp_path / "run.sh"))
    (found,) = caught.value.diagnostics
    assert "model_name = $MODEL" in found.detail
    assert found.hints[0].endswith("run.sh model_name=…")
    assert spec_of(str(tmp_path / "run.sh"), "model_name=llama2-7b").model.num_layers == 64


def test_a_model_s_own_file_lies_in_a_folder_next_to_base(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "base.yml").write_text("per_device_batch_size: 2\nbase_emb_dim: 512\n", encoding="utf-8")
    (tmp_path / "models/mine.yml").write_text("base_emb_dim: 256\nnormalization_layer_epsilon: 1e-6\n", encoding="utf-8")
    base = str(tmp_path / "base.yml")
    with pytest.raises(MegaplanError, match=r"configs/models/other\.yml"):
        spec_of("model_name=other")
    (tmp_path / "base.yml").write_text("per_device_batch_size: 2\n", encoding="utf-8")
    spec = spec_of(base, "model_name=mine")
    assert (spec.model.hidden_size, spec.model.norm_eps) == (256, 1e-6)
    (tmp_path / "models/seen.yml").write_text("base_emb_dim: 256\nuse_multimodal: true\n", encoding="utf-8")
    with pytest.raises(MegaplanError, match="use_multimodal"):
        spec_of(base, "model_name=seen")


def test_assumptions_are_notes() -> None:
    found = import_maxtext(["model_name=llama3.1-8b", "sa_block_q=2048"]).loaded.diagnostics
    notes = {each.code: each.detail for each in found if each.severity is Severity.NOTE}
    assert "8 devices of tpu-v5p until set" in notes["MP917"]
    assert "sa_block_q" in notes["MP919"]


def test_the_command_writes_a_spec_that_the_estimate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model_name=qwen3-next-80b-a3b", "compile_topology=v5p-256", "per_device_batch_size=1", "max_target_length=4096"]
    assert run(["import", "maxtext", *words, "-o", "next.yaml"]) == 0
    assert run(["estimate", "next.yaml"]) in (0, 1)
    assert "tpu-v5p" in capsys.readouterr().out
    assert run(["export", "next.yaml", "--to", "maxtext", "--strict", "-o", "next.yml"]) == 0
    assert "decoder_block: qwen3_next" in (tmp_path / "next.yml").read_text(encoding="utf-8")


def test_defaults_of_variables_are_inside_each_other(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "SIZE=${1:-${SIZE:-4}}\nPROGRAM=${2:-train}\n"
        'python3 -m MaxText."$PROGRAM" base.yml model_name=llama3-8b steps=3 per_device_batch_size=${SIZE} compile_topology=${3}\n'
        'python3 -m MaxText."$PROGRAM" base.yml model_name=llama3-8b steps=3 per_device_batch_size="${SIZE}"\n'
    )
    assert import_maxtext([str(script)]).loaded.spec.batch.micro_batch_size == 4


def test_a_script_s_model_lies_next_to_the_base_that_it_names(tmp_path: Path) -> None:
    models_folder = tmp_path / "MaxText/configs/models"
    models_folder.mkdir(parents=True)
    (models_folder / "own.yml").write_text(
        "base_emb_dim: 256\nbase_num_decoder_layers: 3\nbase_num_query_heads: 4\nbase_num_kv_heads: 4\nbase_mlp_dim: 512\n"
        "head_dim: 64\nvocab_size: 512\ndecoder_block: llama2\n"
    )
    script = tmp_path / "scripts/deep/run.sh"
    script.parent.mkdir(parents=True)
    script.write_text("python3 -m MaxText.train MaxText/configs/base.yml model_name=own per_device_batch_size=1\n")
    assert import_maxtext([str(script)]).loaded.spec.model.num_layers == 6


OTHERS = {
    "python3 MaxText/decode.py": "inference",
    "python -m maxtext.inference.vllm_decode": "inference",
    "python3 ../inference_microbenchmark.py": "inference",
    "python3 -m MaxText.llama_or_mistral_ckpt": "the conversion of a checkpoint",
    "python3 -m maxtext.checkpoint_conversion.to_maxtext": "the conversion of a checkpoint",
    "python MaxText/generate_param_only_checkpoint.py": "the conversion of a checkpoint",
    "python3 -m maxtext.trainers.post_train.rl.train_rl": "further models",
    "python3 -m maxtext.trainers.post_train.distillation.train_distill": "further models",
    "python3 -m tests.utils.forward_pass_logit_checker": "a check",
}


def test_a_list_of_runs_is_named_with_its_entry(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('python3 -m benchmarks.benchmark_runner xpk \\\n --device_type=v6e-256 --num_slices=2 --model_name="m_2x"\n', "utf-8")
    with pytest.raises(MegaplanError) as caught:
        spec_of(str(script))
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.line) == ("MP926", 1)
    assert found.detail.endswith("--model_name m_2x")
    assert "compile_topology=v6e-256 compile_topology_num_slices=2" in found.hints[0]


TRAINERS = ("-m MaxText.train", "MaxText/train.py", "-m maxtext.trainers.pre_train.train", "-m maxtext.trainers.post_train.sft.train_sft")


@pytest.mark.parametrize("command", OTHERS)
def test_a_script_that_trains_no_one_model_is_refused_by_its_program(tmp_path: Path, command: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"# python3 MaxText/train.py\n\n{command} base.yml \\\n  model_name=llama2-7b per_device_batch_size=1\n", encoding="utf-8"
    )
    with pytest.raises(MegaplanError) as caught:
        spec_of(str(script))
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.line) == ("MP926", 3)
    assert OTHERS[command] in found.detail


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_script_that_also_converts_is_read_by_its_training(tmp_path: Path, trainer: str) -> None:
    script = tmp_path / "run.sh"
    rows = [f"{command} base.yml model_name=llama2-7b max_target_length=64" for command in OTHERS]
    train = f"python3 {trainer} base.yml model_name=llama2-7b max_target_length=128 compile_topology=v5p-8"
    script.write_text("\n".join([*rows, train, *rows]), encoding="utf-8")
    assert spec_of(str(script)).batch.seq_length == 128


@pytest.mark.parametrize("key", ["kd_teacher_parameters_path", "teacher_overrides"])
def test_a_teacher_is_not_passed_over(tmp_path: Path, key: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m MaxText.train base.yml model_name=llama2-7b {key}=gs://x/items my_own=3\n", encoding="utf-8")
    with pytest.raises(MegaplanError) as caught:
        spec_of(str(script))
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0].split("   ")[0]) == ("MP914", f"--ignore {key}")
    script.write_text("python3 -m MaxText.train base.yml model_name=llama2-7b my_own=3\n", encoding="utf-8")
    notes = "\n".join(each.detail for each in import_maxtext([str(script)]).loaded.diagnostics)
    assert "not read, because it changes no priced tensor: my_own" in notes


@pytest.mark.parametrize(
    ("scale", "hidden", "heads", "width", "layers", "billions"),
    [
        (1, 2048, 16, 7168, 16, 1),
        (16, 4096, 64, 28672, 32, 16),
        (32, 8192, 64, 28672, 32, 32),
        (128, 8192, 128, 57344, 64, 128),
        (1024, 16384, 256, 114688, 128, 1024),
    ],
)
def test_sizes_by_one_scale(scale: int, hidden: int, heads: int, width: int, layers: int, billions: int) -> None:
    """The files 16b.sh to 1024b.sh of MaxText's folders of configurations are named by their parameters."""
    spec = spec_of(f"global_parameter_scale={scale}", "compile_topology=v5p-8")
    model = spec.model
    assert (model.hidden_size, model.attention.num_heads, model.attention.num_kv_heads) == (hidden, heads, heads)
    assert (model.mlp.ffn_hidden_size, model.num_layers) == (width, 2 * layers)
    assert abs(build_inventory(spec).parameters / 1e9 - billions) < 0.2 * billions


@pytest.mark.parametrize("scale", ["3", "0", "true", "0.5"])
def test_a_scale_is_a_power_of_two(scale: str) -> None:
    with pytest.raises(MegaplanError, match="a power of two"):
        spec_of(f"global_parameter_scale={scale}")


def test_a_script_of_base_alone_has_the_model_of_base(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m maxtext.train configs/base.yml per_device_batch_size=4 ici_fsdp_parallelism=8\n", encoding="utf-8")
    found = import_maxtext([str(script)], devices=8).loaded
    assert (found.spec.model.num_layers, found.spec.model.hidden_size, found.spec.model.vocab_size) == (32, 2048, 32_000)
    assert any("the model is the default of base.yml" in each.detail for each in found.diagnostics)
    with pytest.raises(MegaplanError, match="neither model_name nor a size"):
        import_maxtext(["per_device_batch_size=4", "ici_fsdp_parallelism=8"], devices=8)
