"""A mirror of the file system for a recorded script: the folders that it works in are copies, and what lies around them is linked."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_ENTRIES, MAX_BYTES, MAX_FILE_BYTES = 4_000, 2**25, 2**20
_LINKED = frozenset({".git", ".venv", "node_modules", "__pycache__"})
"""Folders of a repository that no launch script reads."""


def work_folder(path: Path) -> Path:
    """The folder to copy for a script or a current folder: the repository that holds it, else the folder itself."""
    folder = path if path.is_dir() else path.parent
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def build_mirror(tree: Path, folders: Iterable[Path], home: Path) -> None:
    """Make `tree` a second root: copies of the folders, breadth first up to the limits, and links to everything beside them.

    Dotfiles around the folders, such as keys and shell profiles of the home folder, are left out.

    Args:
        tree: An empty folder.
        folders: Absolute paths to copy.
        home: A folder that is mirrored, too, by links to its entries.
    """
    copied: list[Path] = []
    for folder in sorted(set(folders), key=lambda each: len(each.parts)):
        if not any(folder.is_relative_to(each) for each in copied):
            _surround(tree, folder)
            _copy(folder, _real_folder(_within(tree, folder)), tree)
            copied.append(folder)
    if not any(home.is_relative_to(each) for each in copied):
        _surround(tree, home / "entry")


def _surround(tree: Path, path: Path) -> None:
    """Make every folder above `path` a folder of links."""
    for above in reversed(path.parents):
        target = _real_folder(_within(tree, above))
        for entry in _entries(above):
            place = target / entry.name
            if not entry.name.startswith(".") and not os.path.lexists(place) and Path(entry.path) not in tree.parents:
                place.symlink_to(entry.path)


def _copy(folder: Path, target: Path, tree: Path) -> None:
    """Copy small files; larger ones, and what is past the limits, are linked."""
    waiting, num_entries, num_bytes = deque([(folder, target)]), 0, 0
    while waiting:
        source, into = waiting.popleft()
        for entry in _entries(source):
            path, place = Path(entry.path), into / entry.name
            if path in tree.parents:
                continue
            num_entries += 1
            if entry.is_dir(follow_symlinks=False) and entry.name not in _LINKED and num_entries < MAX_ENTRIES:
                place.mkdir(exist_ok=True)
                waiting.append((path, place))
                continue
            size = entry.stat().st_size if entry.is_file() else MAX_BYTES
            if num_entries < MAX_ENTRIES and size <= min(MAX_FILE_BYTES, MAX_BYTES - num_bytes) and _copied(path, place):
                num_bytes += size
            elif not os.path.lexists(place):
                place.symlink_to(path)


def _copied(path: Path, place: Path) -> bool:
    try:
        shutil.copyfile(path, place)
    except OSError:
        return False
    return True


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from sorted(found, key=lambda entry: entry.name)
    except OSError:
        return


def _within(tree: Path, path: Path) -> Path:
    return tree / path.relative_to("/")


def _real_folder(place: Path) -> Path:
    """A folder, in the place of a link if one stands there."""
    if place.is_symlink():
        place.unlink()
    place.mkdir(parents=True, exist_ok=True)
    return place
