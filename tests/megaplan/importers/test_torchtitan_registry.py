"""Configurations of torchtitan in Python: read without running them, equal to the same job as TOML."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory

REGISTRY = '''
"""Configurations."""
import os
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.trainer import Trainer

os.makedirs("/tmp/never-made-by-megaplan")
SEQ = 4 * 1024


def base(steps=1000) -> Trainer.Config:
    """A job."""
    spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets",
        loss=ChunkedCELoss.Config(fn=made_by(spec)),
        metrics=MetricsProcessor.Config(log_freq=1),
        model_spec=spec,
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=SEQ, steps=steps),
        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASETS["c4"]),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=-1),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
    )


def full() -> Trainer.Config:
    config = base()
    config.activation_checkpoint = FullAC.Config()
    config.compile = CompileConfig(enable=True)
    assert config.model_spec is not None
    return config


def kept() -> Trainer.Config:
    config = replace(base(steps=5), activation_checkpoint=None)
    config.training.seq_len = config.training.local_batch_size * SEQ
    return config


def tokens() -> Trainer.Config:
    config = base()
    config.training = TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * SEQ, max_context_length=SEQ, steps=1000)
    config.optimizer = default_adamw(lr=3e-4)
    return config


def staged() -> Trainer.Config:
    config = tokens()
    config.training.num_tokens_per_train_step = 64 * SEQ
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=2, tensor_parallel_degree=2, num_pp_microbatches=4)
    config.compile = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    return config


def own_class() -> OwnTrainerConfig:
    return OwnTrainerConfig(model_spec=model_registry("8B"), training=TrainingConfig(local_batch_size=2, seq_len=SEQ, steps=1000))


def low() -> Trainer.Config:
    config = base()
    config.model_converters = ModelConvertersContainer.Config(
        converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True, filter_fqns=["output"])],
    )
    return config


def low_in_spec() -> Trainer.Config:
    config = base()
    enabled = config.compile.enable and "model" in config.compile.components
    made = Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True, filter_fqns=["output"], model_compile_enabled=enabled)
    config.model_spec = model_registry("8B", converters=[made])
    return config


def branched() -> Trainer.Config:
    config = base()
    if os.environ.get("LONG"):
        config.training.seq_len = 131072
    return config


def flex() -> Trainer.Config:
    config = base()
    config.model_spec = model_registry("8B", attn_backend="flex")
    return config


def in_backward() -> Trainer.Config:
    config = base()
    config.optimizer = OptimizersInBackwardContainer.Config(lr=3e-4)
    return config


def muon() -> Trainer.Config:
    config = base()
    config.optimizer = DistributedMuon.Config(lr=3e-4)
    return config


def unset() -> Trainer.Config:
    config = Trainer.Config(model_spec=model_registry("8B"))
    config.parallelism.tensor_parallel_degree = 4
    config.parallelism.spmd_backend = "other"
    return config


def groups() -> Trainer.Config:
    config = base()
    config.optimizer = OptimizersContainer.Config(lr=3e-4, param_groups=[ParamGroupConfig(pattern="output", weight_decay_multiplier=0.0)])
    return config


def converted() -> GraphTrainer.Config:
    return to_graph_trainer_config(base(), model_registry)


def muons() -> Trainer.Config:
    config = groups()
    config.optimizer.param_groups = [ParamGroupConfig(pattern="output", optimizer_name="Muon")]
    return config


def typo() -> Trainer.Config:
    config = base()
    config.parallelism.tensor_paralel_degree = 4
    return config


def looped() -> Trainer.Config:
    config, spec = base(), model_registry("8B")
    spec = model_registry("8B")
    for layer in spec.model.layers:
        layer.attention.mask_type = "block_causal"
    config = base()
    config.model_spec = spec
    return config


def elsewhere() -> Trainer.Config:
    config = base()
    config.training.local_batch_size = batch_of("c4")
    return config
'''
PLAIN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 4096
steps = 1000
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
FLOAT8 = '[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nfilter_fqns = ["output"]\n'
CASES = {
    "base": PLAIN,
    "full": PLAIN.replace('mode = "selective"\nselective_ac_option = "op"', 'mode = "full"') + "[compile]\nenable = true\n",
    "kept": PLAIN.replace('mode = "selective"\nselective_ac_option = "op"', 'mode = "none"').replace("4096", "8192").replace("1000", "5"),
    "tokens": PLAIN,
    "low": PLAIN.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]') + FLOAT8,
    "low_in_spec": PLAIN.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]') + FLOAT8,
}
FILE = "torchtitan/models/llama3/config_registry.py"


def read(function, text=REGISTRY, name=FILE, **given):
    return import_torchtitan(text, name, (), 8, function=function, **given)


@pytest.mark.parametrize("function", CASES)
def test_a_function_is_the_job_that_its_toml_is(function):
    made, written = read(function).document, import_torchtitan(CASES[function], "config_registry.toml", (), 8).document
    assert made | {"name": ""} == written | {"name": ""}
    assert made["name"] == function


def codes(function, **given):
    with pytest.raises(MegaplanError) as refused:
        read(function, **given)
    return [found.code for found in refused.value.diagnostics], str(refused.value)


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("branched", "MP932", "training.seq_len is made on line"),
        ("looped", "MP932", "model.flavor"),
        ("elsewhere", "MP932", "training.local_batch_size"),
        ("muon", "MP932", "optimizer"),
        ("typo", "MP913", "tensor_paralel_degree"),
        ("muons", "MP914", "optimizer.param_groups"),
        ("converted", "MP932", "is built by to_graph_trainer_config, which is not in the file"),
        (None, "MP933", "--config base"),
        ("absent", "MP933", "absent"),
    ],
)
def test_what_decides_an_estimate_and_is_not_known_is_refused(function, code, said):
    found, text = codes(function)
    assert found[0] == code
    assert said in text


def test_a_model_of_the_registry_that_the_host_has_not_is_refused_with_its_reason():
    found, text = codes("base", name="torchtitan/models/qwen3_5/config_registry.py")
    assert found == ["MP914"]
    assert "gated delta nets" in text
    assert "--model qwen3" not in text


def test_fields_of_a_section_that_the_file_leaves_out_are_added_to_its_defaults():
    assert read("unset").loaded.spec.mesh.tp == 4
    assert read("groups").document | {"name": ""} == read("base").document | {"name": ""}


def test_masks_by_document_are_noted():
    """Flex attention keeps what the kernel without masks keeps, so that the spec is the same."""
    (note,) = [found for found in read("flex").loaded.diagnostics if found.code == "MP919"]
    assert "flex masks attention by document" in note.detail
    assert read("flex").loaded.spec.model == read("base").loaded.spec.model


def test_steps_in_backward_are_noted():
    notes = [found.detail for found in read("in_backward").loaded.diagnostics if found.code == "MP919"]
    assert (
        "the optimizer takes each gradient in backward and frees it, and the estimate has them all, which is more" in notes[0].splitlines()
    )


def test_nothing_in_the_file_runs(tmp_path):
    marker = tmp_path / "ran"
    read("base", REGISTRY.replace("/tmp/never-made-by-megaplan", str(marker)))
    assert not marker.exists()


@pytest.mark.parametrize("text", ["def base(:\n", "x = [" * 5000, "a = 1\n", "def f():\n    return f()\n", ""])
def test_a_file_without_a_configuration_is_refused(text):
    assert codes(None, text=text)[0][0] in ("MP916", "MP933")


def test_the_model_is_that_of_the_folder_or_of_the_functions_name():
    named = REGISTRY.replace("def base(", "def llama3_base(").replace("= base()", "= llama3_base()")
    named = named.replace("replace(base(", "replace(llama3_base(")
    assert read("llama3_base", named, name="mine.py").document["model"]["hidden_size"] == 4096
    with pytest.raises(MegaplanError):
        read("base", name="mine.py")
    assert read("base", name="mine.py", model="llama3/70B").document["model"]["hidden_size"] == 8192


def test_a_flavor_of_ones_own_states_its_sizes():
    text = REGISTRY.replace('"8B"', '"mine"')
    attention = "attention: {kind: gqa, num_heads: 8, num_kv_heads: 4, head_dim: 64}"
    model = f"{{pattern: AD, num_layers: 8, hidden_size: 512, vocab_size: 4096, {attention}, mlp: {{ffn_hidden_size: 1024}}}}"
    found = import_torchtitan(text, FILE, (f"model={model}",), 8, function="base").loaded.spec
    assert (found.model.hidden_size, found.mesh.world_size) == (512, 8)
    with pytest.raises(MegaplanError, match="--set"):
        import_torchtitan(text, FILE, (), 8, function="base")


def test_a_folder_that_begins_like_a_known_model_is_another_model():
    text = "def qwen3_vl_8b():\n    return Trainer.Config(model_spec=model_registry('8B'))\n"
    with pytest.raises(MegaplanError, match=r"model\.name = qwen3_vl"):
        import_torchtitan(text, "torchtitan/models/qwen3_vl/config_registry.py")


STATED = """
def _sizes(*, fuse_qkv):
    dim, n_layers = 512, 6
    layers = _build_qwen3_moe_layers(
        fuse_qkv=fuse_qkv, n_layers=n_layers, dim=dim, n_heads=8, n_kv_heads=2, head_dim=64, moe_hidden_dim=384, num_experts=16, top_k=4,
        attn_backend="flex", moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=64, theta=1e6),
    )
    for layer in layers:
        layer.moe.load_balance_coeff = None
    return Qwen3Model.Config(vocab_size=5120, dim=dim, norm=norm(dim), layers=layers)


