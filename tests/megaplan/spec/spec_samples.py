"""A small spec with every letter, and copies of it with changes."""

from collections.abc import Callable
from pathlib import Path

from megaplan.errors import Diagnostic
from megaplan.spec.load import LoadedSpec

REPOSITORY = Path(__file__).parents[3]
SAMPLE = Path(__file__).with_name("sample.yaml").read_text(encoding="utf-8")

Edit = tuple[str, str]
Accepted = Callable[..., LoadedSpec]
Refused = Callable[..., tuple[Diagnostic, ...]]


def edited(*edits: Edit) -> str:
    """The sample with each old text replaced once; an edit that finds nothing is a mistake of the test."""
    text = SAMPLE
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text
