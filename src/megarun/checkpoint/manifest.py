"""What a checkpoint says of itself: `manifest.json`, read and checked without torch.

A folder `step-00000040` of a run's `checkpoints` holds the data files, `index.json` (where in them each piece of each tensor lies),
`plan.json` (the plan it was saved under) and, last, `manifest.json`: sizes and SHA-256 of all others. A folder without a manifest was never
finished. Tensors lie in torch's own format, which is read with `weights_only`; all else is JSON.

Format 2 has two fields more than format 1: the run's line among others of its folder (`megarun.checkpoint.lines`), and its data
(`megarun.data.identity`). Format 1 is read as the first line, of data that is not known.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaplan.errors import MegaplanError
from megarun.checkpoint.lines import FIRST_LINE, Finished, Line, Place, by_line, check_line
from megarun.data.identity import DataFile, DataFiles
from megarun.data.progress import DataProgress
from megarun.errors import refusal

FORMAT = "megaplan.checkpoint/2"
OLD_FORMAT = "megaplan.checkpoint/1"
MANIFEST, INDEX, PLAN = "manifest.json", "index.json", "plan.json"
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8})")
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's own account.

    Attributes:
        step: Optimizer steps done.
        seed: Of parameters and data.
        global_batch: Sequences and tokens a sequence: with step, seed, skipped batches and validation fraction, the data position.
        model_digest: Of the plan it was saved under; another one is another model.
        plan_digest: Of the plan it was saved under.
        world_size: Ranks that saved it.
        torch: Version that saved it.
        files: Every other file of the folder.
        data_progress: Batches that bad steps have left out.
        validation_fraction: The part of every token file's rows that training left out, a decimal number.
        line: The run's line in its folder.
        data: What it was trained on last; None in format 1, which does not say.
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
        """Where it stands among its folder's checkpoints."""
        return Place(self.line, self.step)

    def document(self) -> dict[str, Any]:
        """The keys and values of manifest.json, its format excepted; `data_progress` has the key `course` in every format so far."""
        return {"course" if key == "data_progress" else key: value for key, value in asdict(self).items()}

    def text(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, **self.document()}, indent=1, sort_keys=True) + "\n"


def folder_name(step: int) -> str:
    """Of a checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run: those of the newest line first, of each line newest first; damage is not looked for."""
    return [each.path for line in by_line(finished(run)) for each in line]


def finished(run: Path) -> list[Finished]:
    """Every checkpoint of a run with its place, by step; manifests are read, and nothing else."""
    folder = run / FOLDER
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
    return [_finished(folder / name) for name in names if (folder / name / MANIFEST).is_file()]


def _finished(path: Path) -> Finished:
    step = int(path.name.rpartition("-")[2])
    try:
        return Finished(path, step, read_manifest(path).place)
    except MegaplanError:
        return Finished(path, step, None)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        MegaplanError: MP644 if it cannot be read or is not one, MP643 if a newer version wrote it.
    """
    path = checkpoint / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        written = document.pop("format")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None
    if written not in (FORMAT, OLD_FORMAT):
        raise refusal("MP643", f"{path}: format = {written!r}, this megarun reads {FORMAT!r} and older", file=str(path))
    try:
        return _parsed(document, old=written == OLD_FORMAT)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refusal("MP644", f"{path}: {type(error).__name__}: {error}", file=str(path)) from None


def _parsed(document: dict[str, Any], *, old: bool) -> Manifest:
    files = {}
    for name, record in document["files"].items():
        check_name(name)
        files[name] = FileRecord(_count(record["bytes"]), str(record["sha256"]))
    sequences, length = document["global_batch"]
    return Manifest(
        step=_count(document["step"]),
        seed=_count(document["seed"]),
        global_batch=(_count(sequences), _count(length)),
        model_digest=str(document["model_digest"]),
        plan_digest=str(document["plan_digest"]),
        world_size=_count(document["world_size"]),
        torch=str(document["torch"]),
        files=files,
        data_progress=_data_progress(document["course"]),
        validation_fraction=str(document.get("validation_fraction", "0")),  # older ones had no way to leave rows out
        line=FIRST_LINE if old else check_line(tuple((_count(number), _count(step)) for number, step in document["line"])),
        data=None if old else _data(document["data"]),
    )


def _data(document: Any) -> DataFiles | None:
    if document is None:
        return None
    return tuple(
        DataFile(_text(file["name"]), _text(file["payload_sha256"]), _count(file["num_tokens"]), _count(file["weight"]))
        for file in document
    )


def _data_progress(document: dict[str, Any]) -> DataProgress:
    skipped = tuple((_count(first), _count(stop)) for first, stop in document["skipped"])
    if any(first >= stop for first, stop in skipped) or any(one[1] >= two[0] for one, two in pairwise(skipped)):
        raise ValueError(f"course.skipped = {document['skipped']} are no ranges that rise")
    losses = tuple(document["losses"])
    if not all(type(loss) is float and math.isfinite(loss) for loss in losses):
        raise ValueError(f"course.losses = {document['losses']} are no losses")
    return DataProgress(skipped, losses)


def check_name(name: str) -> None:
    """Refuse what is not a plain file name.

    Raises:
        ValueError: It could lead out of the folder.
    """
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"{name!r} is no file of the folder")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def damaged_files(checkpoint: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files, a line each; empty if all are as they were written.

    Args:
        checkpoint: The folder.
        manifest: Its manifest.
        share: (index, count): every `count`-th file from `index`, so that ranks can divide the reading; whether the manifest has every
            file that the index names is the first one's to find.
    """
    wrong = unlisted_files(checkpoint, manifest) if share[0] == 0 else []
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        path, record = checkpoint / name, manifest.files[name]
        try:
            found = record_of(path)
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
            continue
        if found.bytes != record.bytes:
            wrong.append(f"{name}: {found.bytes:,} bytes, saved were {record.bytes:,}")
        elif found.sha256 != record.sha256:
            wrong.append(f"{name}: SHA-256 {found.sha256[:16]}…, saved was {record.sha256[:16]}…")
    return wrong


def unlisted_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Files that a whole checkpoint has and the manifest does not list, or lists too short, a line each; no data file is read.

    A save that did not see what other nodes had written could leave their files out of both folder and manifest, and only the index knew.
    """
    wrong = [f"{name}: {MANIFEST} does not list it" for name in (INDEX, PLAN) if name not in manifest.files]
    try:
        tensors = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))["tensors"]
        ends: dict[str, int] = {}
        for found in tensors.values():
            for _, _, name, offset, length in found["chunks"]:
                check_name(name)
                ends[name] = max(ends.get(name, 0), _count(offset) + _count(length))
    except OSError:
        return wrong  # which the comparison of files says
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [*wrong, f"{INDEX}: {type(error).__name__}: {error}"]
    for name, end in sorted(ends.items()):
        if name not in manifest.files:
            wrong.append(f"{name}: {INDEX} needs it, and {MANIFEST} does not list it")
        elif manifest.files[name].bytes < end:
            wrong.append(f"{name}: {INDEX} needs {end:,} bytes of it, saved were {manifest.files[name].bytes:,}")
    return wrong


def misplaced_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or of another size than they were saved with, a line each; no data file is read."""
    wrong = []
    for name, record in sorted(manifest.files.items()):
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
            continue
        if size != record.bytes:
            wrong.append(f"{name}: {size:,} bytes, saved were {record.bytes:,}")
    return wrong


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())
