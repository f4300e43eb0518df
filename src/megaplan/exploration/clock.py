"""The time of a step: what a layout's layers cost, a bound for all cuts, and the exact step of given cuts.

Where the step-time model has constants for the host and terms for every block, it is that model (`exploration.fitted`). Else it is the
schedule's replay with layer times from the device's rates, and what data ranks exchange (`cost.replay`). All times are whole
nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.layout.spans import Spans
from megaplan.partition.values import StackCosts
from megaplan.spec.models import Spec

Terms = Mapping[str, int]
StepOf = Callable[[Spec, Spans], int]
CHANGES = (("-10 %", 90), ("+10 %", 110))
"""Changes of an efficiency: in words, and as percent of what it was."""
SKEW = 1.5
"""Rows of the busiest expert rank over its even share, under uneven routing."""


class Clock(Protocol):
    """Times specs of one model on one kind of device.

    Attributes:
        basis: What the times rest on, in words.
        knows_schedules: True if `bound_ns` holds for every schedule of a spec's mesh, and so for any number of slots a rank.
    """

    basis: str
    knows_schedules: bool

    def bound_ns(self, spec: Spec) -> int:
        """Lower bound on this spec's step over all cuts."""
        ...

    def bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """The same of a layout with a policy, whose spec is made only where it is needed."""
        ...

    def tight_bound_ns(self, spec: Spec) -> int:
        """A bound for the spec's schedule that takes longer and is mostly larger."""
        ...

    def costs(self, spec: Spec) -> StackCosts:
        """Costs to balance: nanoseconds of each layer and of both ends."""
        ...

    def most_cost(self, spec: Spec, limit_ns: int) -> int | None:
        """With a larger cost of the busiest slot, or rank, the step is longer than the limit; None if that is not known."""
        ...

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The step of these cuts."""
        ...

    def variants(self, specs: Sequence[Spec]) -> Iterator[tuple[str, StepOf]]:
        """Steps of these specs with one efficiency changed, and under uneven routing where the times know it, each with its name."""
        ...

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Nanoseconds of the step by term."""
        ...
