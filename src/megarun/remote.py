"""Folders and files in a storage that fsspec reaches: `s3://`, `memory://`, `file://`.

An object store writes objects atomically and cannot rename. `RemotePath` has the methods of `pathlib.Path` that checkpoints use,
so that the same code lists, checks and reads them in a storage and in a file system. Every operation is tried several times; if all fail, a
`StorageError` is raised, which is never mistaken for a missing or damaged file.

Source: fsspec's AbstractFileSystem; s3fs also retries single requests; these retries are for the whole operation.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from megaplan.errors import MegaplanError
from megarun.errors import refusal

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0  # the wait is doubled after each attempt, with jitter: 15 to 23 s in total
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError, TypeError)
_MARK = "://"
_STATE = ("size", "ETag", "etag", "VersionId", "generation", "md5Hash", "LastModified", "mtime", "created", "ino")
"""Keys of fsspec's `info`, by the storages' own names."""
_Result = TypeVar("_Result")


class StorageError(MegaplanError):
    """MP666: an operation of a storage failed in every attempt; the contents are unknown."""


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """A file or folder by its URL, without a slash at the end.

    Every method raises `StorageError` if the storage fails.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self.url.rpartition("/")[0])

    def resolve(self) -> "RemotePath":
        """Return the path itself: a storage has no links."""
        return self

    def exists(self) -> bool:
        """True if it is a file, or a folder with something in it."""
        return bool(self._tried("looked at", lambda: _filesystem(self.url).exists(self._path)))

    def is_file(self) -> bool:
        """True if it is a file."""
        return bool(self._tried("looked at", lambda: _filesystem(self.url).isfile(self._path)))

    def iterdir(self) -> "Iterator[RemotePath]":
        """Entries of the folder; empty if it does not exist."""
        try:
            found = self._tried("listed", lambda: _filesystem(self.url).ls(self._path, detail=False))
        except FileNotFoundError:
            return
        for path in found:
            name = str(path).rstrip("/").rpartition("/")[2]
            if name and str(path).rstrip("/") != self._path:
                yield self / name

    def size(self) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: It does not exist.
        """
        return int(self._tried("looked at", lambda: _filesystem(self.url).info(self._path)["size"]))

    def state(self) -> str:
        """The values of an object that change with its bytes, as the storage gives them: size, and its own tag, sum or time.

        Raises:
            FileNotFoundError: It does not exist.
        """
        found = self._tried("looked at", lambda: _filesystem(self.url).info(self._path))
        return " ".join(f"{key}={found[key]}" for key in _STATE if found.get(key) is not None)

    def open(self) -> BinaryIO:
        """Open a file for reading.

        Raises:
            FileNotFoundError: It does not exist.
        """
        opened: BinaryIO = self._tried("opened", lambda: _filesystem(self.url).open(self._path, "rb"))
        return opened

    def read_bytes(self, max_bytes: int) -> bytes:
        """The first bytes of a file, at most one more than `max_bytes`.

        Raises:
            FileNotFoundError: It does not exist.
        """
        return bytes(self._tried("read", lambda: _filesystem(self.url).cat_file(self._path, start=0, end=max_bytes + 1)))

    def write_bytes(self, data: bytes) -> None:
        """Write a file in one request, replacing an existing one."""
        self._written(lambda path: _filesystem(self.url).pipe_file(path, data))

    def upload(self, local: Path) -> None:
        """Upload a local file, replacing an existing one."""
        self._written(lambda path: _filesystem(self.url).put_file(str(local), path))

    def unlink(self) -> None:
        """Remove a file; a missing one is ignored."""
        try:
            self._tried("removed", lambda: _filesystem(self.url).rm_file(self._path))
        except FileNotFoundError:
            return

    def remove_tree(self) -> None:
        """Remove a folder with its contents; a missing one is ignored."""
        try:
            self._tried("removed", lambda: _filesystem(self.url).rm(self._path, recursive=True))
        except FileNotFoundError:
            return

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of its file system in fsspec."""
        # listings must include what other processes have written since; a local storage makes folders as an object store does, by writing
        # into them
        return {"auto_mkdir": True} if self._is_local else {"use_listings_cache": False}

    @property
    def _is_local(self) -> bool:
        return self.url.startswith(("file:", "local:"))

    @property
    def _path(self) -> str:
        return str(_filesystem(self.url)._strip_protocol(self.url))

    def _written(self, write: Callable[[str], Any]) -> None:
        """Write to the path given; objects appear atomically, so a file of a local storage gets its name at the end."""
        partial = f"{self._path}.partial" if self._is_local else self._path

        def action() -> None:
            write(partial)
            if self._is_local:
                os.replace(partial, self._path)

        try:
            self._tried("written", action)
        except FileNotFoundError as error:  # of the bucket
            raise _failed(self.url, "written", 1, error) from error

    def _tried(self, what: str, action: Callable[[], _Result]) -> _Result:
        """Run the action, and repeat it after failures that may be transient."""
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as error:  # every storage has its own
                if isinstance(error, _FINAL) or attempt == ATTEMPTS:
                    raise _failed(self.url, what, attempt, error) from error
                time.sleep(pause * random.uniform(1, 1.5))
                pause *= 2
        raise AssertionError


AnyPath = Path | RemotePath
"""Location of checkpoints: a folder on this machine, or in a storage."""


def any_path(word: str) -> AnyPath:
    """A path, or a URL in the storage that it names.

    Raises:
        MegaplanError: MP665 if there is no such storage, its package is not installed, or the URL has a password.
    """
    if _MARK not in word:
        return Path(word)
    given = urlsplit(word)
    if given.password is not None or (given.username is not None and given.scheme != "file"):
        shown = word.replace(f"{given.netloc.rpartition('@')[0]}@", "…@")
        raise refusal(
            "MP665",
            f"{shown}: a URL must not contain credentials; they are read from the environment or the profile of the storage's tools",
        )
    url = RemotePath(word.rstrip("/") if word.rstrip("/").rpartition(_MARK)[2] else word)
    if not urlsplit(url.url).netloc + urlsplit(url.url).path.strip("/"):
        raise refusal("MP665", f"{word}: names no bucket or folder", hints=("s3://BUCKET/RUN",))
    _filesystem(url.url)
    return url


def _filesystem(url: str) -> Any:
    """The file system of a URL; fsspec keeps one a thread."""
    import fsspec  # noqa: PLC0415  (only where a URL is given)

    protocol = url.partition(_MARK)[0]
    try:
        return fsspec.filesystem(protocol, **RemotePath(url).options)
    except ImportError as error:
        raise refusal("MP665", f"{url}: {error}", hints=("pip install 'megaplan[s3]'",)) from None
    except ValueError as error:
        raise refusal("MP665", f"{url}: {error}") from None


def _failed(url: str, what: str, attempts: int, error: BaseException) -> StorageError:
    said = (str(error).splitlines() or [""])[0]
    times = "" if attempts == 1 else f" in {attempts} attempts"
    return StorageError(refusal("MP666", f"{url}: not {what}{times}: {type(error).__name__}: {said}", file=url).diagnostics)