def job() -> Trainer.Config:
    spec = ModelSpec(name="qwen3", flavor="own", model=_sizes(fuse_qkv=True), parallelize_fn=parallelize, state_dict_adapter=Adapter)
    return Trainer.Config(model_spec=spec, optimizer=default_adamw(lr=1e-4), training=TrainingConfig(local_batch_size=2, seq_len=512))
"""


def test_a_model_whose_sizes_the_file_states_needs_no_registry():
    """Totals by hand; sizes that a loop changes are not known."""
    half = 512 * 64 * (2 * 8 + 2 * 2) + 2 * 64 + 3 * 512 * 384 * 16 + 16 * 512 + 2 * 512
    spec = import_torchtitan(STATED, "own/config_registry.py").loaded.spec
    assert build_inventory(spec).parameters == 2 * 5120 * 512 + 512 + 6 * half
    for before, after in (("layer.moe.load_balance_coeff = None", "layer.head_dim = 32"), ('name="qwen3"', 'name="own"')):
        with pytest.raises(MegaplanError, match="MP932"):
            import_torchtitan(STATED.replace(before, after), "own/config_registry.py")


@pytest.mark.parametrize(("sequences", "updates"), [(16, 1), (64, 4)])
def test_tokens_of_a_microbatch_are_those_of_a_stage(sequences: int, updates: int) -> None:
    text = REGISTRY.replace("per_train_step = 64 * SEQ", f"per_train_step = {sequences} * SEQ")
    read = import_torchtitan(text, "llama3/config_registry.py", gpus=8, function="staged").loaded.spec
    assert (read.mesh.pp, read.mesh.dp_shard, read.batch.micro_batch_size, read.schedule.num_microbatches) == (2, 2, 2, 4)
    assert read.schedule.steps_per_update == updates  # 4 microbatches of 2 sequences on each of 2 data ranks
    assert read.host.async_tensor_parallel is (updates == 1)  # which host megarun, of gradients over several steps, has not


def test_tokens_that_are_no_sequences_are_named() -> None:
    text = REGISTRY.replace("num_tokens_per_train_step = 64 * SEQ", "num_tokens_per_train_step = SEQ + 1")
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(text, "llama3/config_registry.py", gpus=8, function="staged")
    assert [each.location.key for each in caught.value.diagnostics] == ["training.num_tokens_per_train_step"]


def test_a_class_of_a_fork_is_a_configuration() -> None:
    own = import_torchtitan(REGISTRY, "llama3/config_registry.py", gpus=8, function="own_class").loaded.spec
    assert (own.model.hidden_size, own.batch.seq_length, own.batch.micro_batch_size) == (4096, 4096, 2)


def test_a_model_without_a_spec_is_refused_before_values_that_only_a_run_knows() -> None:
    text = REGISTRY.replace("steps=steps)", "steps=os.cpu_count())")
    for folder, code in (("llama3", "MP932"), ("deepseek_v4", "MP914")):
        with pytest.raises(MegaplanError) as caught:
            import_torchtitan(text, f"{folder}/config_registry.py", gpus=8, function="base")
        assert [each.code for each in caught.value.diagnostics] == [code]
