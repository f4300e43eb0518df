"""The time of a step: costs of a layout's layers, a bound for all cuts, and the exact step for given cuts.

If the step-time model has constants for the host and terms for every block, it is used (`exploration.fitted`). Otherwise the step is the
schedule's replay with layer times from the device's rates, and the exchanges of data ranks (`cost.replay`). All times are whole
nanoseconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.layout.build import Spans
from megaplan.partition.values import StackCosts
from megaplan.spec.models import Spec

Terms = Mapping[str, int]
StepOf = Callable[[Spec, Spans], int]
CHANGES = (("-10 %", 90), ("+10 %", 110))
"""Changes of an efficiency: text, and percent of the old value."""
SKEW = 1.5
"""Rows of the busiest expert rank relative to its even share, under uneven routing."""


class Clock(Protocol):
    """Times specs of one model on one kind of device.

    Attributes:
        basis: Description of the sources of the times.
        knows_schedules: True if `bound_ns` holds for every schedule of a spec's mesh, and so for any number of slots per rank.
    """

    basis: str
    knows_schedules: bool

    def bound_ns(self, spec: Spec) -> int:
        """Lower bound on this spec's step over all cuts."""
        ...

    def bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """The same bound for a layout with a policy; its spec is built only on demand."""
        ...

    def tight_bound_ns(self, spec: Spec) -> int:
        """A bound for the spec's schedule that takes longer to compute and is usually larger."""
        ...

    def costs(self, spec: Spec) -> StackCosts:
        """Costs to balance: nanoseconds of each layer and of both ends."""
        ...

    def most_cost(self, spec: Spec, limit_ns: int) -> int | None:
        """Cost of the busiest slot, or rank, above which the step is longer than the limit; None if unknown."""
        ...

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The step for these cuts."""
        ...

    def variants(self, specs: Sequence[Spec]) -> Iterator[tuple[str, StepOf]]:
        """Steps of these specs with one efficiency changed, and under uneven routing if the times model it, each with its name."""
        ...

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Nanoseconds of the step by term."""
        ...
