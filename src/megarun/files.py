"""Reading files that another process wrote, and writing files of a run.

Only regular files are read, and no more than a bound; in a storage, objects count as regular files. No link inside a run's folder is
followed for writing: anyone who can write there could let it point to any file of the user.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from megarun.errors import refusal
from megarun.remote import AnyPath, RemotePath

PASSING = frozenset((errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EREMOTEIO))
"""Errors that network file systems give while a server or a path to it changes, and that often pass."""
PAUSES_SECONDS = (0.1, 1.0)
_Result = TypeVar("_Result")


def again(read: Callable[[], _Result]) -> _Result:
    """The result of a reading that is tried again after an error that may pass.

    Raises:
        OSError: It fails each time, or with an error that does not pass.
    """
    for pause in PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(pause)
    return read()


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file for reading; a link to one is followed, and an error that may pass is met with another try.

    A pipe would block and a device may have no end, so neither is read: the type is checked before opening and again on the open file.
    Opening does not block, in case the file was replaced in between.

    Raises:
        OSError: It does not exist, cannot be opened, is a loop of links, or is not a regular file.
        StorageError: The storage of the file fails.
    """
    if isinstance(path, RemotePath):
        return path.open()
    return again(lambda: _opened(path))


def read_regular(path: AnyPath, read: Callable[[BinaryIO], _Result]) -> _Result:
    """Read a regular file by a function; after an error that may pass, the file is opened and read again.

    Raises:
        OSError: See `open_regular`, or it cannot be read.
        StorageError: The storage of the file fails.
    """

    def tried() -> _Result:
        with path.open() if isinstance(path, RemotePath) else _opened(path) as file:
            return read(file)

    return again(tried)


def _opened(path: Path) -> BinaryIO:
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
    limit = max_bytes + 1
    data = path.read_bytes(max_bytes) if isinstance(path, RemotePath) else read_regular(path, lambda file: file.read(limit))
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


def refuse_link(path: Path) -> None:
    """Refuse to write a file or folder if its path is a link.

    Raises:
        MegaplanError: MP671.
    """
    if path.is_symlink():
        with suppress(OSError):
            raise refusal("MP671", f"{path} is a link to {path.readlink()}", hints=(f"rm {path}",), file=str(path))
        raise refusal("MP671", f"{path} is a link", hints=(f"rm {path}",), file=str(path))


def open_own(path: Path, flags: int) -> BinaryIO:
    """Open a file of a run for writing, which is made if it does not exist.

    Args:
        path: The file.
        flags: More flags of `os.open`, such as O_EXCL, O_APPEND or O_TRUNC.

    Raises:
        MegaplanError: MP671, a link is in its place.
        OSError: It cannot be opened, or is not a regular file.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EEXIST):
            refuse_link(path)
        raise
    file = os.fdopen(handle, "ab" if flags & os.O_APPEND else "wb")
    try:
        _require_regular(path, os.fstat(handle).st_mode)
    except OSError:
        file.close()
        raise
    return file


def write_whole(path: Path, text: str, mark: str) -> None:
    """Write a file of a run atomically: at every time its name has the old file or the new one.

    Args:
        path: The file.
        text: Text of the file.
        mark: Part of the name of the file until it is complete; no other process uses it.

    Raises:
        OSError: It cannot be written.
    """
    new = path.with_name(f".{path.name}.{mark}")
    try:
        with open_own(new, os.O_EXCL) as file:
            file.write(text.encode())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def make_own_folder(path: Path) -> None:
    """Make a folder in a folder that exists, unless it is there.

    Raises:
        MegaplanError: MP671, a link is in its place.
        OSError: It cannot be made.
    """
    refuse_link(path)
    path.mkdir(exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents; a missing one is ignored.

    Raises:
        OSError: A part of it cannot be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a folder" if stat.S_ISDIR(mode) else "not a regular file", str(path))
