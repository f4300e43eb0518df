"""Files that are replaced or written again between the comparison of their sums and their reading."""

import os
from pathlib import Path

import pytest

from megarun.checkpoint.sums import ChangedFileError, FileRecord, open_summed, record_of
from megarun.data.corpus import read_corpus
from megarun.data.token_file import TokenFile
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime


def test_a_file_is_read_as_it_was_summed(tmp_path: Path) -> None:
    """Replaced, and written in place under its old time; both are summed again and refused."""
    path = tmp_path / "a"
    path.write_bytes(b"x" * 64)
    record = record_of(path)
    with open_summed(path, record) as file:
        assert file.read() == b"x" * 64
    before = path.stat()
    path.write_bytes(b"y" * 64)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ChangedFileError, match="in the manifest"), open_summed(path, record):
        pass
    path.unlink()
    path.write_bytes(b"x" * 64)
    with open_summed(path, record) as file:  # another file of the same bytes
        assert file.read() == b"x" * 64
    with pytest.raises(ChangedFileError, match="changed while it was read"), open_summed(path, record):
        path.write_bytes(b"y" * 64)
    (tmp_path / "b").write_bytes(b"x" * 64)
    with open_summed(tmp_path / "b", FileRecord(64, record.sha256)) as file:
        (tmp_path / "a").replace(tmp_path / "b")  # the descriptor keeps the file that was summed
        assert file.read() == b"x" * 64


def test_tokens_are_of_the_file_that_was_checked(tmp_path: Path) -> None:
    """Header, rows and `verify` are of one file, also when another one gets its name."""
    for name, text in (("one", "some text " * 40), ("two", "other text " * 36 + "abcd")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
        tokenize(read_corpus(tmp_path / name), TokenizerKind.BYTES, 257, tmp_path / f"{name}.tokens")
    source = TokenFile(tmp_path / "one.tokens")
    rows = source.rows(0, 0, 2, 16)
    (tmp_path / "two.tokens").replace(tmp_path / "one.tokens")
    assert (source.rows(0, 0, 2, 16) == rows).all()
    source.verify()
    assert TokenFile(tmp_path / "one.tokens").identity != source.identity
