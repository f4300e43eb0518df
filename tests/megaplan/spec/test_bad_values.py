"""Values of the wrong name, type or size: code, place, value and repair, and all of them at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from spec_samples import SAMPLE, Edit, Refused

CASES = yaml.safe_load(Path(__file__).with_name("bad_values.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_one_wrong_value(refused: Refused, case: dict[str, Any]) -> None:
    code, key, line = case["found"]
    (found,) = [item for item in refused(*case["edits"]) if item.location.key == key]
    assert (found.code, found.location.line) == (code, line)
    assert case["shows"] in found.detail
    assert case.get("hint", found.hints[0]) in found.hints


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
