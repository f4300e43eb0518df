"""Exact values of layouts: cuts chosen by time under memory, the step of those cuts, and the largest peak of any rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaplan.budget.evaluation import BlockMemo
from megaplan.budget.reserve import device_budget
from megaplan.exploration.clock import Clock
from megaplan.exploration.clocks import clock_of
from megaplan.exploration.floors import Floors, NoFloors
from megaplan.exploration.recompute import chain
from megaplan.exploration.space import Space
from megaplan.exploration.values import Exact, Layout, Objective, Outcome, Policy
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans, spans_of
from megaplan.partition.certify import stack_of
from megaplan.partition.fitting import quick_fitting
from megaplan.partition.memory import Memory
from megaplan.partition.stack import Stack
from megaplan.spec.device import device_of
from megaplan.spec.models import Spec

ROUNDS = 4
"""Splits of one spec that are budgeted while cuts are looked for that fit."""
HOPELESS = 20
"""A layout whose thriftiest policy exceeds the memory by more than this part of it is not tried with policies that keep more."""
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Fitting:
    """Cuts of one spec.

    Attributes:
        spans: Those that fit, or the ones that were tried last.
        over_bytes: By how much the worst rank exceeds the memory less the headroom asked for; 0 or less where they fit.
        proven: Whether it is proven that no cuts fit.
    """

    spans: Spans
    over_bytes: int
    proven: bool


class Side:
    """What specs with one inventory share: tensors of embedding and head depend on whether the vocabulary is sharded."""

    def __init__(self, spec: Spec) -> None:
        self.inventory: Inventory = build_inventory(spec)
        self.clock: Clock = clock_of(spec, self.inventory)
        self.floors = Floors(self.inventory) if spec.host.name == "megarun" else NoFloors()
        self._memos: dict[str, BlockMemo] = {}

    def memo(self, spec: Spec) -> BlockMemo:
        """Blocks of specs with this precision."""
        return self._memos.setdefault(str(spec.precision.grads), BlockMemo())


class Evaluator:
    """Evaluates layouts of one space; what they share is worked out once."""

    def __init__(self, space: Space, headroom_bytes: int = 0, objective: Objective = "time") -> None:
        """`headroom_bytes` are to stay free on every rank; of a layout's policies the best for the objective is its own."""
        self.space, self.headroom_bytes, self.objective = space, headroom_bytes, objective
        self._sides: dict[bool, Side] = {}
        self.usable_bytes = device_budget(device_of(space.base.device)).usable_bytes
        if space.base.host.name == "megarun":
            self._keep_chain()

    def side(self, spec: Spec) -> Side:
        """What specs like this one share."""
        key = spec.mesh.vocab_parallel
        if key not in self._sides:
            self._sides[key] = Side(spec)
        return self._sides[key]

    def _keep_chain(self) -> None:
        """Of many recompute policies, those of `exploration.recompute`, by bytes and times of one sequence on one rank."""
        options, space = self.space.recomputes, self.space
        plain = Layout(1, 1, "1f1b", 1, 1, 1, 1, 1, 1, 1, 1)
        own = space.policies(plain)[0]
        plain_spec = space.spec_of(plain, own)

        def spec_with(letter: str, policy: str) -> Spec:
            recompute = tuple((each, policy if each == letter else "none") for each, _ in options[0])
            return space.spec_of(plain, own._replace(recompute=recompute))

        def saved(letter: str, policy: str) -> int:
            return -self.side(plain_spec).floors.kept_bytes(spec_with(letter, policy))

        def lost(letter: str, policy: str) -> int:
            return sum(self.side(plain_spec).clock.costs(spec_with(letter, policy)).layers)

        space.keep_recomputes(chain(options, saved, lost))

    def floor_bytes(self, spec: Spec) -> int:
        """No cuts of the spec have a smaller largest peak."""
        return self.side(spec).floors.peak_bytes(spec)

    def bound_ns(self, layout: Layout) -> int:
        """No policy, no cuts and, of a mesh, no schedule give a shorter step."""
        return self._bound_of(layout, tight=False)

    def _bound_of(self, layout: Layout, *, tight: bool) -> int:
        return min(self.step_bound_ns(self.space.spec_of(layout, policy), tight=tight) for policy in self._cheapest(layout))

    def step_bound_ns(self, spec: Spec, *, tight: bool = True) -> int:
        """No cuts give the spec a shorter step; without `tight`, nor does any schedule."""
        clock = self.side(spec).clock
        return max(clock.bound_ns(spec), clock.tight_bound_ns(spec)) if tight else clock.bound_ns(spec)

    def bounds(self, layout: Layout) -> list[tuple[int, Policy]]:
        """Policies of a layout by what their step is at least."""
        return sorted((self.step_bound_ns(self.space.spec_of(layout, policy)), policy) for policy in self.space.policies(layout))

    def fits_nowhere(self, mesh: Layout) -> int:
        """By how many bytes every policy and schedule of a mesh exceeds the memory at least; 0 or less where one may fit."""
        policies = self.space.policies(mesh)
        recomputes = [policy.recompute for policy in policies]
        most = self.usable_bytes - self.headroom_bytes
        specs = {policy._replace(recompute=()) for policy in policies}
        found = [self.space.spec_of(mesh, policy) for policy in specs]
        return min(self.side(spec).floors.least_bytes(spec, recomputes) for spec in found) - most

    def exact(self, layout: Layout, policy: Policy) -> Exact | Fitting:
        """The best cuts that fit, or how far what was tried is from fitting."""
        spec = self.space.spec_of(layout, policy)
        memory = self._memory(spec)
        stack = stack_of(spec, self.side(spec).clock.costs(spec))
        fitting = self.fitting(stack, memory)
        if fitting.over_bytes > 0:
            return fitting
        headroom = self.headroom_bytes - max(memory.excesses(fitting.spans))
        step = self.side(spec).clock.step_ns(spec, fitting.spans)
        return Exact(layout, policy, fitting.spans, step, self.usable_bytes - headroom, headroom)

    def fitting(self, stack: Stack, memory: Memory) -> Fitting:
        """The best cuts for the busiest slot, or rank, of those that fit."""
        found = stack.best()
        if found is None:
            raise AssertionError("a layout has no more slots than there are places to cut")
        spans = spans_of(found.cuts, stack.num_layers)
        over = max(memory.excesses(spans))
        if over <= 0 or len(spans) == 1:
            return Fitting(spans, over, proven=over > 0)
        limited = replace(stack, sums=memory.sums(spans))
        fitted, proven = quick_fitting(limited, memory, ROUNDS)
        if fitted is None:
            return Fitting(spans, over, proven)
        spans = spans_of(fitted.cuts, stack.num_layers)
        return Fitting(spans, max(memory.excesses(spans)), proven=False)

    def outcomes(self, mesh: Layout, limit_ns: int = UNLIMITED) -> list[Outcome]:
        """Of every schedule of a mesh; see `outcome`."""
        over = self.fits_nowhere(mesh)
        layouts = self.space.layouts_of(mesh)
        if over > 0:
            num = len(self.space.policies(mesh))
            return [Outcome(layout, None, 0, num, UNLIMITED, proven=True, over_bytes=over) for layout in layouts]
        return [self.outcome(layout, limit_ns) for layout in layouts]

    def outcome(self, layout: Layout, limit_ns: int = UNLIMITED) -> Outcome:
        """The layout's best policy, where its step can be shorter than a limit.

        Args:
            layout: The layout.
            limit_ns: A policy whose step is known to be longer is left out.
        """
        least = self._bound_of(layout, tight=True)
        num_policies = len(self.space.policies(layout))
        if least > limit_ns and self.objective != "headroom":
            return Outcome(layout, None, 0, num_policies, least, proven=False)
        thrifty = self.thriftiest(layout)
        found = self.exact(layout, thrifty)
        best = found if isinstance(found, Exact) else None
        over = 0 if isinstance(found, Exact) else found.over_bytes
        proven = best is not None or (isinstance(found, Fitting) and found.proven)
        if over * HOPELESS > self.usable_bytes:
            return Outcome(layout, None, 1, num_policies - 1, least, proven, over)
        return self._best_policy(Outcome(layout, best, 1, 0, UNLIMITED, proven, over), thrifty, limit_ns)

    def _best_policy(self, tried: Outcome, thrifty: Policy, limit_ns: int) -> Outcome:
        """The outcome of a layout of which the thriftiest policy has been tried."""
        layout, best, proven, bound = tried.layout, tried.best, tried.proven, UNLIMITED
        evaluated, pruned, policies = 1, 0, self.bounds(layout)
        most = self.usable_bytes - self.headroom_bytes
        for index, (least, policy) in enumerate(policies):
            if policy == thrifty:
                bound = min(bound, least) if best is not None or not tried.proven else bound
                continue
            if self.objective != "headroom" and least > min(limit_ns, best.step_ns if best is not None else limit_ns):
                pruned += len(policies) - index
                bound = min(bound, least)
                break
            floor = self.floor_bytes(self.space.spec_of(layout, policy))
            worse = self.objective == "headroom" and best is not None and self.usable_bytes - floor < best.headroom_bytes
            if floor > most or worse:
                pruned += 1
                continue
            evaluated += 1
            found = self.exact(layout, policy)
            if isinstance(found, Exact):
                bound = min(bound, least)
                best = found if best is None else min(best, found, key=lambda one: one.order(self.objective))
            elif not found.proven:
                proven, bound = False, min(bound, least)
        return Outcome(layout, best, evaluated, pruned, bound, proven, 0 if best is not None else tried.over_bytes)

    def thriftiest(self, layout: Layout) -> Policy:
        """The policy that keeps the least: if no cuts fit with it, the layout does not."""
        policies = self.space.policies(layout)

        def kept(policy: Policy) -> tuple[int, bool, bool, Policy]:
            spec = self.space.spec_of(layout, policy)
            return self.side(spec).floors.kept_bytes(spec), not policy.reshard, not policy.vocab_parallel, policy

        return min(policies, key=kept)

    def _cheapest(self, layout: Layout) -> list[Policy]:
        """Policies one of which has the smallest bound: those that run nothing again."""
        policies = self.space.policies(layout)
        plain = [policy for policy in policies if not policy.full_layers and not policy.modules]
        plain = [policy for policy in plain if all(name == "none" for _, name in policy.recompute)]
        return plain or list(policies)

    def _memory(self, spec: Spec) -> Memory:
        side = self.side(spec)
        return Memory(spec, side.inventory, headroom_bytes=self.headroom_bytes, memo=side.memo(spec))
