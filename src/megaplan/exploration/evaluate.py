"""Exact values of layouts: cuts chosen by time under memory, the step of those cuts, and the largest peak of any rank."""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from megaplan.budget.evaluation import BlockMemo
from megaplan.budget.values import device_budget
from megaplan.cost.replay import kept
from megaplan.exploration.clock import Clock
from megaplan.exploration.clocks import clock_of
from megaplan.exploration.floors import floors_of
from megaplan.exploration.policies import keeps_more
from megaplan.exploration.recompute import chain
from megaplan.exploration.space import UNSCHEDULED, Space
from megaplan.exploration.values import ONE_RANK, Exact, Fitting, LayoutChoice, MemoryPolicy, Objective, Outcome
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import spans_of
from megaplan.partition.fitting import quick_fitting
from megaplan.partition.memory import Memory
from megaplan.partition.stack import Stack, stack_of
from megaplan.partition.step import shortened
from megaplan.partition.values import Balance, StackCosts
from megaplan.schedules import num_copies, placement
from megaplan.schedules.placement import Placement
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec
from megaplan.spec.pools import device_counts

ROUNDS = 4
"""Splits of one spec that are budgeted in the search for fitting cuts."""
HOPELESS = 20
"""Relative excess of a policy over the memory above which policies that keep more are not tried."""
LIKELY = 1.5
"""Ratio of available memory to the lower bound from which cuts are likely to fit."""
UNLIMITED = 1 << 62
Policies = list[tuple[int, MemoryPolicy]]
"""Policies of a layout, each with a lower bound on its step."""


class Side:
    """Values that specs with one inventory share: whether the vocabulary is sharded decides the tensors of embedding and head."""

    def __init__(self, spec: Spec, copies: int = 1) -> None:
        """`copies` as for `clock_of`."""
        self.inventory: Inventory = build_inventory(spec)
        self.clock: Clock = clock_of(spec, self.inventory, copies)
        self.floors = floors_of(spec, self.inventory)
        self._memos: dict[str, BlockMemo] = {}

    def memo(self, spec: Spec) -> BlockMemo:
        """Blocks of specs with this precision."""
        return self._memos.setdefault(str(spec.precision.grads), BlockMemo())


