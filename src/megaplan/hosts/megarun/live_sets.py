"""The tensors that are allocated at a point of a block, and the points that can be the peak for some sizes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LiveSet:
    """Tensors that are allocated while one operation runs: forward storages, gradients, parameter gradients.

    Gradients have the name of their tensor; the last `num_new` are the operation's results. A name occurs twice if a second gradient is
    about to be added to a first. The last `num_own` storages are the operation's own: it makes them to compute gradients. `tensors` are
    storages and gradients together, derived from them.
    """

    op: str
    storages: tuple[str, ...]
    gradients: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    new_params: tuple[str, ...] = ()
    num_new: int = 0
    num_own: int = 0
    tensors: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", (*self.storages, *self.gradients))

    def before(self) -> "LiveSet":
        """The live set just before the operation: without the gradients that it makes, and its own storages."""
        storages = self.storages[: len(self.storages) - self.num_own]
        gradients, kept = self.gradients[: len(self.gradients) - self.num_new], len(self.params) - len(self.new_params)
        return LiveSet(self.op, storages, gradients, self.params[:kept])

    def without(self, storages: Iterable[str]) -> "LiveSet":
        """The live set before an operation without some forward storages."""
        freed = frozenset(storages)
        return replace(self, storages=tuple([name for name in self.storages if name not in freed]))


def largest_points(points: tuple[LiveSet, ...], params: Callable[[LiveSet], tuple[str, ...]]) -> tuple[LiveSet, ...]:
    """Live sets that can be the peak if these parameter gradients count."""
    return undominated(points, lambda point: (*point.storages, *_marked(point, params(point))))


def _marked(point: LiveSet, params: tuple[str, ...]) -> tuple[str, ...]:
    """Gradients and parameter gradients, under names that no storage has."""
    return (*(f"d.{name}" for name in point.gradients), *(f"p.{name}" for name in params))


def undominated(items: Sequence[T], held: Callable[[T], tuple[str, ...]]) -> tuple[T, ...]:
    """Items whose names are not all contained, with multiplicity, in another item; among equal items the first."""
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
