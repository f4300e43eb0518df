"""`megaplan import torchtitan` of launches: arguments after a job file, and scripts that start one."""

from pathlib import Path

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.imported import Imported
from megaplan.importers.torchtitan.launches import read_job
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 4096
[compile]
enable = true
"""
REGISTRY = """
def llama3_small():
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8 * 2048, max_context_length=2048, steps=10),
        activation_checkpoint=FullAC.Config(),
    )
"""
STARTS = "#!/bin/bash\nNGPU=${NGPU:-16}\ntorchrun --nnodes 2 --nproc_per_node=${NGPU} -m torchtitan.train "


def imported(path: Path, *argv: str) -> Imported:
    found = read_job(str(path), argv)
    return import_torchtitan(found.text, found.name, gpus=found.gpus, function=found.function, launch=found.launch)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), (1, 8, 4, 4096, True)),
        (("--training.local_batch_size", "2", "--parallelism.tensor_parallel_degree=4"), (4, 2, 2, 4096, True)),
        (("--training.seq-len", "8192", "--compile.no-enable"), (1, 8, 4, 8192, False)),
        (
            ("--compile.enable", "--parallelism.data_parallel_shard_degree", "4", "--parallelism.tensor_parallel_degree", "2"),
            (2, 4, 4, 4096, True),
        ),
    ],
)
def test_arguments_replace_the_values_of_the_file(tmp_path: Path, argv: tuple[str, ...], expected: tuple[object, ...]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    spec = imported(tmp_path / "job.toml", *argv).loaded.spec
    found = spec.mesh.tp, spec.mesh.dp_shard, spec.batch.micro_batch_size, spec.batch.seq_length, spec.host.compile_model
    assert found == expected


def test_a_script_is_followed_to_its_job_file_and_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/job.toml").write_text(JOB)
    script = tmp_path / "run.sh"
    script.write_text(STARTS + '--job.config_file /elsewhere/configs/job.toml --training.steps 7 "$@"\n')
    spec = imported(script, "--parallelism.tensor_parallel_degree=8").loaded.spec
    assert (spec.mesh.world_size, spec.mesh.tp, spec.mesh.dp_shard, spec.training.steps) == (32, 8, 4, 7)


def test_a_script_names_a_module_and_a_function(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(REGISTRY)
    script = tmp_path / "run.sh"
    script.write_text(STARTS + "--module ${MODULE:-llama3} --config ${CONFIG:-llama3_small}\n")
    spec = imported(script).loaded.spec
    assert (spec.mesh.world_size, spec.batch.micro_batch_size, str(spec.recompute.default)) == (32, 8, "full")


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ("--job.config_file configs/absent.toml", "MP916", "reads configs/absent.toml, which is not here"),
        ("--module absent --config absent_8b", "MP916", "reads absent/config_registry.py, which is not here"),
        ("--job.config_file $FILE", "MP916", "--job.config_file has no value"),
        ("--training.steps 3", "MP916", "starts no job"),
    ],
)
def test_a_launch_without_its_job_is_one_error(tmp_path: Path, rest: str, code: str, said: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(STARTS + rest + "\n")
    with pytest.raises(MegaplanError) as caught:
        read_job(str(script))
    (found,) = caught.value.diagnostics
    assert (found.code, said in found.detail) == (code, True)
    assert "megaplan import torchtitan" in found.hints[0]


def test_a_script_that_lacks_an_argument_has_the_command_with_one(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('if [ -z "$1" ]; then exit 1; fi\npython -m torchtitan.train --job.config_file $1.toml\n')
    with pytest.raises(MegaplanError) as caught:
        read_job(str(script))
    hints = [hint for each in caught.value.diagnostics for hint in each.hints]
    assert not any("import megatron" in hint for hint in hints)


def test_a_setting_of_a_forks_own_layers_is_refused_and_one_that_is_off_is_a_note(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB + "[model.shared]\ngrouping = 2\nrank = 8\n")
    with pytest.raises(MegaplanError) as caught:
        imported(job)
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP913", "--ignore model.shared.grouping --ignore model.shared.rank")
    job.write_text(JOB.replace("[training]", "use_own_kernel = false\n[training]"))
    assert imported(job).loaded.spec.model.num_layers == 64


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ("fault_tolerance=FaultTolerance(enable=True)", "MP914", "torchft"),
        ("async_loop=AsyncLoopConfig(), trainer=PolicyTrainer.Config()", "MP926", "generated answers"),
    ],
)
def test_other_trainings_in_python_are_refused_by_name(fields: str, code: str, said: str) -> None:
    text = REGISTRY.replace('model_spec=model_registry("debugmodel"),', f'model_spec=model_registry("debugmodel"), {fields},')
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(text, "torchtitan/models/llama3/config_registry.py", function="llama3_small")
    assert (caught.value.diagnostics[0].code, said in caught.value.diagnostics[0].detail) == (code, True)


def test_a_fork_registers_a_flavor_of_torchtitans_own_table(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan/experiments/own/llama3"
    (folder / "train_configs").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import torchtitan.models.llama3 as upstream\n"
        'llama3_configs = {"1B": upstream.llama3_configs["1B"]("sdpa")}\n'
        'register_train_spec(name="llama3_own", train_spec=TrainSpec(model_cls=upstream.Llama3Model, model_args=llama3_configs))\n'
    )
    job = folder / "train_configs/job.toml"
    job.write_text(JOB.replace('"llama3"', '"llama3_own"').replace('"8B"', '"1B"'))
    spec = imported(job).loaded.spec
    assert (build_inventory(spec).parameters, spec.model.tie_embeddings) == (1_235_814_400, True)