class Evaluator:
    """Evaluates layouts of one space; shared values are computed once."""

    def __init__(self, space: Space, headroom_bytes: int = 0, objective: Objective = "time", deadline: float | None = None) -> None:
        """`headroom_bytes` must stay free on every rank; the best policy for the objective is chosen for each layout.

        After the deadline, a value of `time.monotonic`, outcomes have only bounds.
        """
        self.space, self.headroom_bytes, self.objective, self.deadline = space, headroom_bytes, objective, deadline
        self._sides: dict[bool, Side] = {}
        self._plain: dict[int, list[MemoryPolicy]] = {}
        self._thrifty: dict[int, MemoryPolicy] = {}
        self._balances: dict[tuple[StackCosts, Placement, int, int], Balance | int] = {}  # the best cuts, or a cost above that of all cuts
        self._looked_at: tuple[LayoutChoice | None, dict[MemoryPolicy, Spec]] = None, {}
        devices = [device_of(each) for _, each in device_counts(space.base, space.devices)]
        self.usable_bytes = max([device_budget(device, space.devices).usable_bytes for device in devices])
        if not space.by_modules:
            self._keep_chain()

    @property
    def is_late(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and monotonic() > self.deadline

    def side(self, spec: Spec) -> Side:
        """Values that specs like this one share."""
        if spec.mesh.vocab_parallel not in self._sides:
            self._sides[spec.mesh.vocab_parallel] = Side(
                spec, max([num_copies(placement(kind)) for kind, _ in self.space.schedules(2)], default=1)
            )
        return self._sides[spec.mesh.vocab_parallel]

    def side_of(self, layout: LayoutChoice, policy: MemoryPolicy) -> Side:
        """The same for the spec of a layout with a policy."""
        known = self._sides.get(policy.vocab_parallel)
        return self.side(self.spec(layout, policy)) if known is None else known

    def spec(self, layout: LayoutChoice, policy: MemoryPolicy) -> Spec:
        """The result of `Space.spec_of`, cached for the current layout."""
        if self._looked_at[0] != layout:
            self._looked_at = layout, {}
        known = self._looked_at[1]
        if policy not in known:
            known[policy] = self.space.spec_of(layout, policy)
        return known[policy]

    def _keep_chain(self) -> None:
        """Reduce many recompute policies to the choice of `exploration.recompute`, by bytes and times of one sequence on one rank."""
        options, space = self.space.recomputes, self.space
        own = space.policies(ONE_RANK)[0]
        plain_spec = space.spec_of(ONE_RANK, own)

        def spec_with(letter: str, policy: str) -> Spec:
            policies = tuple((each, policy if each == letter else "none") for each, _ in options[0])
            return space.spec_of(ONE_RANK, own._replace(recompute=policies))

        def saved(letter: str, policy: str) -> int:
            return -self.side(plain_spec).floors.kept_bytes(spec_with(letter, policy))

        def lost(letter: str, policy: str) -> int:
            return sum(self.side(plain_spec).clock.costs(spec_with(letter, policy)).layers)

        space.keep_recomputes(chain(options, saved, lost))

    def floor_bytes(self, spec: Spec) -> int:
        """Lower bound on the spec's peak memory over all cuts."""
        return self.side(spec).floors.peak_bytes(spec)

    def bound_ns(self, layout: LayoutChoice) -> int:
        """Lower bound on the step over all policies and cuts, and for a mesh over all schedules."""
        if layout.kind != UNSCHEDULED[0] or self.side(self.space.base).clock.knows_schedules:
            return self._bound_of(layout, tight=False)
        slots = self.space.slots_of(layout) or [layout.vpp]
        return min(self._bound_of(layout._replace(vpp=vpp), tight=False) for vpp in slots)

    def _bound_of(self, layout: LayoutChoice, *, tight: bool) -> int:
        return min([self._bound_on(layout, policy, tight=tight) for policy in self._cheapest(layout)])

    def _bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, *, tight: bool) -> int:
        clock = self.side_of(layout, policy).clock
        bound = clock.bound_on(layout, policy, self.spec)
        return max(bound, clock.tight_bound_ns(self.spec(layout, policy))) if tight and clock.knows_schedules else bound

    def step_bound_ns(self, spec: Spec, *, tight: bool = True) -> int:
        """Lower bound on the spec's step over all cuts, and without `tight` over all schedules."""
        clock = self.side(spec).clock
        return max(clock.bound_ns(spec), clock.tight_bound_ns(spec)) if tight else clock.bound_ns(spec)

    def bounds(self, layout: LayoutChoice) -> list[tuple[int, MemoryPolicy]]:
        """Policies of a layout, by the lower bound on their step."""
        return sorted([(self._bound_on(layout, policy, tight=True), policy) for policy in self.space.policies(layout)])

    def fits_nowhere(self, mesh: LayoutChoice) -> int:
        """Smallest excess of every policy and schedule of a mesh over the memory; 0 or less if one may fit."""
        by_side: dict[bool, list[MemoryPolicy]] = {}
        for policy in self.space.policies(mesh):
            by_side.setdefault(policy.vocab_parallel, []).append(policy)
        sides = [(self.side_of(mesh, policies[0]), policies) for policies in by_side.values()]
        most = self.usable_bytes - self.headroom_bytes
        return min(side.floors.least_on(mesh, policies, self.space.spec_of) for side, policies in sides) - most

    def fits_on_no_mesh(self) -> int:
        """Excess of a mean rank over the memory if all ranks store the model and its state together; 0 or less if a layout may fit."""
        specs = (self.space.spec_of(ONE_RANK, policy) for policy in self.space.policies(ONE_RANK))
        stored = min(self.side(spec).floors.stored_bytes(spec) for spec in specs)
        return -(-stored // self.space.devices) - self.usable_bytes + self.headroom_bytes

    def exact(self, layout: LayoutChoice, policy: MemoryPolicy, limit_ns: int = UNLIMITED) -> Exact | Fitting | None:
        """The best cuts that fit, or the excess of the closest that were tried; None if their step is longer than a limit."""
        spec = self.spec(layout, policy)
        memory = self._memory(spec)
        stack = stack_of(spec, self.side(spec).clock.costs(spec))
        most = self.side(spec).clock.most_cost(spec, limit_ns) if limit_ns < UNLIMITED else None
        likely = self._floor_on(layout, policy) * LIKELY <= self.usable_bytes - self.headroom_bytes
        fitting = self.fitting(stack, memory, most, likely=likely)
        if fitting is None:
            return None
        if fitting.over_bytes > 0:
            return fitting
        spans = fitting.spans
        if spec.interleaves_pairs:  # not bound by the slowest slot: exchanges of one slot overlap with computation of another
            spans = shortened(spec, self.side(spec).inventory, spans, memory)
        peak, headroom = memory.fullest(spans)
        return Exact(layout, policy, spans, self.side(spec).clock.step_ns(spec, spans), peak, headroom)

    def fitting(self, stack: Stack, memory: Memory, most: int | None = None, *, likely: bool = False) -> Fitting | None:
        """The fitting cuts that are best for the busiest slot, or rank; None if it costs more than `most`, fitting or not.

        If they are likely to fit, the budget is checked before the sums of memory, which a fitting split keeps anyway.
        """
        found = self._balance(stack, most)
        if found is None:
            return None
        spans = spans_of(found.cuts, stack.num_layers)
        if len(spans) == 1:
            over = max(memory.excesses(spans))
            return Fitting(spans, over, proven=over > 0, by_sums=False)
        if likely and (over := max(memory.excesses(spans))) <= 0:
            return Fitting(spans, over, proven=False)
        limited = replace(stack, sums=memory.sums(spans))
        certain = max(limited.rank_excess(rank, spans) for rank in range(stack.pp))
        if certain <= 0 and (over := max(memory.excesses(spans))) <= 0:  # cuts that exceed the sums are refused without a budget
            return Fitting(spans, over, proven=False)
        quick = quick_fitting(limited, memory, ROUNDS, most)
        if quick.balance is None:
            over = certain if quick.proven else max(memory.excesses(spans))
            return Fitting(spans, over, quick.proven, quick.beyond)
        spans = spans_of(quick.balance.cuts, stack.num_layers)
        return Fitting(spans, max(memory.excesses(spans)), proven=False)

    def _balance(self, stack: Stack, most: int | None) -> Balance | None:
        """The best cuts without memory limits, None if they cost more than `most`.

        Layouts with the same work differ only in schedule, microbatches, data ranks or resharding: a result or refutation for one holds for
        the others.
        """
        key = stack.costs, stack.where, stack.pp, stack.vpp
        known = self._balances.get(key, 0)
        if isinstance(known, int) and (most is None or most > known):
            found = stack.best(most=most)
            if found is None and most is None:
                raise AssertionError("a layout has no more slots than there are places to cut")
            known = kept(self._balances)[key] = most or 0 if found is None else found
        return None if isinstance(known, int) or (most is not None and known.value > most) else known

    def refined(self, mesh: LayoutChoice) -> tuple[int, list[Outcome]]:
        """Bound on a mesh's step over the policies that may fit; and the outcomes of its layouts, if none may fit."""
        over = self.fits_nowhere(mesh)
        if over > 0:
            num = len(self.space.policies(mesh))
            layouts = self.space.layouts_of(mesh)
            return UNLIMITED, [Outcome(layout, None, 0, num, UNLIMITED, proven=True, over_bytes=over) for layout in layouts]
        if not self.space.by_modules:  # computing lower bounds of a schedule for policies by letter takes longer than it saves
            return self.bound_ns(mesh), []
        least, outcomes = UNLIMITED, []
        for layout in self.space.layouts_of(mesh):
            policies = self.bounds(layout)
            bound = next((bound for bound, policy in policies if bound < least and self._may_fit(layout, policy)), UNLIMITED)
            least = min(least, bound)
            if least == UNLIMITED:
                outcomes.append(self._left_out(layout, policies, self.thriftiest(layout)))
        return least, outcomes if least == UNLIMITED else []

    def outcomes(self, mesh: LayoutChoice, limit_ns: int = UNLIMITED) -> list[Outcome]:
        """Outcomes of every schedule of a mesh; see `outcome`."""
        return [self.outcome(layout, limit_ns) for layout in self.space.layouts_of(mesh)]

    def outcome(self, layout: LayoutChoice, limit_ns: int = UNLIMITED) -> Outcome:
        """The layout's best policy, if its step can be shorter than a limit.

        Args:
            layout: The layout.
            limit_ns: Policies with a longer step are left out.
        """
        num_policies = len(self.space.policies(layout))
        if self.is_late:
            return Outcome(layout, None, 0, num_policies, self._bound_of(layout, tight=False), proven=False, is_late=True)
        least = self._bound_of(layout, tight=True)
        if least > limit_ns and self.objective != "headroom":
            return Outcome(layout, None, 0, num_policies, least, proven=False)
        policies, thrifty = self.bounds(layout), self.thriftiest(layout)
        if self.objective != "headroom" and not any(bound <= limit_ns and self._may_fit(layout, policy) for bound, policy in policies):
            return self._left_out(layout, policies, thrifty)
        slowest = {policy: bound for bound, policy in policies}[thrifty]
        tries = slowest <= self._limit(limit_ns)
        found = self.exact(layout, thrifty, self._limit(limit_ns)) if tries else None
        best = found if isinstance(found, Exact) else None
        over = found.over_bytes if isinstance(found, Fitting) else 0
        proven = best is not None or (isinstance(found, Fitting) and found.proven)
        if proven and isinstance(found, Fitting) and found.by_sums and self._keeps_least(thrifty):
            return Outcome(layout, None, 1, num_policies - 1, UNLIMITED, proven, over)
        left, dropped = self._left(layout, policies, thrifty, found)
        bound = min(_bound_after(found, slowest, limit_ns), dropped)
        return self._best_policy(Outcome(layout, best, int(tries), num_policies, bound, proven, over), left, limit_ns)

    def _keeps_least(self, thrifty: MemoryPolicy) -> bool:
        """True if no policy fits once the memory sums refute the policy with the least memory.

        For policies by modules the sums do not contain the tensors that layers keep under full recompute; modules are not ordered this way.
        """
        return not self.space.by_modules or thrifty.full_layers > 0

    def _limit(self, limit_ns: int, best: Exact | None = None) -> int:
        """Upper limit on the step of an acceptable policy."""
        if self.objective == "headroom":
            return UNLIMITED
        return limit_ns if best is None else min(limit_ns, best.step_ns)

    def _may_fit(self, layout: LayoutChoice, policy: MemoryPolicy) -> bool:
        return self._floor_on(layout, policy) <= self.usable_bytes - self.headroom_bytes

    def _floor_on(self, layout: LayoutChoice, policy: MemoryPolicy) -> int:
        return self.side_of(layout, policy).floors.peak_on(layout, policy, self.spec)

    def _left_out(self, layout: LayoutChoice, policies: Sequence[tuple[int, MemoryPolicy]], thrifty: MemoryPolicy) -> Outcome:
        """Outcome of a layout whose policies are all too slow or too large, by their bounds alone."""
        over = max(0, self._floor_on(layout, thrifty) - self.usable_bytes + self.headroom_bytes)
        bound = next((bound for bound, policy in policies if self._may_fit(layout, policy)), UNLIMITED)
        return Outcome(layout, None, 0, len(policies), bound, bound == UNLIMITED, over)

    def _best_policy(self, tried: Outcome, left: Policies, limit_ns: int) -> Outcome:
        """Outcome of a layout whose policy with the least memory has been tried; `left` has the policies to try, as in `bounds`."""
        layout, best, proven, bound = tried.layout, tried.best, tried.proven, tried.bound_ns
        evaluated = tried.num_evaluated
        while left:
            limit = self._limit(limit_ns, best)
            bound = min([bound, *[least for least, _ in left if least > limit]])
            left = [(least, policy) for least, policy in left if least <= limit and self._may_be_better(layout, policy, best)]
            if not left:
                break
            if self.is_late:
                bound = min([bound, *[least for least, _ in left]])
                break
            # a policy that fits excludes slower ones, and one far from fitting excludes ones that save less memory: start in the middle
            least, policy = left.pop(len(left) // 2)
            evaluated += 1
            found = self.exact(layout, policy, limit)
            bound = min(bound, _bound_after(found, least, limit))
            if isinstance(found, Exact):
                best = found if best is None else min(best, found, key=lambda one: one.order(self.objective))
            elif found is not None:
                left, dropped = self._without_more(left, policy, found)
                proven, bound = proven and found.proven, min(bound, dropped)
        return Outcome(layout, best, evaluated, tried.num_pruned - evaluated, bound, proven, 0 if best is not None else tried.over_bytes)

    def _left(
        self, layout: LayoutChoice, policies: Sequence[tuple[int, MemoryPolicy]], thrifty: MemoryPolicy, found: Exact | Fitting | None
    ) -> tuple[Policies, int]:
        """Policies to try after the one with the least memory, and the least bound of the excluded ones that are not proven not to fit.

        If that one is far from fitting, only policies with other kernels remain, whose scratch follows no order.
        """
        left = [(least, policy) for least, policy in policies if policy != thrifty and self._may_fit(layout, policy)]
        if not isinstance(found, Fitting) or found.over_bytes * HOPELESS <= self.usable_bytes:
            return left, UNLIMITED
        dropped = [least for least, policy in left if policy.triton == thrifty.triton]
        return [each for each in left if each[1].triton != thrifty.triton], UNLIMITED if found.proven else min(dropped, default=UNLIMITED)

    def _without_more(self, left: Policies, policy: MemoryPolicy, found: Fitting) -> tuple[Policies, int]:
        """Policies to try after one did not fit, and the least bound of excluded ones that are not proven unfit."""
        if not _hopeless(found, self.usable_bytes):
            return left, UNLIMITED
        kept = [(least, other) for least, other in left if not keeps_more(other, policy)]
        dropped = [least for least, other in left if keeps_more(other, policy)]
        return kept, UNLIMITED if found.proven else min(dropped, default=UNLIMITED)

    def _may_be_better(self, layout: LayoutChoice, policy: MemoryPolicy, best: Exact | None) -> bool:
        """True if a policy may leave as much free memory as the best so far (only for that objective)."""
        if self.objective != "headroom" or best is None:
            return True
        return self.usable_bytes - self._floor_on(layout, policy) >= best.headroom_bytes

    def thriftiest(self, layout: LayoutChoice) -> MemoryPolicy:
        """The policy with the least memory: if no cuts fit with it, the layout does not fit."""
        if not self.space.by_modules:
            return self._thriftiest(layout)
        if layout.tp not in self._thrifty:  # policies by letter are ordered by the time of their recompute, the same for every layout
            self._thrifty[layout.tp] = self._thriftiest(layout)
        return self._thrifty[layout.tp]

    def _thriftiest(self, layout: LayoutChoice) -> MemoryPolicy:
        known: dict[MemoryPolicy, int] = {}

        def saved(policy: MemoryPolicy) -> tuple[int, bool, bool, MemoryPolicy]:
            same = policy._replace(reshard=False, vocab_parallel=False, grads="")  # the tensors that layers keep do not depend on these
            if same not in known:
                spec = self.spec(layout, policy)
                known[same] = self.side(spec).floors.kept_bytes(spec)
            return known[same], not policy.reshard, not policy.vocab_parallel, policy

        return min(self.space.policies(layout), key=saved)

    def _cheapest(self, layout: LayoutChoice) -> list[MemoryPolicy]:
        """Policies without recompute, one of which has the smallest bound."""
        if layout.tp in self._plain:
            return self._plain[layout.tp]
        policies = self.space.policies(layout)
        plain = [policy for policy in policies if not policy.full_layers and not policy.modules]
        plain = [policy for policy in plain if all(name == "none" for _, name in policy.recompute)]
        self._plain[layout.tp] = plain or list(policies)
        return self._plain[layout.tp]

    def _memory(self, spec: Spec) -> Memory:
        side = self.side(spec)
        return Memory(spec, side.inventory, headroom_bytes=self.headroom_bytes, memo=side.memo(spec))


def _hopeless(found: Fitting, usable_bytes: int) -> bool:
    """True if no policy that keeps more is tried."""
    return (found.proven and found.by_sums) or found.over_bytes * HOPELESS > usable_bytes


def _bound_after(found: Exact | Fitting | None, least: int, limit_ns: int) -> int:
    """Lower bound on the step of a policy, after its cuts were searched for under a limit; `least` is the earlier bound."""
    if isinstance(found, Exact):
        return least
    if found is None or not found.proven:
        return max(least, limit_ns) if found is None or found.beyond else least
    return UNLIMITED
