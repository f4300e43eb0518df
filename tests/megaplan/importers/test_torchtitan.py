"""`megaplan import torchtitan`: job files of three periods, their unstated settings, and errors of an import."""

import json

import pytest
from torchtitan_jobs import NEW, OLD, codes, spec_of

from megaplan.budget.peaks import build_budget
from megaplan.cli.main import run
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError, Severity
from megaplan.exporters.torchtitan import export_torchtitan
from megaplan.exporters.values import Source
from megaplan.importers.structure import Policy
from megaplan.importers.torchtitan.models import FLAVORS
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts

PARAMETER_COLUMNS = Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS
PARAMETERS = {
    "llama3/8B": 8_030_261_248,
    "llama3/70B": 70_553_706_496,
    "llama3/405B": 405_853_388_800,
    "qwen3/0.6B": 596_049_920,
    "qwen3/8B": 8_190_735_360,
    "qwen3/32B": 32_762_123_264,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_flavors_have_the_models_parameters(model):
    name, flavor = model.split("/")
    spec = spec_of("", gpus=8, model=model)
    assert build_inventory(spec).parameters == PARAMETERS[model]
    assert spec.model.num_layers == 2 * FLAVORS[name][flavor].blocks


def test_a_file_of_2024():
    spec = spec_of(OLD, gpus=16)
    assert (spec.mesh.pp, spec.mesh.vpp, spec.mesh.tp, spec.mesh.dp_shard) == (4, 2, 2, 2)
    assert (spec.schedule.kind, spec.schedule.num_microbatches, spec.batch.micro_batch_size) == ("interleaved_1f1b", 4, 4)
    assert spec.split.spans == tuple((8 * index, 8 * index + 8) for index in range(8))
    assert (spec.host.compile_model, spec.host.compile_loss) == (True, False)
    assert (spec.host.repeat_kv, spec.host.fsdp_ends, spec.host.keep_pipeline_outputs, spec.host.foreach_optimizer) == (
        True,
        "root",
        True,
        True,
    )
    assert (spec.precision.recipe.name, spec.precision.recipe.param_gather) == ("fp8_current", True)
    assert spec.sharding.reshard_after_forward is False
    assert spec.recompute.default == "selective"


def test_a_file_of_2026_and_one_note_of_defaults():
    found = import_torchtitan(NEW, "job.toml").loaded
    spec = found.spec
    assert (spec.host.compile_model, spec.host.compile_loss, spec.host.repeat_kv, spec.host.fsdp_ends) == (True, True, False, "separate")
    assert (spec.precision.recipe.name, spec.precision.recipe.param_gather) == ("fp8_rowwise", False)
    assert (spec.recompute.default, spec.host.checkpoint_every) == ("full", 2)  # selective, every second block, is the default
    assert spec.model.tie_embeddings
    notes = [item for item in found.diagnostics if item.code == "MP919"]
    assert len(notes) == 1
    assert notes[0].severity is Severity.NOTE
    assert 'training.dtype = "float32"' in notes[0].detail


@pytest.mark.parametrize(
    ("model", "compiled", "eager"), [("deepseek_v3/16B", True, True), ("deepseek_v3/16B", False, False), ("llama3/8B", True, False)]
)
def test_files_before_those_in_python_scale_outputs_of_experts_outside_the_compiler(model, compiled, eager):
    name, flavor = model.split("/")
    text = f'[model]\nname = "{name}"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = 1\n[compile]\nenable = {str(compiled).lower()}\n'
    spec = import_torchtitan(text, "job.toml", (), 8).loaded.spec
    assert (spec.host.compile_model, spec.host.eager_combine) == (compiled, eager)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwen3/30B-A3B", 30_532_122_624),
        ("qwen3/235B-A22B", 235_093_634_560),
        ("deepseek_v3/16B", 15_706_484_224),
        ("deepseek_v3/236B", 235_741_434_880),
        ("deepseek_v3/671B", 671_026_404_352),
    ],
)
def test_models_with_experts_have_their_published_sizes(model, parameters):
    text = "[training]\nlocal_batch_size = 4\nseq_len = 4096\n[parallelism]\nexpert_parallel_degree = 8\n"
    spec = import_torchtitan(text, "job.toml", (), 64, model).loaded.spec
    assert build_inventory(spec).parameters == parameters
    assert (spec.mesh.ep, spec.mesh.efsdp, spec.mesh.world_size) == (8, 8, 64)


def test_gpus_that_no_one_states_are_assumed_with_a_note():
    found = import_torchtitan(OLD, "job.toml").loaded
    assert found.spec.mesh.world_size == 8
    assert [item.code for item in found.diagnostics if item.code == "MP917"] == ["MP917"]
    assert codes(NEW, gpus=12)[0] == ["MP914"]


