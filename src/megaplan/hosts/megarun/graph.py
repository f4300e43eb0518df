"""A block's operations with derived facts: the storage of a name, its keepers, and storages that a recomputed region drops."""

from collections.abc import Mapping
from typing import NamedTuple

from megaplan.blocks.ops import INPUT, Op, again

REDUCE_SCATTER = "reduce_scatter"
AGAIN = "recompute"  # the region's recomputation, among the holders of a storage
LATER = "W"  # the second half of a split backward, among the keepers of a storage


class Graph(NamedTuple):
    """A program with derived facts: view roots, keepers, and the storages that a recompute region reads, drops and caches.

    `parts` are the operations of each checkpoint in order, if a block has several: each recomputes its part of the region separately.
    `passed` are storages that the region makes and other blocks keep: they are freed when the region makes them again.
    """

    ops: tuple[Op, ...]
    roots: dict[str, str]
    held: frozenset[str]
    keepers: dict[str, list[str]]
    saved: frozenset[str]
    region: frozenset[str]
    entering: frozenset[str]
    dropped: frozenset[str]
    cached: frozenset[str]
    away: frozenset[str] = frozenset()
    parts: tuple[frozenset[str], ...] = ()
    passed: frozenset[str] = frozenset()

    @property
    def checkpoints(self) -> tuple[frozenset[str], ...]:
        """Operations of each checkpoint: all in one, if none are stated."""
        return self.parts or (frozenset(op.name for op in self.ops),)

    def made_by(self, part: frozenset[str]) -> frozenset[str]:
        """Storages that a checkpoint's operations make."""
        return frozenset(name for op in self.ops if op.name in part for name in op.makes)

    @property
    def reduced(self) -> frozenset[str]:
        """Partial sums that are reduced over a TP group: a bias is added after the reduction, so in backward its gradient exists first."""
        return frozenset(name for op in self.ops if op.name == REDUCE_SCATTER for name in op.reads)

    def run_again(self, part: frozenset[str], wanted: frozenset[str], *, splittable: bool) -> tuple[Op, ...]:
        """Operations of a checkpoint that recompute runs: up to the last storage that it saves.

        Args:
            part: Operations of the checkpoint.
            wanted: Storages that backward needs.
            splittable: True if a linear's input and weight gradients are separate, so that the last product of the region runs too.
        """
        region = set(self.region & part)
        if splittable:
            dropped = self.dropped & self.made_by(part)
            region |= {op.name for op in self.ops if op.is_linear and self.roots[op.keeps[0]] in dropped}
        inner = tuple(op for op in self.ops if op.name in region)
        saving = [index for index, op in enumerate(inner) if op.saves]
        if not saving:  # frozen parameters: backward needs nothing of the region
            return ()
        stop = saving[-1]
        last = inner[stop]
        if splittable and last.is_linear:
            return *inner[:stop], last._replace(makes=tuple(again(name) for name in last.makes))  # no operation reads it
        runs = not last.keeps_first or any(name in wanted for name in last.makes)  # an operation that was not recomputed keeps its result
        return inner[: stop + 1 if runs else stop]

    @property
    def for_others(self) -> tuple[str, ...]:
        """Storages that other blocks' W needs."""
        return tuple(self.roots[name] for op in self.ops if op.waits for name in op.keeps)

    def again(self, part: frozenset[str]) -> str:
        """The second run of a checkpoint, among the keepers of a storage."""
        return f"{AGAIN} {min(part)}"

    def waiting(self, *, splits: bool) -> dict[str, set[str]]:
        """The keepers of each storage whose backward has not run, when backward begins."""
        found = {name: set(names) for name, names in self.keepers.items() if name != INPUT}
        for part in self.checkpoints:
            inner = [op for op in self.ops if op.name in part & self.region]
            given = self.entering - self.cached  # outputs that the recomputation finds in its cache are not inputs of the region
            for name in frozenset(self.roots[name] for op in inner for name in op.reads) & given & self.saved:
                found.setdefault(name, set()).update(op.name for op in inner)
            for name in self.cached & self.made_by(part):
                found.setdefault(name, set()).add(self.again(part))
        for op in self.ops if splits else ():
            for name in (self.roots[kept] for kept in (op.keeps if op.waits else op.late_keeps)):
                if name != INPUT and not (op.waits and name in self.passed):
                    found[name].add(LATER)
        return found


def roots_of(ops: tuple[Op, ...]) -> dict[str, str]:
    """The storage of every name: for a view, the storage that it views; names that no operation makes belong to other blocks."""
    roots: dict[str, str] = {}
    for op in ops:
        for name in op.reads:
            roots.setdefault(name, name)
        for name in op.makes:
            roots[name] = roots[op.reads[0]] if op.is_view else name
    return roots


def keepers_of(ops: tuple[Op, ...], roots: Mapping[str, str]) -> dict[str, list[str]]:
    """The operations that keep each storage, in execution order."""
    keepers: dict[str, list[str]] = {}
    for op in ops:
        for name in op.keeps:
            keepers.setdefault(roots[name], []).append(op.name)
    return keepers


def dropped_by(ops: tuple[Op, ...], roots: Mapping[str, str], region: frozenset[str], after: frozenset[str]) -> frozenset[str]:
    """Storages made by a recomputed region, except those that later operations keep."""
    behind = frozenset(roots[name] for op in ops if op.name in after for name in op.keeps)
    return frozenset(name for op in ops if op.name in region and not op.is_view for name in op.makes) - behind
