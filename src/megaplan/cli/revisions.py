"""Plans of two git revisions: those that changed between them."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.diagnostics import refuse
from megaplan.plan.document import FORMAT

RANGE = ".."


class ChangedPlan(NamedTuple):
    """A plan file that differs between two revisions.

    Attributes:
        path: Path of the file.
        before: The document in the first revision; None if there is none.
        after: The document in the second revision.
    """

    path: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def is_revision(text: str) -> bool:
    """True if an argument of `megaplan diff` is a git revision or a range of them, not a file."""
    return not os.path.exists(text) and (RANGE in text or _git("rev-parse", "--verify", "--quiet", f"{text}^{{commit}}") is not None)


def changed_plans(revisions: str, paths: Sequence[str]) -> list[ChangedPlan]:
    """Plans that differ: `A..B` between A and B, `A...B` between their last common commit and B, `A` between A and the files here.

    Args:
        revisions: A revision or a range.
        paths: Files or folders to which the comparison is limited; empty for the current folder and its subfolders.

    Raises:
        MegaplanError: MP480, git does not know a revision, or this is not a repository.
    """
    first, _, last = revisions.partition("..." if "..." in revisions else RANGE)
    before, after = first or "HEAD", (last or "HEAD") if RANGE in revisions else None
    for name in (before, after):
        if name is not None and _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") is None:
            raise refuse("MP480", f"{name} is not a file, and no revision of a git repository here", "megaplan diff OLD.json NEW.json")
    if "..." in revisions:
        base = _git("merge-base", before, after or "HEAD")
        if base is None:
            raise refuse("MP480", f"{before} and {after} have no common commit", f"megaplan diff {before}..{after}")
        before = base.strip()
    names = _git("diff", "--name-only", "--relative", "-z", before, *([after] if after else []), "--", *(paths or (".",))) or ""
    found = []
    for name in sorted(filter(None, names.split("\0"))):
        if not name.endswith(".json"):
            continue
        old = _plan(_git("show", f"{before}:./{name}"))
        new = _plan(_git("show", f"{after}:./{name}") if after else _text(name))
        if old is not None or new is not None:
            found.append(ChangedPlan(name, old, new))
    return found


def _plan(text: str | None) -> dict[str, Any] | None:
    """The document, if the text is a plan."""
    if text is None or FORMAT.partition("/")[0] not in text:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_plan = isinstance(document, dict) and str(document.get("format", "")).startswith(FORMAT.partition("/")[0] + "/")
    return document if is_plan else None


def _text(name: str) -> str | None:
    path = Path(name)
    return path.read_text(encoding="utf-8", errors="replace") if os.path.isfile(path) else None


def _git(*words: str) -> str | None:
    """Output of a command of git; None if it fails, or if there is no git."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, encoding="utf-8", errors="replace")
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
