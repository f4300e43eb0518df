"""The manifest of a checkpoint, `manifest.json`: read and checked without torch.

A folder `step-00000040` of a run's `checkpoints` has the data files, `index.json` (the position of each piece of each tensor in them),
`plan.json` (the plan of the run that saved it) and, written last, `manifest.json`: sizes and SHA-256 of all others. A save has another name
until it is complete, so a folder of this name without a manifest is damaged. Tensors are in torch's own format, which is read with
`weights_only`; the other files are JSON.

Format 2 adds two fields to format 1: the run's line in its folder (`megarun.checkpoint.lines`) and its data (`megarun.data.identity`).
Format 1 is read as the first line, with unknown data. Format 3 adds `digest`, the SHA-256 of the manifest's other keys and values: the
manifest is the only file whose checksum no other file has.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from megaplan.errors import MegaplanError
from megarun.checkpoint.index import INDEX, check_name, count, file_ends, read_index
from megarun.checkpoint.lines import FIRST_LINE, Finished, Line, Place, by_line, check_line
from megarun.checkpoint.sums import ChangedFileError, FileRecord, read_summed, record_of
from megarun.data.identity import DataFile, DataFiles
from megarun.data.progress import START, DataProgress
from megarun.errors import refusal
from megarun.files import entries, read_bounded, size_of
from megarun.remote import AnyPath, RemotePath, StorageError

FORMAT = "megaplan.checkpoint/3"
WITHOUT_DIGEST = "megaplan.checkpoint/2"
OLD_FORMAT = "megaplan.checkpoint/1"
MANIFEST, PLAN = "manifest.json", "plan.json"
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8})(?:\.(\d{1,9}))?")
MAX_MANIFEST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        step: Optimizer steps done.
        seed: Seed of parameters and data.
        global_batch: (sequences, tokens per sequence); with step, seed, skipped batches and validation fraction, the data position.
        model_digest: Model digest of the plan; a different digest means another model.
        plan_digest: Digest of the plan.
        world_size: Number of ranks that saved it.
        torch: torch version that saved it.
        files: Size and checksum of every other file of the folder, by name.
        data_progress: Batches skipped because of bad steps, and the latest losses.
        validation_fraction: Share of every token file's rows that training excludes, a decimal number.
        line: Line of the run in its folder.
        data: Token files of the latest training; None in format 1, which does not record them.
    """

    step: int
    seed: int
    global_batch: tuple[int, int]
    model_digest: str
    plan_digest: str
    world_size: int
    torch: str
    files: dict[str, FileRecord]
    data_progress: DataProgress = field(default_factory=DataProgress)
    validation_fraction: str = "0"
    line: Line = FIRST_LINE
    data: DataFiles | None = None

    @property
    def place(self) -> Place:
        """Position among the checkpoints of its folder."""
        return Place(self.line, self.step)

    def document(self) -> dict[str, Any]:
        """The keys and values of manifest.json, without its format; the key of `data_progress` is `course` in every format so far."""
        return {"course" if key == "data_progress" else key: value for key, value in asdict(self).items()}

    def text(self) -> str:
        """The text of manifest.json, with its digest."""
        document = {"format": FORMAT, **self.document()}
        return json.dumps(document | {"digest": manifest_digest(document)}, indent=1, sort_keys=True) + "\n"


def manifest_digest(document: dict[str, Any]) -> str:
    """SHA-256 of a manifest's keys and values, without `digest`; independent of white space and of the order of keys."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def folder_name(step: int, number: int = 0) -> str:
    """Folder name of a checkpoint after `step` optimizer steps; `number` counts the saves of one step in a storage."""
    return f"step-{step:08d}" + (f".{number}" if number else "")


def list_checkpoints(run: AnyPath) -> list[AnyPath]:
    """Finished checkpoints of a run, newest line first and newest checkpoint first; files are not checked for damage."""
    return [each.path for line in by_line(finished(run)) for each in line]


def finished(run: AnyPath) -> list[Finished]:
    """Every checkpoint of a run with its position, by step; reads only manifests. If a step was saved several times, the last save counts.

    Raises:
        StorageError: The storage fails; its contents are then unknown.
    """
    last = {name_of(path.name)[0]: path for path in saves(run) if not isinstance(path, RemotePath) or (path / MANIFEST).is_file()}
    return [_finished(path, step) for step, path in sorted(last.items())]


def saves(run: AnyPath) -> list[AnyPath]:
    """Every folder of a save, by step and number; in a storage, unfinished ones are included."""
    found = [path for path in entries(run / FOLDER) if _NAME.fullmatch(path.name) and (isinstance(path, RemotePath) or path.is_dir())]
    return sorted(found, key=lambda path: name_of(path.name))


def name_of(name: str) -> tuple[int, int]:
    """Step and number of a save: `step-00000040.2` is the third save of step 40. An object store renames nothing, so each has its folder.

    Raises:
        ValueError: It is not a name of a save.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a checkpoint's name")
    return int(match[1]), int(match[2] or 0)


def _finished(path: AnyPath, step: int) -> Finished:
    try:
        return Finished(path, step, read_manifest(path).place)
    except StorageError:
        raise
    except MegaplanError:
        return Finished(path, step, None)


