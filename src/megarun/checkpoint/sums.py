"""Sums of a checkpoint's files: the bytes that are read are the bytes that were summed.

Between the comparison of a file's sum and the reading of its tensors another file may get its name, or its bytes may be written again. So a
file is read from a descriptor whose size, times and inode are, before and after, the same as when it was summed; else this process sums it
again. A text is summed from the bytes that are parsed.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from megarun.files import open_regular, read_bounded, read_regular
from megarun.remote import AnyPath, RemotePath

_READ_BYTES = 1 << 22
Known = dict[tuple[str, str], str]
"""SHA-256 by path and state of a file."""
_KNOWN: Known = {}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


class ChangedFileError(OSError):
    """A file differs from the summed one, or was written while it was read."""


def record_of(path: AnyPath) -> FileRecord:
    """Size and checksum of a file.

    Raises:
        OSError: It cannot be read, or is written meanwhile.
        StorageError: The storage of the file fails.
    """
    return read_regular(path, lambda file: _summed(path, file))


def known_sums(folder: AnyPath) -> Known:
    """Checksums of a folder's files that this process knows, for the other ranks."""
    return {key: sha256 for key, sha256 in _KNOWN.items() if key[0].startswith(f"{folder}/")}


def learn(sums: Mapping[tuple[str, str], str]) -> None:
    """Take over the sums of another rank."""
    _KNOWN.update(sums)


@contextmanager
def open_summed(path: AnyPath, record: FileRecord) -> Iterator[BinaryIO]:
    """Open a file whose bytes have the recorded sum; it must not change while it is open.

    Raises:
        ChangedFileError: It has another sum, or is written meanwhile.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        state = _state(path, file)
        if _KNOWN.get((str(path), state)) != record.sha256:
            found = _summed(path, file)
            if found != record:
                raise ChangedFileError(f"{path.name}: SHA-256 {found.sha256[:16]}…, {record.sha256[:16]}… in the manifest")
            file.seek(0)
        yield file
        if _state(path, file) != state and _again(path, file) != record:  # times also change when only another name of the file is removed
            raise ChangedFileError(f"{path.name}: changed while it was read")


def read_summed(path: AnyPath, record: FileRecord, max_bytes: int) -> str:
    """The text of a file whose bytes have the recorded sum.

    Raises:
        ChangedFileError: It has another sum.
        OSError: It cannot be read.
        ValueError: It is larger than `max_bytes`, or not UTF-8.
    """
    text = read_bounded(path, max_bytes)
    data = text.encode()
    if (len(data), hashlib.sha256(data).hexdigest()) != (record.bytes, record.sha256):
        raise ChangedFileError(f"{path.name}: SHA-256 {hashlib.sha256(data).hexdigest()[:16]}…, {record.sha256[:16]}… in the manifest")
    return text


def _again(path: AnyPath, file: BinaryIO) -> FileRecord:
    file.seek(0)
    return _summed(path, file)


def _summed(path: AnyPath, file: BinaryIO) -> FileRecord:
    digest, size, state = hashlib.sha256(), 0, _state(path, file)
    while block := file.read(_READ_BYTES):
        digest.update(block)
        size += len(block)
    if _state(path, file) != state:
        raise ChangedFileError(f"{path.name}: changed while it was read")
    _KNOWN[str(path), state] = digest.hexdigest()
    return FileRecord(size, digest.hexdigest())


def _state(path: AnyPath, file: BinaryIO) -> str:
    """Values that change when the bytes of a file change: size, times and inode of the open file, or a storage's values."""
    if isinstance(path, RemotePath):
        return path.state()
    found = os.fstat(file.fileno())
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
