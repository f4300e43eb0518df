"""Reading a token file: validated when opened, memory-mapped, and split into the rows of a step."""

import copy
import hashlib
import os
from errno import EINVAL
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaplan.errors import MegaplanError
from megarun.data.format import DTYPES, MAGIC, OFFSET_BYTES, PAYLOAD_START, PREAMBLE, VERSION, Header, parse_header
from megarun.data.identity import DataFile, DataFiles
from megarun.data.order import shuffled
from megarun.errors import refusal
from megarun.files import open_regular

CHUNK_BYTES = 1 << 24
REWRITE = "megarun data tokenize DIR -o {}"


class TokenFile:
    """A memory-mapped token file: the documents' tokens, and the rows of every training step.

    Attributes:
        path: Path of the file.
        header: Header of the file.
        document_offsets: int64 [num_documents + 1]: document i is `tokens[offsets[i]:offsets[i + 1]]`, including its end of document.
        tokens: uint16 or uint32 [num_tokens], mapped read-only.
        classes: uint8 [num_tokens], the class of each token, mapped read-only; None if the file has none.
        platforms: uint8 [num_documents], the platform of each document, mapped read-only; None if the file has none.
        stamp: Size in bytes, time of the last change in ns, and number of the file when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file and validate everything except the digest, which `verify` checks.

        Raises:
            MegaplanError: MP611 unreadable, MP612 not a token file, MP613 a newer format, MP614 damaged.
        """
        self.path = Path(path)
        # opened once: header, maps and `verify` refer to the same file, even if another file gets its name later
        self._file, self.header = _opened(self.path)
        file, header, dtype = self._file, self.header, DTYPES[self.header.dtype]
        found = os.fstat(file.fileno())
        self.stamp = found.st_size, found.st_mtime_ns, found.st_ino
        self.document_offsets: NDArray[np.int64] = np.memmap(file, "<i8", "r", PAYLOAD_START, (header.num_documents + 1,))
        self.tokens: NDArray[np.uint16 | np.uint32] = np.memmap(file, dtype, "r", header.tokens_start, (header.num_tokens,))
        self.classes: NDArray[np.uint8] | None = None
        if header.structure:
            self.classes = np.memmap(file, np.uint8, "r", header.classes_start, (header.num_tokens,))
        self.platforms: NDArray[np.uint8] | None = None
        if header.platform:
            self.platforms = np.memmap(file, np.uint8, "r", header.platforms_start, (header.num_documents,))
        offsets = self.document_offsets
        if offsets[0] != 0 or offsets[-1] != header.num_tokens or not (offsets[1:] > offsets[:-1]).all():
            expected = f"not strictly from 0 to {header.num_tokens:,}"
            detail = f"document offsets increase from {int(offsets[0]):,} to {int(offsets[-1]):,}, {expected}"
            raise self.damaged(detail)
        self._held_out, self._validates = Fraction(0), False

    def split(self, fraction: Fraction) -> "tuple[TokenFile, TokenFile]":
        """Two views of the file: training rows, and the last ⌊fraction · W⌋ of its W windows for evaluation.

        Both views are otherwise the file itself. No token is predicted in both.

        Args:
            fraction: Share of the windows for evaluation, above 0 and below 1.
        """
        parts = copy.copy(self), copy.copy(self)
        for part, validates in zip(parts, (False, True), strict=True):
            part._held_out, part._validates = fraction, validates
        return parts

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including each document's end."""
        return self.header.num_tokens

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: all ids are below it."""
        return self.header.vocab_size

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.header.num_documents

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of all texts over all tokens, each document's end included."""
        return self.header.num_text_bytes / self.num_tokens

    @property
    def identity(self) -> DataFiles:
        """The data identity for checkpoints and other ranks."""
        return (DataFile(self.path.name, self.header.payload_sha256, self.num_tokens, 1),)

    def document(self, index: int) -> NDArray[np.uint16 | np.uint32]:
        """Tokens of document `index`, including its end of document.

        Raises:
            IndexError: If there is no such document.
        """
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]

    def num_windows(self, seq_length: int) -> int:
        """Rows per epoch: consecutive windows of seq_length tokens, each with the token that follows it in the file.

        Raises:
            MegaplanError: MP615 if seq_length is below 1, or no window fits; MP628 if a part of the file has none.
        """
        first, stop = self._span(seq_length)
        return stop - first

    def _span(self, seq_length: int) -> tuple[int, int]:
        """Windows of this part of the file, [first, stop)."""
        if seq_length < 1:
            raise refusal("MP615", f"batch.seq_length = {seq_length}; a row needs at least 1 token", "batch.seq_length")
        if self.num_tokens < seq_length + 1:
            detail = f"num_tokens = {self.num_tokens:,} < seq_length + 1 = {seq_length + 1:,}"
            hints = (f"--set batch.seq_length={self.num_tokens - 1}",) if self.num_tokens > 1 else ()
            raise refusal("MP615", detail, "batch.seq_length", (*hints, REWRITE.format(self.path)), str(self.path))
        windows = (self.num_tokens - 1) // seq_length
        kept = windows - int(self._held_out * windows)
        if self._held_out and not 0 < kept < windows:
            detail = f"{self.path}: {windows:,} rows of {seq_length:,} tokens, of which --validation-fraction leaves {kept:,} for training"
            raise refusal("MP628", f"{detail}, {windows - kept:,} for evaluation", "--validation-fraction", file=str(self.path))
        return (kept, windows) if self._validates else (0, kept)

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.int64]:
        """The global batch of a step, a pure function of its arguments.

        Row i of step s is training row s · num_rows + i; each epoch of `num_windows(seq_length)` rows reads every window once, in an order
        derived from the seed and the epoch, independent of the number of ranks.

        Args:
            step: 0-based.
            seed: Any integer; it orders the windows.
            num_rows: Number of sequences of the global batch.
            seq_length: T; a row has T inputs, and columns 1 … T are their labels.

        Returns:
            int64 [num_rows, seq_length + 1].

        Raises:
            MegaplanError: MP615 no window fits; MP614 an id outside the vocabulary.
            ValueError: If step is negative or num_rows below 1.
        """
        return self.read(self.windows(row_numbers(step, num_rows), seed, seq_length), seq_length)

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.int32]:
        """Start of the document of each token of `rows`.

        Returns:
            int32 [num_rows, seq_length + 1]: the column of the document's first token, 0 if that is before the row.

        Raises:
            MegaplanError: MP615 no window fits.
            ValueError: If step is negative or num_rows below 1.
        """
        return self.read_starts(self.windows(row_numbers(step, num_rows), seed, seq_length), seq_length)

    def windows(self, numbers: NDArray[np.int64], seed: int, seq_length: int) -> NDArray[np.int64]:
        """The window that each row of training reads, by the row's number: int64 [k] in and out.

        Raises:
            MegaplanError: MP615 no window fits.
        """
        first, stop = self._span(seq_length)
        num_windows = stop - first
        epochs, positions = np.divmod(numbers, num_windows)
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = first + shuffled(positions[here], num_windows, seed, epoch)
        return found

    def read(self, windows: NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
        """Tokens of windows [k]: int64 [k, seq_length + 1].

        Raises:
            MegaplanError: MP614 an id outside the vocabulary, or the file has been truncated since it was opened.
        """
        self._require_length()
        found = np.empty((len(windows), seq_length + 1), dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            found[row] = self.tokens[window * seq_length : (window + 1) * seq_length + 1]
        if found.size and found.max() >= self.vocab_size:
            window = int(windows[(found >= self.vocab_size).any(1)][0])
            detail = f"token id {int(found.max()):,}, first in window {window} of {seq_length}, header.vocab_size = {self.vocab_size:,}"
            raise self.damaged(detail)
        return found

    def read_starts(self, windows: NDArray[np.int64], seq_length: int) -> NDArray[np.int32]:
        """Start of the document of each token of windows [k]: int32 [k, seq_length + 1], see `starts`."""
        self._require_length()
        found = np.zeros((len(windows), seq_length + 1), dtype=np.int32)
        for row, window in zip(found, windows.tolist(), strict=True):
            first = window * seq_length
            begin, end = np.searchsorted(self.document_offsets, (first + 1, first + seq_length + 1))
            columns = self.document_offsets[begin:end] - first  # documents that start after the row's first token
            row[columns] = columns
            np.maximum.accumulate(row, out=row)
        return found

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.uint8]:
        """Classes of each token of `rows`, uint8 [num_rows, seq_length + 1].

        Raises:
            MegaplanError: MP615 no window fits; MP614 a class outside the scheme; MP626 the file has no classes.
            ValueError: If step is negative or num_rows below 1.
        """
        return self.read_classes(self.windows(row_numbers(step, num_rows), seed, seq_length), seq_length)

    def read_classes(self, windows: NDArray[np.int64], seq_length: int) -> NDArray[np.uint8]:
        """Classes of windows [k]: uint8 [k, seq_length + 1].

        Raises:
            MegaplanError: MP614 a class outside the scheme; MP626 the file has no classes.
        """
        if self.classes is None:
            raise self.unclassified()
        found = np.empty((len(windows), seq_length + 1), dtype=np.uint8)
        for row, window in enumerate(windows.tolist()):
            found[row] = self.classes[window * seq_length : (window + 1) * seq_length + 1]
        if found.size and found.max() >= self.header.num_categories:
            window = int(windows[(found >= self.header.num_categories).any(1)][0])
            limit = f"header.num_categories = {self.header.num_categories}"
            raise self.damaged(f"class {int(found.max())}, first in window {window} of {seq_length}, {limit}")
        return found

    def platform_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.uint8]:
        """Platforms of each token of `rows`, its document's, uint8 [num_rows, seq_length + 1].

        Raises:
            MegaplanError: MP615 no window fits; MP614 a platform outside the header's number; MP626 the file has none.
            ValueError: If step is negative or num_rows below 1.
        """
        return self.read_platforms(self.windows(row_numbers(step, num_rows), seed, seq_length), seq_length)

    def read_platforms(self, windows: NDArray[np.int64], seq_length: int) -> NDArray[np.uint8]:
        """Platforms of windows [k]: uint8 [k, seq_length + 1].

        Raises:
            MegaplanError: MP614 a platform outside the header's number; MP626 the file has none.
        """
        if self.platforms is None:
            raise self.without_platforms()
        self._require_length()
        places = windows[:, None] * seq_length + np.arange(seq_length + 1)
        found: NDArray[np.uint8] = self.platforms[np.searchsorted(self.document_offsets, places, side="right") - 1]
        if found.size and found.max() >= self.header.num_platforms:
            raise self.damaged(f"platform {int(found.max())}, header.num_platforms = {self.header.num_platforms}")
        return found

    def without_platforms(self) -> MegaplanError:
        """MP626: the model needs platforms and this file has none."""
        hint = f"megarun data tokenize DIR --platform -o {self.path}"
        return refusal("MP626", "header.platform is missing", "model.features.platform", (hint,), str(self.path))

    def unclassified(self) -> MegaplanError:
        """MP626: the model needs token classes and this file has none."""
        hint = f"megarun data tokenize DIR --structure -o {self.path}"
        return refusal("MP626", "header.structure is missing", "model.features.structure", (hint,), str(self.path))

    def verify(self) -> None:
        """Read the entire file and compare its digest with the header's.

        Raises:
            MegaplanError: MP614 if they differ.
        """
        found = payload_sha256(self._file)
        if found != self.header.payload_sha256:
            raise self.damaged(f"sha256 of the payload = {found}\nheader.payload_sha256 = {self.header.payload_sha256}")

    def _require_length(self) -> None:
        """Refuse a file that is shorter than when it was opened: reading a mapped page beyond its end would kill the process (SIGBUS)."""
        mapped: Any = self.tokens
        num_bytes = mapped._mmap.size()  # the size of the mapped file, even if another file has its name now
        if num_bytes < self.header.file_bytes:
            detail = f"truncated while it is read: it has {num_bytes:,} bytes, when it was opened {self.header.file_bytes:,}"
            raise self.damaged(detail)

    def damaged(self, detail: str) -> MegaplanError:
        """MP614 for this file."""
        return refusal("MP614", detail, None, (REWRITE.format(self.path),), str(self.path))


