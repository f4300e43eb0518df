"""Documents made to take long, grow, or slip through: answered in time, and never with another exception."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_samples import SAMPLE, Refused, edited

from megaplan.errors import MegaplanError, render_diagnostic
from megaplan.spec.document import parse_document
from megaplan.spec.load import load_spec_text, spec_from_document

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + depth)}: &{chr(98 + depth)} [{', '.join(['*' + chr(97 + depth)] * 9)}]\n" for depth in range(20)
)
FLOODS = {
    "aliases": BOMB + SAMPLE,
    "brackets": "[" * 1_000_000,
    "braces": "{" * 1_000_000,
    "dashes": "- " * 500_000,
    "keys": SAMPLE + "".join(f"k{index}: 1\n" for index in range(100_000)),
    "wrong items": edited(("{mode: weighted}", f"{{pin: [{'a,' * 490_000}]}}")),
    "wrong pairs": edited(("{mode: weighted}", f"{{spans: [{'[1],' * 240_000}]}}")),
    "tags": edited(("{mode: weighted}", f"{{pin: [{'!x a,' * 190_000}]}}")),
    "duplicates": SAMPLE + "x: 1\n" * 200_000,
    "unknown letters": edited(("AMERD", "A*" * 400_000)),
    "boundaries": edited(("AMERD", "A|" * 400_000 + "A")),
    "long name": edited(("name: sample", "name: " + "x" * 900_000)),
    "long number": edited(("tp: 1", "tp: " + "1" * 900_000)),
    "overlapping spans": edited(
        ("num_layers: 10", "num_layers: 4096"), ("{mode: weighted}", f"{{together: [{'[0, 4096], ' * 6000}], pin: [4]}}")
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_answered_in_time_and_in_few_lines(refused: Refused, name: str) -> None:
    found = refused(text=FLOODS[name])
    assert len(found) <= 62
    assert max(len(render_diagnostic(item)) for item in found) < 2000


def test_nothing_that_a_terminal_would_obey_is_shown(refused: Refused) -> None:
    (found,) = refused(("name: sample", r'name: "\e[31mred\x07\u202e"'))
    assert found.detail.isprintable()


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values: st.SearchStrategy[Any] = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)
PATHS = [
    ("name",), ("model",), ("model", "pattern"), ("model", "num_layers"), ("model", "attention"), ("model", "attention", "kind"),
    ("model", "attention", "nope_layers"), ("model", "mamba"), ("model", "moe", "routing_skew"), ("model", "features"), ("mesh",),
    ("mesh", "tp"), ("mesh", "extra"), ("schedule",), ("precision", "families"), ("recompute", "blocks"), ("split", "spans"),
    ("split", "pin"), ("split", "reason"), ("split", "together"), ("serving",), ("training", "learning_rate"), ("device", "name"),
]  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PATHS), values)
def test_any_value_anywhere_is_accepted_or_refused_in_our_words(path: tuple[str, ...], value: Any) -> None:
    document = parse_document(SAMPLE, None).value
    section = document
    for step in path[:-1]:
        section = section.setdefault(step, {})
    section[path[-1]] = value
    try:
        spec_from_document(document)
    except MegaplanError as error:
        codes, text = {found.code for found in error.diagnostics}, "\n".join(render_diagnostic(found) for found in error.diagnostics)
        assert "MP134" not in codes, "its own finding without words"
        assert "Input should" not in text


@settings(max_examples=200)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60) | st.text(alphabet="{}[]:,-&*!|>'\"%@`#? \n\tab1", max_size=60))
def test_any_text_is_accepted_or_refused(text: str) -> None:
    with pytest.raises(MegaplanError):
        load_spec_text(text, "any.yaml")
