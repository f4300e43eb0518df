"""The results of a trace; they need no torch, so that a parent process can collect them."""

from dataclasses import dataclass, field

from megaplan.budget.values import Cells
from megaplan.columns import Column, Phase


@dataclass(frozen=True, slots=True)
class Row:
    """Equal storages.

    Attributes:
        column: Budget column.
        kind: Kind as text.
        name: Name of their parameter, else path of the module that allocated them.
        op: Operation that allocated them.
        shape: Shape of each.
        dtype: Dtype of each.
        count: Number of storages.
        nbytes: Total bytes of all storages.
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
        """Name, count, kind, shape, dtype and operation on one line."""
        times = f"{self.count} × " if self.count > 1 else ""
        return f"{self.name or 'stage'}: {times}{self.kind} {list(self.shape)} {self.dtype} by {self.op.removesuffix('.default')}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A storage that is alive after its forward.

    Attributes:
        block: Inventory block that allocated it.
        row: Description of the storage.
        savers: Paths, relative to the block, of the modules that saved it for backward; empty if autograd did not.
    """

    block: str
    row: Row
    savers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A storage that only the estimate or only the trace has.

    Attributes:
        name: Description for messages.
        column: Budget column.
        estimate: Bytes in the ledger.
        trace: Bytes in the runtime.
    """

    name: str
    column: Column
    estimate: int
    trace: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Result of the trace of one rank.

    Attributes:
        rank: Global rank.
        cells: Bytes by phase and column at the phase's own peak; every phase and column is present.
        rows: Rows of equal storages at the peaks, largest first.
        kept: Storages that the first forward of every stage left alive.
        differences: Differences of these, and of storages alive between two steps, from the ledger.
        num_events: Number of counted allocations, resizes and frees.
        reserved: Bytes that torch's CUDA allocator would have reserved by each phase's end, from a replay of the log; empty without one.
        host_bytes: Host memory of optimizer state and of kept tensors.
    """

    rank: int
    cells: Cells
    rows: dict[Phase, tuple[Row, ...]]
    kept: tuple[Kept, ...]
    differences: tuple[Difference, ...]
    num_events: int
    reserved: dict[Phase, int] = field(default_factory=dict)
    host_bytes: int = 0

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes of each phase at its own peak."""
        return {phase: sum(cells.values()) for phase, cells in self.cells.items()}

    @property
    def peak_phase(self) -> Phase:
        """The phase with the largest peak; the earliest of equal ones, as in the budget."""
        phases = self.phases
        return max(Phase, key=lambda phase: phases[phase])

    @property
    def peak_bytes(self) -> int:
        """The largest phase."""
        return max(self.phases.values())
