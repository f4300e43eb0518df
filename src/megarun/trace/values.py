"""The values of a trace; they need no torch, so that a parent process can collect what others traced."""

from __future__ import annotations

from dataclasses import dataclass

from megaplan.budget.values import Cells
from megaplan.columns import Column, Phase


@dataclass(frozen=True, slots=True)
class Row:
    """Storages of one make.

    Attributes:
        column: Where they are booked.
        kind: What they are, in words.
        name: Of the parameter they belong to, else the path of the module that made them.
        op: The operation that made them.
        shape: Of each.
        dtype: Of each.
        count: How many.
        nbytes: Of all of them.
    """

    column: Column
    kind: str
    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int

    def describe(self) -> str:
        """Name, make, shape and dtype on one line."""
        times = f"{self.count} × " if self.count > 1 else ""
        return f"{self.name or 'stage'}: {times}{self.kind} {list(self.shape)} {self.dtype} by {self.op.removesuffix('.default')}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A storage that outlived its forward.

    Attributes:
        block: Inventory block that made it.
        row: What it is.
        savers: Paths, relative to the block, of what saved it for backward; empty if autograd did not.
    """

    block: str
    row: Row
    savers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A storage that only one side knows.

    Attributes:
        name: What and where, for a person.
        column: Its budget column.
        estimate: Bytes the ledger has.
        trace: Bytes the runtime holds.
    """

    name: str
    column: Column
    estimate: int
    trace: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What a trace of one rank found.

    Attributes:
        rank: The rank.
        cells: Bytes by phase and column at the phase's own peak; every phase and column is present.
        rows: The same storages grouped by make, largest first.
        kept: What the first forward of every stage left alive.
        differences: Where that, or what is alive between two steps, is not what the ledger says.
        num_events: Births, resizes and deaths that were counted.
    """

    rank: int
    cells: Cells
    rows: dict[Phase, tuple[Row, ...]]
    kept: tuple[Kept, ...]
    differences: tuple[Difference, ...]
    num_events: int

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes of each phase at its own peak."""
        return {phase: sum(cells.values()) for phase, cells in self.cells.items()}

    @property
    def peak_phase(self) -> Phase:
        """The phase with the largest peak; of equal ones the earliest, as the budget says it."""
        phases = self.phases
        return max(Phase, key=lambda phase: phases[phase])

    @property
    def peak_bytes(self) -> int:
        """The largest phase."""
        return max(self.phases.values())
