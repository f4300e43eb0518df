"""Which checkpoints go when a new one is whole; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megaplan.errors import MegaplanError
from megarun.checkpoint.manifest import Manifest, finished, misplaced_files, read_manifest


@dataclass(slots=True)
class Retention:
    """What a process knows of its folder that decides what may go.

    Attributes:
        keep: Whole checkpoints of the run's line to leave, the newest.
        start: The checkpoint that this process goes on from, which stays as long as it runs; None if there is none in its folder.
        damaged: Checkpoints that are not what their manifests say: found when all bytes were read, which no save does again.
    """

    keep: int
    start: Path | None = None
    damaged: set[Path] = field(default_factory=set)

    def outdated(self, run: Path, new: Path, manifest: Manifest) -> list[Path]:
        """Checkpoints to remove now that `new` is whole: those older than the `keep` newest whole ones it came of.

        Only what lies on the line of the new one can go: other lines are another run's, and what cannot be read is on no line that is
        known. Whole is what has all its files in their sizes, unless it is known to be damaged.
        """
        self.damaged.discard(new)
        behind = [each for each in reversed(finished(run)) if each.place is not None and each.place.leads_to(manifest.place)]
        num_whole = 0
        for index, each in enumerate(behind):
            num_whole += each.path == new or self._whole(each.path)
            if num_whole == self.keep:
                return [older.path for older in behind[index + 1 :] if not self._starts_at(older.path)]
        return []

    def _whole(self, path: Path) -> bool:
        try:
            return path not in self.damaged and not misplaced_files(path, read_manifest(path))
        except MegaplanError:  # gone, or being changed by someone else
            return False

    def _starts_at(self, path: Path) -> bool:
        return self.start is not None and path.resolve() == self.start.resolve()
