"""Megatron's own pattern and layout texts: the result of each, or the position of its error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.pattern import SYMBOLS, format_hybrid, parse_hybrid
from megaplan.hosts.megatron.stages import check_layout, format_layout, parse_layout

NEMOTRON_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

VALID = {
    "M*M*": (("M*M*",), None, 0),
    "M-M-|M-M*-": (("M-M-", "M-M*-"), None, 0),
    "M|M|M|M": (("M", "M", "M", "M"), None, 0),
    "||M": (("", "", "M"), None, 0),
    "MEME/MM/MM": (("MEME",), "MM", 2),
    "GEGEGE*E": (("GEGEGE*E",), None, 0),
    "MDMD": (("MDMD",), None, 0),
    "M+M+": (("M+M+",), None, 0),
    "/MM/MM": (("",), "MM", 2),
    "M*M*/": (("M*M*",), None, 0),
    "MMM|M|MMMMM": (("MMM", "M", "MMMMM"), None, 0),
    "": (("",), None, 0),
    "M*/DD": (("M*",), "DD", 1),
    NEMOTRON_NANO: ((NEMOTRON_NANO,), None, 0),
}
INVALID = {
    "M*X*": "'X' at column 3",
    "MaMM": "'a' at column 2",
    "M*M*1": "'1' at column 5",
    "M*M*/MX": "'X' at column 7",
    "M*M*/MM/M*": "module 1 is 'M*' at column 9",
    "M*M*/M|M/M|M": "'|' at column 7",
    "MDM*-": "'*' and 'D' in one pattern, the second at column 4",
    "M+M*-": "'*' and '+' in one pattern, the second at column 4",
    "MX|M*": "'X' at column 2",
    "M M": "' ' at column 2",
    "(M*)2": "'(' at column 1",
    "M//MM": "module 1 is 'MM' at column 4",
}


@pytest.mark.parametrize("text", VALID)
def test_a_valid_pattern(text: str) -> None:
    found = parse_hybrid(text)
    assert (found.segments, found.module, found.num_modules) == VALID[text]


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_pattern_names_the_column(text: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        parse_hybrid(text)
    assert {item.code for item in caught.value.diagnostics} == {"MP910"}
    assert INVALID[text] in caught.value.diagnostics[0].detail


@pytest.mark.parametrize(
    ("text", "hint"), [("M3", "write every layer"), ("(M)", "write every layer"), ("MX", "symbol of the list"), ("M ", "of the list")]
)
def test_a_wrong_symbol_is_told_what_to_write(text: str, hint: str) -> None:
    """Counts and brackets look like a repetition, which Megatron's patterns have not."""
    with pytest.raises(MegaplanError) as caught:
        parse_hybrid(text)
    assert hint in caught.value.diagnostics[0].hints[0]


def test_layers_and_offsets_of_segments() -> None:
    assert len(parse_hybrid("||M").main) == 1
    assert parse_hybrid("MMM|M|MMMMM").offsets == (0, 3, 4)
    assert len(parse_hybrid(NEMOTRON_NANO).main) == 52


def test_stages_follow_virtual_stage_then_rank() -> None:
    assert parse_hybrid("M|*|E|-").stages(2) == ("M", "*", "E", "-")
    assert parse_hybrid("M*M*").stages(2) == ("M*", "M*")
    assert parse_hybrid("M*M*M*M*").stages(4, first=2) == ("M*", "M*", "M*", "M*")
    assert parse_hybrid("MMMMM").stages(3, first=2, last=1) == ("MM", "MM", "M")
    assert parse_hybrid("MMM").stages(2, first=2, last=1) == ("MM", "M")


UNFIT = {
    ("M|M|M", 2, None, 1): "3 % 2 = 1",
    ("M*M*M*", 4, None, 1): "6 layers do not divide over 4 ranks",
    ("M*M*", 2, None, 2): "2 virtual stages per rank, but the pattern has no '|'",
    ("M*|M*", 2, 2, 1): "has '|'",
    ("M*M*M*M*M", 4, 2, 1): "7 layers do not divide over 3 ranks",
    ("M", 2, 2, 1): "-1 layers",
}


