"""Writing files: whole or not at all, and nothing replaced by accident."""

from __future__ import annotations

import os
from pathlib import Path

from megaplan.diagnostics import refuse
from megaplan.terminal import output

STDOUT = "-"


def write_new(path: str, text: str, *, force: bool) -> None:
    """Write `text` to a file that does not exist yet, or to stdout for `-`.

    Raises:
        MegaplanError: The file exists and `force` is off, or it cannot be written.
    """
    if path != STDOUT and Path(path).exists() and not Path(path).is_dir() and not force:
        raise refuse("MP482", f"{path} exists", "add --force to replace it", file=path)
    write_whole(path, text)


def check_target(path: str, source: str) -> None:
    """Refuse a target that would be lost: the source itself, or a file that is no plan.

    Raises:
        MegaplanError: MP482, before anything is computed.
    """
    target = Path(path)
    if target.is_dir():
        raise refuse("MP482", f"{path} is a directory", f"name a file, like {target / 'plan.json'}", file=path)
    if not target.is_file():
        return
    if source != STDOUT and Path(source).exists() and target.samefile(source):
        raise refuse("MP482", f"{path} is the spec itself", "-o plan.json", file=path)
    with target.open("rb") as file:
        head = file.read()
    if head.strip() and b'"megaplan.plan/' not in head:
        raise refuse("MP482", f"{path} exists and is no plan; it would be replaced", "-o plan.json", file=path)


def write_picture(path: str, text: str) -> None:
    """Write an SVG, which may replace another SVG and nothing else; to stdout for `-`.

    Raises:
        MegaplanError: MP482, the file exists and is no SVG, or cannot be written.
    """
    target = Path(path)
    if path != STDOUT and target.is_file():
        with target.open("rb") as file:
            head = file.read(1024)
        if head.strip() and b"<svg" not in head:
            raise refuse("MP482", f"{path} exists and is no SVG; it would be replaced", "--svg timeline.svg", file=path)
    write_whole(path, text)


def write_whole(path: str, text: str) -> None:
    """Write `text` to a file, replacing what is there in one step, or to stdout for `-`.

    Raises:
        MegaplanError: The path is a directory, or cannot be written.
    """
    if path == STDOUT:
        output.write(text)
        return
    target = Path(path)
    if target.is_dir():
        raise refuse("MP482", f"{path} is a directory", f"name a file, like {target / 'plan.json'}", file=path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe has nothing to be replaced
            target.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        reason = (error.strerror or type(error).__name__).lower()
        raise refuse("MP482", f"{path}: {reason}", "name a file in a directory that exists and may be written", file=path) from None
