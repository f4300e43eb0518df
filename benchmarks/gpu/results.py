"""The file of results: a line of JSON for everything that is found, appended and flushed at once."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
NOT_RUN = "not run"


class Results:
    """Appends to the file of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        truncated = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if truncated:  # the machine went away while a line was written
            self._file.write("\n")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line so that it is there whatever happens next."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def lines_of(folders: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """All lines of several calls, in order; one that is cut off is left out."""
    for folder in folders:
        path = folder / FILE
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def statuses(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Each job's last status."""
    return {line["job"]: line["status"] for line in lines if "job" in line and "status" in line}


def of_done_jobs(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings without status lines; a job that ran twice has the lines of its last run only."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "job" not in line:
            continue
        if line.get("status") == "started":
            found[line["job"]] = []
        elif "status" not in line:
            found.setdefault(line["job"], []).append(line)
    return [line for job in found.values() for line in job]
