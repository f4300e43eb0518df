"""Compares estimate and trace per phase and per column, and finds differences above tolerance."""

from dataclasses import dataclass

from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megarun.trace.values import RankTrace

PHASE_SHARE = 0.001
"""Tolerance of a phase and of the peak, as a share of the trace."""
SCALARS_BYTES = 4096
"""Numbers that no ledger lists and that a phase may differ by, however small it is.

These are the loss and its sum, a parameter's step, and in fp64 the squares of gradient norms: one per tensor, and their copy in one tensor
when they are summed.
"""
COLUMN_SHARE, PEAK_SHARE = 0.01, 0.002
"""Tolerance of a column: this share of the column or that share of the rank's peak, whichever is larger."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One number of estimate and trace, in bytes."""

    estimate: int
    trace: int

    @property
    def difference(self) -> int:
        """Estimate − trace; negative for an underestimate."""
        return self.estimate - self.trace

    @property
    def error(self) -> float:
        """The difference as a share of the trace."""
        if self.trace == 0:
            return 0.0 if self.estimate == 0 else float("inf")
        return self.difference / self.trace

    @property
    def within(self) -> bool:
        """True if the error is within the tolerance of a phase."""
        return abs(self.difference) <= max(PHASE_SHARE * self.trace, SCALARS_BYTES)


@dataclass(frozen=True, slots=True)
class RankComparison:
    """One rank's estimate and trace.

    The estimate is allocated bytes, without the allocator's overhead. `reserved` compares the estimate's closed form with a replay of the
    traced allocations and frees in a model of torch's allocator.

    Attributes:
        budget: Estimate of the rank.
        trace: Trace of the rank.
    """

    budget: RankBudget
    trace: RankTrace

    @property
    def phases(self) -> dict[Phase, Pair]:
        """Every phase at its own peak."""
        traced = self.trace.phases
        return {
            phase: Pair(total - self.budget.cells[phase][Column.OVERHEAD], traced[phase]) for phase, total in self.budget.phases.items()
        }

    @property
    def reserved(self) -> Pair:
        """Bytes that the allocator has reserved when all phases are over: a model on both sides."""
        return Pair(self.budget.peak_bytes, max(self.trace.reserved.values(), default=0))

    @property
    def host(self) -> Pair:
        """Host memory of optimizer state."""
        return Pair(self.budget.host.total, self.trace.host_bytes)

    @property
    def peak(self) -> Pair:
        """The largest phase of estimate and trace."""
        phases = self.phases.values()
        return Pair(max(pair.estimate for pair in phases), max(pair.trace for pair in phases))

    @property
    def peak_phase(self) -> Phase:
        """Phase of the estimate's peak, the earliest of equal ones, whose columns the report shows."""
        phases = self.phases
        return max(Phase, key=lambda phase: phases[phase].estimate)

    def columns(self, phase: Phase) -> dict[Column, Pair]:
        """Every column of a phase but the allocator's overhead."""
        estimate, trace = self.budget.cells[phase], self.trace.cells[phase]
        return {column: Pair(estimate[column], trace[column]) for column in Column if column is not Column.OVERHEAD}

    def column_within(self, pair: Pair) -> bool:
        """True if the error is within the tolerance of a column on this rank."""
        return abs(pair.difference) <= max(COLUMN_SHARE * pair.trace, PEAK_SHARE * self.peak.trace)

    @property
    def columns_past_tolerance(self) -> dict[Phase, dict[Column, Pair]]:
        """Columns above tolerance by phase; phases without any are omitted."""
        past = {
            phase: {column: pair for column, pair in self.columns(phase).items() if not self.column_within(pair)} for phase in self.phases
        }
        return {phase: columns for phase, columns in past.items() if columns}

    @property
    def within(self) -> bool:
        """True if peak, phases, every phase's columns, and host memory are all within tolerance."""
        phases = self.phases.values()
        return self.peak.within and self.host.within and all(pair.within for pair in phases) and not self.columns_past_tolerance
