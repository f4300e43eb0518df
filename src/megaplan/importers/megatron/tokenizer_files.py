"""Counting the tokens of a tokenizer's own files: JSON of Hugging Face or GPT-2, and models of SentencePiece."""

import json
import os
import re
from pathlib import Path
from typing import Any

from megaplan.spec.read import folders_above

MOST_BYTES = 2**26
_PARTS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_ADDED = ("added_tokens.json", "tokenizer_config.json")
WITH_END = re.compile(r"class _?NullTokenizer\b.*?def vocab_size\(self\):\s*(?:\"\"\".*?\"\"\"\s*)?return ([^\n]*)", re.DOTALL)
"""The expression that a NullTokenizer returns as its vocabulary's size."""
NULL_FILES = (
    *("megatron/core/tokenizers/text/libraries/null_tokenizer.py", "megatron/training/tokenizer/tokenizer.py"),
    *("megatron/tokenizer/tokenizer.py", "megatron/core/tokenizers/null_tokenizer.py"),
)
"""Files of a Megatron that hold its NullTokenizer."""


def counted_tokens(name: str, script: str = "") -> int | None:
    """The tokens of a tokenizer, added ones included; None if it is not here, or in no known form.

    Args:
        name: Path of a file or folder.
        script: Path of the script that names it, whose folder relative paths may begin at.
    """
    for start in (Path(), Path(script).parent):
        path = start / name
        try:
            if os.path.isdir(path):
                part = next((path / each for each in _PARTS if os.path.isfile(path / each)), None)
                return None if part is None else _counted(part, [path / each for each in _ADDED])
            if os.path.isfile(path):
                return _counted(path, [])
        except (OSError, ValueError, RecursionError):
            return None
    return None


def _counted(path: Path, added: list[Path]) -> int | None:
    if path.stat().st_size > MOST_BYTES:
        return None
    if path.suffix != ".json":
        return _pieces(path.read_bytes())
    tokens = _names(json.loads(path.read_text(encoding="utf-8")))
    for each in added:
        if tokens and os.path.isfile(each):
            tokens |= _names(json.loads(each.read_text(encoding="utf-8")))
    return len(tokens) or None


def _names(whole: Any) -> set[str]:
    """The tokens of one file: of a fast tokenizer's model, a table of tokens, or the added ones of a configuration."""
    if not isinstance(whole, dict):
        return set()
    if "added_tokens_decoder" in whole or "tokenizer_class" in whole:
        return {str(each["content"]) for each in (whole.get("added_tokens_decoder") or {}).values()}
    if not isinstance(whole.get("model"), dict):
        return {name for name, number in whole.items() if isinstance(number, int)}
    table = whole["model"].get("vocab") or {}
    names = set(table) if isinstance(table, dict) else {str(piece) for piece, _ in table}
    return names | {str(each["content"]) for each in whole.get("added_tokens") or ()}


def _pieces(data: bytes) -> int | None:
    """The pieces of a SentencePiece model: fields 1 of its message, each of a length; None if the bytes are no such message."""
    place = count = 0
    while place < len(data):
        tag, place = _number(data, place)
        if tag & 7 == 2:
            size, place = _number(data, place)
            place += size
            count += tag >> 3 == 1
        elif tag & 7 == 0:
            _, place = _number(data, place)
        else:
            place += {1: 8, 5: 4}.get(tag & 7, len(data) + 1)
    return count if place == len(data) and count else None


def _number(data: bytes, place: int) -> tuple[int, int]:
    """A varint (seven bits per byte), and the position after it."""
    found = shift = 0
    while place < len(data) and shift < 64:
        found |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if not data[place - 1] & 128:
            break
    return found, place


def ends_beyond(script: str) -> bool | None:
    """True if the NullTokenizer of the Megatron around a launch counts an end of documents beyond `--vocab-size`; None without one.

    Megatron-LM's did until April 2026 (commit c9dfe347).
    """
    path = Path(script)
    if not os.path.isfile(path):
        return None
    folders = [*folders_above(script), Path.cwd()]
    for file in (folder / name for folder in folders for name in NULL_FILES):
        if os.path.isfile(file) and (found := WITH_END.search(file.read_text(encoding="utf-8", errors="replace"))):
            return "+ 1" in found[1]
    return None