AGES = {"2024": "batch_size = 8", "2025": "local_batch_size = 8\ncompile = true", "2026": "local_batch_size = 8"}
DEGREES = ("pipeline", "tensor", "context", "data_parallel_shard", "data_parallel_replicate")


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("axis", DEGREES)
def test_versions_that_read_toml_shard_no_model_over_one_data_rank(axis, age):
    """Only ranks of shards and of context get FSDP2: with the others the spec is for host megarun, and a warning says why."""
    key = f"{axis}_degree" if axis.startswith("data") else f"{axis}_parallel_degree"
    whole = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n' + AGES[age]
    new = {key: 8, "data_parallel_shard_degree": 1} if axis != "data_parallel_shard" else {key: 8}
    if age == "2024":
        moved = {name: value for name, value in new.items() if name.startswith(("data", "tensor"))}
        rest = {name: value for name, value in new.items() if name not in moved}
        text = whole + "".join(f"\n{name} = {value}" for name, value in moved.items())
        text += "\n[experimental]" + "".join(f"\n{name} = {value}" for name, value in rest.items())
    else:
        text = whole + "\n[parallelism]" + "".join(f"\n{name} = {value}" for name, value in new.items())
    loaded = import_torchtitan(text, "job.toml", gpus=8).loaded
    replicated = axis == "data_parallel_replicate"
    assert loaded.spec.precision.params.bytes == (4 if axis in ("pipeline", "tensor") else 2)
    if axis in ("context", "data_parallel_shard"):
        assert loaded.spec.host.name == "torchtitan"
        return
    assert loaded.spec.host.name == "megarun"
    (said,) = [found.detail for found in loaded.diagnostics if found.severity is Severity.WARNING and found.code == "MP919"]
    assert ("replicate() buckets" if replicated else "one data rank") in said
    with pytest.raises(MegaplanError, match="MP902"):
        import_torchtitan(text, "job.toml", gpus=8, policy=Policy(strict=True))


def test_versions_after_toml_shard_over_one_rank_too():
    job = json.dumps({"model": {"name": "llama3", "flavor": "8B"}, "parallelism": {"data_parallel_shard_degree": 1}})
    assert spec_of(job, gpus=1).precision.params.bytes == 2


def test_gradient_accumulation():
    more = NEW.replace("local_batch_size = 4", "local_batch_size = 4\nglobal_batch_size = 128")
    spec = spec_of(more)
    assert (spec.batch.micro_batch_size, spec.schedule.num_microbatches, spec.global_batch_size) == (4, 4, 128)
    assert codes(more.replace("128", "100"))[0] == ["MP914"]


def test_stages_of_2026():
    def spans(*lines):
        text = NEW.replace("qwen3", "llama3").replace('"1.7B"', '"405B"').replace("data_parallel_shard_degree = 8", "\n".join(lines))
        text = text.replace("local_batch_size = 4", "local_batch_size = 16")
        return [stop - start for start, stop in spec_of(text, gpus=64).split.spans]

    schedule = "pipeline_parallel_degree = 8", 'pipeline_parallel_schedule = "1F1B"'
    assert spans(*schedule) == [30, *[32] * 6, 30]
    less = "pipeline_parallel_first_stage_less_layers = 2", "pipeline_parallel_last_stage_less_layers = 0"
    assert spans(*schedule, *less) == [28, *[32] * 7]
    interleaved = "pipeline_parallel_degree = 8", 'pipeline_parallel_schedule = "Interleaved1F1B"', "pipeline_parallel_layers_per_stage = 4"
    assert len(spans(*interleaved)) == 32
    names = [
        ["tok_embeddings", *[f"layers.{index}" for index in range(100)]],
        [*[f"layers.{index}" for index in range(100, 126)], "norm", "output"],
    ]
    assert spans("pipeline_parallel_degree = 2", f"module_fqns_per_model_part = {json.dumps(names)}") == [200, 52]


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        ('name = "qwen3"\nflavor = "1.7B"', 'name = "llama4"\nflavor = "17bx16e_irope"', "MP914", "in chunks"),
        ('flavor = "1.7B"', 'flavor = "9B"', "MP916", "qwen3/8B"),
        ("seq_len = 4096", 'seq_len = "4k"', "MP916", "an integer from 1 on"),
        ("seq_len = 4096", "seq_len = 4096\nenable_cpu_offload = true", "MP914", "host's memory"),
        ("seq_len = 4096", "seq_length = 4096", "MP913", "training.seq_length"),
        ('filter_fqns = ["output"]', 'filter_fqns = ["output", "w2"]', "MP914", "not of the output"),
        ('recipe_name = "rowwise"', 'recipe_name = "rowwise_with_gw_hp"', "MP914", "tensorwise and rowwise"),
        ("[compile]", '[activation_checkpoint]\nmode = "memory_budget"\n[compile]', "MP914", "partitioner"),
        ("[compile]", '[activation_checkpoint]\nselective_ac_option = "each"\n[compile]', "MP916", "op, or how many"),
        ("[compile]", f'[activation_checkpoint]\nselective_ac_option = "{"9" * 5000}"\n[compile]', "MP916", "op, or how many"),
        ("[compile]", "expert_parallel_degree = 2\n[compile]", "MP914", "no experts"),
        ("[compile]", "disable_loss_parallel = true\n[compile]", "MP914", "full logits"),
        ("[model]", "[model", "MP916", "no TOML or JSON"),
        ("[compile]", 'pipeline_parallel_degree = 32\npipeline_parallel_schedule = "1F1B"\n[compile]', "MP914", "28 blocks on 32 stages"),
        (
            "[compile]",
            'pipeline_parallel_degree = 2\npipeline_parallel_split_points = ["layers"]\n[compile]',
            "MP916",
            "layers.0, layers.1",
        ),
        ("[compile]", "pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = 3\n[compile]", "MP916", "list of lists"),
        (
            "[compile]",
            'pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["layers.1"], ["layers.0"]]\n[compile]',
            "MP914",
            "blocks 0 to 27",
        ),
        (
            "[compile]",
            'pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["layers.x"], []]\n[compile]',
            "MP916",
            "layers.0, layers.1",
        ),
    ],
)
def test_what_cannot_be_read_is_one_error(before, after, code, said):
    assert before in NEW
    found, text = codes(NEW.replace(before, after))
    assert found == [code]
    assert said in text


