"""Converts a folder of texts to a token file, in one pass with constant memory after the tokenizer is trained."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

from megarun.data.corpus import Corpus, ProgressCallback, silent
from megarun.data.format import DTYPES, MAGIC, PAYLOAD_START, Header, dtype_of
from megarun.data.platforms import SCHEME as PLATFORM_SCHEME
from megarun.data.platforms import document_platforms
from megarun.data.structure import CLASSES, OTHER, SCHEME, token_classes
from megarun.data.token_file import payload_sha256, tokenizer_path
from megarun.data.tokenizer import TokenizerKind, TrainedTokenizer, bytes_tokenizer, train_bpe
from megarun.errors import refusal

BATCH_BYTES = 1 << 20  # texts encoded together, on all cores


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Result of `tokenize`.

    Attributes:
        header: Header of the token file.
        tokenizer_path: Path of the tokenizer's JSON.
        tokenizer: Tokenizer that made the tokens.
    """

    header: Header
    tokenizer_path: Path
    tokenizer: TrainedTokenizer


def check_output(path: Path) -> None:
    """Refuse an output path that cannot be written, before any work.

    Raises:
        MegaplanError: MP619 if the folder is missing, or the path is a folder or a file of another kind.
    """
    if not path.parent.is_dir():
        raise refusal("MP619", f"no folder {path.parent}", "--output", (f"mkdir -p {path.parent}",), str(path))
    if path.is_dir():
        raise refusal("MP619", "it is a folder", "--output", (f"-o {path / 'corpus.tokens'}",), str(path))
    if path.exists():
        start = b""
        if path.is_file():
            with _written(path), path.open("rb") as file:
                start = file.read(len(MAGIC))
        if not path.is_file() or start not in (MAGIC, b""):
            raise refusal("MP619", "it exists and is not a token file", "--output", (f"-o {path}.tokens",), str(path))


def tokenize(
    corpus: Corpus,
    kind: TokenizerKind,
    vocab_size: int,
    path: Path,
    progress: ProgressCallback = silent,
    *,
    structure: bool = False,
    platform: bool = False,
    given: TrainedTokenizer | None = None,
) -> Tokenized:
    """Tokenize a corpus into `path` and write the tokenizer's JSON next to it; both writes are atomic, the token file last.

    Args:
        corpus: The documents.
        kind: Kind of tokenizer.
        vocab_size: Vocabulary size of BPE; smaller if the sample has too few pairs.
        path: Path of the token file; an existing token file is replaced.
        progress: Callback for every batch.
        structure: True to write the lexical class of every token.
        platform: True to write the platform of every document.
        given: Tokenizer to use instead of a new one.

    Raises:
        MegaplanError: MP619 if it cannot be written, MP616 if a document changed during tokenization, or there are too many platforms,
            MP680 if lexical classes are wanted of a tokenizer that was not made here.
    """
    with _replacing(path) as file:
        progress("training the tokenizer", 0, 1)
        tokenizer = given or (bytes_tokenizer() if kind is TokenizerKind.BYTES else train_bpe(corpus, vocab_size))
        if structure and not tokenizer.is_own:
            raise refusal("MP680", "--structure needs the bytes of each token, which only a tokenizer of this command has")
        header = _write_payload(file, corpus, tokenizer, progress, structure=structure, platform=platform)
        file.flush()
        header = replace(header, payload_sha256=payload_sha256(file))
        file.seek(0)
        file.write(header.pack())
        with _replacing(tokenizer_path(path)) as json_file:
            json_file.write(tokenizer.json)
    return Tokenized(header, tokenizer_path(path), tokenizer)


def _write_payload(
    file: BinaryIO, corpus: Corpus, tokenizer: TrainedTokenizer, progress: ProgressCallback, *, structure: bool, platform: bool
) -> Header:
    """Write tokens, classes and platforms after the space for header and offsets, then the offsets; the header lacks the digest."""
    platforms, num_platforms = document_platforms(corpus.paths) if platform else (np.zeros(0, np.uint8), 0)
    header = Header(
        dtype=dtype_of(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        num_tokens=0,
        num_documents=len(corpus.paths),
        end_of_document_id=tokenizer.end_of_document_id,
        num_text_bytes=corpus.num_text_bytes,
        tokenizer=tokenizer.kind.value,
        tokenizer_sha256=tokenizer.sha256,
        tokenizer_sample_bytes=tokenizer.sample_bytes,
        payload_sha256="",
        structure=SCHEME if structure else "",
        num_categories=len(CLASSES) if structure else 0,
        platform=PLATFORM_SCHEME if platform else "",
        num_platforms=num_platforms,
    )
    dtype = DTYPES[header.dtype]
    offsets = np.zeros(header.num_documents + 1, dtype="<i8")
    file.seek(header.tokens_start)
    done = 0
    with TemporaryFile() as classes:  # their offset is known only after all tokens are written
        for batch in _batches(corpus):
            texts = [corpus.text(index) for index in batch]
            for index, text, ids in zip(batch, texts, tokenizer.encode(texts), strict=True):
                file.write(np.append(ids, tokenizer.end_of_document_id).astype(dtype).tobytes())
                if structure:
                    classes.write(np.append(token_classes(text, tokenizer.id_bytes[ids]), np.uint8(OTHER)).tobytes())
                offsets[index + 1] = offsets[index] + len(ids) + 1
                done += corpus.num_bytes[index]
            progress("tokenizing", done, corpus.num_text_bytes)
        classes.seek(0)
        shutil.copyfileobj(classes, file)
    file.write(platforms.tobytes())
    file.seek(PAYLOAD_START)
    file.write(offsets.tobytes())
    return replace(header, num_tokens=int(offsets[-1]))


def _batches(corpus: Corpus) -> Iterator[list[int]]:
    """Documents in order, about BATCH_BYTES at a time."""
    batch: list[int] = []
    room = BATCH_BYTES
    for index, size in enumerate(corpus.num_bytes):
        batch.append(index)
        room -= size
        if room <= 0:
            yield batch
            batch, room = [], BATCH_BYTES
    if batch:
        yield batch


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` if the body succeeds, else removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _written(path):
            file = temporary.open("w+b")
        with _written(path), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _written(path):
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Convert OSError to MP619."""
    try:
        yield
    except OSError as error:
        raise refusal("MP619", error.strerror or str(error), "--output", (f"ls -ld {path.parent}",), str(path)) from error
