"""What a killed or failed process left in a run's `checkpoints` folder: restored or removed before the next run starts; needs no torch.

Folders with a leading dot are not checkpoints. `.step-N.partial` is a save that was not finished, `.step-N.replaced` the checkpoint of a
step that is saved a second time, until the new one has its place, and `.step-N.removed` one that retention had begun to remove. A process
killed between the two renames of a second save leaves the only whole checkpoint of that step under `.replaced`.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from megarun.checkpoint.manifest import FOLDER, MANIFEST

PARTIAL, REPLACED, REMOVED = "partial", "replaced", "removed"
_LEFT = re.compile(rf"\.(step-\d{{8}})\.({PARTIAL}|{REPLACED}|{REMOVED})")


def hidden(final: Path, what: str) -> Path:
    """The hidden folder of a checkpoint in one of the three states."""
    return final.with_name(f".{final.name}.{what}")


def tidy(run: Path) -> list[Path]:
    """Restore replaced checkpoints whose step has no other, remove everything else that is left over; returns those restored.

    Only one process may call it, and no save may be in progress. A folder that cannot be changed is left as it is: the next save of its
    step reports it.
    """
    folder = run / FOLDER
    restored = []
    for path in _entries(folder):
        match = _LEFT.fullmatch(path.name)
        if match is None:
            continue
        final = folder / match[1]
        if match[2] == REPLACED and (path / MANIFEST).is_file() and not (final / MANIFEST).is_file():
            with suppress(OSError):
                shutil.rmtree(final, ignore_errors=True)
                path.rename(final)
                restored.append(final)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return restored


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