STATED = NEW.replace("qwen3", "llama3").replace('"1.7B"', '"8B"').replace("seq_len = 4096", 'seq_len = 4096\ndtype = "bfloat16"')


@pytest.mark.parametrize(("reduce", "state", "sum_bytes"), [("float32", 2, 4), ("bfloat16", 2, 2)])
def test_a_stated_dtype_is_that_of_parameters_gradients_and_moments(reduce, state, sum_bytes):
    """Bytes of a rank from the parameters' number: the sum of a block, in the reduction's dtype, is cast unless both are one."""
    spec = spec_of(STATED.replace("seq_len = 4096", f'seq_len = 4096\nmixed_precision_reduce = "{reduce}"'))
    inventory = build_inventory(spec)
    assert inventory.parameters == PARAMETERS["llama3/8B"]
    budget = build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))
    cells, share = budget.worst.cells[Phase.OPTIMIZER], PARAMETERS["llama3/8B"] // 8
    names = 32 * 9 + 3
    assert sum(cells[column] for column in PARAMETER_COLUMNS) == state * share
    assert cells[Column.MATRIX_OPTIMIZER] + cells[Column.OTHER_OPTIMIZER] == 2 * state * share + 4 * names
    largest = 128_256 * 4096 // 8  # embedding or head
    assert cells[Column.GRADIENTS] == state * share + (sum_bytes * largest if sum_bytes != state else 0)


@pytest.mark.parametrize(
    "more",
    [
        "",
        "\n[activation_checkpoint]\nmode = 'full'",
        "\n[activation_checkpoint]\nmode = 'none'\n[optimizer]\nimplementation = 'foreach'",
        "\n[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'",
    ],
)
def test_an_export_of_an_import_imports_as_the_same_spec(more):
    text = NEW.replace("qwen3", "llama3").replace('"1.7B"', '"8B"') + (more or "\n[activation_checkpoint]\nmode = 'full'")
    text = text.replace("local_batch_size = 4", "local_batch_size = 8\nsteps = 1000")
    pipeline = "pipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 2"
    for job in (text, text.replace("data_parallel_shard_degree = 8", pipeline)):
        first = spec_of(job)
        inventory = build_inventory(first)
        source = Source(first, inventory, build_layout(first, inventory, choose_cuts(first, inventory).spans))
        exported = export_torchtitan(source)
        assert [loss for loss in exported.losses if loss.strict] == []
        second = import_torchtitan(exported.text, "job.toml", model="llama3/8B").loaded.spec
        assert second == first


def test_the_command_writes_a_spec_that_is_estimated(tmp_path, capsys):
    job, spec = tmp_path / "job.toml", tmp_path / "job.yaml"
    job.write_text(NEW)
    assert run(["import", "torchtitan", str(job), "-o", str(spec), "--set", "device.name=h100-sxm"]) == 0
    assert run(["estimate", str(spec)]) == 0
    assert "host torchtitan, blocks and loss compiled" in capsys.readouterr().out


