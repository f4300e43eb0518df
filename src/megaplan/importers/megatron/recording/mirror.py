"""The mirror of the file system that a recorded script works in: links to everything, and copies of what it writes."""

from __future__ import annotations

import os

MAX_COPY_BYTES = 2**20
FOLDER = os.environ.get("MEGAPLAN_FOLDER", "")
TREE = f"{FOLDER}/tree"


def placed(path: str) -> str:
    """The absolute path in the mirror; one of the recording's own, and a device, is itself."""
    current = os.environ.get("PWD", "")
    path = os.path.normpath(os.path.join(current if current.startswith("/") else os.getcwd(), path))
    return path if path.startswith((f"{FOLDER}/", "/dev/", "/proc/self/")) else f"{TREE}{path}"


def copy_up(path: str, tree: str, home: str = "", *, copies: bool = False) -> None:
    """Make the folders above a path of the mirror real ones, whose entries are links, and a file to write a copy.

    Args:
        path: In the mirror; another is left alone.
        tree: The mirror's root.
        home: A folder in which, and above which, dotfiles are left out: keys, and profiles of shells.
        copies: Small files of the last folder are copies, not links.
    """
    if not path.startswith(f"{tree}/"):
        return
    home = home or os.environ.get("HOME", "")[len(tree) :]
    parts = path[len(tree) :].split("/")
    for depth in range(1, len(parts)):
        real = "/".join(parts[:depth]) or "/"
        folder = f"{tree}{real}".rstrip("/")
        if os.path.islink(folder):
            os.unlink(folder)
        elif os.path.isdir(folder):
            continue
        os.makedirs(folder, exist_ok=True)
        for entry in os.scandir(real) if os.path.isdir(real) and os.access(real, os.R_OK | os.X_OK) else ():
            target, hidden = f"{folder}/{entry.name}", entry.name.startswith(".") and f"{home}/".startswith(f"{real.rstrip('/')}/")
            if (
                copies
                and depth == len(parts) - 1
                and entry.is_file()
                and entry.stat().st_size <= MAX_COPY_BYTES
                and os.access(entry, os.R_OK)
            ):
                copied(entry.path, target)
            elif not hidden and not os.path.lexists(target):
                os.symlink(entry.path, target)
    if os.path.islink(path) and os.path.isfile(path):
        real = os.path.realpath(path)
        os.unlink(path)
        if os.path.getsize(real) <= MAX_COPY_BYTES:
            copied(real, path)


def copied(source: str, path: str) -> None:
    """Copy the bytes of a small file."""
    with open(source, "rb") as read, open(path, "wb") as written:
        written.write(read.read(MAX_COPY_BYTES))


def target(path: str) -> str:
    """Where a redirection into a file goes: its place in the mirror, whose folder is made."""
    path = placed(path) + ("/." if path.endswith("/.") else "")
    copy_up(path, TREE)
    if path.startswith(f"{TREE}/"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return path
