"""Every bad file is refused by name, and the rows of a step match the reference page."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaplan.errors import MegaplanError
from megarun.cli.main import run
from megarun.data.order import shuffled
from megarun.data.token_file import TokenFile

pytestmark = pytest.mark.runtime
DOCUMENTS = [[1, 2, 256], [3, 256], [4, 5, 6, 256]]
BAD_HEADERS: dict[str, dict[str, Any]] = {
    "no JSON": {"header_text": b"{'dtype'"},
    "not UTF-8": {"header_text": b'{"dtype": "\xff"}'},
    "a list": {"header_text": b"[1]"},
    "deeply nested": {"header_text": b"[" * 4000},
    "longer than its room": {"header_bytes": 5000},
    "a field missing": {"header": {"num_tokens": None}},
    "a text for a count": {"header": {"num_tokens": "9"}},
    "a truth for a count": {"header": {"num_documents": True}},
    "a fraction": {"header": {"num_tokens": 9.0}},
    "negative": {"header": {"num_tokens": -9}},
    "no whole number of 64 bits": {"header": {"num_tokens": 10**3000}},
    "an unknown dtype": {"header": {"dtype": "float32"}},
    "more ids than the dtype holds": {"header": {"vocab_size": 65_537}},
    "fewer ids than bytes": {"header": {"vocab_size": 256}},
    "an end outside the vocabulary": {"header": {"end_of_document_id": 300}},
    "no documents": {"header": {"num_documents": 0}},
    "more documents than tokens": {"header": {"num_documents": 10}},
    "version 0": {"version": 0},
    "offsets that do not begin at 0": {"offsets": [1, 3, 5, 9]},
    "offsets that do not end at num_tokens": {"offsets": [0, 3, 5, 8]},
    "offsets that fall": {"offsets": [0, 5, 3, 9]},
    "an empty document": {"offsets": [0, 3, 3, 9]},
}


def refused(path: Path, code: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...] = ()) -> str:
    """Opening the file raises the code at its path, and the command prints it and exits 2; the detail."""
    with pytest.raises(MegaplanError) as error:
        TokenFile(path)
    (found,) = error.value.diagnostics
    assert (found.code, found.location.file) == (code, str(path))
    assert len(found.hints) >= 2
    assert run(["data", "inspect", str(path), *words]) == 2
    printed = capsys.readouterr()
    assert f"error[{code}]" in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return found.detail


def test_a_file_that_shrinks_while_it_is_read_is_refused(token_file: Any) -> None:
    """Mapped pages behind the new end would kill the process; a file of another name, or one that grows, does not matter."""
    path = token_file(DOCUMENTS)
    source = TokenFile(path)
    expected = source.rows(0, 0, 1, 2)
    path.rename(path.with_name("moved"))
    path.write_bytes(b"")
    assert (source.rows(0, 0, 1, 2) == expected).all()
    os.truncate(path.with_name("moved"), 4100)
    for read in (source.rows, source.starts):
        with pytest.raises(MegaplanError, match=r"(?s)MP614.*truncated while it is read: it has 4,100 bytes"):
            read(0, 0, 1, 2)


def test_a_good_file(token_file: Any) -> None:
    """The reader agrees with a file that was made from the reference page alone."""
    source = TokenFile(token_file(DOCUMENTS))
    source.verify()
    assert (source.num_tokens, source.vocab_size, source.num_documents) == (9, 300, 3)
    assert source.document_offsets.tolist() == [0, 3, 5, 9]
    assert [source.document(index).tolist() for index in range(3)] == DOCUMENTS
    for index in (-1, 3):
        with pytest.raises(IndexError):
            source.document(index)


@pytest.mark.parametrize("change", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_damaged_header_or_table(change: dict[str, Any], token_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers in the parts of a file must agree."""
    assert len(refused(token_file(DOCUMENTS, **change), "MP614", capsys)) < 200