def row_numbers(step: int, num_rows: int) -> NDArray[np.int64]:
    """Training row numbers of 0-based `step`: int64 [num_rows], starting at step · num_rows.

    Raises:
        ValueError: If step is negative or num_rows below 1.
    """
    if step < 0 or num_rows < 1:
        raise ValueError(f"step = {step}, num_rows = {num_rows}: step must be at least 0, num_rows at least 1")
    return np.arange(step * num_rows, (step + 1) * num_rows)


def tokenizer_path(token_path: Path) -> Path:
    """Path of a token file's tokenizer: `corpus.tokens.tokenizer.json` for `corpus.tokens`."""
    return token_path.with_name(f"{token_path.name}.tokenizer.json")


def tokenizer_file(path: Path) -> Path:
    """The tokenizer next to a token file if there is one, else the file itself."""
    own = tokenizer_path(path)
    return own if own.is_file() else path


def payload_sha256(file: BinaryIO) -> str:
    """SHA-256 of all bytes after the header."""
    digest = hashlib.sha256()
    file.seek(PAYLOAD_START)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _opened(path: Path) -> tuple[BinaryIO, Header]:
    """Open the file; read and validate its header, including the file's length."""
    place, rewrite = str(path), (REWRITE.format(path),)
    try:
        file = open_regular(path)
    except (OSError, ValueError) as error:  # ValueError: the name contains a null character
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = (f"ls -ld {place}",) if isinstance(error, OSError) and error.errno == EINVAL else rewrite
        raise refusal("MP611", f"it is {reason}" if hint != rewrite else reason, None, hint, place) from error
    try:
        return file, _read_header(file, path)
    except MegaplanError:
        file.close()
        raise


