"""The values of a split: the cuts with their reason, and the certificate of their quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megaplan.errors import Diagnostic
from megaplan.layout.spans import Spans
from megaplan.schedules.placement import Placement
from megaplan.units import short_count

Mode = Literal["equal", "weighted", "manual"]
CutObjective = Literal["bottleneck", "step_time"]
Measures = Literal["slot", "rank", "step"]


class StackCosts(NamedTuple):
    """Costs of a model's layers and ends: integers of one unit.

    Attributes:
        layers: Cost of each layer, in model order.
        first: Cost added to the first slot (side embeddings; the token embedding costs 0).
        last: Cost added to the last slot (head and MTP).
        unit: Unit of all three.
    """

    layers: tuple[int, ...]
    first: int = 0
    last: int = 0
    unit: str = "flops_per_token"

    def of_slots(self, spans: Spans) -> tuple[int, ...]:
        """Cost of each slot."""
        costs = [sum(self.layers[start:stop]) for start, stop in spans]
        costs[0] += self.first
        costs[-1] += self.last
        return tuple(costs)


class Balance(NamedTuple):
    """The best cuts for the bottleneck.

    Attributes:
        cuts: Cuts, ascending, one fewer than slots.
        value: Cost of the largest slot, or rank. The search has refuted every smaller one.
    """

    cuts: tuple[int, ...]
    value: int


class Certificate(NamedTuple):
    """Quality of a split for its objective (R-29).

    Attributes:
        objective: Objective of `value`: `bottleneck`, the part that paces a step, or `step_time`, the whole step.
        value: Value of these cuts.
        lower_bound: Lower bound for all cuts under the same constraints. For `bottleneck` the search has refuted every smaller value.
        costs: Cost of each slot, in model order.
        unit: Unit of all values.
        measures: Part that `value` is the cost of: the largest slot, the largest rank (V placement), or the step.
    """

    objective: CutObjective
    value: int
    lower_bound: int
    costs: tuple[int, ...]
    unit: str
    measures: Measures = "slot"

    @property
    def gap(self) -> int:
        """Difference from the bound, in the same unit."""
        return self.value - self.lower_bound

    @property
    def optimal(self) -> bool:
        """True if no cuts under the same constraints are better."""
        return self.gap == 0


@dataclass(frozen=True)
class Cuts:
    """A decided split.

    Attributes:
        spans: One half-open layer span for each slot, in model order.
        mode: Mode that decided it.
        objective: Objective of `weighted`; None in the other modes.
        reason: Reason for a manual split.
        protects: Topics of `decided_against`, or free text, that a manual split protects.
        decided_against: Digest of each topic that a manual split may depend on (R-25); empty in the other modes, which are decided again.
        certify: Function that computes the certificate.
        diagnostics: Warnings about these cuts.
    """

    spans: Spans
    mode: Mode
    objective: CutObjective | None
    certify: Callable[[], Certificate] = field(repr=False, compare=False)
    reason: str | None = None
    protects: tuple[str, ...] = ()
    decided_against: dict[str, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate, in every mode against the best cuts under the same constraints. A long schedule's bound takes seconds, once."""
        return self.certify()


def amount(number: int, unit: str, *, named: bool = True) -> str:
    """A cost for display: nanoseconds as milliseconds, counts in thousands, millions, billions, with the name of the unit."""
    if unit == "ns":
        return f"{number / 1e6:,.2f} ms" if number else "0"
    return f"{short_count(number)} {unit.replace('flops_per_token', 'FLOPs a token')}" if named else short_count(number)


def bottleneck(where: Placement, costs: tuple[int, ...]) -> tuple[Measures, int]:
    """The part that paces a step, and its cost: the largest slot; in V placement the largest rank, which owns slots i and 2P − 1 − i."""
    if where == "v":
        return "rank", max(costs[index] + costs[-1 - index] for index in range(len(costs) // 2))
    return "slot", max(costs)
