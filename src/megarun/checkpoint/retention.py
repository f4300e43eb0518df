"""Choice of the checkpoints that are removed after a new one is complete; needs no torch."""

from dataclasses import dataclass, field

from megaplan.errors import MegaplanError
from megarun.checkpoint.manifest import Manifest, finished, misplaced_files, read_manifest
from megarun.remote import AnyPath, StorageError


@dataclass(slots=True)
class Retention:
    """The state of a process that decides which checkpoints are removed.

    Attributes:
        keep: Number of newest complete checkpoints of the run's line to keep.
        start: Checkpoint that this process continues, which is kept while it runs; None if it is not in the folder.
        damaged: Checkpoints whose files do not match their manifests, found at start; saves do not check files again.
    """

    keep: int
    start: AnyPath | None = None
    damaged: set[AnyPath] = field(default_factory=set)

    def outdated(self, run: AnyPath, new: AnyPath, manifest: Manifest) -> list[AnyPath]:
        """Checkpoints to remove after `new` is complete: the ones older than its `keep` newest complete ancestors.

        Only checkpoints on the line of the new one are removed: other lines belong to other runs, and an unreadable checkpoint's line is
        unknown. A checkpoint is complete if it has all its files in their sizes and is not known to be damaged.
        """
        self.damaged.discard(new)
        behind = [each for each in reversed(finished(run)) if each.place is not None and each.place.leads_to(manifest.place)]
        num_complete = 0
        for index, each in enumerate(behind):
            num_complete += each.path == new or self._is_complete(each.path)
            if num_complete == self.keep:
                return [older.path for older in behind[index + 1 :] if not self._starts_at(older.path)]
        return []

    def _is_complete(self, path: AnyPath) -> bool:
        try:
            return path not in self.damaged and not misplaced_files(path, read_manifest(path))
        except StorageError:
            raise
        except MegaplanError:  # another process has removed or is changing it
            return False

    def _starts_at(self, path: AnyPath) -> bool:
        return self.start is not None and path.resolve() == self.start.resolve()