def _read_header(file: BinaryIO, path: Path) -> Header:
    place, rewrite = str(path), (REWRITE.format(path),)
    try:
        start, num_bytes = file.read(PAYLOAD_START), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise refusal("MP611", error.strerror or str(error), None, rewrite, place) from error
    if not start.startswith(MAGIC):
        what = f"it starts with {start[:8].hex(' ')}; a token file starts with {MAGIC.hex(' ')}" if start else "it is empty"
        raise refusal("MP612", what, None, (REWRITE.format(f"{place}.tokens" if start else place),), place)
    if len(start) < PAYLOAD_START:
        raise refusal("MP614", f"truncated: it has {len(start):,} bytes, its header {PAYLOAD_START:,}", None, rewrite, place)
    _, version, header_bytes = PREAMBLE.unpack_from(start)
    if version > VERSION:
        raise refusal("MP613", f"its format version = {version}, the newest known = {VERSION}", None, rewrite, place)
    try:
        if version < 1:
            raise ValueError(f"its format version = {version}")
        if header_bytes > PAYLOAD_START - PREAMBLE.size:
            raise ValueError(f"its header has {header_bytes:,} bytes, at most {PAYLOAD_START - PREAMBLE.size:,} fit")
        header = parse_header(start[PREAMBLE.size : PREAMBLE.size + header_bytes], version)
    except ValueError as error:
        raise refusal("MP614", str(error), None, rewrite, place) from error
    if num_bytes != header.file_bytes:
        parts = f"{PAYLOAD_START:,} + {OFFSET_BYTES} · ({header.num_documents:,} + 1)"
        width = DTYPES[header.dtype].itemsize + bool(header.structure)
        platforms = f" + {header.num_documents:,}" if header.platform else ""
        expected = f"{parts} + {width} · {header.num_tokens:,}{platforms} = {header.file_bytes:,} bytes"
        what = "truncated" if num_bytes < header.file_bytes else "too long"
        raise refusal("MP614", f"{what}: it has {num_bytes:,} bytes, but its header says {expected}", None, rewrite, place)
    return header
