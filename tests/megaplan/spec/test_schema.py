"""The JSON Schema matches the loader."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from megaplan.errors import MegaplanError
from megaplan.families.attention.keys import Compressor, SharedKeys
from megaplan.families.registry import Letter, Rated
from megaplan.scalars import PeakType, RecipeType, ReserveName, Section
from megaplan.spec.fields import all_keys, kinds_of, legal_keys
from megaplan.spec.host_words import RematTensor
from megaplan.spec.load import load_spec_text
from megaplan.spec.models import Host, LayerWindow, Mesh, Pool, Training
from megaplan.spec.schema import schema_id, spec_schema
from megaplan.spec.validate import EDITOR_KEY

PLANS = Path(__file__).parents[3] / "plans"


def sections(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *schema["$defs"].values()]


def test_every_key_of_every_section_is_described() -> None:
    for section in sections(spec_schema()):
        assert section["description"]
        assert "Attributes" not in section["description"]
        for name, key in section["properties"].items():
            assert key["description"].endswith("."), name


def test_a_plain_section_is_that_of_an_empty_mapping() -> None:
    """`Section.plain` runs no validator, so no validator may change a default."""
    found = []
    pending = [Section]
    while pending:
        pending += (kind := pending.pop()).__subclasses__()
        if not any(field.is_required() for field in kind.model_fields.values()):
            plain, read = kind.plain(), kind.model_validate({})
            assert (plain, plain.model_fields_set, plain.model_dump()) == (read, read.model_fields_set, read.model_dump()), kind
            found.append(kind)
    assert {Host, Mesh, Training} <= set(found)


def test_unknown_keys_are_errors_everywhere() -> None:
    assert all(section["additionalProperties"] is False for section in sections(spec_schema()))


def test_the_schema_is_json_and_names_its_dialect() -> None:
    schema = json.loads(json.dumps(spec_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["format", "name", "model", "batch"]
    assert schema["properties"]["format"]["const"] == "megaplan.spec/1"


def test_fields_and_schema_list_the_same_keys() -> None:
    named = {key for section in sections(spec_schema()) for key in section["properties"]}
    mappings = (Letter, Rated, ReserveName, PeakType, RecipeType, RematTensor)  # whose words are keys of mappings, not of sections
    rated = {key for words in mappings for key in get_args(words)}
    inside_lists = {key for section in (LayerWindow, Pool, Compressor, SharedKeys) for key in section.model_fields}  # written together
    assert {str(path[-1]) for path in all_keys()} - (rated - named) | inside_lists == named - {EDITOR_KEY}


@pytest.mark.parametrize(
    ("path", "kinds"), [(("model", "attention"), ("gqa", "mla")), (("model", "mamba"), ("mamba1", "mamba2", "mamba3")), (("mesh",), ())]
)
def test_sections_of_several_kinds_are_narrowed(path: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    assert kinds_of(path) == kinds
    assert "kv_lora_rank" not in legal_keys(("model", "attention"), {"model": {"attention": {"kind": "gqa"}}})
    assert "kv_lora_rank" in legal_keys(("model", "attention"), {"model": {}})


def test_a_schema_is_named_by_the_version_of_its_format() -> None:
    """One name for each version, which is not a place on the network."""
    assert spec_schema()["$id"] == "urn:megaplan:spec:1"
    assert schema_id("megaplan.plan/1") == "urn:megaplan:plan:1"


def test_a_spec_may_name_its_schema(tmp_path: Path) -> None:
    """The key changes nothing; a value that is not text is an error as any unknown key."""
    text = (PLANS / "tiny-hybrid.yaml").read_text(encoding="utf-8")
    assert load_spec_text(f"$schema: x.json\n{text}").spec == load_spec_text(text).spec
    assert "$schema" not in load_spec_text(f"$schema: x.json\n{text}").spec.as_document()
    with pytest.raises(MegaplanError, match="schema"):
        load_spec_text(f"$schema: 5\n{text}")
