"""A copy of megaplan with further lines, in which tests make a thing from its recipe; its commands run in their own processes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import megaplan

ROOT = Path(__file__).parents[2]


def copy_of_megaplan(folder: Path, lines: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """Fill a folder with `src/megaplan` and `docs/errors`, and change the listed files.

    Args:
        folder: An empty folder.
        lines: Added lines of each file (text of the file that occurs once, text that is put after it).
    """
    shutil.copytree(Path(megaplan.__file__).parent, folder / "src/megaplan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs/errors", folder / "docs/errors")
    for name, additions in lines.items():
        file = folder / name
        text = file.read_text(encoding="utf-8")
        for after, added in additions:
            assert text.count(after) == 1, (name, after)
            text = text.replace(after, after + added)
        file.write_text(text, encoding="utf-8")
    return folder


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the copy, `megaplan WORDS`, or of Python if they begin with `-c`; in the copy's folder, on lines of 200 columns."""
    environment = {"PYTHONPATH": os.pathsep.join([str(copy / "src"), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    command = [sys.executable, *(words if words[0] == "-c" else ("-m", "megaplan", *words))]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
