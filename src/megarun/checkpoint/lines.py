"""Lines of checkpoints: ancestry of the checkpoints of a folder after a run resumed from an older one; needs no torch.

A run that starts from a checkpoint other than the newest starts a new line, of which the later checkpoints are not ancestors. A line's
history is a sequence of (number, step): line `number` started after `step` steps of the preceding line in the sequence. A checkpoint is an
ancestor of another one if the history of the other passes through it. Line numbers of a folder increase; the highest is the newest.

Source: PostgreSQL's timelines, which distinguish recoveries from one archive in the same way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megarun.remote import AnyPath

Line = tuple[tuple[int, int], ...]

FIRST_LINE: Line = ((0, 0),)
"""The line of the first run in a folder, and of every checkpoint in a format without lines."""


class Place(NamedTuple):
    """Position of a checkpoint: its line, and optimizer steps done."""

    line: Line
    step: int

    def leads_to(self, other: "Place") -> bool:
        """True if this checkpoint is an ancestor of `other`, or is `other`."""
        depth = len(self.line)
        if other.line[:depth] != self.line:
            return False
        return self.step <= (other.step if len(other.line) == depth else other.line[depth][1])


@dataclass(frozen=True, slots=True)
class Finished:
    """A folder of a checkpoint, damaged or not.

    Attributes:
        path: Folder of the checkpoint.
        step: Optimizer steps done, from the folder's name.
        place: Position from the manifest; None if the manifest cannot be read.
    """

    path: AnyPath
    step: int
    place: Place | None


def check_line(line: Line) -> Line:
    """Return the line if it is valid.

    Raises:
        ValueError: It is empty, or numbers or steps do not increase.
    """
    if not line or any(one[0] >= two[0] or one[1] > two[1] for one, two in pairwise(line)):
        raise ValueError(f"line = {line} is not a history of lines")
    return line


def by_line(found: Iterable[Finished]) -> list[list[Finished]]:
    """Checkpoints grouped by line, newest line first and newest checkpoint first; each checkpoint occurs once.

    A checkpoint whose manifest cannot be read is assigned to the newest line, because newer ones might depend on it.
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
    """The line of a run's new checkpoints, and the existing checkpoints on other lines.

    Args:
        found: Checkpoints in the run's folder.
        start: Checkpoint of this folder that the run continues; None if it continues none, or one of another folder.
        step: Optimizer steps done at the start of the run.
    """
    known = [each for each in found if each.place is not None]
    left = [each for each in known if start is None or (each.place is not None and not each.place.leads_to(start))]
    if not left:
        return (start.line if start is not None else FIRST_LINE), []
    number = 1 + max(each.place.line[-1][0] for each in known if each.place is not None)
    return (*(start.line if start is not None else ()), (number, step)), left
