"""Selection of lists of names whose total weight can be the largest for some weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def undominated(items: Sequence[T], held: Callable[[T], tuple[str, ...]]) -> tuple[T, ...]:
    """Items of which no other one holds at least the same names, as often; of equal ones the first."""
    kept = [_numbered(held(item)) for item in items]
    return tuple(
        item
        for index, item in enumerate(items)
        if not any(
            kept[index] <= other and (kept[index] != other or position < index) for position, other in enumerate(kept) if position != index
        )
    )


def _numbered(names: tuple[str, ...]) -> frozenset[str | tuple[str, int]]:
    """A list of names as a set: repeated names are numbered, so that inclusion of sets is inclusion of lists with multiplicity."""
    found: frozenset[str | tuple[str, int]] = frozenset(names)
    if len(found) == len(names):
        return found
    counts: Counter[str] = Counter()
    members: list[str | tuple[str, int]] = []
    for name in names:
        members.append((name, counts[name]) if counts[name] else name)
        counts[name] += 1
    return frozenset(members)
