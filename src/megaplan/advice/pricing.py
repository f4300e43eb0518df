"""What a changed spec costs: legal or not, bounds of its peak and step, and its cuts and peak as a command would choose and print them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.reserve import device_budget
from megaplan.errors import MegaplanError, Severity
from megaplan.exploration.evaluate import Side
from megaplan.inventory.tensors import Inventory
from megaplan.layout.planned_step import num_actions
from megaplan.layout.spans import Spans, spans_of
from megaplan.partition.certify import stack_of
from megaplan.partition.choose import choose_cuts
from megaplan.partition.constraints import constraints_of
from megaplan.partition.costs import stack_costs
from megaplan.partition.memory import Memory
from megaplan.partition.weigh import cuts_that_fit
from megaplan.scalars import MAX_MICROBATCHES
from megaplan.spec.device import device_of
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.rules import check_rules

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts

RULES, BOUNDS = 300, 400
"""Work of checking a spec, and of its bounds, in steps of about a microsecond."""
FULL_SEARCH = 100_000
"""Of a search for other cuts than the best ones."""
MAX_TIMED = 50_000
"""Actions of a schedule up to which its step is replayed; of longer ones the bound stands for it."""


class Price(NamedTuple):
    """A spec under the cuts that the command chooses.

    Attributes:
        spans: Those cuts.
        peak_bytes: The largest peak of any rank.
        over_bytes: By how much that exceeds what is usable; 0 or less where it fits.
    """

    spans: Spans
    peak_bytes: int
    over_bytes: int


@dataclass
class Work:
    """What may be spent, in steps of about a microsecond; counted, not measured, so that the same spec always gets the same advice."""

    most: int
    spent: int = 0

    @property
    def left(self) -> int:
        """What is left; negative if the last piece was larger."""
        return self.most - self.spent


@dataclass
class Pricer:
    """Prices changes of one spec.

    Attributes:
        kept: Cuts that stand whatever the spec says, as a plan's do.
        baseline: Cuts of an earlier plan, which win among equally good ones.
        measured: The costs file as it applies to a spec; None for modelled costs.
        work: That all prices share.
    """

    kept: Spans | None = None
    baseline: Spans | None = None
    measured: Callable[[Spec, Inventory], MeasuredCosts | None] = lambda _spec, _inventory: None
    work: Work = field(default_factory=lambda: Work(1 << 62))
    _sides: dict[bool, Side] = field(default_factory=dict)

    def side(self, spec: Spec) -> Side:
        """What specs with one inventory share."""
        key = spec.mesh.vocab_parallel
        if key not in self._sides:
            self._sides[key] = Side(spec)
        return self._sides[key]

    def legal(self, spec: Spec) -> bool:
        """Whether the command takes the spec."""
        self.work.spent += RULES
        if spec.schedule.num_microbatches > MAX_MICROBATCHES or spec.schedule.steps_per_update > MAX_MICROBATCHES:
            return False
        if any(item.severity is Severity.ERROR for item in check_rules(spec)):
            return False
        return self.kept is None or len(self.kept) == spec.mesh.num_slots

    def floor_bytes(self, spec: Spec) -> int:
        """No cuts have a smaller peak; 0 for a host without floors."""
        self.work.spent += BOUNDS
        return self.side(spec).floors.peak_bytes(spec)

    def step_ns(self, spec: Spec, spans: Spans | None = None) -> int:
        """The modelled step of some cuts, or a bound for all of them."""
        mesh, clock = spec.mesh, self.side(spec).clock
        if spans is None or num_actions(mesh.pp, mesh.vpp, spec.schedule.num_microbatches) > MAX_TIMED:
            return clock.bound_ns(spec)
        return clock.step_ns(spec, spans)

    def price(self, spec: Spec) -> Price | None:
        """Cuts and peak; None where the command has none, or the work that is left is too little to know."""
        try:
            spans = self._spans(spec)
            return None if spans is None else self._priced(spec, spans)
        except MegaplanError:
            return None

    def _spans(self, spec: Spec) -> Spans | None:
        if self.kept is not None:
            return self.kept
        side = self.side(spec)
        measured = self.measured(spec, side.inventory)
        own = spec.split.mode == "weighted" and spec.split.objective == "bottleneck"
        if not own or self.baseline is not None or parse_pattern(spec.model.pattern, spec.model.num_layers).spans is not None:
            if spec.split.mode == "weighted":
                self.work.spent += FULL_SEARCH
            return choose_cuts(spec, side.inventory, self.baseline, measured=measured).spans
        num_layers = len(side.inventory.layers)
        constraints_of(spec).check(num_layers, spec.mesh.num_slots)
        stack = stack_of(spec, stack_costs(spec, side.inventory, measured))
        memory = Memory(spec, side.inventory, measured, memo=side.memo(spec))
        self.work.spent += stack.partition_work
        found = stack.best()
        if found is None:
            return None
        spans = spans_of(found.cuts, num_layers)
        over = max(memory.excesses(spans))
        if 0 < over * 4 < self.usable_bytes(spec) and spec.mesh.num_slots > 1 and self.work.left > FULL_SEARCH:
            fitted = cuts_that_fit(stack, memory, found)
            spans = spans if fitted is None else spans_of(fitted.balance.cuts, num_layers)
        self.work.spent += memory.work
        return spans

    def _priced(self, spec: Spec, spans: Spans) -> Price:
        side = self.side(spec)
        memory = Memory(spec, side.inventory, memo=side.memo(spec))
        over = max(memory.excesses(spans))
        self.work.spent += memory.work
        return Price(spans, over + self.usable_bytes(spec), over)

    def usable_bytes(self, spec: Spec) -> int:
        """Of the spec's device."""
        return device_budget(device_of(spec.device)).usable_bytes
