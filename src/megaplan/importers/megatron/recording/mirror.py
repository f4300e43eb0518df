"""The mirror of the file system that a recorded script works in: links to everything, and copies of what it writes."""

import os

MAX_COPY_BYTES = 2**20
FOLDER = os.environ.get("MEGAPLAN_FOLDER", "")
TREE = f"{FOLDER}/tree"


def placed(path: str) -> str:
    """The absolute path in the mirror; files of the recording itself, and devices, keep their path."""
    current = os.environ.get("PWD", "")
    path = os.path.normpath(os.path.join(current if current.startswith("/") else os.getcwd(), path))
    return path if path.startswith((f"{FOLDER}/", "/dev/", "/proc/self/")) else f"{TREE}{path}"


def copy_up(path: str, tree: str, home: str = "", *, copies: bool = False) -> None:
    """Make a path of the mirror writable: replace linked parent folders by folders of links, and a linked file by a copy.

    Args:
        path: A path in the mirror; any other is left alone.
        tree: Root of the mirror.
        home: Folder in which, and above which, dotfiles are excluded: keys, and startup files of shells.
        copies: Small files of the last folder are copied, too.
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
        _fill(folder, real, home, copies=copies and depth == len(parts) - 1)
    if os.path.islink(path) and os.path.isfile(path):
        real = os.path.realpath(path)
        os.unlink(path)
        if os.path.getsize(real) <= MAX_COPY_BYTES:
            copied(real, path)


def _fill(folder: str, real: str, home: str, *, copies: bool) -> None:
    """Link the entries of a folder into its place in the mirror."""
    if not os.path.isdir(real) or not os.access(real, os.R_OK | os.X_OK):
        return
    hides = f"{home}/".startswith(f"{real.rstrip('/')}/")
    for entry in os.scandir(real):
        target = f"{folder}/{entry.name}"
        if (hides and entry.name.startswith(".")) or os.path.lexists(target):
            continue
        small = copies and os.path.isfile(entry.path) and os.path.getsize(entry.path) <= MAX_COPY_BYTES
        if small and os.access(entry.path, os.R_OK):
            copied(entry.path, target)
        else:
            os.symlink(entry.path, target)


def copied(source: str, path: str) -> None:
    """Copy the bytes of a small file."""
    with open(source, "rb") as read, open(path, "wb") as written:
        written.write(read.read(MAX_COPY_BYTES))


def target(path: str) -> str:
    """The file in the mirror that a redirection writes; its folder is created."""
    path = placed(path) + ("/." if path.endswith("/.") else "")
    copy_up(path, TREE)
    if path.startswith(f"{TREE}/"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return path
