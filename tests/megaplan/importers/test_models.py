"""Published models import with their totals, their layers, and through a spec file unchanged."""

import pytest
from hf_samples import DEEPSEEK_V3, GONE, MODELS, config, text

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.imported import spec_text
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import load_spec_text
from megaplan.spec.pattern import parse_pattern

ACTIVE = {  # as published, to a tenth of a billion
    "Mixtral-8x7B-v0.1": 12.9,
    "Mixtral-8x22B-v0.1": 39.2,
    "Qwen3-235B-A22B": 22.2,
}


def letters(imported: ImportedConfig) -> str:
    model = imported.loaded.spec.model
    return parse_pattern(model.pattern, model.num_layers).layers


@pytest.mark.parametrize("name", MODELS)
def test_total_and_layers_are_the_published_ones(name: str) -> None:
    imported = import_hf(text(config(name)), "config.json")
    assert build_inventory(imported.loaded.spec).parameters == MODELS[name]["total_params"]
    assert letters(imported) == MODELS[name]["pattern"]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name: str) -> None:
    spec = import_hf(text(config(name)), "config.json").loaded.spec
    assert round(build_inventory(spec).active_parameters / 1e9, 1) == ACTIVE[name]


def test_deepseek_v3_by_hand() -> None:
    imported = import_hf(text(DEEPSEEK_V3), "config.json")
    h, heads = 7168, 128
    attention = h + h * 1536 + 1536 + 1536 * heads * 192 + h * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * h
    dense, experts = h + 3 * h * 18432, h + 256 * h + 257 * 3 * h * 2048
    assert (
        build_inventory(imported.loaded.spec).parameters
        == 2 * 129280 * h + h + 61 * attention + 3 * dense + 58 * experts
        == 671_026_404_352
    )
    assert letters(imported) == "AD" * 3 + "AE" * 58


def test_kimi_k2_by_hand() -> None:
    """The model type is DeepSeek-V3's class under another name."""
    changes = {
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    }
    ends = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
    imported = import_hf(
        text({**DEEPSEEK_V3, "model_type": "kimi_k2", "vocab_size": 163840, **changes, "rope_scaling": ends}), "config.json"
    )
    h, heads = 7168, 64
    attention = h + h * 1536 + 1536 + 1536 * heads * 192 + h * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * h
    dense, experts = h + 3 * h * 18432, h + 384 * h + 385 * 3 * h * 2048
    total = 2 * 163840 * h + h + 61 * attention + dense + 60 * experts
    assert build_inventory(imported.loaded.spec).parameters == total == 1_026_408_209_408
    assert imported.family == "deepseek_v3"
    assert any("read as deepseek_v3" in item.detail for item in imported.loaded.diagnostics if item.code == "MP820")


def test_nemotron_h_with_experts_by_hand() -> None:
    moe = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96}
    fields = config(
        "Nemotron-H-8B",
        hybrid_override_pattern="ME*-",
        num_hidden_layers=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=1000,
        **moe,
    )
    imported = import_hf(text(fields), "config.json")
    h, inner, groups = 4096, 128 * 64, 8 * 128
    mamba = h + h * (2 * inner + 2 * groups + 128) + 5 * (inner + 2 * groups) + 3 * 128 + inner + inner * h
    experts = h + 8 * h + 8 * 2 * h * 64 + 2 * h * 96
    attention, dense = h + 2 * h * 4096 + 2 * h * 1024, h + 2 * h * 21504
    assert build_inventory(imported.loaded.spec).parameters == 2 * 1000 * h + h + mamba + experts + attention + dense
    assert imported.loaded.spec.model.attention.nope_layers == (2,)
    assert imported.loaded.spec.model.moe.score == "sigmoid"


def test_layers_of_nemotron_h_as_a_list_of_names() -> None:
    names = [{"M": "mamba", "*": "attention", "-": "mlp"}[letter] for letter in config("Nemotron-H-8B")["hybrid_override_pattern"]]
    listed = config("Nemotron-H-8B", hybrid_override_pattern=GONE, layers_block_type=names)
    assert import_hf(text(listed), "c").document == import_hf(text(config("Nemotron-H-8B")), "c").document


