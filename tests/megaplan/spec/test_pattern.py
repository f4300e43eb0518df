"""Patterns: cycling, boundaries, normalisation, and the message for every wrong character (R-1 … R-3)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.spec.architecture import Mamba2
from megaplan.spec.pattern import LETTERS, parse_pattern

words = st.text(alphabet=LETTERS, min_size=1, max_size=20)
anything = st.text(alphabet=st.sampled_from("AMERDamerd|*-+G/ 13()\t×É\x07"), max_size=20)


def format_pattern(layers: str, spans: Sequence[tuple[int, int]] | None = None) -> str:
    """The text of a pattern: the letters, with `|` between the spans if they are given."""
    return layers if spans is None else "|".join(layers[start:stop] for start, stop in spans)


def problems(text: str, num_layers: int = 4) -> tuple[Diagnostic, ...]:
    with pytest.raises(MegaplanError) as caught:
        parse_pattern(text, num_layers)
    return caught.value.diagnostics


@pytest.mark.requirement("R-2")
@given(st.lists(words, min_size=2, max_size=8))
def test_slots_survive_print_and_parse(slots: list[str]) -> None:
    text = "|".join(slots)
    parsed = parse_pattern(text, sum(map(len, slots)))
    assert parsed.spans is not None
    assert format_pattern(parsed.layers, parsed.spans) == text
    assert [parsed.layers[start:stop] for start, stop in parsed.spans] == slots


@pytest.mark.requirement("R-3")
@given(words, st.integers(min_value=1, max_value=100))
def test_a_pattern_without_boundaries_is_cycled(word: str, num_layers: int) -> None:
    parsed = parse_pattern(word.lower(), num_layers)
    assert parsed.layers == "".join(word[index % len(word)] for index in range(num_layers))
    assert parsed.spans is None
    assert parse_pattern(format_pattern(parsed.layers), num_layers).layers == parsed.layers


@given(anything, st.integers(min_value=1, max_value=30))
def test_any_text_parses_or_is_refused_with_codes(text: str, num_layers: int) -> None:
    try:
        parsed = parse_pattern(text, num_layers)
    except MegaplanError as error:
        codes = {found.code for found in error.diagnostics}
    else:
        codes = set()
        assert len(parsed.layers) == num_layers
        assert set(parsed.layers) <= set(LETTERS)
    assert codes <= {"MP301", "MP303", "MP304", "MP306"}


def test_layers_are_counted_in_the_alphabets_order() -> None:
    assert parse_pattern("AD", 64).describe() == "64 layers = 32 A + 32 D"
    assert parse_pattern("AEMEAEMEAEMR", 52).counts() == {"A": 13, "M": 13, "E": 22, "R": 4}
    assert parse_pattern("M", 1).describe() == "1 layer = 1 M"


@pytest.mark.requirement("R-1")
def test_an_unknown_letter_names_its_columns_and_the_alphabet() -> None:
    (found,) = problems("AXEMx")
    assert found.code == "MP301"
    assert "'X' at columns 2 and 5" in found.detail
    assert "A (attention), M (Mamba), E (experts), R (recurrent), D (dense MLP)" in found.detail


def test_five_columns_are_named_and_the_others_counted() -> None:
    assert "'X' at columns 1, 3, 5, 7 and 9" in problems("XAXAXAXAX")[0].detail
    assert "'X' at columns 1, 3, 5, 7, 9 and 2 more" in problems("XAXAXAXAXAXAX")[0].detail


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("M*M-", "pattern: MAMD"),
        ("M*M*", "Megatron's '*' is A with attention.kind gqa"),
        ("M+M+", "Megatron's '+' is A with attention.kind mla"),
        ("MEME/MM", "Megatron's '/' begins multi-token prediction; write features.mtp instead"),
        ("(AE)3", "there is no repetition: a pattern without '|' is cycled to num_layers"),
        ("ablock eblock mblock", "pattern: AEM"),
        ("ablock,eblock|mblock", "pattern: AE|M"),
    ],
)
def test_other_notations_are_translated(text: str, hint: str) -> None:
    found = problems(text)
    assert "MP301" in {item.code for item in found}
    assert hint in [line for item in found for line in item.hints]


@pytest.mark.parametrize(
    ("text", "num_layers", "code", "detail", "hint"),
    [
        ("", 4, "MP304", "model.pattern = ''", "pattern: AD"),
        ("   ", 4, "MP304", "model.pattern = '   '", "pattern: AD"),
        ("A E", 4, "MP306", "with a space at column 2", "pattern: AE"),
        ("AE|M", 4, "MP303", "3 letters and '|', so it is not cycled, and model.num_layers = 4", "num_layers: 3"),
    ],
)
def test_shape_errors_show_the_text_and_the_repair(text: str, num_layers: int, code: str, detail: str, hint: str) -> None:
    (found,) = problems(text, num_layers)
    assert found.code == code
    assert detail in found.detail
    assert hint in found.hints


@pytest.mark.parametrize("num_letters", [59, 60, 61])
def test_a_translation_is_offered_as_far_as_it_can_be_shown(num_letters: int) -> None:
    """60 letters are shown whole; a longer pattern would be pasted without its end."""
    (found,) = problems("M" + "*" * (num_letters - 1), num_letters)
    offered = [hint for hint in found.hints if hint.startswith("pattern: ")]
    assert offered == (["pattern: M" + "A" * (num_letters - 1)] if num_letters <= 60 else [])


def test_mamba_2_is_the_reference_implementation_s_unless_stated() -> None:
    """The defaults of `mamba_ssm.modules.mamba2.Mamba2`: a config that leaves them out means those."""
    mamba = Mamba2.model_validate({"kind": "mamba2"})
    sizes = mamba.expand, mamba.head_dim, mamba.state_dim, mamba.num_groups, mamba.conv_kernel, mamba.conv_bias, mamba.chunk_size
    assert sizes == (2, 64, 128, 1, 4, True, 256)
