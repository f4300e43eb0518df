"""Canonical JSON: one text per value."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megaplan
from megaplan.plan.canonical import compact, digest, dumps, normalise
from megaplan.plan.inputs import inputs_record, spec_values
from megaplan.spec.models import Spec

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@pytest.mark.requirement("R-52")
@given(values)
def test_the_written_text_reads_back_to_the_same_value_and_the_same_text(value):
    normal = normalise(value)
    text = dumps(normal)
    assert json.loads(text) == normal
    assert dumps(json.loads(text)) == text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.requirement("R-52")
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_becomes_an_integer_or_a_string_and_returns_exactly(value):
    normal = normalise(value)
    assert isinstance(normal, (int, str))
    assert float(normal) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_has_no_form(value):
    with pytest.raises(ValueError, match="no canonical form"):
        normalise(value)


@given(st.dictionaries(st.text(), scalars, min_size=2))
def test_key_order_changes_neither_text_nor_digest(value):
    reversed_value = dict(reversed(value.items()))
    left, right = normalise(value), normalise(reversed_value)
    assert dumps(left) == dumps(right)
    assert digest(left) == digest(right)


def test_a_stage_is_one_line_and_a_rank_has_a_line_for_each_column():
    document = {
        "stages": [{"slot": 0, "layers": [0, 4], "letters": "AEME"}, {"slot": 1, "layers": [4, 8], "letters": "AEMR"}],
        "ranks": [{"ranks": [[0, 4]], "columns": {"gradients_bytes": 2, "activations_bytes": 1}}],
    }
    assert dumps(document) == (
        "{\n"
        '  "ranks": [\n'
        "    {\n"
        '      "columns": {\n'
        '        "activations_bytes": 1,\n'
        '        "gradients_bytes": 2\n'
        "      },\n"
        '      "ranks": [[0, 4]]\n'
        "    }\n"
        "  ],\n"
        '  "stages": [\n'
        '    {"layers": [0, 4], "letters": "AEME", "slot": 0},\n'
        '    {"layers": [4, 8], "letters": "AEMR", "slot": 1}\n'
        "  ]\n"
        "}\n"
    )


def test_the_digested_form_is_the_one_of_rfc_8785():
    assert compact({"b": [1, "é", None], "a": {"z": True}}) == '{"a":{"z":true},"b":[1,"é",null]}'
    assert digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    "change",
    [
        "device.reached={bf16: 0.7}",
        "pools=[{count: 1, device: {name: h100-sxm, reached: {bf16: 0.7}, efficiency_percent: {A: 50}, step_factor: 1.1}}]",
        "model.moe.routing_skew={first: [1.75], rest: 1.5}",
        "model.moe.routing_skew=[1.75, 1.25]",
    ],
)
def test_floats_in_every_place_of_a_spec_come_back(change: str) -> None:
    spec = megaplan.load("plans/tiny-hybrid-pp2.yaml", change).spec
    assert Spec.model_validate(spec_values(json.loads(json.dumps(inputs_record(spec))))) == spec
