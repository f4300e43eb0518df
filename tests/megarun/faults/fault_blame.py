"""Ranks that the messages of a job blame, each with its reason."""

import re

BLAMED = (
    r"rank (\d+)[^\n:]* of \d+ failed first",
    r"rank (\d+)[^\n:]*: its process has ended",
    r"rank (\d+)[^\n:]*: (?:no sign of life|\d+ s there)",
)


def blamed(said: str) -> set[int]:
    """Ranks that are said to have failed, to have ended, or to be stuck."""
    return {int(rank) for form in BLAMED for rank in re.findall(form, said)}


def ended(said: str) -> str:
    """Start of a message, `rank 1 (pp 1): its process has ended; then `, if it says which rank has ended; else empty."""
    found = re.search(r"rank \d+[^\n:]*: its process has ended", said)
    return f"{found[0]}; then " if found else ""
