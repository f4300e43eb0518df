"""Triton's cache of compiled kernels as a folder that may have been made elsewhere.

An entry is a folder named by a hash. Its group file lists its files by absolute path, and an entry whose files are not at these paths
counts as missing, so that a copied or mounted cache would be compiled again.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from triton import knobs

GROUPS = "*/__grp__*.json"
VARIABLE = "TRITON_CACHE_DIR"


def cache_folder() -> Path:
    """The cache of this process."""
    return Path(knobs.cache.dir)


def use_cache(folder: Path) -> None:
    """Make this process and its children use another cache.

    Raises:
        OSError: The folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".writable.{os.getpid()}"
    probe.touch()
    probe.unlink()
    os.environ[VARIABLE] = str(folder.absolute())


def settle(folder: Path) -> int:
    """Correct the file paths in the entries of a moved cache; returns the number of changed entries.

    An entry is unchanged if its paths are right, or its files are not in its own folder; a read-only folder is unchanged.
    """
    changed = 0
    for group in folder.glob(GROUPS):
        with suppress(OSError, ValueError, KeyError, AttributeError, RecursionError):
            document = json.loads(group.read_text(encoding="utf-8"))
            paths = document["child_paths"]
            own = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
            if own == paths or all(map(os.path.exists, paths.values())) or not all(map(os.path.exists, own.values())):
                continue
            fresh = group.with_name(f"{group.name}.{os.getpid()}")
            fresh.write_text(json.dumps({**document, "child_paths": own}), encoding="utf-8")
            fresh.replace(group)
            changed += 1
    return changed


def size_of(folder: Path) -> tuple[int, int]:
    """Entries with compiled kernels, and bytes of all files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.suffix == ".cubin" for path in files), sum(path.stat().st_size for path in files)
