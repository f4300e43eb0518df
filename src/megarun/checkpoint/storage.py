"""DCP's file storage with an index in JSON, checksums, and an atomic rename of the folder.

torch stores its index as a pickle, which runs code when it is read; here it is JSON. Each rank writes its data file and reports its size
and checksum to the coordinator; when the coordinator sees all files in their sizes, it writes index and manifest and renames the folder.

Source: torch/distributed/checkpoint/filesystem.py, `FileSystemWriter.finish` and `FileSystemReader.read_metadata`.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity
from megaplan.terminal.output import report
from megarun.checkpoint.index import INDEX, read_index
from megarun.checkpoint.leftovers import PARTIAL, REMOVED, REPLACED, hidden
from megarun.checkpoint.manifest import FOLDER, MANIFEST, PLAN, Manifest, folder_name
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.sums import ChangedFileError, FileRecord, open_summed, record_of
from megarun.errors import refusal
from megarun.files import make_own_folder, open_own, refuse_link, remove, size_of
from megarun.remote import AnyPath, RemotePath, StorageError

MOST_NAMED = 8
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)}


class UnseenFilesError(RuntimeError):
    """The coordinator does not see the files that the ranks have written."""


@dataclass(frozen=True)
class Written(WriteResult):
    """DCP's result for one written piece, with the data that the coordinator needs to check its file.

    Attributes:
        record: Size and checksum of the file, computed by the rank that wrote it.
        host: Host name of that rank.
    """

    record: FileRecord
    host: str


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint of a run.

    Args:
        run: Folder of the run.
        manifest: Manifest without its files.
        plan: Text of the run's plan file.
        retention: Decides which older checkpoints are removed after this one is complete.
    """

    def __init__(self, run: Path, manifest: Manifest, plan: str, retention: Retention) -> None:
        final = run / FOLDER / folder_name(manifest.step)
        self._begin(run, hidden(final, PARTIAL), final, manifest, plan, retention)

    def _begin(self, run: AnyPath, partial: Path, final: AnyPath, manifest: Manifest, plan: str, retention: Retention) -> None:
        self._run, self._partial, self._final = run, partial, final
        self._manifest, self._plan, self._retention = manifest, plan, retention
        super().__init__(partial)
        files: Any = self.fs
        files.mkdir, files.create_stream = self._make_folder, self._create

    _DEPTH = 2
    """Folders of this save below the run's."""

    def _make_folder(self, _: Any) -> None:
        """Make the folders of this save, but not the run's: one that was removed is not made again."""
        for folder in (*list(self._partial.parents)[self._DEPTH - 2 :: -1], self._partial):
            make_own_folder(folder)

    @contextmanager
    def _create(self, path: Any, _: str) -> Iterator[Any]:
        with open_own(Path(path), os.O_TRUNC) as file:
            yield file

    @property
    def _folder(self) -> AnyPath:
        """Folder in which the coordinator looks for the files of all ranks."""
        return self._partial

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remove files of a killed save before any rank writes.

        The folder itself stays: other ranks create it at the same time, and `mkdir` fails if it disappears.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        refuse_link(self._partial.parent)
        refuse_link(self._partial)
        if is_coordinator and self._partial.is_dir():
            for left in self._partial.iterdir():
                remove(left)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and compute its checksum."""
        results, host = super().write_data(plan, planner).wait(), socket.gethostname()
        names = {result.storage_data.relative_path for result in results}
        records = {name: record_of(self._partial / name) for name in names}
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([_summed(result, records[result.storage_data.relative_path], host) for result in results])
        return summed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index, plan and manifest, then commit; on the coordinator, after every rank has written.

        Raises:
            UnseenFilesError: The folder does not have exactly the files that the ranks have written.
        """
        files = self._seen(results)
        index = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, text in ((INDEX, _index_text(metadata, index)), (PLAN, self._plan)):
            files[name] = self._write(name, text)
        self._commit(replace(self._manifest, files=files).text())
        self._remove_outdated()

    def _write(self, name: str, text: str) -> FileRecord:
        _write(self._partial / name, text)
        return record_of(self._partial / name)

    def _commit(self, manifest: str) -> None:
        """Write the manifest, then rename the folder."""
        assert isinstance(self._final, Path)
        _write(self._partial / MANIFEST, manifest)
        replaced = hidden(self._final, REPLACED)
        if os.path.lexists(self._final):  # the step is saved a second time
            with suppress(OSError):
                remove(replaced)
            self._final.rename(replaced)
        self._partial.rename(self._final)
        _sync_folder(self._final.parent)
        with suppress(OSError):
            remove(replaced)

    def _remove_outdated(self) -> None:
        """Remove older checkpoints; a failure is a warning, because the new checkpoint is complete."""
        old = self._final
        try:
            for old in self._outdated():
                try:
                    self._remove(old)
                except OSError as error:
                    _warn(old, f"{old}: {error.strerror or error}")
        except StorageError as error:
            _warn(old, error.diagnostics[0].detail)

    def _outdated(self) -> list[AnyPath]:
        return self._retention.outdated(self._run, self._final, self._manifest)

    def _remove(self, old: AnyPath) -> None:
        """Remove a checkpoint; it is renamed first, so that it is never incomplete under its own name."""
        assert isinstance(old, Path)
        removed = hidden(old, REMOVED)
        remove(removed)
        old.rename(removed)
        remove(removed)

    def _seen(self, results: Sequence[Sequence[WriteResult]]) -> dict[str, FileRecord]:
        """The files that the ranks have written, after checking that this rank sees exactly these."""
        files: dict[str, FileRecord] = {}
        wrong: list[str] = []
        for rank, of_rank in enumerate(results):
            for written in {each.storage_data.relative_path: each for each in of_rank}.values():
                name = written.storage_data.relative_path
                files[name] = written.record  # type: ignore[attr-defined]
                reason = _unlike(self._folder / name, files[name].bytes)
                if reason:
                    wrong.append(f"rank {rank} on {written.host}: {name}: {reason}")  # type: ignore[attr-defined]
        wrong += [f"{path.name}: not written by a rank of this run" for path in self._folder.iterdir() if path.name not in files]
        if wrong:
            shared = "; is --out shared by all nodes?" if self._folder is self._partial else ""
            here = f"rank 0 on {socket.gethostname()} does not see the files that the ranks have written{shared}"
            more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
            raise UnseenFilesError("\n".join([here, *wrong[:MOST_NAMED], *more]))
        return files

    def discard(self) -> None:
        """Remove the files of an unfinished save."""
        shutil.rmtree(self._partial, ignore_errors=True)