def read_manifest(checkpoint: AnyPath) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        MegaplanError: MP644 if it cannot be read, is not valid, does not match its digest, or has another step than the folder's name;
            MP643 if a newer version wrote it.
        StorageError: The storage fails.
    """
    path = checkpoint / MANIFEST
    try:
        document = json.loads(read_bounded(path, MAX_MANIFEST_BYTES))
        written = document["format"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None
    if written not in (FORMAT, WITHOUT_DIGEST, OLD_FORMAT):
        raise refusal("MP643", f"{path}: format = {written!r}, this megarun reads {FORMAT!r} and older", file=str(path))
    try:
        if written == FORMAT and document["digest"] != manifest_digest(document):
            raise ValueError(f"digest {manifest_digest(document)[:16]}…, {str(document['digest'])[:16]}… in the manifest")
        found = _parsed(document, old=written == OLD_FORMAT)
        if _NAME.fullmatch(checkpoint.name) and name_of(checkpoint.name)[0] != found.step:
            raise ValueError(f"step = {found.step}, the folder is {checkpoint.name}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None
    return found


def _parsed(document: dict[str, Any], *, old: bool) -> Manifest:
    files = {}
    for name, record in document["files"].items():
        check_name(name)
        files[name] = FileRecord(count(record["bytes"]), str(record["sha256"]))
    sequences, length = document["global_batch"]
    return Manifest(
        step=count(document["step"]),
        seed=count(document["seed"]),
        global_batch=(count(sequences), count(length)),
        model_digest=str(document["model_digest"]),
        plan_digest=str(document["plan_digest"]),
        world_size=count(document["world_size"]),
        torch=str(document["torch"]),
        files=files,
        data_progress=_data_progress(document["course"]),
        validation_fraction=str(document.get("validation_fraction", "0")),  # older versions could not keep validation rows
        line=FIRST_LINE if old else check_line(tuple((count(number), count(step)) for number, step in document["line"])),
        data=None if old else _data(document["data"]),
    )


def _data(document: Any) -> DataFiles | None:
    if document is None:
        return None
    return tuple(
        DataFile(_text(file["name"]), _text(file["payload_sha256"]), count(file["num_tokens"]), count(file["weight"])) for file in document
    )


def _data_progress(document: dict[str, Any]) -> DataProgress:
    skipped = tuple((count(first), count(stop)) for first, stop in document["skipped"])
    if any(first >= stop for first, stop in skipped) or any(one[1] >= two[0] for one, two in pairwise(skipped)):
        raise ValueError(f"course.skipped = {document['skipped']} is not a list of increasing ranges")
    losses = tuple(document["losses"])
    if not all(type(loss) is float and math.isfinite(loss) for loss in losses):
        raise ValueError(f"course.losses = {document['losses']} is not a list of losses")
    scale = float(document.get("loss_scale", START.loss_scale))  # older versions scaled no losses
    if math.frexp(scale)[0] != 0.5 or scale < 1:
        raise ValueError(f"course.loss_scale = {scale} is not a power of two")
    return DataProgress(skipped, losses, scale, count(document.get("num_scaled", 0)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def damaged_files(checkpoint: AnyPath, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Damaged files, one line each; empty if all files match the manifest.

    Args:
        checkpoint: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        share: (index, count): read every `count`-th file from `index`, so that ranks divide the reading; index 0 also checks that the
            manifest lists every file of the index.
    """
    wrong = unlisted_files(checkpoint, manifest) if share[0] == 0 else []
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        path, record = checkpoint / name, manifest.files[name]
        try:
            found = record_of(path)
        except OSError as error:
            wrong.append(str(error) if isinstance(error, ChangedFileError) else f"{name}: {error.strerror or 'no such file'}")
            continue
        if found.bytes != record.bytes:
            wrong.append(f"{name}: {found.bytes:,} bytes, {record.bytes:,} in the manifest")
        elif found.sha256 != record.sha256:
            wrong.append(f"{name}: SHA-256 {found.sha256[:16]}…, {record.sha256[:16]}… in the manifest")
    return wrong


def unlisted_files(checkpoint: AnyPath, manifest: Manifest) -> list[str]:
    """Files that the manifest must list but does not, or lists with too small a size, one line each; no data file is read.

    If rank 0 could not see the files of other nodes, both folder and manifest may lack them; only the index lists them.
    """
    wrong = [f"{name}: not listed in {MANIFEST}" for name in (INDEX, PLAN) if name not in manifest.files]
    try:
        ends = file_ends(read_index(checkpoint, manifest.files.get(INDEX)))
    except StorageError:
        raise
    except MegaplanError as error:
        return [*wrong, *(each.detail.removeprefix(f"{checkpoint}/") for each in error.diagnostics)]
    for name, end in sorted(ends.items()):
        if name not in manifest.files:
            wrong.append(f"{name}: needed by {INDEX}, not listed in {MANIFEST}")
        elif manifest.files[name].bytes < end:
            wrong.append(f"{name}: {INDEX} needs {end:,} bytes, {manifest.files[name].bytes:,} in the manifest")
    return wrong


def read_listed(checkpoint: AnyPath, manifest: Manifest, name: str, max_bytes: int) -> str:
    """The text of a checkpoint's file, with the checksum verified against the manifest.

    Raises:
        MegaplanError: MP644: the index cannot be read, or differs from the manifest.
        StorageError: The storage fails.
    """
    path = checkpoint / name
    try:
        return read_summed(path, manifest.files[name], max_bytes)
    except KeyError:
        raise refusal("MP644", f"{path}: not listed in {MANIFEST}", file=str(path)) from None
    except (OSError, ValueError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None


def misplaced_files(checkpoint: AnyPath, manifest: Manifest) -> list[str]:
    """Files that are missing or whose size differs from the manifest, one line each; no data file is read."""
    wrong = []
    for name, record in sorted(manifest.files.items()):
        try:
            size = size_of(checkpoint / name)
        except OSError as error:
            wrong.append(f"{name}: {error.strerror or 'no such file'}")
            continue
        if size != record.bytes:
            wrong.append(f"{name}: {size:,} bytes, {record.bytes:,} in the manifest")
    return wrong
