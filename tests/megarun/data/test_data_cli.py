"""`megarun data` as a person and a script see it: text, JSON, entropy, exit status."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarun.cli.main import run
from megarun.data.statistics import measure
from megarun.data.token_file import TokenFile, tokenizer_path

pytestmark = pytest.mark.runtime


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["data", "inspect", str(path), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document: dict[str, Any] = json.loads(printed.out)
    return document


def test_tokenize_then_inspect(corpus: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts and entropy equal those of the texts' bytes, counted here; only the answer is printed off a terminal."""
    (corpus / "x.bin").write_bytes(b"\0\1")
    path = tmp_path / "x.tokens"
    assert run(["data", "tokenize", str(corpus), "-o", str(path), "--tokenizer", "bytes"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "1 binary: it has a zero byte (first: x.bin)" in printed.out
    assert str(path) in printed.out

    symbols: list[int] = [symbol for text in texts for symbol in [*text.encode(), 256]]
    counts = Counter(symbols)
    entropy = sum(count / len(symbols) * math.log2(len(symbols) / count) for count in counts.values())
    found = inspected(path, capsys)
    assert found["format"] == "megarun.data-inspect/1"
    assert found["num_tokens"] == len(symbols)
    assert found["num_documents"] == len(texts)
    assert found["num_text_bytes"] == sum(len(text.encode()) for text in texts)
    assert found["vocabulary_used"] == len(counts)
    assert found["vocab_size"] == 257
    assert found["unigram_entropy_bits"] == pytest.approx(entropy, rel=1e-12)
    assert found["unigram_entropy_nats"] == pytest.approx(entropy * math.log(2), rel=1e-12)
    lengths = sorted(len(text.encode()) + 1 for text in texts)
    assert [found[f"{which}_document_tokens"] for which in ("shortest", "median", "longest")] == [lengths[0], lengths[2], lengths[-1]]
    assert found["tokenizer_file"] == {"path": f"{path}.tokenizer.json", "state": "matches"}


@pytest.mark.parametrize("num_ids", [1, 2, 7, 256])
def test_the_entropy_of_equal_frequencies(num_ids: int, token_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the logarithm of their number, also when the file is read in many parts."""
    path = token_file([list(range(num_ids))] * 5)
    whole = measure(TokenFile(path))
    assert whole.unigram_entropy_nats == pytest.approx(math.log(num_ids), abs=1e-15)
    monkeypatch.setattr("megarun.data.statistics.CHUNK_TOKENS", 3)
    assert measure(TokenFile(path)) == whole


def test_the_entropy_of_random_tokens(token_file: Any) -> None:
    """Against a sum over a histogram made by sorting."""
    tokens = np.random.default_rng(0).zipf(1.3, 20_000) % 70_000
    found = measure(TokenFile(token_file([tokens.tolist()], 70_000)))
    _, counts = np.unique(tokens, return_counts=True)
    assert found.unigram_entropy_nats == pytest.approx(float(np.log(20_000) - (counts * np.log(counts)).sum() / 20_000), rel=1e-12)
    assert found.vocabulary_used == len(counts)


def test_the_text_of_inspect(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entropy in both units, and whether the tokenizer file is the one that made the tokens."""
    path = tmp_path / "x.tokens"
    assert run(["data", "tokenize", str(corpus), "-o", str(path), "--vocab-size", "5000"]) == 0
    assert "not 5,000: the sample has no further pair" in capsys.readouterr().out
    found = inspected(path, capsys)
    assert run(["data", "inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{found['unigram_entropy_nats']:.4f} nats, {found['unigram_entropy_bits']:.4f} bits per token" in text
    assert ": matches" in text
    tokenizer_path(path).write_text("{}")
    assert inspected(path, capsys)["tokenizer_file"]["state"] == "another tokenizer"
    tokenizer_path(path).unlink()
    assert inspected(path, capsys)["tokenizer_file"]["state"] == "missing"


def test_tokenizing_a_folder_into_itself_twice(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run's output is not a document of the second."""
    path = corpus / "x.tokens"
    written = []
    for _ in range(2):
        assert run(["data", "tokenize", str(corpus), "-o", str(path), "--vocab-size", "300"]) == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert "2 written by this command" in capsys.readouterr().out


def test_a_failure_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One error document on stdout, exit 2."""
    assert run(["data", "inspect", str(tmp_path / "no"), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "megaplan.error/1"
    assert [found["code"] for found in document["diagnostics"]] == ["MP611"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokenizer", "words"], "'words' is not bpe, bytes"),
        (["--vocab-size", "many"], "--vocab-size"),
        (["--vocab-size", "12"], "MP618"),
        (["--vocab-size", "4294967296"], "MP618"),
        (["--tokenizer", "bytes", "--vocab-size", "2048"], "MP618"),
        (["--limit-bytes", "8 parsecs"], "unknown unit"),
        (["--limit-bytes", "0"], "is too small"),
        (["--limit-bytes", "-5"], "-5"),
        (["--limit-bytes", "3"], "MP617"),
        (["--include", "*.cpp"], "MP617"),
        (["--colour"], "--colour"),
    ],
)
def test_bad_options(words: list[str], says: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named, exits 2 and leaves no file."""
    assert run(["data", "tokenize", str(corpus), "-o", str(tmp_path / "x.tokens"), *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert "error[MP" in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not list(tmp_path.glob("*.tokens*"))


def test_sizes_with_a_unit(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3kB are 3,000 bytes of text."""
    path = tmp_path / "x.tokens"
    assert run(["data", "tokenize", str(corpus), "-o", str(path), "--tokenizer", "bytes", "--limit-bytes", "3kB"]) == 0
    assert 0 < inspected(path, capsys)["num_text_bytes"] <= 3000