class CheckpointReader(FileSystemReader):
    """Reads one checkpoint, from a storage through torch's own file system for fsspec."""

    def __init__(self, checkpoint: AnyPath, manifest: Manifest) -> None:
        super().__init__(str(checkpoint))
        self._checkpoint, self._files = checkpoint, manifest.files
        if isinstance(checkpoint, RemotePath):
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem  # noqa: PLC0415  (only where a URL is given)

            self.fs = FileSystem()  # type: ignore[assignment]
            self.path = self.fs.init_path(checkpoint.url, **checkpoint.options)
        files: Any = self.fs
        files.create_stream = self._open

    @contextmanager
    def _open(self, path: Any, _: str) -> Iterator[Any]:
        """One of the checkpoint's files, as the manifest lists it."""
        name = str(path).rpartition("/")[2]
        if name not in self._files:
            raise ChangedFileError(f"{name}: not listed in {MANIFEST}")
        with open_summed(self._checkpoint / name, self._files[name]) as file:
            yield file

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the index.

        Raises:
            MegaplanError: MP644 if it is not valid, or has a dtype that checkpoints do not have.
        """
        path = self._checkpoint
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for name, found in read_index(path, self._files.get(INDEX)).items():
            if found.dtype not in DTYPES:
                raise refusal("MP644", f"{path / INDEX}: {name}: dtype = {found.dtype!r}", file=str(path / INDEX))
            chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in found.chunks]
            for each, chunk in zip(found.chunks, chunks, strict=True):
                stored[MetadataIndex(name, chunk.offsets)] = _StorageInfo(each.file, each.offset, each.length)
            properties = TensorProperties(dtype=DTYPES[found.dtype])
            tensors[name] = TensorStorageMetadata(properties=properties, size=torch.Size(found.shape), chunks=chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=stored, storage_meta=StorageMeta())


def first_error(error: BaseException) -> tuple[BaseException, str]:
    """The error of the first rank that failed, and that rank, from DCP's exception for all ranks."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(sorted(error.failures.items())))
        return first, f"rank {rank}: "
    return error, ""


def first_reason(error: BaseException) -> str:
    """The error of the first rank that failed, in one sentence; missing files have one line each."""
    first, where = first_error(error)
    if isinstance(first, UnseenFilesError):
        return str(first)
    if isinstance(first, MegaplanError):
        return f"{where}{first.diagnostics[0].detail}"
    said = str(first).splitlines() or [""]
    return f"{where}{type(first).__name__}: {said[0].split('. ')[0]}"


def _summed(result: WriteResult, record: FileRecord, host: str) -> Written:
    known = {each.name: getattr(result, each.name) for each in fields(WriteResult)}
    return Written(**known, record=record, host=host)


def _unlike(path: AnyPath, num_bytes: int) -> str | None:
    """Difference between a file and the written bytes; None if the size is equal."""
    try:
        size = size_of(path)
    except OSError as error:
        return error.strerror or "No such file or directory"
    return None if size == num_bytes else f"{size:,} bytes, {num_bytes:,} written"


def _index_text(metadata: Metadata, stored: dict[MetadataIndex, _StorageInfo]) -> str:
    tensors = {}
    for name, found in sorted(metadata.state_dict_metadata.items()):
        if not isinstance(found, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor: a checkpoint stores only tensors")
        chunks = []
        for chunk in found.chunks:
            place = stored[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
        tensors[name] = {"dtype": str(found.properties.dtype), "shape": list(found.size), "chunks": chunks}
    return json.dumps({"tensors": tensors}) + "\n"


def _warn(old: AnyPath, detail: str) -> None:
    report([diagnostic("MP657", detail, Location(file=str(old)), severity=Severity.WARNING)])


def _write(path: Path, text: str) -> None:
    with open_own(path, os.O_TRUNC) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
