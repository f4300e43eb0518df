"""The texts of a folder: which files are documents, in which order, and why other files are skipped."""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from megarun.errors import refusal

ProgressCallback = Callable[[str, int, int], None]
"""Progress callback: task, amount done, total amount."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress callback that does nothing."""


class SkipReason(StrEnum):
    """Reason why a file is not a document."""

    HIDDEN = "hidden: the name starts with a dot"
    NOT_INCLUDED = "not matched by --include"
    OUTPUT = "written by this command"
    LINKED_FOLDER = "a link to a folder"
    NOT_A_FILE = "neither a file nor a folder"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    BINARY = "binary: it has a zero byte"
    NOT_UTF8 = "not UTF-8"
    BY_LIMIT = "beyond --limit-bytes"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Files skipped for one reason; a hidden, linked or unreadable folder counts as one file.

    Attributes:
        reason: Reason for skipping them.
        num_files: Number of files.
        first: Path of the first file, relative to the corpus.
    """

    reason: SkipReason
    num_files: int
    first: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of a folder, in the order of their paths.

    Attributes:
        root: The folder.
        paths: Paths of the documents, relative to the root, with `/`.
        num_bytes: Size of each document in bytes.
        skipped: Skipped files by reason.
    """

    root: Path
    paths: tuple[str, ...]
    num_bytes: tuple[int, ...]
    skipped: tuple[Skipped, ...]

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(self.num_bytes)

    def text(self, index: int) -> str:
        """The text of document `index`, unmodified.

        Raises:
            MegaplanError: MP616 if the file changed since the folder was listed.
        """
        path = self.root / self.paths[index]
        try:
            content = path.read_bytes()
            if len(content) == self.num_bytes[index]:
                return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise refusal("MP616", f"{error}, although it was readable before", file=str(path)) from error
        raise refusal("MP616", f"it has {len(content):,} bytes; it had {self.num_bytes[index]:,} before", file=str(path))


def read_corpus(
    root: Path,
    include: Sequence[str] = ("*",),
    limit_bytes: int | None = None,
    progress: ProgressCallback = silent,
    *,
    without: Sequence[Path] = (),
) -> Corpus:
    """List a folder's documents: its UTF-8 text files in the order of their paths.

    With a limit the corpus is a sample of the entire folder, not its alphabetical beginning: every n-th included file is read, with the
    smallest n that keeps their size within the limit, and reading stops before a file that would exceed it.

    Args:
        root: The folder, read with its subfolders. Links to files are followed, links to folders are not.
        include: Patterns of file names, or of relative paths if they have a `/`; a document matches at least one.
        limit_bytes: Maximum total size of the documents in bytes; None for no limit.
        progress: Callback for every file.
        without: Files to skip even if they are text, such as an earlier run's output.

    Raises:
        MegaplanError: MP616 if the folder cannot be read, MP617 if it has no document.
    """
    skipped = _Skips()
    included = _included(root, include, without, skipped)
    stride = 1 if limit_bytes is None else max(1, -(-sum(size for _, size in included) // limit_bytes))
    documents: dict[str, int] = {}
    room = limit_bytes
    for index, (name, size) in enumerate(included):
        progress("reading", index, len(included))
        if index % stride or (room is not None and size > room):
            skipped.add(SkipReason.BY_LIMIT, name)
            room = 0 if index % stride == 0 else room  # the limit stops reading; it does not select small files
            continue
        found = _text_bytes(root / name)
        if isinstance(found, SkipReason):
            skipped.add(found, name)
            continue
        documents[name] = found
        room = None if room is None else room - found
    corpus = Corpus(root, tuple(documents), tuple(documents.values()), skipped.found())
    if not documents:
        raise refusal("MP617", _no_document(corpus, include, limit_bytes), None, (f"ls {root}",), str(root))
    return corpus


class _Skips:
    """Counts by reason, with the first example of each."""

    def __init__(self) -> None:
        self._by_reason: dict[SkipReason, list[str]] = {}

    def add(self, reason: SkipReason, name: str) -> None:
        self._by_reason.setdefault(reason, []).append(name)

    def found(self) -> tuple[Skipped, ...]:
        return tuple(Skipped(reason, len(names), min(names)) for reason, names in sorted(self._by_reason.items()))


def _walk(root: Path, skipped: _Skips) -> list[str]:
    """Relative paths of all files that are not hidden, sorted."""

    def unreadable(error: OSError) -> None:
        if Path(error.filename) == root:
            raise refusal("MP616", error.strerror or str(error), None, (f"ls -ld {root.parent}",), str(root)) from error
        skipped.add(SkipReason.UNREADABLE, Path(error.filename).relative_to(root).as_posix())

    found = []
    for folder, folders, files in os.walk(root, onerror=unreadable):
        inside = Path(folder).relative_to(root)
        for name in [*folders, *files]:
            if name.startswith("."):
                skipped.add(SkipReason.HIDDEN, (inside / name).as_posix())
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):  # os.walk lists it but does not enter it
                skipped.add(SkipReason.LINKED_FOLDER, (inside / name).as_posix())
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _included(root: Path, include: Sequence[str], without: Sequence[Path], skipped: _Skips) -> list[tuple[str, int]]:
    """Relative paths and sizes of the regular files that match --include, sorted by path."""
    found = []
    outputs, place = {path.resolve() for path in without}, root.resolve()
    for name in _walk(root, skipped):
        if not _matches(name, include):
            skipped.add(SkipReason.NOT_INCLUDED, name)
            continue
        if place / name in outputs:
            skipped.add(SkipReason.OUTPUT, name)
            continue
        try:
            status = (root / name).stat()
        except OSError:
            skipped.add(SkipReason.UNREADABLE, name)
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((name, status.st_size))
        else:
            skipped.add(SkipReason.NOT_A_FILE, name)
    return found


def _matches(name: str, include: Sequence[str]) -> bool:
    """True if a pattern matches the file; case-sensitive on every system, so that all systems find the same documents."""
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in pattern else last, pattern) for pattern in include)


def _text_bytes(path: Path) -> int | SkipReason:
    """Size of a document in bytes, or the reason that the file is skipped."""
    try:
        content = path.read_bytes()
        content.decode()
    except OSError:
        return SkipReason.UNREADABLE
    except UnicodeDecodeError:
        return SkipReason.BINARY if b"\0" in content else SkipReason.NOT_UTF8
    if b"\0" in content:
        return SkipReason.BINARY
    return len(content) or SkipReason.EMPTY


def _no_document(corpus: Corpus, include: Sequence[str], limit_bytes: int | None) -> str:
    lines = [f"--include {','.join(include)}, --limit-bytes {'none' if limit_bytes is None else f'{limit_bytes:,}'}"]
    lines += [f"{skip.num_files:,} × {skip.reason} (first: {skip.first})" for skip in corpus.skipped]
    return "\n".join(lines if corpus.skipped else [*lines, "the folder is empty"])
