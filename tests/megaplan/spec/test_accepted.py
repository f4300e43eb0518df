"""Specs that must parse: the reference example, public models, and forms that mean the same."""

import json
from pathlib import Path

import pytest
import yaml
from spec_samples import SAMPLE, Accepted

from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.spec.load import load_spec, load_spec_text, spec_from_document
from megaplan.spec.models import LatentAttention, Mamba3
from megaplan.spec.rules import check_rules
from megaplan.spec.type_errors import near_keys

REFERENCE = Path(__file__).with_name("reference.yaml").read_text(encoding="utf-8")
MODELS = {
    "llama-3.1-8b": """
  {pattern: AD, num_layers: 64, hidden_size: 4096, vocab_size: 128256,
   attention: {kind: gqa, num_heads: 32, num_kv_heads: 8, head_dim: 128, rope_theta: 500000.0}, mlp: {ffn_hidden_size: 14336}}""",
    "mixtral-8x7b": """
  {pattern: AE, num_layers: 64, hidden_size: 4096, vocab_size: 32000,
   attention: {kind: gqa, num_heads: 32, num_kv_heads: 8, head_dim: 128, rope_theta: 1.0e+6},
   moe: {num_experts: 8, top_k: 2, ffn_hidden_size: 14336}}""",
    "mamba2-2.7b": """
  {pattern: M, num_layers: 64, hidden_size: 2560, vocab_size: 50288, tie_embeddings: true,
   mamba: {kind: mamba2, expand: 2, head_dim: 64, state_dim: 128, num_groups: 1, conv_kernel: 4}}""",
    "qwen3-30b-a3b": """
  {pattern: AE, num_layers: 96, hidden_size: 2048, vocab_size: 151936,
   attention: {kind: gqa, num_heads: 32, num_kv_heads: 4, head_dim: 128, qk_norm: true, rope_theta: 1000000.0},
   moe: {num_experts: 128, top_k: 8, ffn_hidden_size: 768}}""",
}


def model_spec(name: str) -> str:
    return f"format: megaplan.spec/1\nname: {name}\nmodel: {MODELS[name]}\nbatch: {{micro_batch_size: 1, seq_length: 4096}}\n"


def test_the_reference_example_parses_unchanged() -> None:
    loaded = load_spec_text(REFERENCE, "reference.yaml")
    model = loaded.spec.model
    assert isinstance(model.attention, LatentAttention)
    assert isinstance(model.mamba, Mamba3)
    assert model.attention.indexer is not None
    assert model.attention.indexer.layers[-1] == 44
    assert loaded.spec.mesh.world_size == 8
    assert loaded.spec.recompute.blocks == {"M": "selective"}
    assert loaded.spec.training.learning_rate == 3e-4
    assert loaded.diagnostics == ()


@pytest.mark.parametrize("name", MODELS)
def test_public_models_parse_without_a_word(name: str) -> None:
    loaded = load_spec_text(model_spec(name))
    assert loaded.diagnostics == ()
    assert (loaded.spec.mesh.world_size, loaded.spec.schedule.kind, loaded.spec.precision.params) == (1, "1f1b", DType.BF16)


def test_a_document_with_every_default_written_out_is_the_same_spec() -> None:
    for text in (REFERENCE, SAMPLE, *(model_spec(name) for name in MODELS)):
        spec = load_spec_text(text).spec
        assert spec_from_document(spec.as_document()) == spec
        assert spec_from_document(json.loads(json.dumps(spec.as_document()))) == spec


def test_json_and_yaml_are_the_same_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(yaml.safe_load(SAMPLE), indent="\t"), encoding="utf-8")
    loaded = load_spec(str(path))
    assert loaded.spec == load_spec_text(SAMPLE).spec
    location = loaded.source.locate("mesh.tp")
    assert (location.line, location.column) == (path.read_text().splitlines().index('\t\t"tp": 1,') + 1, 3)


def test_exponents_without_a_point_are_numbers(accepted: Accepted) -> None:
    spec = accepted(("split:", "training: {learning_rate: 3e-4, weight_decay: 1}\nsplit:")).spec
    assert (spec.training.learning_rate, spec.training.weight_decay) == (3e-4, 1.0)


def test_words_that_other_readers_turn_into_switches_stay_words(accepted: Accepted) -> None:
    assert accepted(("name: sample", "name: NO")).spec.name == "NO"
    assert accepted(("name: sample", "name: 1f1b")).spec.name == "1f1b"


def test_lower_case_patterns_are_kept_as_written_and_read_in_upper_case(accepted: Accepted) -> None:
    assert accepted(("AMERD", "amerd")).spec.model.pattern == "amerd"


@pytest.mark.requirement("R-25")
def test_boundaries_mean_a_manual_split(accepted: Accepted) -> None:
    spec = accepted(("AMERD", "AMERD|AMERD"), ("{mode: weighted}", "{reason: keeps each cycle whole}")).spec
    assert spec.split.mode == "manual"
    assert spec_from_document(spec.as_document()) == spec


def test_every_key_has_its_place() -> None:
    source = load_spec_text(SAMPLE, "sample.yaml").source
    lines = SAMPLE.splitlines()
    for key in ("name", "model.moe.top_k", "mesh.etp", "batch.seq_length"):
        location = source.locate(key)
        assert location.line is not None
        assert location.column is not None
        assert lines[location.line - 1][location.column - 1 :].startswith(key.rpartition(".")[2])
    assert source.locate("mesh.vocab_parallel").line == lines.index("mesh:") + 1
    assert source.locate("serving.batch_size").line is None


def test_rules_need_no_source() -> None:
    spec = load_spec_text(SAMPLE).spec
    wrong = spec.model_copy(update={"mesh": spec.mesh.model_copy(update={"tp": 3})})
    assert next((found.code, found.location.key) for found in check_rules(wrong)) == ("MP201", "mesh.tp")


def test_every_letter_has_a_section() -> None:
    assert {family.section for family in FAMILIES.values()} <= set(type(load_spec_text(SAMPLE).spec.model).model_fields)
    assert near_keys(("model", "mamaba"), {}, {}) == ["did you mean model.mamba?"]
