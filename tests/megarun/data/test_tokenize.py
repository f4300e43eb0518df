"""Texts to tokens and back: round trip, determinism, documents, exclusions, and failing writes."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from megaplan.errors import MegaplanError
from megarun.data.corpus import Corpus, SkipReason, read_corpus
from megarun.data.format import dtype_of
from megarun.data.token_file import TokenFile, tokenizer_path
from megarun.data.tokenize import check_output, tokenize
from megarun.data.tokenizer import (
    SAMPLE_BYTES,
    TokenizerKind,
    bytes_tokenizer,
    check_vocab_size,
    sample_of,
    segments_of,
    train_bpe,
)

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
KINDS = [(TokenizerKind.BYTES, 257), (TokenizerKind.BPE, 290)]


def code_of(error: pytest.ExceptionInfo[MegaplanError]) -> str:
    (found,) = error.value.diagnostics
    assert found.detail
    assert len(found.hints) >= 1
    return found.code


@pytest.mark.parametrize(("kind", "vocab_size"), KINDS)
def test_every_text_comes_back(kind: TokenizerKind, vocab_size: int, corpus: Path, texts: list[str], tmp_path: Path) -> None:
    """Each document decodes to its text to the byte, also one that spells the end of document."""
    path = tmp_path / "x.tokens"
    done = tokenize(read_corpus(corpus), kind, vocab_size, path)
    source, decoder = TokenFile(path), Tokenizer.from_file(str(done.tokenizer_path))
    source.verify()
    assert source.num_documents == len(texts)
    assert source.vocab_size == decoder.get_vocab_size() == vocab_size
    end = source.header.end_of_document_id
    for index, text in enumerate(texts):
        tokens = source.document(index).tolist()
        assert tokens[-1] == end
        assert end not in tokens[:-1]
        assert decoder.decode(tokens[:-1], skip_special_tokens=False) == text
    assert done.tokenizer_path == tokenizer_path(path)


def test_bytes_are_bytes(corpus: Path, texts: list[str], tmp_path: Path) -> None:
    """Ids are the UTF-8 bytes; the tokenizer's JSON says the same."""
    path = tmp_path / "x.tokens"
    tokenize(read_corpus(corpus), TokenizerKind.BYTES, 257, path)
    expected = b"".join(text.encode() + b"\xff\xff" for text in texts)  # no UTF-8 text has the byte 255
    found = b"".join(b"\xff\xff" if token == 256 else bytes([token]) for token in TokenFile(path).tokens.tolist())
    assert found == expected
    library = bytes_tokenizer().tokenizer
    assert library.encode(texts[0]).ids == list(texts[0].encode())


def test_two_runs_write_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """In two processes, with one thread and with two, with other hash seeds, from folders whose files were made in another order."""
    again = tmp_path / "again"
    for path in sorted(corpus.rglob("*.h"), reverse=True):
        copy = again / path.relative_to(corpus)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    written = []
    for run, (folder, threads) in enumerate([(corpus, "1"), (again, "2")]):
        out = tmp_path / f"{run}.tokens"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}",
            "PYTHONHASHSEED": threads,
            "RAYON_NUM_THREADS": threads,
        }
        words = ["data", "tokenize", str(folder), "-o", str(out), "--vocab-size", "300"]
        subprocess.run([sys.executable, "-m", "megarun", *words], env=environment, check=True, capture_output=True, timeout=60)
        written.append((out.read_bytes(), tokenizer_path(out).read_bytes()))
    assert written[0] == written[1]


