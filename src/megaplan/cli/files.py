"""Atomic file writes that never replace a different file by accident."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megaplan.diagnostics import refuse
from megaplan.terminal import output

if TYPE_CHECKING:
    from megaplan.importers.imported import Imported

STDOUT = "-"


def expanded(names: Sequence[str]) -> list[str]:
    """Names with patterns such as `plans/*.json` replaced by the files that match, in order; a name that matches nothing stays."""
    from glob import glob  # noqa: PLC0415

    found: list[str] = []
    for name in names:
        is_pattern = any(mark in name for mark in "*?[") and not os.path.exists(name)
        found += sorted(glob(name, recursive=True)) or [name] if is_pattern else [name]
    return found


def write_new(path: str, text: str | bytes, *, force: bool) -> None:
    """Write `text` to a file that does not exist yet, or to stdout for `-`.

    Raises:
        MegaplanError: The file exists and `force` is off, or it cannot be written.
    """
    if path != STDOUT and os.path.exists(path) and not os.path.isdir(path) and not force:
        raise refuse("MP482", f"{path} exists", "add --force to replace it", file=path)
    write_whole(path, text)


def write_spec(target: str, imported: Imported, title: str, *, force: bool) -> None:
    """Write an imported spec as `write_new` does, and report what the importer found.

    Args:
        target: Output file; - for stdout.
        imported: The spec.
        title: First comment of the file.
        force: Replace the file if it exists.
    """
    write_new(target, imported.text(title), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}\n")
    output.report(imported.loaded.diagnostics)


def check_target(path: str, source: str) -> None:
    """Refuse a target that must not be overwritten: the source itself, or a file that is not a plan.

    Raises:
        MegaplanError: MP482, before anything is computed.
    """
    target = Path(path)
    if os.path.isdir(target):
        raise refuse("MP482", f"{path} is a directory", f"name a file, like {target / 'plan.json'}", file=path)
    if not os.path.isfile(target):
        return
    if source != STDOUT and os.path.exists(source) and target.samefile(source):
        raise refuse("MP482", f"{path} is the spec itself", "-o plan.json", file=path)
    with target.open("rb") as file:
        head = file.read()
    if head.strip() and b'"megaplan.plan/' not in head:
        raise refuse("MP482", f"{path} exists and is not a plan; it would be overwritten", "-o plan.json", file=path)


def write_picture(path: str, text: str) -> None:
    """Write an SVG, which may replace only another SVG; to stdout for `-`.

    Raises:
        MegaplanError: MP482, the file exists and is not an SVG, or cannot be written.
    """
    _check_kind(path, b"<svg", "an SVG", "--svg timeline.svg")
    write_whole(path, text)


def write_page(path: str, text: str) -> None:
    """Write a report, which may replace only another report; to stdout for `-`.

    Raises:
        MegaplanError: MP482, the file exists and is not a report, or cannot be written.
    """
    _check_kind(path, b'name="generator" content="megaplan"', "a report", "-o report.html")
    write_whole(path, text)


def write_signature(path: str, text: str) -> None:
    """Write a signature, which may replace only another signature.

    Raises:
        MegaplanError: MP482, the file exists and is not a signature, or cannot be written.
    """
    _check_kind(path, b'"megaplan.signature/', "a signature", "mv PLAN OTHER")
    write_whole(path, text)


def _check_kind(path: str, mark: bytes, kind: str, hint: str) -> None:
    """Refuse to replace a file whose first bytes have no such mark."""
    target = Path(path)
    if path != STDOUT and os.path.isfile(target):
        with target.open("rb") as file:
            head = file.read(1024)
        if head.strip() and mark not in head:
            raise refuse("MP482", f"{path} exists and is not {kind}; it would be overwritten", hint, file=path)


def write_whole(path: str, text: str | bytes) -> None:
    """Write `text` atomically to a file, or (only `str`) to stdout for `-`.

    Raises:
        MegaplanError: The path is a directory, or cannot be written.
    """
    if path == STDOUT and isinstance(text, str):
        output.write(text)
        return
    content = text.encode() if isinstance(text, str) else text
    target = Path(path)
    if os.path.isdir(target):
        raise refuse("MP482", f"{path} is a directory", f"name a file, like {target / 'plan.json'}", file=path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if os.path.exists(target) and not os.path.isfile(target):  # a device or a pipe is written directly
            target.write_bytes(content)
            return
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):  # also where the folder is no folder
            partial.unlink()
        reason = (error.strerror or type(error).__name__).lower()
        raise refuse("MP482", f"{path}: {reason}", "name a file in an existing, writable directory", file=path) from None
