"""Places of keys in a JSON text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megaplan.plan.locate import locate

TEXT = '{\n  "a": {"b": [10, {"c": 1}]},\n  "d": "x, }"\n}\n'


def test_keys_and_elements_are_found_at_their_first_character():
    assert locate(TEXT, ("a",)) == (2, 3)
    assert locate(TEXT, ("a", "b")) == (2, 9)
    assert locate(TEXT, ("a", "b", 0)) == (2, 15)
    assert locate(TEXT, ("a", "b", 1, "c")) == (2, 20)
    assert locate(TEXT, ("d",)) == (3, 3)


def test_a_key_that_is_missing_is_placed_at_the_deepest_part_that_exists():
    assert locate(TEXT, ("a", "nothing")) == locate(TEXT, ("a",))
    assert locate(TEXT, ()) == (1, 1)


values = st.recursive(st.integers() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.text(), values, min_size=1), st.data())
def test_every_key_is_found_whatever_its_text(document, data):
    key = data.draw(st.sampled_from(sorted(document)))
    text = json.dumps(document, indent=1)
    line, column = locate(text, (key,))
    assert text.split("\n")[line - 1][column - 1 :].startswith(json.dumps(key))
