"""Which checkpoints of a folder belong together, where a run began from the middle of another one; needs no torch.

A run that starts from a checkpoint that is not the newest does not come of those behind it, and begins a new line. A line's history is a
row of (number, step): line `number` began after `step` steps, from the line before it in the row. A checkpoint lies on the line of another
one if that one's history passes through it. Line numbers of a folder rise, and the highest is the newest.

Source: PostgreSQL's timelines, which tell recoveries from one archive apart in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

Line = tuple[tuple[int, int], ...]

FIRST_LINE: Line = ((0, 0),)
"""Of a run that nothing went before in its folder, and of every checkpoint that was written before there were lines."""


class Place(NamedTuple):
    """Where a checkpoint stands: its line, and optimizer steps done."""

    line: Line
    step: int

    def leads_to(self, other: Place) -> bool:
        """Whether `other` came of this one, or is this one."""
        depth = len(self.line)
        if other.line[:depth] != self.line:
            return False
        return self.step <= (other.step if len(other.line) == depth else other.line[depth][1])


@dataclass(frozen=True, slots=True)
class Finished:
    """A folder with a manifest.

    Attributes:
        path: The folder.
        step: Of its name.
        place: Of its manifest; None if that cannot be read.
    """

    path: Path
    step: int
    place: Place | None


def check_line(line: Line) -> Line:
    """The line, if it is one.

    Raises:
        ValueError: It is empty, or numbers or steps do not rise.
    """
    if not line or any(one[0] >= two[0] or one[1] > two[1] for one, two in pairwise(line)):
        raise ValueError(f"line = {line} is no history of lines")
    return line


def by_line(found: Iterable[Finished]) -> list[list[Finished]]:
    """Checkpoints by line, each from its newest to its oldest; the newest line comes first, and each checkpoint once.

    One whose manifest cannot be read counts to the newest line: its place is unknown, and so is whether newer ones need it.
    """
    rest, lines = list(found), []
    while rest:
        known = [each.place for each in rest if each.place is not None]
        head = max(known, key=lambda place: (place.line[-1][0], place.step), default=None)
        on_line = [each for each in rest if each.place is None or (head is not None and each.place.leads_to(head))]
        rest = [each for each in rest if each not in on_line]
        lines.append(sorted(on_line, key=lambda each: each.step, reverse=True))
    return lines


def next_line(found: Sequence[Finished], start: Place | None, step: int) -> tuple[Line, list[Finished]]:
    """The line of what a run will save, and the checkpoints that it leaves: those on other lines.

    Args:
        found: What its folder holds.
        start: The checkpoint of this folder that it goes on from; None if it goes on from none, or from another folder's.
        step: Steps done where it begins.
    """
    known = [each for each in found if each.place is not None]
    left = [each for each in known if start is None or (each.place is not None and not each.place.leads_to(start))]
    if not left:
        return (start.line if start is not None else FIRST_LINE), []
    number = 1 + max(each.place.line[-1][0] for each in known if each.place is not None)
    return (*(start.line if start is not None else ()), (number, step)), left
