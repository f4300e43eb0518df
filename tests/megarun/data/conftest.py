"""Token files made from the written format alone, and folders of texts."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEXTS = {
    "a/deep/unicode.h": "// größer ≤ 深層学習 🙂 — naïve\n",
    "a/windows.h": "\ufeffint x;\r\n\tint y;\r\n\r\n",
    "b.h": "template <typename T>\nstruct Vector { T x, y, z; };\n" * 40,
    "c.h": "<|end_of_document|> is text here, <|endoftext|> too\x07",
    "z.h": "return 0;" * 300 + "\n",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with the texts above."""
    root = tmp_path / "corpus"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


@pytest.fixture
def texts() -> list[str]:
    """The texts in the order of their paths."""
    return [TEXTS[name] for name in sorted(TEXTS)]


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a token file from `docs/reference/token-file.md`, with any part replaced."""

    def write(documents: list[list[int]], vocab_size: int = 300, name: str = "made.tokens", **changes: Any) -> Path:
        letter, dtype = ("H", "uint16") if vocab_size <= 65536 else ("I", "uint32")
        offsets, tokens = [0], []
        for document in documents:
            tokens += document
            offsets.append(len(tokens))
        offsets = changes.pop("offsets", offsets)
        payload = struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(tokens)}{letter}", *tokens)
        header = {
            "dtype": dtype,
            "vocab_size": vocab_size,
            "num_tokens": len(tokens),
            "num_documents": len(documents),
            "end_of_document_id": 256,
            "num_text_bytes": 1,
            "tokenizer": "bytes",
            "tokenizer_sha256": "",
            "tokenizer_sample_bytes": 0,
            "payload_sha256": hashlib.sha256(payload).hexdigest(),
        }
        magic, version = changes.pop("magic", b"\x89MGTOK\r\n"), changes.pop("version", 1)
        header = {key: value for key, value in (header | changes.pop("header", {})).items() if value is not None}
        text = changes.pop("header_text", json.dumps(header).encode())
        start = magic + struct.pack("<II", version, changes.pop("header_bytes", len(text))) + text
        content = start.ljust(4096, b"\0") + changes.pop("payload", payload)
        assert not changes
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write