def test_every_shorter_file_is_refused(token_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut anywhere, and one byte too long."""
    path = token_file(DOCUMENTS)
    content = path.read_bytes()
    for length in (8, 9, 20, 4095, 4096, 4100, len(content) - 1):
        path.write_bytes(content[:length])
        assert "truncated" in refused(path, "MP614", capsys)
    path.write_bytes(content + b"\0")
    assert "too long: it has 4,147 bytes" in refused(path, "MP614", capsys)


@pytest.mark.parametrize(
    "content", [b"", b"\x89MGTOK", b"\x89MGTOK\n\x01" * 600, b"plain text\n" * 1000, b"\0" * 5000, os.urandom(10_000_000)]
)
def test_other_files(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty, a beginning of the magic, a copy in text mode, text, zeros, 10 MB of noise."""
    (tmp_path / "x").write_bytes(content)
    refused(tmp_path / "x", "MP612", capsys)


def test_a_file_of_a_later_version(token_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's kind is not guessed, whatever its header looks like."""
    assert "4" in refused(token_file(DOCUMENTS, version=4, header_text=b"\xff"), "MP613", capsys)


@pytest.mark.parametrize("name", ["missing", "folder", "pipe", "loop", "n" * 300])
def test_what_is_not_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe is refused rather than waited for."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / name, "MP611", capsys)


def test_changed_tokens(token_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit is found by the digest; an id past the vocabulary also where it is read."""
    path = token_file(DOCUMENTS)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(MegaplanError, match="sha256 of the payload"):
        TokenFile(path).verify()
    assert run(["data", "inspect", str(path)]) == 2
    assert "MP614" in capsys.readouterr().err

    path = token_file([[1, 2, 300, 256]])
    with pytest.raises(MegaplanError, match="token id 300, first in window 0 of 3"):
        TokenFile(path).rows(0, 0, 1, 3)
    assert run(["data", "inspect", str(path)]) == 2
    assert "token id 300, header.vocab_size = 300" in capsys.readouterr().err


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_length=st.integers(1, 12),
    step=st.integers(0, 5),
    num_rows=st.integers(1, 4),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_starts_are_the_first_columns_of_the_documents(
    token_file: Any, lengths: list[int], seq_length: int, step: int, num_rows: int
) -> None:
    """Token i of document d is d: two columns share a start exactly where they share a document, and a start is its first column."""
    source = TokenFile(token_file([[index] * length for index, length in enumerate(lengths)]))
    if sum(lengths) <= seq_length:
        with pytest.raises(MegaplanError, match="num_tokens"):
            source.starts(step, 3, num_rows, seq_length)
        return
    rows, starts = source.rows(step, 3, num_rows, seq_length), source.starts(step, 3, num_rows, seq_length)
    assert (starts.shape, starts.dtype) == (rows.shape, np.int32)
    for row, found in zip(rows.tolist(), starts.tolist(), strict=True):
        assert found == [row.index(document) for document in row]


def counting(token_file: Any, num_tokens: int) -> TokenFile:
    """Token i is i, so a row says where it comes from."""
    return TokenFile(token_file([list(range(num_tokens))], max(300, num_tokens)))


@pytest.mark.parametrize(("num_tokens", "seq_length"), [(101, 10), (110, 10), (11, 10), (400, 1), (997, 64)])
def test_an_epoch_visits_every_window_once(num_tokens: int, seq_length: int, token_file: Any) -> None:
    """Windows do not overlap except for the one token that is a label here and an input there."""
    source = counting(token_file, num_tokens)
    num_windows = source.num_windows(seq_length)
    assert num_windows == (num_tokens - 1) // seq_length
    orders = []
    for epoch in range(3):
        rows = source.rows(epoch, 5, num_windows, seq_length)
        assert rows.dtype == np.int64
        assert rows.shape == (num_windows, seq_length + 1)
        assert (np.diff(rows, axis=1) == 1).all()
        assert sorted(rows[:, 0].tolist()) == list(range(0, num_windows * seq_length, seq_length))
        orders.append(rows[:, 0].tolist())
    if num_windows > 5:
        assert orders[0] != orders[1] != orders[2]
        assert orders[0] != source.rows(0, 6, num_windows, seq_length)[:, 0].tolist()
        assert orders[0] != sorted(orders[0])


def test_rows_are_a_function_of_their_position_alone(token_file: Any) -> None:
    """However a batch is divided, among steps or ranks, and whenever it is read, row i of training is the same; a batch may pass epochs."""
    source = counting(token_file, 201)  # 20 windows of 10
    whole = source.rows(0, 3, 60, 10)
    for step in (4, 0, 2, 1, 3):
        assert (source.rows(step, 3, 12, 10) == whole[12 * step : 12 * step + 12]).all()
    assert (np.concatenate([source.rows(step, 3, 1, 10) for step in range(60)]) == whole).all()
    assert (TokenFile(source.path).rows(10**9, 3, 4, 10) == source.rows(10**9, 3, 4, 10)).all()


def documented_order(length: int, seed: int, epoch: int) -> list[int]:
    """The reference page's algorithm on plain integers."""
    digest = hashlib.blake2b(f"megarun.rows/1 {seed} {epoch}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]
    half = 1
    while 4**half < length:
        half += 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def network(x: int) -> int:
        left, right = divmod(x, 2**half)
        for key in keys:
            left, right = right, left ^ mix(right ^ key) % 2**half
        return left * 2**half + right

    found = []
    for position in range(length):
        x = network(position)
        while x >= length:
            x = network(x)
        found.append(x)
    return found


@given(length=st.integers(1, 500), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_the_order_is_the_documented_permutation(length: int, seed: int, epoch: int) -> None:
    """A bijection for every length, seed and epoch, equal to its own implementation."""
    found = shuffled(np.arange(length), length, seed, epoch).tolist()
    assert sorted(found) == list(range(length))
    assert found == documented_order(length, seed, epoch)


@pytest.mark.parametrize("length", [5, 12, 16])
def test_no_window_prefers_a_position(length: int) -> None:
    """Over many epochs every window comes at every position about equally often: within 5 standard deviations."""
    num_epochs = 3000
    counts = np.zeros((length, length), dtype=np.int64)
    for epoch in range(num_epochs):
        counts[np.arange(length), shuffled(np.arange(length), length, 0, epoch)] += 1
    mean = num_epochs / length
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean * (1 - 1 / length))


def test_large_lengths_are_computed_without_a_table() -> None:
    """Distinct numbers below the length, from the ends and the middle of 2^50."""
    length = 2**50 + 1
    positions = np.concatenate([np.arange(1000), np.arange(length - 1000, length), np.arange(2**49, 2**49 + 1000)])
    found = shuffled(positions, length, 0, 0)
    assert len(set(found.tolist())) == 3000
    assert found.min() >= 0
    assert found.max() < length


@pytest.mark.parametrize(
    ("num_tokens", "seq_length", "words"),
    [(9, 9, "9 < seq_length + 1 = 10"), (9, 0, "batch.seq_length = 0"), (9, -1, "= -1"), (1, 1, "1 < seq_length + 1 = 2")],
)
def test_rows_that_cannot_be(num_tokens: int, seq_length: int, words: str, token_file: Any) -> None:
    """Fewer tokens than a row has, and rows without a token."""
    with pytest.raises(MegaplanError) as error:
        counting(token_file, num_tokens).rows(0, 0, 1, seq_length)
    (found,) = error.value.diagnostics
    assert found.code == "MP615"
    assert words in found.detail
    assert found.location.key == "batch.seq_length"


@pytest.mark.parametrize(("step", "num_rows"), [(-1, 1), (0, 0)])
def test_a_step_has_a_number_and_rows(step: int, num_rows: int, token_file: Any) -> None:
    """A caller's mistake, not a user's."""
    with pytest.raises(ValueError, match="step ="):
        counting(token_file, 100).rows(step, 0, num_rows, 4)