def test_dense_layers_among_experts() -> None:
    fields = config("Qwen3-235B-A22B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    imported = import_hf(text(fields), "config.json")
    assert letters(imported) == "ADAEADADADAE"
    assert imported.loaded.spec.model.mlp.ffn_hidden_size == 12288


def test_granite_without_experts_has_the_shared_mlp() -> None:
    imported = import_hf(text(config("granite-4.0-h-tiny", num_local_experts=0)), "config.json")
    assert set(letters(imported)) == set("MAD")
    assert imported.loaded.spec.model.mlp.ffn_hidden_size == 1024
    assert imported.loaded.spec.model.moe is None


def test_granite_with_rotary_embedding() -> None:
    fields = config("granite-4.0-h-tiny", position_embedding_type="rope")
    attention = import_hf(text(fields), "config.json").loaded.spec.model.attention
    assert (attention.nope_layers, attention.rope_theta) == ((), 10000.0)


@pytest.mark.parametrize(("first", "window", "full"), [(0, 4096, ()), (36, None, ()), (3, 4096, (0, 2, 4))])
def test_windows_of_all_layers_of_some_or_of_none(first: int, window: int | None, full: tuple[int, ...]) -> None:
    """Layers from the given one on slide; the A of layer i is letter 2 i."""
    fields = config("Qwen3-8B", use_sliding_window=True, sliding_window=4096, max_window_layers=first)
    attention = import_hf(text(fields), "config.json").loaded.spec.model.attention
    assert (attention.window_size, attention.full_layers) == (window, full)


def test_a_rotary_base_among_the_rotary_parameters() -> None:
    fields = config("Qwen3-8B", rope_theta=GONE, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    imported = import_hf(text(fields), "config.json")
    assert imported.loaded.spec.model.attention.rope_theta == 500_000.0
    assert [item.code for item in imported.loaded.diagnostics] == ["MP821"]


def test_what_is_not_carried_is_listed_in_one_warning() -> None:
    found = import_hf(text(config("granite-4.0-h-tiny")), "config.json").loaded.diagnostics
    assert [item.code for item in found] == ["MP820", "MP822", "MP821"]
    assert found[0].severity is Severity.WARNING
    fields = [line.split(" = ")[0] for line in found[0].detail.splitlines()]
    assert fields == ["embedding_multiplier", "residual_multiplier", "logits_scaling"]


@pytest.mark.parametrize(
    ("name", "changes", "limits"),
    [
        ("Nemotron-H-8B", {"time_step_min": 0.002, "time_step_limit": [0.5, 0.6]}, (0.002, None)),
        ("Nemotron-H-8B", {"time_step_min": GONE}, (0.001, None)),
        ("Mamba-Codestral-7B-v0.1", {}, (0.0, None)),
        ("Mamba-Codestral-7B-v0.1", {"time_step_limit": None}, (0.0, None)),
        ("Mamba-Codestral-7B-v0.1", {"time_step_limit": [0.001, 0.1]}, (0.001, 0.1)),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.001, float("inf")]}, (0.001, None)),
    ],
)
def test_limits_of_time_steps(name: str, changes: dict[str, object], limits: tuple[float, float | None]) -> None:
    """Limits are read as the code of each family reads them: nemotron_h reads no `time_step_limit`."""
    imported = import_hf(text(config(name, **changes)), "config.json")
    mamba = imported.loaded.spec.model.mamba
    assert (mamba.time_step_min, mamba.time_step_max) == limits
    assert not any("time_step" in item.detail for item in imported.loaded.diagnostics if item.code != "MP822")


@pytest.mark.parametrize("limit", [[0.001], [0.1, "large"], ["Infinity", 1.0], [-1.0, 1.0], 0.1])
def test_a_limit_of_time_steps_is_two_numbers(limit: object) -> None:
    with pytest.raises(MegaplanError) as refused:
        import_hf(text(config("Mamba-Codestral-7B-v0.1", time_step_limit=limit)), "config.json")
    assert [(item.code, item.location.key) for item in refused.value.diagnostics] == [("MP804", "time_step_limit")]


def test_the_batch_is_noted_until_it_is_set() -> None:
    both = ["batch.micro_batch_size=2", "batch.seq_length=512"]
    codes = [[item.code for item in import_hf(text(config("Qwen3-8B")), "c", both[:count]).loaded.diagnostics] for count in range(3)]
    assert codes == [["MP821"], ["MP821"], []]


def test_the_name_is_that_of_the_origin() -> None:
    named = import_hf(text(config("Qwen3-8B", _name_or_path="Qwen/Qwen3-8B")), "c").loaded.spec.name
    assert (named, import_hf(text(config("Qwen3-235B-A22B")), "c").loaded.spec.name) == ("Qwen3-8B", "qwen3-moe")


OVERRIDES = ["mesh.dp_shard=4", "batch.micro_batch_size=2", "name='3e-4'", "recompute={default: selective}"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overrides", [[], OVERRIDES], ids=["bare", "set"])
def test_a_spec_file_is_the_same_spec(name: str, overrides: list[str]) -> None:
    imported = import_hf(text(config(name)), "config.json", overrides)
    again = load_spec_text(spec_text(imported.document, ["two\nlines"]), "spec.yaml").spec
    assert again == imported.loaded.spec
    assert again.mesh.dp_shard == (4 if overrides else 1)