def test_experts_over_tensor_parallel_ranks_are_priced_as_megarun_runs_them():
    job = '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 4\n'
    loaded = import_torchtitan(job + '[activation_checkpoint]\nmode = "full"\n', "job.toml").loaded
    assert (loaded.spec.host.name, loaded.spec.mesh.tp, loaded.spec.mesh.ep) == ("megarun", 2, 4)
    assert loaded.spec.recompute.blocks == {"E": "selective"}


def test_converters_of_other_products_are_left_out_with_a_note():
    for given, said in (('"float8"', ""), ('["npu_gmm", "float8"]', "not read of model.converters: npu_gmm")):
        found = import_torchtitan(NEW.replace('["quantize.linear.float8"]', given), "job.toml").loaded
        assert found.spec == spec_of(NEW)
        assert any(said in note.detail for note in found.diagnostics)
    assert codes(NEW.replace('["quantize.linear.float8"]', '["lora"]'))[0] == ["MP914"]
    whole = import_torchtitan(NEW.replace('filter_fqns = ["output"]', "filter_fqns = []"), "job.toml").loaded
    assert whole.spec == spec_of(NEW)
    assert any("the head's product is not carried over" in note.detail for note in whole.diagnostics)


def test_gpus_are_those_of_the_launcher_until_stated():
    job = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n'
    assert spec_of(job).mesh.dp_shard == 8
    both = "[parallelism]\ndata_parallel_replicate_degree = 8\n"
    assert (spec_of(job + both).mesh.dp_replicate, spec_of(job + both).mesh.dp_shard) == (8, 2)
    cut = job.replace('flavor = "8B"', 'flavor = "8B_flex"')
    assert spec_of(cut).model == spec_of(job).model
    said = "model.flavor = 8B_flex is read with the sizes of llama3/8B"
    assert any(said in each.detail for each in import_torchtitan(cut, "job.toml").loaded.diagnostics)
    assert spec_of(job.replace('flavor = "8B"', 'flavor = "8B"\nnorm_type = "fused_rmsnorm"')).model == spec_of(job).model
    assert codes(job.replace('flavor = "8B"', 'flavor = "8B"\nnorm_type = "np_layernorm"'))[0] == ["MP914"]
    assert spec_of(job + "global_batch_size = 4\n").mesh.dp_shard == 4


def test_optimizers_of_forks():
    job = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nmax_norm = -1\n[optimizer]\nname = "CustomAdamW"\n'
    found = import_torchtitan(job, "job.toml").loaded
    assert any("CustomAdamW is priced as AdamW" in note.detail for note in found.diagnostics)
    assert found.spec.training.gradient_clip is None
    assert codes(job.replace("CustomAdamW", "Scion"))[0] == ["MP916"]
    ignored = Policy(ignored=frozenset({"optimizer.name"}))
    assert import_torchtitan(job.replace("CustomAdamW", "Scion"), "job.toml", policy=ignored).loaded.spec == found.spec


def test_float8_has_the_section_of_2025():
    older = NEW.replace("quantize.linear.float8", "quantize.dense.float8")
    assert older != NEW
    assert spec_of(older) == spec_of(NEW)


def test_a_file_without_a_section_of_a_job_is_no_job():
    assert codes('name = "expert"\ndescription = "of torchtitan"\n')[0] == ["MP916"]


def test_an_unknown_key_is_a_note_unless_it_decides_a_tensor_or_is_a_misspelling():
    forked = NEW + "\n[infra]\nset_gpu_affinity = true\n[own]\nprefetch = 2\n"
    warning, note = [found for found in import_torchtitan(forked, "job.toml").loaded.diagnostics if found.code == "MP913"]
    assert (note.severity, note.detail) == (Severity.NOTE, "infra.set_gpu_affinity = true")
    assert (warning.severity, warning.detail.partition(":")[0]) == (Severity.WARNING, "own.prefetch = 2")
    for policy, text in (
        (Policy(strict=True), forked),
        (Policy(), NEW + "\n[own]\nnum_extra_layers = 2\n"),
        (Policy(), NEW.replace("seq_len = 4096", "seq_length = 4096")),
    ):
        with pytest.raises(MegaplanError, match="MP913"):
            import_torchtitan(text, "job.toml", policy=policy)
    assert import_torchtitan(
        NEW + "\n[own]\nnum_extra_layers = 2\n", "job.toml", policy=Policy(ignored=frozenset({"own.num_extra_layers"}))
    )