def test_what_is_not_text_is_left_out_and_counted(corpus: Path, tmp_path: Path) -> None:
    """Every file of the folder is a document, or is counted under a reason."""
    (corpus / "binary.h").write_bytes(b"int\0main")
    (corpus / "latin.h").write_bytes("größer".encode("latin-1"))
    (corpus / "empty.h").touch()
    (corpus / ".hidden").mkdir()
    (corpus / ".hidden" / "in.h").write_text("x")
    (corpus / ".dot.h").write_text("x")
    (corpus / "notes.md").write_text("x")
    (corpus / "dangling.h").symlink_to("nowhere")
    (corpus / "linked").symlink_to("a")
    (corpus / "alias.h").symlink_to("b.h")
    os.mkfifo(corpus / "pipe.h")
    out = corpus / "out.h"
    tokenizer_path(out).write_text("{}")
    found = read_corpus(corpus, ("*.h", "out.*"), without=(out, tokenizer_path(out)))
    assert found.paths == ("a/deep/unicode.h", "a/windows.h", "alias.h", "b.h", "c.h", "z.h")
    assert {skip.reason: (skip.num_files, skip.first) for skip in found.skipped} == {
        SkipReason.BINARY: (1, "binary.h"),
        SkipReason.NOT_UTF8: (1, "latin.h"),
        SkipReason.EMPTY: (1, "empty.h"),
        SkipReason.HIDDEN: (2, ".dot.h"),
        SkipReason.NOT_INCLUDED: (1, "notes.md"),
        SkipReason.UNREADABLE: (1, "dangling.h"),
        SkipReason.LINKED_FOLDER: (1, "linked"),
        SkipReason.NOT_A_FILE: (1, "pipe.h"),
        SkipReason.OUTPUT: (1, "out.h.tokenizer.json"),
    }


def test_a_pattern_with_a_slash_names_paths(corpus: Path) -> None:
    """A pattern without a slash names files in every folder."""
    assert read_corpus(corpus, ("a/*",)).paths == ("a/deep/unicode.h", "a/windows.h")
    assert read_corpus(corpus, ("windows.*", "Z.h")).paths == ("a/windows.h",)


def test_a_limit_takes_evenly_spread_files(tmp_path: Path) -> None:
    """Every n-th file in path order; at most the limit; every other file is counted."""
    for index in range(100):
        (tmp_path / f"{index:03}.txt").write_text("x" * 10)
    found = read_corpus(tmp_path, limit_bytes=250)
    assert found.paths == tuple(f"{index:03}.txt" for index in range(0, 100, 4))
    assert found.num_text_bytes == 250
    assert [(skip.reason, skip.num_files, skip.first) for skip in found.skipped] == [(SkipReason.BY_LIMIT, 75, "001.txt")]
    assert read_corpus(tmp_path, limit_bytes=1000).num_text_bytes == 1000


def test_a_limit_is_not_a_filter_for_small_files(tmp_path: Path) -> None:
    """The reading ends before the file that would pass the limit, even if a later one would fit."""
    for name, size in {"a": 10, "b": 1, "c": 500, "d": 1, "e": 1, "f": 1}.items():
        (tmp_path / name).write_text("x" * size)
    found = read_corpus(tmp_path, limit_bytes=300)
    assert found.paths == ("a",)
    assert sum(skip.num_files for skip in found.skipped) == 5


def test_segments_encode_as_the_whole(corpus: Path) -> None:
    """A text cut into small segments has the tokens of the uncut text, with any white space at the cuts."""
    trained = train_bpe(read_corpus(corpus), 320)
    text = "int a; \n  b;\n\n\nc;\n\td;\r\ne = 'x';\n\u00a0f;\n\u2003\n#\n" * 50
    parts = list(segments_of(text, 16))
    assert len(parts) > 50
    assert "".join(parts) == text
    whole = trained.tokenizer.encode(text, add_special_tokens=False).ids
    assert [token for part in parts for token in trained.tokenizer.encode(part, add_special_tokens=False).ids] == whole
    assert trained.encode([text])[0].tolist() == whole
    assert list(segments_of("no cut " * 10, 16)) == ["no cut " * 10]


def test_the_tokenizer_is_trained_on_a_bounded_sample(tmp_path: Path) -> None:
    """Every n-th document, the last one cut at the bound, never inside a character."""
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("ü" * 50)
    corpus = read_corpus(tmp_path)
    sample = list(sample_of(corpus, 455))
    assert sample == ["ü" * 50] * 4 + (["ü" * 27] if len(sample) == 5 else [])
    assert [len(text.encode()) for text in sample_of(corpus, 55)] == [54]
    assert sum(len(text.encode()) for text in sample_of(corpus)) == corpus.num_text_bytes <= SAMPLE_BYTES


