"""Checkpoints in a storage: written to a local stage, uploaded by the saving thread while training continues, committed by the manifest.

A storage cannot rename, so a save has its own folder, `step-00000040`, or `step-00000040.1` if that step was saved before, and
the manifest is its last object: a folder without one is not a checkpoint. Rank 0 chooses the folder, and the others read it in DCP's plan.
"""

import hashlib
import json
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megarun.checkpoint.leftovers import remove_remote
from megarun.checkpoint.manifest import FOLDER, MANIFEST, Manifest, folder_name, name_of, saves
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.storage import CheckpointWriter
from megarun.checkpoint.sums import FileRecord
from megarun.errors import refusal
from megarun.launch.process import ProcessIdentity
from megarun.remote import AnyPath, RemotePath

STAGE, OWNER = "upload", "owner.json"
MAX_OWNER_BYTES = 1 << 16


def stage_of(out: Path, rank: int) -> Path:
    """The folder of a rank's files until they are uploaded."""
    return out / STAGE / f"rank-{rank}"


class Owner:
    """A job's claim on the checkpoints of a storage: if two jobs claim it, the later one keeps it, and the saves of the other fail.

    Called by rank 0 alone.

    Args:
        root: Storage that holds the folder of checkpoints.
    """

    def __init__(self, root: RemotePath) -> None:
        self._path, self._token = root / FOLDER / OWNER, secrets.token_hex(16)

    def claim(self) -> None:
        """Write the claim.

        Raises:
            StorageError: The storage fails, or may not be written.
        """
        process = ProcessIdentity.own()
        self._path.write_bytes(json.dumps({"token": self._token, "host": process.host, "pid": process.pid}).encode())

    def require(self) -> None:
        """Refuse to write after another job's claim.

        Raises:
            MegaplanError: MP658.
            StorageError: The storage fails.
        """
        try:
            found = json.loads(self._path.read_bytes(MAX_OWNER_BYTES))
            token, who = found["token"], f"process {int(found['pid'])} on {str(found['host'])!r}"
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            token, who = "", "another process"
        if token != self._token:
            raise refusal("MP658", f"{self._path}: {who} uses the storage", file=str(self._path.parent))


@dataclass
class _Placed(_StoragePrefix):
    """DCP's prefix of a rank's files, with the folder of the save."""

    folder: str


class RemoteWriter(CheckpointWriter):
    """Writes one checkpoint of a run into a storage.

    Args:
        root: Storage that holds the folder of checkpoints.
        stage: Folder of this rank alone, on a local disk.
        manifest: Manifest without its files.
        plan: Text of the run's plan file.
        retention: Decides which older checkpoints are removed after this one is complete.
        owner: The job's claim on the storage, looked at before the commit.
    """

    def __init__(
        self, root: RemotePath, stage: Path, manifest: Manifest, plan: str, retention: Retention, owner: Owner | None = None
    ) -> None:
        self._remote, self._owner = root / FOLDER, owner
        self._begin(root, stage / folder_name(manifest.step), self._remote / folder_name(manifest.step), manifest, plan, retention)

    _DEPTH = 3

    @property
    def _folder(self) -> AnyPath:
        return self._final

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remove this rank's files of a failed save."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        shutil.rmtree(self._partial, ignore_errors=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose a folder that no save has used; on the coordinator."""
        numbers = [number for step, number in (name_of(path.name) for path in saves(self._run)) if step == self._manifest.step]
        folder = folder_name(self._manifest.step, max(numbers, default=-1) + 1)
        self._final = self._remote / folder
        planned = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=_Placed(plan.storage_data.prefix, folder)) for plan in planned]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file to the stage and upload it."""
        self._final = self._remote / plan.storage_data.folder
        written = super().write_data(plan, planner)
        for name in sorted({result.storage_data.relative_path for result in written.wait()}):
            (self._final / name).upload(self._partial / name)
        shutil.rmtree(self._partial, ignore_errors=True)
        return written

    def _write(self, name: str, text: str) -> FileRecord:
        data = text.encode()
        (self._final / name).write_bytes(data)
        return FileRecord(len(data), hashlib.sha256(data).hexdigest())

    def _commit(self, manifest: str) -> None:
        """Write the manifest, the last object of a checkpoint."""
        if self._owner is not None:
            self._owner.require()
        (self._final / MANIFEST).write_bytes(manifest.encode())

    def _outdated(self) -> list[AnyPath]:
        """Saves to remove, among them earlier saves of this step, which the new one replaces."""
        new = name_of(self._final.name)
        return [*super()._outdated(), *(path for path in saves(self._run) if name_of(path.name)[0] == new[0] and path != self._final)]

    def _remove(self, old: AnyPath) -> None:
        assert isinstance(old, RemotePath)
        remove_remote(old)

    def discard(self) -> None:
        """Remove this rank's stage. The next start removes files in the storage without a manifest; the manifest may have been written."""
        shutil.rmtree(self._partial, ignore_errors=True)
