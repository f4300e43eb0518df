"""Reading files that another process wrote: regular files only, and no more than a bound. In a storage, objects are as regular files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from megarun.remote import AnyPath, RemotePath


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file for reading; a link to one is followed.

    A pipe would block and a device may have no end, so neither is opened: the type is looked at first, and again on the open file, which is
    opened without blocking in case it was replaced in between.

    Raises:
        OSError: It does not exist, cannot be opened, is a loop of links, or is not a regular file.
        StorageError: The storage of the file fails.
    """
    if isinstance(path, RemotePath):
        return path.open()
    _require_regular(path, path.stat().st_mode)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def read_bounded(path: AnyPath, max_bytes: int) -> str:
    """The text of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: See `open_regular`.
        ValueError: The file is larger, or not UTF-8.
        StorageError: The storage of the file fails.
    """
    if isinstance(path, RemotePath):
        data = path.read_bytes(max_bytes)
    else:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return data.decode("utf-8")


def size_of(path: AnyPath) -> int:
    """Bytes of a file.

    Raises:
        OSError: It does not exist.
        StorageError: The storage of the file fails.
    """
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def entries(folder: AnyPath) -> list[AnyPath]:
    """Entries of a folder, by name; empty if it cannot be listed.

    Raises:
        StorageError: The storage of the folder fails.
    """
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a folder" if stat.S_ISDIR(mode) else "not a regular file", str(path))
