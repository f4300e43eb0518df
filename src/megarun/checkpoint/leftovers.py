"""Leftovers of a killed or failed process in a run's `checkpoints` folder: restored or removed before the next run starts; needs no torch.

Folders with a leading dot are not checkpoints. `.step-N.partial` is a save that was not finished, `.step-N.replaced` the checkpoint of a
step that is saved a second time, until the new one has its place, and `.step-N.removed` one that retention had begun to remove. A process
killed between the two renames of a second save leaves the only complete checkpoint of that step under `.replaced`.
"""

import re
from contextlib import suppress
from pathlib import Path

from megarun.checkpoint.manifest import FOLDER, MANIFEST, finished, saves
from megarun.files import entries, remove
from megarun.remote import AnyPath, RemotePath

PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
_LEFT = re.compile(rf"\.(step-\d{{8}})\.({PARTIAL}|{REPLACED}|{REMOVED})")


def hidden(final: Path, what: str) -> Path:
    """The hidden folder of a checkpoint in one of the three states."""
    return final.with_name(f".{final.name}.{what}")


def tidy(run: AnyPath) -> list[Path]:
    """Restore replaced checkpoints whose step has no other, remove all other leftovers; returns the restored ones.

    Only one process may call this, with no save in progress. A folder that cannot be changed is left as it is: the next save of its
    step reports it. In a storage a save without a manifest is not finished, and only the last one of a step counts.
    """
    if isinstance(run, RemotePath):
        kept = {each.path for each in finished(run)}
        for path in saves(run):
            if isinstance(path, RemotePath) and path not in kept:
                remove_remote(path)
        return []
    folder = run / FOLDER
    restored = []
    for path in entries(folder):
        assert isinstance(path, Path)
        match = _LEFT.fullmatch(path.name)
        if match is None:
            continue
        final = folder / match[1]
        if match[2] == REPLACED and (path / MANIFEST).is_file() and not (final / MANIFEST).is_file():
            with suppress(OSError):
                remove(final)
                path.rename(final)
                restored.append(final)
        else:
            with suppress(OSError):
                remove(path)
    return restored


def remove_remote(save: RemotePath) -> None:
    """Remove a save from a storage, manifest first: without a manifest the rest does not count."""
    (save / MANIFEST).unlink()
    save.remove_tree()
