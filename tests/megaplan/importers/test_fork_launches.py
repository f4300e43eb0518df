"""Launches of forks: tokenizers that are here or only named, programs that train no decoder, and encoders in front of one."""

import json
from pathlib import Path

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.megatron.tokenizer_files import counted_tokens

RUN = f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN} --make-vocab-size-divisible-by 1"


def vocabulary(words: str, name: str = "launch.sh") -> int:
    return import_megatron(f"{RUN} {words}", name).loaded.spec.model.vocab_size


def warned(text: str, name: str = "launch.sh") -> list[str]:
    return [found.detail for found in import_megatron(text, name).loaded.diagnostics if found.severity is Severity.WARNING]


def piece(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("words", "name", "tokens"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/qwen3-8b", "launch.sh", 151_669),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen3_8B.sh", 151_669),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen25_7B.sh", 151_665),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/qwen2/run.sh", 151_646),
        ("--tokenizer-type HuggingFaceTokenizer", "conf/Nemotron-H-8B.sh", 131_072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $HOME/gemma-3-4b", "launch.sh", 262_145),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER", "launch.sh", 32_000),
        ("--tokenizer-type TikTokenizer --tokenizer-model $TOKENIZER", "launch.sh", 131_072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model EleutherAI/pythia-12b", "launch.sh", 50_277),
    ],
)
def test_tokens_of_a_tokenizer_by_its_name_or_the_scripts(words: str, name: str, tokens: int) -> None:
    assert vocabulary(words, name) == tokens


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/own", "train_qwen3_8B.sh"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /models/own.model", "train_llama2.sh"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "train_qwen35_8B.sh"),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $2", "launch.sh"),
    ],
)
def test_a_tokenizer_that_is_named_and_unknown_is_asked_for(words: str, name: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        vocabulary(words, name)
    found = caught.value.diagnostics[0]
    assert (found.code, found.hints[0]) == ("MP916", "--set model.vocab_size=…")


def test_a_guessed_vocabulary_is_a_warning() -> None:
    said = warned(f"{RUN} --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen3_8B.sh")
    assert "HuggingFaceTokenizer $TOKENIZER is not known: 151,669 tokens, by the name jobs/train_qwen3_8B.sh" in said
    assert not any("tokens" in each for each in warned(f"{RUN} --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/qwen3-8b"))


def test_tokenizers_that_are_here_are_counted(tmp_path: Path) -> None:
    fast = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 1, "content": "b"}]}
    configured = {"tokenizer_class": "X", "added_tokens_decoder": {"2": {"content": "<s>"}, "3": {"content": "</s>"}}}
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast/tokenizer.json").write_text(json.dumps(fast), encoding="utf-8")
    assert counted_tokens("fast", str(tmp_path / "launch.sh")) == 3
    (tmp_path / "fast/tokenizer_config.json").write_text(json.dumps(configured), encoding="utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}), encoding="utf-8")
    pieces = b"".join(piece(1, f"p{number}".encode()) for number in range(5))
    (tmp_path / "spm.model").write_bytes(pieces + piece(2, b"trainer") + bytes([3 << 3, 150, 1]))
    (tmp_path / "text.model").write_bytes(b"YQ== 0\nYg== 1\n")
    script = str(tmp_path / "launch.sh")
    assert vocabulary("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./fast", script) == 4
    assert vocabulary("--vocab-file vocab.json", script) == 2
    assert vocabulary("--tokenizer-type Llama2Tokenizer --tokenizer-model spm.model", script) == 5
    assert counted_tokens("text.model", script) is None
    assert counted_tokens("absent", script) is None


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("pretrain_bert.py", "BERT"),
        ("pretrain_t5.py", "T5"),
        ("tools/retro/main.py", "RETRO"),
        ("tasks/main.py", "a task of evaluation"),
        ("tools/run_text_generation_server.py", "inference"),
        ("tools/checkpoint/convert.py", "the conversion of a checkpoint"),
    ],
)
def test_programs_that_train_no_decoder(program: str, what: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"torchrun {program} {PLAIN}", "run.sh")
    (found,) = caught.value.diagnostics
    assert (found.code, f", {what}, and" in found.detail) == ("MP926", True)


@pytest.mark.parametrize(("program", "counts"), [("pretrain_vlm.py", 1), ("examples/multimodal/train.py", 1), ("pretrain_gpt.py", 0)])
def test_encoders_that_are_not_counted_are_named(program: str, counts: int) -> None:
    assert sum("builds encoders in front of the decoder" in each for each in warned(f"torchrun {program} {PLAIN}")) == counts
