"""Faults of files: checkpoints that contradict themselves, files that are not files, leftovers of kills, and folders that others use."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_bench import ERROR, Bench, Outcome, copy_of, first_line, losses, newest_step, refused

import megarun.checkpoint.storage
from megarun.checkpoint.index import INDEX
from megarun.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from megarun.checkpoint.sums import record_of
from megarun.data.token_file import TokenFile
from megarun.training.folder import LOCK, Holder

BEFORE = 6  # steps of a run that is damaged: checkpoints after 4 and 6
DATA = "__0_0.distcp"


def resigned(path: Path, *names: str, **values: Any) -> None:
    """The manifest with the sums that files have now, and with other values; its digest holds."""
    manifest = read_manifest(path)
    files = manifest.files | {name: record_of(path / name) for name in names}
    (path / MANIFEST).write_text(replace(manifest, **{"files": files, **values}).text())


def manifest_edited(key: str, value: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        document = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps(document | {key: value}))

    return edit


def index_edited(edit: Callable[[list[Any]], None]) -> Callable[[Path], None]:
    """Chunks of the first matrix changed, under sums that match."""

    def act(path: Path) -> None:
        document = json.loads((path / INDEX).read_text())
        edit(next(each["chunks"] for each in document["tensors"].values() if len(each["shape"]) == 2))
        (path / INDEX).write_text(json.dumps(document))
        resigned(path, INDEX)

    return act


def shorter(chunks: list[Any]) -> None:
    chunks[0][1][0] -= 1


def instead_of(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else under a file's name."""

    def act(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return act


def unreadable_tensors(path: Path) -> None:
    (path / DATA).write_bytes(os.urandom((path / DATA).stat().st_size))
    resigned(path, DATA)


def _without_files(path: Path) -> None:
    manifest = read_manifest(path)
    (path / MANIFEST).write_text(replace(manifest, files={}).text())


CONTRADICTIONS: dict[str, Callable[[Path], Any]] = {
    "its manifest says another step": manifest_edited("step", 14),
    "its manifest says other skipped batches": manifest_edited("course", {"skipped": [[1, 2]], "losses": []}),
    "its manifest lists no files": _without_files,
    "its folder is renamed to another step": lambda path: path.rename(path.with_name("step-00000014")),
    "its index leaves out a row of a tensor": index_edited(shorter),
    "its index has a chunk twice": index_edited(lambda chunks: chunks.append(chunks[0])),
    "its data file is a pipe": instead_of(DATA, os.mkfifo),
    "its data file is a link to /dev/zero": instead_of(DATA, lambda path: path.symlink_to("/dev/zero")),
    "its index is a loop of links": instead_of(INDEX, lambda path: path.symlink_to(path)),
    "its manifest is a folder": instead_of(MANIFEST, Path.mkdir),
    "its tensors cannot be read, under sums that match": unreadable_tensors,
}


def kept(bench: Bench) -> Path:
    """A run of 6 steps, to copy."""
    folder = bench.folder / "kept"
    return folder if folder.exists() else bench.whole("kept", BEFORE)


def contradiction(bench: Bench, what: str) -> Outcome:
    """The previous checkpoint is used, and the reason reported."""
    out = copy_of(kept(bench), what.replace(" ", "-").replace("/", "-").replace(",", ""))
    CONTRADICTIONS[what](list_checkpoints(out)[0])
    began = time.monotonic()
    said, lost = bench.resume(out, BEFORE - 2)
    assert lost == 2
    read = f"{first_line(said, 'warning[MP646]')}; {first_line(said, 'resumed from')}"
    return Outcome(what.replace("its", "the newest checkpoint's", 1), read, lost, time.monotonic() - began, 0)


def killed_between_renames(bench: Bench) -> Outcome:
    """The folder as a kill between the two renames of a second save of a step leaves it."""
    out = copy_of(kept(bench), "between-renames")
    newest = list_checkpoints(out)[0]
    newest.rename(newest.with_name(f".{newest.name}.replaced"))
    (newest.parent / ".step-00000002.partial").mkdir()
    began = time.monotonic()
    said, lost = bench.resume(out, BEFORE)
    assert lost == 0
    assert not list(newest.parent.glob(".*"))
    return Outcome(
        "a kill between the two renames of a save", first_line(said, "a killed save had renamed"), 0, time.monotonic() - began, 0
    )


def old_one_stays(bench: Bench) -> Outcome:
    """The disk refuses to remove an old checkpoint."""
    out, real = copy_of(kept(bench), "stays"), shutil.rmtree

    def refuse(path: Path, **named: Any) -> None:
        if path.name.endswith(".removed"):
            raise PermissionError(1, os.strerror(1))
        real(path, **named)

    megarun.checkpoint.storage.shutil.rmtree = refuse  # type: ignore[assignment]
    began = time.monotonic()
    try:
        said, lost = bench.resume(out, BEFORE)
    finally:
        megarun.checkpoint.storage.shutil.rmtree = real
    return Outcome("an old checkpoint cannot be removed", first_line(said, "warning[MP657]"), lost, time.monotonic() - began, 0)


def cut_metrics(bench: Bench) -> Outcome:
    """A process killed while it writes a line."""
    out = copy_of(kept(bench), "cut-line")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    began = time.monotonic()
    said, lost = bench.resume(out, BEFORE)
    assert max(losses(out)) == max(bench.expected)
    return Outcome("the last line of metrics.jsonl is cut off", first_line(said, "resumed from"), lost, time.monotonic() - began, 0)


def truncated_while_read(bench: Bench) -> Outcome:
    """The token file loses its end in step 4, after the first save: no SIGBUS."""
    tokens, out, real = bench.folder / "shrinking.tokens", bench.folder / "shrinking", TokenFile.read
    shutil.copyfile(bench.tokens, tokens)
    times = [0]

    def read(self: TokenFile, *words: Any) -> Any:
        times[0] += 1
        if times[0] == 4:
            os.truncate(tokens, 4096)
        return real(self, *words)

    TokenFile.read = read  # type: ignore[method-assign]
    try:
        status, said, seconds = bench.here(["train", str(bench.one), "--data", str(tokens), "--out", str(out), "--save-every", "2"])
    finally:
        TokenFile.read = real  # type: ignore[method-assign]
    assert status == ERROR, said
    assert newest_step(out) >= 2
    return Outcome("the token file is truncated during the run", first_line(said, "error[MP614]"), 1, seconds, status)


def another_job(bench: Bench) -> Outcome:
    """A lock of a process that runs: this one."""
    out = copy_of(kept(bench), "used")
    (out / LOCK).write_text(Holder.this_process().text())
    row = refused(bench, "another job uses --out", bench.words(bench.one, out), "MP658")
    assert newest_step(out) == BEFORE
    return row


def lock_left(bench: Bench) -> Outcome:
    """The lock of a process that has ended."""
    out = copy_of(kept(bench), "left")
    document = json.loads(Holder.this_process().text())
    (out / LOCK).write_text(json.dumps(document | {"started": 1}))
    began = time.monotonic()
    said, lost = bench.resume(out, BEFORE)
    return Outcome("a killed job has left its lock", first_line(said, "resumed from"), lost, time.monotonic() - began, 0)


def out_is_a_file(bench: Bench) -> Outcome:
    out = bench.folder / "a-file"
    out.write_text("")
    return refused(bench, "--out is a file", bench.words(bench.one, out), "MP670")


FILES: dict[str, Callable[[Bench], Outcome]] = {
    **{what: (lambda bench, what=what: contradiction(bench, what)) for what in CONTRADICTIONS},
    "killed between renames": killed_between_renames,
    "an old one stays": old_one_stays,
    "metrics cut off": cut_metrics,
    "truncated while read": truncated_while_read,
    "another job": another_job,
    "lock left": lock_left,
    "out is a file": out_is_a_file,
}
