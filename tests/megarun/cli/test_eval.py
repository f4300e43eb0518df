"""`megarun eval`, and tokenizers that another file has."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.data.token_file import TokenFile, tokenizer_path

pytestmark = pytest.mark.runtime
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "eval",
    "model": {
        "pattern": "AMDE",
        "num_layers": 4,
        "hidden_size": 32,
        "vocab_size": 400,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8},
        "mlp": {"ffn_hidden_size": 40},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24},
    },
    "batch": {"micro_batch_size": 2, "seq_length": 24},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "training": {"steps": 3, "learning_rate": 1e-3},
}


def made(*words: Any) -> int:
    """Exit status of a megarun command."""
    return run([str(word) for word in words])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of texts, the token file of the first, and that of the second by the first one's tokenizer."""
    folder = tmp_path_factory.mktemp("eval")
    for name, source in (("a", Path(__file__)), ("b", Path(__file__).with_name("test_cli.py"))):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text(source.read_text()[:6000])
    assert made("data", "tokenize", folder / "a", "-o", folder / "a.tokens", "--vocab-size", 320) == 0
    assert made("data", "tokenize", folder / "b", "-o", folder / "b.tokens", "--tokenizer", folder / "a.tokens") == 0
    return folder


def test_a_file_has_the_tokenizer_of_another(files: Path) -> None:
    first, second = TokenFile(files / "a.tokens"), TokenFile(files / "b.tokens")
    assert second.header.tokenizer_sha256 == first.header.tokenizer_sha256
    assert second.header.end_of_document_id == first.header.end_of_document_id
    words = Tokenizer.from_file(str(tokenizer_path(files / "b.tokens")))
    assert words.decode(second.document(0)[:-1].tolist()) == (files / "b" / "text.txt").read_text()


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_a_file_is_evaluated_as_in_training(packing: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows, in another layout of the same rows: one per microbatch, without FSDP2."""
    spec = Spec.model_validate(SPEC | ({"data": {"packing": packing}} if packing != "none" else {}))
    write_plan(make_plan(spec), tmp_path / "plan.json")
    out, held_out = tmp_path / "run", files / "b.tokens"
    words = ("--data", files / "a.tokens", "--eval-data", held_out, "--out", out, "--save-every", 3)
    assert made("train", tmp_path / "plan.json", *words) == 0
    line = next(found for text in (out / "metrics.jsonl").read_text().splitlines() if "evaluation_loss" in (found := json.loads(text)))
    rows = line["evaluation_tokens"] // 24
    capsys.readouterr()
    assert made("eval", out, held_out, "--rows", rows, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == rows
    assert math.isclose(found["loss"], line["evaluation_loss"], rel_tol=2e-6)
    header = TokenFile(held_out).header
    assert math.isclose(found["bits_per_byte"], found["loss"] / math.log(2) * header.num_tokens / header.num_text_bytes, rel_tol=1e-12)
    assert math.isclose(found["bits_per_byte"], line["evaluation_bits_per_byte"], rel_tol=2e-6)
    assert math.isclose(found["perplexity"], math.exp(found["loss"]), rel_tol=1e-12)


def test_a_file_of_more_tokens_than_the_model_has_is_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {**SPEC, "model": {**SPEC["model"], "vocab_size": 257}, "training": {"steps": 1, "learning_rate": 1e-3}}
    write_plan(make_plan(Spec.model_validate(small)), tmp_path / "plan.json")
    assert made("data", "tokenize", files / "a", "-o", tmp_path / "bytes.tokens", "--tokenizer", "bytes") == 0
    words = ("--data", tmp_path / "bytes.tokens", "--out", tmp_path / "run", "--save-every", 1)
    assert made("train", tmp_path / "plan.json", *words) == 0
    assert made("eval", tmp_path / "run", files / "a.tokens") == 2
    assert "error[MP605]" in capsys.readouterr().err


def test_a_published_tokenizer_ends_documents_with_its_own_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two one")
    vocabulary = {"one": 0, "two": 1, "?": 2, "</s>": 299}  # most ids are left out
    words = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    command = ("data", "tokenize", tmp_path / "texts", "-o", tmp_path / "a.tokens", "--tokenizer", tmp_path / "tokenizer.json")
    assert made(*command) == 0
    source = TokenFile(tmp_path / "a.tokens")
    assert source.document(0).tolist() == [0, 1, 0, 299]
    assert source.vocab_size == 300
    assert tokenizer_path(source.path).read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert made(*command, "--end-of-document", "two") == 0
    assert TokenFile(tmp_path / "a.tokens").header.end_of_document_id == 1
    for more in (("--end-of-document", "three"), ("--structure",)):
        assert made(*command, *more) == 2
        assert "error[MP680]" in capsys.readouterr().err
