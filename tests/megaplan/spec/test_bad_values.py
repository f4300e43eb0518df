"""Values of the wrong name, type or size: code, place, value and repair, and all of them at once."""

import shlex
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from spec_samples import SAMPLE, Edit, Refused

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.spec.document import dotted
from megaplan.spec.fields import all_keys, legal_keys
from megaplan.spec.load import load_spec_text

WRONG = {f"MP{number}" for number in range(123, 135)}
"""Codes of single values that are wrong by themselves."""
CASES = yaml.safe_load(Path(__file__).with_name("bad_values.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_one_wrong_value(refused: Refused, case: dict[str, Any]) -> None:
    code, key, line = case["found"]
    (found,) = [item for item in refused(*case["edits"]) if item.location.key == key]
    assert (found.code, found.location.line) == (code, line)
    assert case["shows"] in found.detail
    assert case.get("hint", found.hints[0]) in found.hints


def test_no_key_takes_a_value_of_another_type() -> None:
    for path in all_keys():
        key = TypeAdapter(legal_keys(path[:-1], None)[str(path[-1])])
        reads_texts = errors_of(key, "?") & {"quantity"}
        for value in (True, "1", "0.5", 1.0):
            if reads_texts and not isinstance(value, bool):
                continue
            taken = key.validate_python(value) if not errors_of(key, value) else value
            assert type(taken) is type(value) or not isinstance(taken, int | float | str), (path, value)


def errors_of(key: TypeAdapter[Any], value: Any) -> set[str]:
    """Types of the errors of a value."""
    try:
        key.validate_python(value)
    except ValidationError as error:
        return {each["type"] for each in error.errors()}
    return set()


@pytest.mark.parametrize("seed", range(3))
def test_a_hint_for_a_value_of_a_wrong_type_is_a_value_of_the_key(seed: int) -> None:
    draw = Random(seed)
    words = ("0", "-1", "1.5", "x", "null", "true", "1e30", "010", "1_000_000_000_000_000", "[1.5]", "[x]", ".nan", "''", "'3'")
    tried = 0
    for _ in range(250):
        given = f"{dotted(draw.choice(all_keys()))}={draw.choice(words)}"
        found = [each for each in refusals(given) if each.code in WRONG and (each.location.file or "").startswith("--set ")]
        for error, hint in ((each, hint) for each in found for hint in each.hints if hint.startswith("--set ") and "…" not in hint):
            left = refusals(given, *(word for word in shlex.split(hint) if word != "--set"))
            assert not [each for each in left if each.code in WRONG and each.location.key == error.location.key], (given, hint)
            tried += 1
    assert tried > 50


def refusals(*overrides: str) -> tuple[Diagnostic, ...]:
    """Errors of the sample with overrides."""
    try:
        load_spec_text(SAMPLE, "sample.yaml", overrides)
    except MegaplanError as error:
        return error.diagnostics
    return ()


@pytest.mark.parametrize(
    ("edit", "code", "detail"),
    [
        (("  tp: 1", "  tp: " + "9" * 5000), "MP124", "9…' (text)"),
        (("  tp: 1", "  tp: " + "9" * 500), "MP130", "a number of 1661 bits"),
        (("name: sample", "name: " + "x" * 101), "MP133", "x…', but a name has 1 to 100"),
    ],
)
def test_a_value_too_long_to_show(refused: Refused, edit: Edit, code: str, detail: str) -> None:
    (found,) = refused(edit)
    assert found.code == code
    assert detail in found.detail


def test_all_are_reported_together_in_reading_order(refused: Refused) -> None:
    found = refused(
        ("name: sample", "name: 5"), ("AMERD", "AM*"), ("tp: 1", "tp: x"), ("ep: 1", "ep: 0"), ("kind: 1f1b", "kind: y"), ("split", "spilt")
    )
    assert [item.code for item in found] == ["MP127", "MP301", "MP124", "MP130", "MP123", "MP120"]
    assert [item.location.line for item in found] == [2, 4, 18, 19, 22, 25]


def test_a_flood_is_cut_with_its_count(refused: Refused) -> None:
    found = refused(text=SAMPLE + "".join(f"k{index}: 1\n" for index in range(5000)))
    assert len(found) == 61
    assert (found[-1].code, found[-1].detail) == ("MP116", "4,940 more findings of the same document")


@pytest.mark.parametrize(
    ("edit", "detail", "hint"),
    [
        (("format: megaplan.spec/1\n", ""), "the document has no key `format`", "format: megaplan.spec/1"),
        (
            ("megaplan.spec/1", "megaplan.spec/2"),
            "format = 'megaplan.spec/2', but this version reads megaplan.spec/1",
            "pip install --upgrade megaplan",
        ),
        (("megaplan.spec/1", "megaplan.spec/0"), "format = 'megaplan.spec/0'", "format: megaplan.spec/1"),
        (("megaplan.spec/1", "megaplan.plan/1"), "format = 'megaplan.plan/1'", "this is a plan; read it with megaplan show PLAN"),
        (("megaplan.spec/1", "1"), "format = 1,", "format: megaplan.spec/1"),
    ],
)
def test_another_format_is_the_only_finding(refused: Refused, edit: tuple[str, str], detail: str, hint: str) -> None:
    (found,) = refused(edit, ("tp: 1", "tp: x"))
    assert found.code == "MP115"
    assert detail in found.detail
    assert hint in found.hints
