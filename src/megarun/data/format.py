"""The bytes of a token file: preamble, JSON header, document offsets, tokens, classes of tokens, platforms of documents.

See `docs/reference/token-file.md`.
"""

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

MAGIC = b"\x89MGTOK\r\n"  # a byte above 127 and a CR-LF pair: they detect a copy in text mode or through a 7-bit channel
VERSION = 3  # files with platforms; with token classes alone they have version 2, with neither version 1, which older readers support
PREAMBLE = struct.Struct("<8sII")  # magic, version, length of the header's JSON
PAYLOAD_START = 4096  # the header is padded to a page, so the offsets are aligned wherever the file is mapped
OFFSET_BYTES = 8
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end of a document
MAX_CATEGORIES = 256  # a class and a platform have one byte each
STRUCTURE_FIELDS, PLATFORM_FIELDS = ("structure", "num_categories"), ("platform", "num_platforms")
WITH_CLASSES, WITH_PLATFORMS = 2, 3
"""Versions that brought them."""
DTYPES: dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_of(vocab_size: int) -> str:
    """The narrowest element type that holds the ids 0 … vocab_size − 1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a token file; the same texts and options give the same header, so it has no paths or times.

    Attributes:
        dtype: Dtype of a token id: `uint16` or `uint32`, little-endian.
        vocab_size: Vocabulary size; ids are 0 … vocab_size − 1.
        num_tokens: Number of tokens, including each document's end.
        num_documents: Number of documents.
        end_of_document_id: Id of the last token of every document.
        num_text_bytes: UTF-8 bytes of all texts.
        tokenizer: `bpe` or `bytes`.
        tokenizer_sha256: SHA-256 of the tokenizer's JSON file.
        tokenizer_sample_bytes: UTF-8 bytes that the tokenizer was trained on; 0 for `bytes`.
        payload_sha256: SHA-256 of all bytes from 4096.
        structure: Scheme of the token classes (`megarun.data.structure`); empty if the file has none.
        num_categories: Number of classes of the scheme.
        platform: Scheme of the documents' platforms (`megarun.data.platforms`); empty if the file has none.
        num_platforms: Number of platforms.
    """

    dtype: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    end_of_document_id: int
    num_text_bytes: int
    tokenizer: str
    tokenizer_sha256: str
    tokenizer_sample_bytes: int
    payload_sha256: str
    structure: str = ""
    num_categories: int = 0
    platform: str = ""
    num_platforms: int = 0

    @property
    def version(self) -> int:
        """The oldest format version that supports the file's contents."""
        return WITH_PLATFORMS if self.platform else WITH_CLASSES if self.structure else 1

    @property
    def tokens_start(self) -> int:
        """Byte offset of the tokens, after num_documents + 1 offsets."""
        return PAYLOAD_START + OFFSET_BYTES * (self.num_documents + 1)

    @property
    def classes_start(self) -> int:
        """Byte offset of the token classes, one byte each, after the tokens."""
        return self.tokens_start + DTYPES[self.dtype].itemsize * self.num_tokens

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.platforms_start + (self.num_documents if self.platform else 0)

    @property
    def platforms_start(self) -> int:
        """Byte offset of the documents' platforms, one byte each, after the classes."""
        return self.classes_start + (self.num_tokens if self.structure else 0)

    def as_document(self) -> dict[str, Any]:
        """The header as a JSON object."""
        return {name: value for name, value in asdict(self).items() if name not in _later_fields(self.version)}

    def pack(self) -> bytes:
        """Preamble and header, padded with zeros: exactly PAYLOAD_START bytes."""
        text = json.dumps(self.as_document(), sort_keys=True, separators=(",", ":")).encode()
        return (PREAMBLE.pack(MAGIC, self.version, len(text)) + text).ljust(PAYLOAD_START, b"\0")


def _later_fields(version: int) -> tuple[str, ...]:
    """Fields that files of a version do not have."""
    return () if version >= WITH_PLATFORMS else PLATFORM_FIELDS if version >= WITH_CLASSES else (*STRUCTURE_FIELDS, *PLATFORM_FIELDS)


def parse_header(text: bytes, version: int) -> Header:
    """Parse the header's JSON.

    Args:
        text: UTF-8 bytes of the JSON.
        version: Format version of the file, at most VERSION.

    Raises:
        ValueError: The header is not valid; the message says why.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({type(error).__name__})") from error
    if not isinstance(values, dict):
        raise ValueError("its header is not a JSON object")
    names = [field for field in fields(Header) if field.name not in _later_fields(version)]
    header = Header(**{field.name: _value(values, field.name, is_text=field.type is str) for field in names})
    if header.dtype not in DTYPES:
        raise ValueError(f"header.dtype = {header.dtype!r}, not {' or '.join(DTYPES)}")
    if not MIN_VOCAB_SIZE <= header.vocab_size <= 2 ** (8 * DTYPES[header.dtype].itemsize):
        raise ValueError(f"header.vocab_size = {header.vocab_size} with header.dtype = {header.dtype}")
    if header.end_of_document_id >= header.vocab_size:
        raise ValueError(f"header.end_of_document_id = {header.end_of_document_id}, header.vocab_size = {header.vocab_size}")
    if not 1 <= header.num_documents <= header.num_tokens:
        raise ValueError(f"header.num_documents = {header.num_documents}, header.num_tokens = {header.num_tokens}")
    needs_classes, needs_platforms = version == WITH_CLASSES or bool(header.structure), version >= WITH_PLATFORMS
    if (needs_classes or header.num_categories) and not (header.structure and 1 <= header.num_categories <= MAX_CATEGORIES):
        raise ValueError(f"header.structure = {header.structure!r}, header.num_categories = {header.num_categories}")
    if needs_platforms and not (header.platform and 1 <= header.num_platforms <= MAX_CATEGORIES):
        raise ValueError(f"header.platform = {header.platform!r}, header.num_platforms = {header.num_platforms}")
    return header


def _value(values: dict[str, Any], name: str, *, is_text: bool) -> Any:
    """One field; integers must not be negative or booleans."""
    if name not in values:
        raise ValueError(f"its header has no {name}")
    value = values[name]
    right = isinstance(value, str) if is_text else isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not right:
        raise ValueError(f"header.{name} = {str(value)[:40]!r}, not a {'text' if is_text else 'count'}")
    return value