def test_a_vocabulary_that_the_sample_does_not_fill(corpus: Path, tmp_path: Path) -> None:
    """The header has the ids there are, not the ids that were asked for."""
    done = tokenize(read_corpus(corpus), TokenizerKind.BPE, 100_000, tmp_path / "x.tokens")
    assert 257 < done.header.vocab_size < 1000
    assert done.header.dtype == "uint16"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_narrowest_element_type(vocab_size: int, dtype: str, token_file: Any) -> None:
    """65,536 ids still fit two bytes, the last one being 65,535; and the reader agrees with the format's text."""
    assert dtype_of(vocab_size) == dtype
    source = TokenFile(token_file([[0, vocab_size - 1, 256]] * 3, vocab_size))
    source.verify()
    assert source.tokens.dtype == np.dtype(dtype)
    assert source.rows(0, 0, 2, 4).max() == vocab_size - 1


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [
        (TokenizerKind.BYTES, 256),
        (TokenizerKind.BYTES, 2048),
        (TokenizerKind.BPE, 256),
        (TokenizerKind.BPE, 0),
        (TokenizerKind.BPE, 2**32 + 1),
    ],
)
def test_vocabulary_sizes_that_cannot_be(kind: TokenizerKind, vocab_size: int) -> None:
    """Bytes have 257 ids; BPE at least those, and ids of 32 bits."""
    with pytest.raises(MegaplanError) as error:
        check_vocab_size(kind, vocab_size)
    assert code_of(error) == "MP618"


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_corpus_is_a_folder(name: str, tmp_path: Path) -> None:
    """A missing name and a file's are refused."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(MegaplanError) as error:
        read_corpus(tmp_path / name)
    assert code_of(error) == "MP616"


def test_a_folder_without_text(tmp_path: Path) -> None:
    """The detail counts why nothing is left."""
    with pytest.raises(MegaplanError) as error:
        read_corpus(tmp_path)
    assert code_of(error) == "MP617"
    assert "the folder is empty" in error.value.diagnostics[0].detail
    (tmp_path / "x.h").write_bytes(b"\0")
    (tmp_path / "y.h").write_bytes(b"\0")
    with pytest.raises(MegaplanError) as error:
        read_corpus(tmp_path, ("*.h",))
    assert "2 × binary: it has a zero byte (first: x.h)" in error.value.diagnostics[0].detail
    (tmp_path / "a.h").write_text("long text")
    with pytest.raises(MegaplanError) as error:
        read_corpus(tmp_path, limit_bytes=3)
    assert "3 × beyond --limit-bytes" in error.value.diagnostics[0].detail


@pytest.mark.parametrize("change", [b"other length", b"\xff" * len("return 0;" * 300 + "\n"), None])
def test_a_document_that_changes_meanwhile(change: bytes | None, corpus: Path, tmp_path: Path) -> None:
    """It is refused by name; the file's offsets were sized for the listed documents."""
    listed = read_corpus(corpus)
    if change is None:
        (corpus / "z.h").unlink()
    else:
        (corpus / "z.h").write_bytes(change)
    with pytest.raises(MegaplanError) as error:
        tokenize(listed, TokenizerKind.BYTES, 257, tmp_path / "x.tokens")
    assert code_of(error) == "MP616"
    assert error.value.diagnostics[0].location.file == str(corpus / "z.h")
    assert not list(tmp_path.glob("*.tokens*"))


@pytest.mark.parametrize("place", ["no/folder/x.tokens", "corpus", "corpus/b.h"])
def test_places_that_cannot_be_written(place: str, corpus: Path) -> None:
    """A missing folder, a folder, and a file of another kind, which stays as it is."""
    before = (corpus / "b.h").read_bytes()
    with pytest.raises(MegaplanError) as error:
        check_output(corpus.parent / place)
    assert code_of(error) == "MP619"
    assert (corpus / "b.h").read_bytes() == before


def big(tmp_path: Path) -> Corpus:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "x.txt").write_text("some text\n" * 20_000)
    return read_corpus(tmp_path / "big")


def test_a_full_disk_leaves_the_old_file(corpus: Path, tmp_path: Path) -> None:
    """A file that cannot be written completely does not exist."""
    path = tmp_path / "x.tokens"
    tokenize(read_corpus(corpus), TokenizerKind.BYTES, 257, path)
    before, listed = path.read_bytes(), big(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(MegaplanError) as error:
            tokenize(listed, TokenizerKind.BYTES, 257, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code_of(error) == "MP619"
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_file()) == ["x.tokens", "x.tokens.tokenizer.json"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Control-C in the middle: no half file, no temporary one."""

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(big(tmp_path), TokenizerKind.BYTES, 257, tmp_path / "x.tokens", interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["big"]
