"""Lexical classes: of C-like text, of its tokens, and in the token file."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaplan.errors import MegaplanError
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.structure import CLASSES, SCHEME, byte_classes, token_classes
from megarun.data.token_file import TokenFile
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime


def pieces(text: str) -> list[tuple[str, str]]:
    """Runs of bytes of one class, white space left out."""
    content, found = text.encode(), byte_classes(text)
    edges = [0, *(np.flatnonzero(np.diff(found)) + 1).tolist(), len(content)]
    runs = [(CLASSES[found[a]], content[a:b].decode()) for a, b in pairwise(edges) if b > a]
    return [(name, piece) for name, piece in runs if name != "whitespace"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int x", [("type_keyword", "int"), ("identifier", "x")]),
        ("f (1.5e-3, 0x1F)", [("called_identifier", "f"), ("opening", "("), ("floating", "1.5e-3"), ("comma", ","), ("integer", "0x1F"),
                              ("closing", ")")]),
        ("1'000 0x1p-3 .5 1e9", [("integer", "1'000"), ("floating", "0x1p-3"), ("floating", ".5"), ("floating", "1e9")]),
        ("a // b\nc /* d\n */ e", [("identifier", "a"), ("line_comment", "// b"), ("identifier", "c"), ("block_comment", "/* d\n */"),
                                  ("identifier", "e")]),
        ("a // b \\\nstill\nc", [("identifier", "a"), ("line_comment", "// b \\\nstill"), ("identifier", "c")]),
        ('s = "a\\"//b"', [("identifier", "s"), ("assignment", "="), ("string", '"a\\"//b"')]),
        ('R"x(a)" b)x" c', [("string", 'R"x(a)" b)x"'), ("identifier", "c")]),
        ("L'\\'' ;", [("character", "L'\\''"), ("semicolon", ";")]),
        ('"open\nx', [("string", '"open'), ("identifier", "x")]),
        ("/* open", [("block_comment", "/* open")]),
        ("  #  define A x", [("directive", "#  define"), ("identifier", "A"), ("identifier", "x")]),
        ("a # b", [("identifier", "a"), ("other", "# b")]),
        ("a->b<<=c<=>d&&!e", [("identifier", "a"), ("access", "->"), ("identifier", "b"), ("assignment", "<<="), ("identifier", "c"),
                              ("comparison", "<=>"), ("identifier", "d"), ("logical", "&&!"), ("identifier", "e")]),
        ("if (größe ? 1 : 2) return;", [("control_keyword", "if"), ("opening", "("), ("identifier", "größe"), ("choice", "?"),
                                        ("integer", "1"), ("choice", ":"), ("integer", "2"), ("closing", ")"),
                                        ("control_keyword", "return"), ("semicolon", ";")]),
    ],
)  # fmt: skip
def test_bytes_have_the_classes_of_the_language(text: str, expected: list[tuple[str, str]]) -> None:
    assert pieces(text) == expected


def test_a_token_has_the_class_of_its_first_byte_that_is_not_white_space() -> None:
    """Spaces before a word belong to its token, as byte-level BPE cuts them; a token of spaces is white space."""
    lengths = np.array([3, 2, 4, 1, 2, 2])
    found = token_classes("int  x = 5;\n\n ", lengths)
    assert [CLASSES[index] for index in found] == ["type_keyword", "whitespace", "identifier", "integer", "semicolon", "whitespace"]
    with pytest.raises(ValueError, match="the tokens have 3 bytes"):
        token_classes("int x", np.array([3]))


@pytest.mark.parametrize(("kind", "vocab_size"), [(TokenizerKind.BYTES, 257), (TokenizerKind.BPE, 290)])
def test_a_token_file_carries_them(kind: TokenizerKind, vocab_size: int, corpus: Path, texts: list[str], tmp_path: Path) -> None:
    """Every document's classes are those of its text; rows of classes lie under the rows of tokens; without them the file is as before."""
    path, bare = tmp_path / "x.tokens", tmp_path / "bare.tokens"
    tokenize(read_corpus(corpus), kind, vocab_size, path, structure=True)
    tokenize(read_corpus(corpus, without=(path,)), kind, vocab_size, bare)
    source, without = TokenFile(path), TokenFile(bare)
    source.verify()
    assert (source.header.structure, source.header.num_categories) == (SCHEME, len(CLASSES))
    assert source.classes is not None
    assert without.classes is None
    assert np.array_equal(source.tokens, without.tokens)
    assert path.stat().st_size == bare.stat().st_size + source.num_tokens
    for index, text in enumerate(texts):
        start, stop = source.document_offsets[index : index + 2]
        assert source.classes[stop - 1] == CLASSES.index("other")
        if kind is TokenizerKind.BYTES:
            classes, here = byte_classes(text), source.classes[start : stop - 1]
            assert np.array_equal(here[classes != 1], classes[classes != 1])
    together = source.tokens.astype(np.int64) * 256 + source.classes
    rows, classes = source.rows(3, 5, 4, 16), source.structure_rows(3, 5, 4, 16)
    windows = {tuple(together[start : start + 16].tolist()) for start in range(0, source.num_tokens - 16, 16)}
    assert {tuple(row) for row in (rows * 256 + classes)[:, :-1].tolist()} <= windows


def test_a_file_without_classes_says_how_to_get_them(token_file: Any) -> None:
    with pytest.raises(MegaplanError) as refused:
        TokenFile(token_file([list(range(40))])).structure_rows(0, 0, 1, 8)
    (found,) = refused.value.diagnostics
    assert found.code == "MP626"
    assert "--structure" in found.hints[0]


@pytest.mark.parametrize("header", [{"structure": ""}, {"num_categories": 0}, {"num_categories": 257}, {"structure": None}])
def test_a_damaged_header_is_found(header: dict[str, Any], token_file: Any) -> None:
    """Version 2 has classes."""
    path = token_file([list(range(40))], version=2, header={"structure": "c-lexical/1", "num_categories": 25} | header)
    with pytest.raises(MegaplanError) as refused:
        TokenFile(path)
    assert [found.code for found in refused.value.diagnostics] == ["MP614"]


def test_the_command_writes_and_shows_them(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.tokens"
    assert run(["data", "tokenize", str(corpus), "-o", str(path), "--tokenizer", "bytes", "--structure"]) == 0
    assert f"{SCHEME}, {len(CLASSES)} classes" in capsys.readouterr().out
    assert run(["data", "inspect", str(path)]) == 0
    assert f"{SCHEME}, {len(CLASSES)} classes" in capsys.readouterr().out
