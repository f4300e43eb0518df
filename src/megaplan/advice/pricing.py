"""The price of a changed spec: legality, bounds on peak and step, and its cuts and peak as a command would choose and print them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.values import spec_device
from megaplan.errors import MegaplanError, Severity
from megaplan.exploration.evaluate import Side
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, cuts_of, spans_of
from megaplan.partition.choose import choose_cuts
from megaplan.partition.constraints import constraints_of
from megaplan.partition.memory import Memory
from megaplan.partition.stack import stack_of
from megaplan.partition.step import Pipeline, shortest
from megaplan.partition.values import objective_of, stack_costs
from megaplan.partition.weigh import cuts_that_fit, fitting_cuts
from megaplan.scalars import MAX_MICROBATCHES
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.pools import parts_of
from megaplan.spec.rules import check_rules

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts

RULES, BOUNDS = 300, 400
"""Work of checking a spec, and of its bounds, in steps of about a microsecond."""
WORK_OF_MEAN = 20
"""Work of the bound from means of the sums (`Stack.least_excess`) for each layer of each slot: nearly a hundred iterations."""
SPLITS_TRIED = 30
"""Number of splits that a search for cuts tries in addition to the best one."""
MAX_ACTIONS = 6_000
"""Actions of a schedule up to which its step is replayed and its states bound the peak; longer ones use simpler bounds for both."""
MAX_TIMED = 60_000
"""Actions of a schedule up to which the step of a change that is shown is replayed; longer ones are compared by their bounds."""
WORK_OF_ACTION, WORK_OF_LINK = 12, 8
"""Work of an action in a step that is examined, and in the part that replays of its schedule share."""


class Price(NamedTuple):
    """A spec under the cuts that the command chooses.

    Attributes:
        spans: The cuts.
        peak_bytes: The largest peak of any rank.
        over_bytes: Excess of the peak over usable memory; 0 or less if it fits.
    """

    spans: Spans
    peak_bytes: int
    over_bytes: int


@dataclass
class Work:
    """A work limit in steps of about a microsecond; steps are counted, not measured, so that the same spec always gets the same advice."""

    most: int
    spent: int = 0

    @property
    def left(self) -> int:
        """Remaining work; negative if the last piece was larger."""
        return self.most - self.spent


@dataclass
class Pricer:
    """Prices changes of one spec.

    Attributes:
        kept: Cuts that are fixed whatever the spec says, as a plan's are.
        baseline: Cuts of an earlier plan, which are preferred among equally good ones.
        measured: Function from a spec to its costs file; None for modelled costs.
        work: Work limit that all prices share.
        thorough: True to run the command's own search for cuts that fit, however much the best cuts exceed the memory.
        useless_bytes: A peak above which a change that does not fit is useless: its least peak is not searched.
    """

    kept: Spans | None = None
    baseline: Spans | None = None
    measured: Callable[[Spec, Inventory], MeasuredCosts | None] = lambda _spec, _inventory: None
    work: Work = field(default_factory=lambda: Work(1 << 62))
    thorough: bool = False
    useless_bytes: int = 1 << 62
    _sides: dict[tuple[bool, bool | None], Side] = field(default_factory=dict)
    _schedules: set[tuple[object, ...]] = field(default_factory=set)

    def side(self, spec: Spec) -> Side:
        """Values that specs with one inventory and one setting of the allocator share."""
        key = spec.mesh.vocab_parallel, spec.host.expandable_segments
        if key not in self._sides:
            self._sides[key] = Side(spec)
        return self._sides[key]

    def legal(self, spec: Spec) -> bool:
        """True if the command accepts the spec."""
        self.work.spent += RULES
        if spec.schedule.num_microbatches > MAX_MICROBATCHES or spec.schedule.steps_per_update > MAX_MICROBATCHES:
            return False
        if any(item.severity is Severity.ERROR for item in check_rules(spec)):
            return False
        return self.kept is None or len(self.kept) == spec.mesh.num_slots

    def floor_bytes(self, spec: Spec) -> int:
        """Lower bound on peak memory over all cuts; 0 for a host without such bounds."""
        self.work.spent += BOUNDS
        floors = self.side(spec).floors
        return floors.peak_bytes(spec) if self._few_actions(spec) else floors.shared_bytes(spec)

    def bound_ns(self, spec: Spec) -> int:
        """Lower bound on the modelled step over all cuts."""
        return max(1, self.side(spec).clock.bound_ns(spec))

    def lost(self, before: tuple[Spec, Spans], after: tuple[Spec, Spans]) -> float:
        """Relative increase of the modelled step of `after`; by their bounds if a schedule is very long."""
        if all(spec.num_actions <= MAX_TIMED for spec, _ in (before, after)):
            first, then = (self._step_ns(*each) for each in (before, after))
        else:
            first, then = (self.bound_ns(spec) for spec, _ in (before, after))
        return then / first - 1

    def modelled_ns(self, spec: Spec, spans: Spans) -> int:
        """The step by which changes are ordered; its bound for a long schedule."""
        return self._step_ns(spec, spans) if spec.num_actions <= MAX_TIMED else self.bound_ns(spec)

    def _step_ns(self, spec: Spec, spans: Spans) -> int:
        self.work.spent += WORK_OF_ACTION * spec.num_actions
        return max(1, self.side(spec).clock.step_ns(spec, spans))

    def step_ns(self, spec: Spec, spans: Spans) -> int | None:
        """The step of an estimate; None for a schedule that is too long for the work limit."""
        return self._step_ns(spec, spans) if self._few_actions(spec) else None

    def _few_actions(self, spec: Spec) -> bool:
        return spec.num_actions <= MAX_ACTIONS

    def price(self, spec: Spec) -> Price | None:
        """Cuts and peak; None if the command has no cuts. If it does not fit, the peak may be larger than with the command's cuts."""
        found = self.quick(spec)
        return found if found is None or found.over_bytes > 0 else self.climbed(spec, found)

    def quick(self, spec: Spec) -> Price | None:
        """The price, but under the cuts from which the command searches for others that fit and have a shorter step (`climbed`)."""
        self.work.spent += WORK_OF_ACTION * spec.num_actions
        try:
            return self._own(spec) if self._searches(spec) else self._priced(spec, self._spans(spec))
        except MegaplanError:
            return None

    def climbed(self, spec: Spec, found: Price) -> Price:
        """The command's price, starting from a fitting one of `quick`."""
        if not self._searches(spec) or objective_of(spec) != "step_time" or len(found.spans) == 1:
            return found
        side = self.side(spec)
        measured, baseline = self.measured(spec, side.inventory), self._baseline(spec)
        pipeline, memory = self._pipeline(spec, measured), Memory(spec, side.inventory, measured, memo=side.memo(spec))
        cuts = shortest(pipeline, constraints_of(spec), cuts_of(found.spans), baseline, memory).cuts
        self.work.spent += pipeline.step.work + memory.work
        return self._priced(spec, spans_of(cuts, len(side.inventory.layers)))

    def chosen(self, spec: Spec) -> Price | None:
        """The price with the cuts that the command chooses; the choice has no work limit if nothing fits."""
        try:
            return self._priced(spec, self._spans(spec))
        except MegaplanError:
            return None

    def _searches(self, spec: Spec) -> bool:
        """True if the command searches for cuts, so that the best ones are known before their memory."""
        weighted = self.kept is None and spec.split.mode == "weighted"
        return weighted and parse_pattern(spec.model.pattern, spec.model.num_layers).spans is None

    def _spans(self, spec: Spec) -> Spans:
        if self.kept is not None:
            return self.kept
        inventory = self.side(spec).inventory
        return choose_cuts(spec, inventory, self.baseline, measured=self.measured(spec, inventory)).spans

    def _own(self, spec: Spec) -> Price | None:
        """Cuts by the steps of `choose_cuts`, without the search for the smallest overflow and without the certificate."""
        side = self.side(spec)
        measured = self.measured(spec, side.inventory)
        num_layers, num_slots = len(side.inventory.layers), spec.mesh.num_slots
        constraints_of(spec).check(num_layers, num_slots)
        by_step = objective_of(spec) == "step_time"
        costs = self._pipeline(spec, measured).costs if by_step else stack_costs(spec, side.inventory, measured)
        stack = stack_of(spec, costs, self._baseline(spec))
        memory = Memory(spec, side.inventory, measured, memo=side.memo(spec))
        self.work.spent += stack.partition_work
        found = stack.best_free
        spans = spans_of(found.cuts, num_layers)
        over = max(memory.excesses(spans))
        search = SPLITS_TRIED * (memory.work + stack.partition_work * spec.mesh.vpp)
        if over > 0 and num_slots > 1 and self.thorough:
            limited = replace(stack, sums=memory.sums(spans))
            self.work.spent += WORK_OF_MEAN * num_slots * num_layers
            usable = self.usable_bytes(spec)  # a change that needs at least twice the memory is hopeless, even at its smallest peak
            if limited.least_excess < max(1, min(usable, self.useless_bytes - usable)):
                budgets = memory.num_budgets  # `climbed` then runs the command's search for a shorter step
                spans = spans_of(fitting_cuts(spec, side.inventory, stack, measured, memory, limited).cuts, num_layers)
                partitions = 2 * (memory.num_budgets - budgets) if stack.where == "loop" else 1
                self.work.spent += memory.work + partitions * stack.partition_work
        elif over > 0 and num_slots > 1 and search <= self.work.left and over * 4 < self.usable_bytes(spec):
            fitted = cuts_that_fit(stack, memory, found)
            spans = spans if fitted is None else spans_of(fitted.balance.cuts, num_layers)
        over = max(memory.excesses(spans))
        self.work.spent += memory.work
        return self._priced(spec, spans) if measured is not None else Price(spans, over + self.usable_bytes(spec), over)

    def _baseline(self, spec: Spec) -> tuple[int, ...] | None:
        """Cuts of the earlier plan, if the spec has the same number of slots."""
        return cuts_of(self.baseline) if self.baseline is not None and len(self.baseline) == spec.mesh.num_slots else None

    def _pipeline(self, spec: Spec, measured: MeasuredCosts | None) -> Pipeline:
        """The pipeline of a spec; the work that specs with the same schedule share is charged to the first of them."""
        schedule = spec.schedule.kind, spec.mesh.pp, spec.mesh.vpp, spec.schedule.num_microbatches
        if schedule not in self._schedules:
            self._schedules.add(schedule)
            self.work.spent += WORK_OF_LINK * spec.num_actions
        return Pipeline(spec, self.side(spec).inventory, measured)

    def _priced(self, spec: Spec, spans: Spans) -> Price:
        side = self.side(spec)
        memory = Memory(spec, side.inventory, memo=side.memo(spec))
        over = max(memory.excesses(spans))
        self.work.spent += memory.work
        return Price(spans, over + self.usable_bytes(spec), over)

    def usable_bytes(self, spec: Spec) -> int:
        """Usable bytes of the spec's device, or of the smallest of its pools."""
        return min(spec_device(part.spec, spec.mesh.world_size).usable_bytes for part in parts_of(spec))