@pytest.mark.parametrize("case", UNFIT, ids=str)
def test_stages_that_do_not_fit(case: tuple[str, int, int | None, int]) -> None:
    text, pp, first, vpp = case
    with pytest.raises(MegaplanError) as caught:
        parse_hybrid(text).stages(pp, first=first, vpp=vpp)
    (found,) = caught.value.diagnostics
    assert found.code == "MP911"
    assert UNFIT[case] in found.detail


symbols = st.text(alphabet=[symbol for symbol in SYMBOLS if symbol not in "D+"], max_size=6)


@given(st.lists(symbols, min_size=1, max_size=6), st.sampled_from([None, "*-", "ME"]), st.integers(1, 3))
def test_a_pattern_survives_being_written(stages: list[str], module: str | None, count: int) -> None:
    found = parse_hybrid(format_hybrid(tuple(stages), (module,) * count if module else ()))
    assert (found.segments, found.module, found.num_modules) == (tuple(stages), module, count if module else 0)


LAYOUTS = {
    "Et*3|(tt|)*29,m|L": ("Ettt", *["tt"] * 29, "m", "L"),
    "E|t*3|(t|)*5mL": ("E", "ttt", *["t"] * 5, "mL"),
    "E|t*3|(t|)*4tm|L": ("E", "ttt", *["t"] * 4, "tm", "L"),
    "Et*2|(tt|)*5t|tmL": ("Ett", *["tt"] * 5, "t", "tmL"),
    "E||tL": ("E", "", "tL"),
}
WRONG_LAYOUTS = {
    "Et|(t(t|)*2)*3L": "'(' at column 6 inside another",
    "Et|(tt|)L": "')' at column 8 is followed by no *n",
    "Et)*2L": "')' at column 3 closes nothing",
    "Et|(tt": "'(' at column 4 is never closed",
    "Etx|L": "'x' at column 3",
    "Et*|L": "'*' at column 3",
    "*2tL": "'*' at column 1",
    "Et3L": "'3' at column 3 is a number without a token to repeat",
    "Et*9999999L": "more than",
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout(text: str) -> None:
    assert parse_layout(text) == LAYOUTS[text]


@pytest.mark.parametrize("text", WRONG_LAYOUTS)
def test_a_wrong_layout_names_the_column(text: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        parse_layout(text)
    (found,) = caught.value.diagnostics
    assert found.code == "MP912"
    assert WRONG_LAYOUTS[text] in found.detail


UNFIT_LAYOUTS = {
    ("E|t|L", 2, 1, 0): "3 stages, pp = 2",
    ("t|EL", 2, 1, 0): "E must be first",
    ("Et|Lt", 2, 2, 0): "L must be last",
    ("Et|tL", 2, 3, 0): "2 layers in the layout, num_layers = 3",
    ("Et|tL", 2, 2, 1): "0 prediction modules in the layout, mtp_num_layers = 1",
    ("Et|tm|mL|", 2, 2, 2): "L must be last",
    ("Et|tm|t|mL", 2, 3, 2): "prediction modules on stages 1, 3",
    ("Etm|t|t|L", 2, 3, 1): "prediction modules on stage 0",
    ("Et|mtL", 2, 2, 1): "a layer is after",
}


@pytest.mark.parametrize("case", UNFIT_LAYOUTS, ids=str)
def test_a_layout_that_does_not_fit(case: tuple[str, int, int, int]) -> None:
    text, *sizes = case
    with pytest.raises(MegaplanError) as caught:
        check_layout(parse_layout(text), *sizes)
    (found,) = caught.value.diagnostics
    assert found.code == "MP911"
    assert UNFIT_LAYOUTS[case] in found.detail


def test_a_layout_that_fits() -> None:
    check_layout(parse_layout("Et*3|(tt|)*29,m|L"), 16, 61, 1)


@given(st.lists(st.text(alphabet="Etm", max_size=9), min_size=1, max_size=8))
def test_a_layout_survives_being_written(stages: list[str]) -> None:
    assert parse_layout(format_layout(stages)) == tuple(stages)
