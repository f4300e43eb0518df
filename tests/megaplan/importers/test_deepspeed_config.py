"""The JSON of `--deepspeed_config` decides ZeRO's stage, its offload and the dtypes of a launch of Megatron-DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest

import megaplan
from megaplan.errors import MegaplanError, Severity
from megaplan.importers.imported import Imported
from megaplan.importers.megatron.spec import import_megatron

SIZES = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1024"
RUN = f"deepspeed --num_nodes 1 --num_gpus 4 pretrain_gpt.py {SIZES} --deepspeed"
BF16 = {"bf16": {"enabled": True}}


def written(config: dict[str, Any], more: str = "", path: str = "/nowhere/ds.json") -> str:
    return f"CONFIG={path}\ncat <<EOT > $CONFIG\n{json.dumps(config, indent=1)}\nEOT\n{RUN} --deepspeed_config $CONFIG {more}\n"


def imported(config: dict[str, Any], more: str = "") -> Imported:
    return import_megatron(written(config, more), "launch.sh")


def warned(found: Imported) -> str:
    return "\n".join(each.detail for each in found.loaded.diagnostics if each.severity is Severity.WARNING)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {**BF16, "zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(("stage", "sharded"), [(0, True), (1, True), (2, True)])
def test_a_stage_of_the_json_is_that_of_the_argument(stage: int, sharded: bool) -> None:
    found = imported(zero(stage), "--bf16")
    assert found.loaded.spec.host.distributed_optimizer is sharded
    assert found.loaded.spec == import_megatron(f"{RUN} --bf16 --zero-stage {stage}", "launch.sh").loaded.spec
    assert ("gradients are sharded in the original, but counted unsharded" in warned(found)) is (stage == 2)


@pytest.mark.parametrize(
    ("dtype", "stage", "more", "sharded", "whole"),
    [
        ("bf16", 0, "", True, True),
        ("bf16", 0, "--no-pipeline-parallel", False, False),
        ("bf16", 1, "", True, False),
        ("fp16", 0, "", False, False),
        ("fp16", 1, "", True, False),
    ],
)
def test_pipelines_in_bf16_shard_the_optimizer_without_zero(dtype: str, stage: int, more: str, sharded: bool, whole: bool) -> None:
    host = import_megatron(f"{RUN} --{dtype} --zero-stage {stage} {more}", "launch.sh").loaded.spec.host
    assert (host.distributed_optimizer, host.all_reduce_gradients) == (sharded, whole)
    assert not import_megatron(f"{RUN.replace(' --deepspeed', '')} --bf16", "launch.sh").loaded.spec.host.distributed_optimizer


def test_gradients_of_backward_stay_beside_those_that_bf16_pipelines_sum() -> None:
    launch = f"{RUN} --bf16 --zero-stage 0"
    found = megaplan.estimate(import_megatron(launch, "launch.sh").document)
    alone = megaplan.estimate(import_megatron(launch, "launch.sh", ["host.all_reduce_gradients=false"]).document)
    assert found.columns["gradients"] - alone.columns["gradients"] == 2 * found.budget.parameters


@pytest.mark.parametrize(
    ("given", "read"),
    [("", ("unfused", None)), ("--use-flash-attn", ("flash", None)), ("--use-flash-attn-v1 --use-flash-attn-v2", ("flash", 2))],
)
def test_modules_are_the_forks_own_until_the_launch_says_otherwise(given: str, read: tuple[str, int | None]) -> None:
    host = import_megatron(f"{RUN} --bf16 {given}", "launch.sh").loaded.spec.host
    assert (host.transformer_impl, host.wgrad_fusion) == ("local", False)
    assert (host.attention_backend, host.flash_version) == read
    engine = import_megatron(f"{RUN} --bf16 {given} --transformer-impl transformer_engine", "launch.sh").loaded.spec.host
    assert (engine.transformer_impl, engine.all_reduce_gradients) == ("transformer_engine", False)
    assert engine.attention_backend == ("flash" if given else "auto")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", "unfused"),
        ("--use-legacy-models", "flash"),
        ("--use-fused-rmsnorm --use-fused-swiglu", "flash"),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec", "flash"),
    ],
)
def test_flash_attention_without_transformer_engine_is_of_mindspeed_and_of_models_before_megatron_core(given: str, read: str) -> None:
    launch = f"torchrun --nproc_per_node 4 pretrain_gpt.py {SIZES} --bf16 --transformer-impl local --use-flash-attn {given}"
    assert import_megatron(launch, "launch.sh").loaded.spec.host.attention_backend == read


def test_stage_3_is_planned_as_wholly_sharded() -> None:
    found = imported(zero(3))
    assert found.loaded.spec.sharding.reshard_after_forward
    assert "planned as Megatron-FSDP" in warned(found)
    with pytest.raises(MegaplanError, match="zero-stage 3"):
        imported(zero(3), "--pipeline-model-parallel-size 2")


def test_the_json_decides_where_the_argument_differs() -> None:
    found = imported(zero(0), "--zero-stage 1 --no-pipeline-parallel")
    assert not found.loaded.spec.host.distributed_optimizer
    assert "ZeRO's stage is 0" in warned(found)


@pytest.mark.parametrize(
    "more", [{"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}, {"offload_optimizer": {"device": "nvme"}}]
)
def test_offload_of_the_optimizer(more: dict[str, Any]) -> None:
    found = imported(zero(1, **more))
    assert found.loaded.spec.host.optimizer_offload == 1
    assert found.loaded.spec == import_megatron(f"{RUN} --bf16 --zero-stage 1 --cpu-optimizer", "launch.sh").loaded.spec
    assert imported(zero(1, offload_optimizer={"device": "none"})).loaded.spec.host.optimizer_offload is None


@pytest.mark.parametrize("more", ["", "--cpu-optimizer"])
def test_offload_under_stage_3_is_counted_on_the_device(more: str) -> None:
    found = imported(zero(3, **({} if more else {"offload_optimizer": {"device": "cpu"}})), more)
    assert (found.loaded.spec.sharding.reshard_after_forward, found.loaded.spec.host.optimizer_offload) == (True, None)
    assert warned(found).count("the optimizer's state is in host memory in the original, but is counted on the device") == 1


@pytest.mark.parametrize(("updates", "size"), [(1, 16), (2, 8), (None, 1)])
def test_batches_of_the_json_give_the_gpus(updates: int | None, size: int) -> None:
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1} | ({"gradient_accumulation_steps": updates} if updates else {})
    launch = written({**BF16, **batch}, "--tensor-model-parallel-size 2" if updates else "").replace("--num_gpus 4 ", "")
    assert import_megatron(launch, "launch.sh").loaded.spec.mesh.world_size == size


def test_offload_of_parameters_is_a_warning() -> None:
    assert "parameters are in host memory there" in warned(imported(zero(3, offload_param={"device": "cpu"})))
    assert "parameters are in host memory there" in warned(import_megatron(f"{RUN} --bf16 --remote-device cpu", "launch.sh"))
    assert "host memory" not in warned(import_megatron(f"{RUN} --bf16 --remote-device none", "launch.sh"))


def test_dtypes_of_the_json() -> None:
    assert imported(BF16).loaded.spec.precision.params.value == "bf16"
    assert imported({"fp16": {"enabled": True}, "bf16": {"enabled": False}}).loaded.spec.precision.params.value == "fp16"
    other = imported({"fp16": {"enabled": True}}, "--bf16")
    assert other.loaded.spec.precision.params.value == "fp16"
    assert "--fp16, as --deepspeed-config says, and not --bf16" in warned(other)
    assert imported({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, "--bf16").loaded.spec.precision.grads.value == "bf16"
    assert imported(BF16).loaded.spec.precision.grads.value == "fp32"


def test_batches_of_the_json_are_taken_where_the_launch_has_none() -> None:
    sizes = {**BF16, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    spec = imported(sizes).loaded.spec
    assert (spec.batch.micro_batch_size, spec.schedule.num_microbatches) == (2, 4)
    other = imported(sizes, "--micro-batch-size 4 --global-batch-size 32")
    assert other.loaded.spec.batch.micro_batch_size == 4
    assert "train_micro_batch_size_per_gpu = 2" in warned(other)


def test_a_file_next_to_the_launch_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(zero(1)), encoding="utf-8")
    script = tmp_path / "launch.sh"
    found = import_megatron(f"{RUN} --deepspeed_config /of/another/machine/ds.json", str(script))
    assert found.loaded.spec.host.distributed_optimizer


@pytest.mark.parametrize("config", ["/nowhere/ds.json", "$UNSET/ds.json"])
def test_a_json_that_is_not_here_is_a_warning(config: str) -> None:
    found = import_megatron(f"{RUN} --bf16 --zero-stage 1 --deepspeed_config {config}", "launch.sh")
    assert found.loaded.spec.host.distributed_optimizer
    assert "does not exist here or is not JSON" in warned(found)


def test_without_deepspeed_the_json_is_not_read() -> None:
    text = written(zero(1), "--bf16").replace("--deepspeed ", "")
    found = import_megatron(text, "launch.sh")
    assert not found.loaded.spec.host.distributed_optimizer
    assert not warned(found)


def test_files_of_loops_are_those_of_their_launch() -> None:
    config = '{"zero_optimization": {"stage": \'$STAGE\'}}'
    text = f"for STAGE in 0 1; do\necho '{config}' > ds.json\n{RUN} --fp16 --deepspeed_config ds.json --seed $STAGE\ndone"
    sharded = [import_megatron(text, "launch.sh", number=number).loaded.spec.host.distributed_optimizer for number in (1, 2)]
    assert sharded == [False, True]


def test_slots_of_include_are_the_gpus() -> None:
    run = f"{RUN} --bf16".replace("--num_nodes 1 --num_gpus 4", "--include one:0,1,2,3@two:4,5,6,7")
    assert import_megatron(run, "launch.sh").loaded.spec.mesh.world_size == 8
    uneven = run.replace("4,5,6,7", "4")
    assert import_megatron(uneven, "launch.sh").loaded.spec.mesh.world_size == 1


def test_a_template_that_sed_fills_is_read(tmp_path: Path) -> None:
    (tmp_path / "TEMPLATE.json").write_text('{"zero_optimization": {"stage": ZERO}, "bf16": {"enabled": BF}}\n', encoding="utf-8")
    script = tmp_path / "launch.sh"
    filled = 'sed "s/ZERO/${STAGE}/" TEMPLATE.json \\\n | sed "s/BF/true/" \\\n > ds.json\n'
    text = f"STAGE=1\n{filled}{RUN} --deepspeed_config ds.json"
    spec = import_megatron(text, str(script)).loaded.spec
    assert (spec.host.distributed_optimizer, spec.precision.params.value) == (True, "bf16")
    again = text.replace(RUN, f"sed -i 's/: 1/: 0/' ds.json; {RUN} --no-pipeline-parallel")
    assert not import_megatron(again, str(script)).loaded.spec.host.distributed_optimizer
    unknown = text.replace(RUN, f"sed -i 's/: [01]/: 0/' ds.json; {RUN}")
    assert "does not exist here or is not JSON" in warned(import_megatron(unknown, str(script)))
    assert "does not exist here or is not JSON" in warned(import_megatron(text.replace("s/ZERO/", "s/Z.*O/"), str(script)))


def test_a_path_of_another_machine_is_found_by_its_end(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/ds.json").write_text(json.dumps(zero(1)), encoding="utf-8")
    script = tmp_path / "runs/one/launch.sh"
    script.parent.mkdir(parents=True)
    found = import_megatron(f"{RUN} --deepspeed_config /home/other/work/conf/ds.json", str(script))
    assert found.loaded.spec.host.distributed_optimizer
