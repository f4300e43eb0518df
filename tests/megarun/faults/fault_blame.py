"""Which ranks the messages of a job blame, and for what."""

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
    """Which rank the job says has ended, as far as it says so: `rank 1 (pp 1): its process has ended; then `."""
    found = re.search(r"rank \d+[^\n:]*: its process has ended", said)
    return f"{found[0]}; then " if found else ""
