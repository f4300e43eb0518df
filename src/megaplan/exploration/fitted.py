"""The clock of hosts with constants in the step-time model."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megaplan.cost.step.blocks import kinds_in
from megaplan.cost.step.compose import (
    Exchanged,
    PassTerms,
    StageTerms,
    exchanged_seconds,
    exposed_seconds,
    optimizer_seconds,
    overlapped_passes,
    pass_seconds,
)
from megaplan.cost.step.constants import values
from megaplan.cost.step.data import Once, once_of
from megaplan.cost.step.from_spec import step_of, timed_step
from megaplan.cost.step.names import names_of
from megaplan.cost.step.pipeline import grown, pipeline_seconds
from megaplan.cost.step.predict import Passes, StepTimer, links_crossed, once_a_stage, pass_terms, stage_terms
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, StageShape, TimedStep
from megaplan.exploration.clock import CHANGES, StepOf, Terms
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.partition.values import StackCosts
from megaplan.schedules import placement, slot_owner
from megaplan.spec.models import Spec

SECOND_NS = 1e9
SLACK = 1 - 1e-9
"""Fraction of a bound that is kept, for the rounding of its sums."""
ROUNDED = 1
"""Nanoseconds by which a layer's cost may be rounded up."""
NOTHING: Passes = ({}, {})


class FittedClock:
    """`megaplan.cost.step` on many meshes: the time of a block is computed once for each local shape."""

    basis = "step-time model with fitted constants"
    knows_schedules = False

    def __init__(self, inventory: Inventory, constants: Mapping[str, float] | None = None) -> None:
        """`constants` are given by name; None for the data file's."""
        self._inventory, self._constants = inventory, constants
        self._kinds = kinds_in(inventory).layers
        self._counts = {kind: float(count) for kind, count in Counter(self._kinds).items()}
        self._timers: dict[tuple[object, ...], StepTimer] = {}
        self._blocks: dict[tuple[object, ...], StageTerms] = {}  # sums of all blocks and both ends
        self._each: dict[tuple[object, ...], StageTerms] = {}  # terms that every stage has once
        self._once: dict[tuple[object, ...], tuple[Once, Exchanged]] = {}
        self._costs: dict[tuple[object, ...], StackCosts] = {}
        self._steps: dict[MemoryPolicy, TimedStep] = {}  # one step per policy: its times that do not depend on mesh and batch
        self._machine: Machine | None = None  # the device of all specs

    def bound_ns(self, spec: Spec) -> int:
        """See `bound_on`."""
        work, timer = self._whole(spec)
        return self._bound_of(work, timer)

    def bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """The bound assumes that work is spread evenly over the ranks.

        It also assumes that the passes of the whole model hide the exchanges of data ranks. A pass combines device and host time
        by a norm, so the passes of all stages take at least as long as one pass of the whole model.
        """
        like = self._steps.get(policy)
        if like is None:
            like = self._steps[policy] = self._whole(spec_of(layout, policy))[0]
        data, world = layout.dp_replicate * layout.dp_shard, layout.pp * layout.tp * layout.cp * layout.dp_replicate * layout.dp_shard
        mesh = MeshShape(world, layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, data)
        work = replace(like, mesh=mesh, batch=BatchShape(layout.micro_batch, like.batch.seq, layout.num_microbatches))
        return self._bound_of(work, self._timer(work))

    def _bound_of(self, work: TimedStep, timer: StepTimer) -> int:
        mesh, rates = work.mesh, timer.rates(work)
        forward, backward = (pass_seconds(terms, rates) for terms in self._passes(work, timer))
        once, exchanged = self._exchanged(work, rates)
        share = overlapped_passes(forward / mesh.pp, backward / mesh.pp, exchanged, once, rates)
        busy = pipeline_seconds(work.batch.num_microbatches, mesh.vpp, [(float(mesh.pp), sum(share))])
        exposed = exposed_seconds(exchanged, once, rates, *overlapped_passes(forward, backward, exchanged, once, rates))
        seconds = grown(busy + exposed, rates["growth"], once.log2_nodes) + optimizer_seconds(once, rates) + rates["fixed"]
        return int(seconds * work.machine.step_factor * SECOND_NS * SLACK)

    def _passes(self, work: TimedStep, timer: StepTimer) -> tuple[PassTerms, PassTerms]:
        """Both passes of all stages together; terms that every stage has once are counted per stage."""
        mesh, batch, once = work.mesh, work.batch, once_a_stage(work.software)
        shape = id(timer), batch.micro, mesh.cp, mesh.tp, links_crossed(work)
        key: tuple[object, ...] = (*shape, mesh.ep, mesh.etp)
        blocks = self._blocks.get(key)
        if blocks is None:
            parts = {kind: passes for kind, passes in timer.parts(work).items() if kind not in once}
            blocks = self._blocks[key] = stage_terms(work, work.stages[0], dict.fromkeys(once, NOTHING) | parts)
        key = (*shape, mesh.vpp, mesh.pp > 1) if len(once) == 1 else (*shape, mesh.vpp, mesh.pp, mesh.ep, mesh.etp)
        each = self._each.get(key)
        if each is None:
            parts = dict.fromkeys(("embedding", "head"), NOTHING) | timer.parts(work, once)
            each = self._each[key] = stage_terms(work, StageShape(1.0, {}), parts)
        return _plus(blocks.forward, each.forward, mesh.pp), _plus(blocks.backward, each.backward, mesh.pp)

    def _exchanged(self, work: TimedStep, rates: Mapping[str, float]) -> tuple[Once, Exchanged]:
        """Exchanges of data ranks, which do not depend on schedule and micro-batch."""
        key = work.mesh._replace(vpp=1), work.software
        found = self._once.get(key)
        if found is None:
            once = once_of(work)
            found = self._once[key] = once, exchanged_seconds(once, rates)
        return found

    def tight_bound_ns(self, spec: Spec) -> int:
        """The bound of `bound_ns`."""
        return self.bound_ns(spec)

    def costs(self, spec: Spec) -> StackCosts:
        """Forward and backward of each block separately, to balance slots; they do not add up to a step."""
        work, timer = self._whole(spec)
        key = work.batch.micro, work.mesh.cp, work.mesh.tp, work.mesh.ep, work.mesh.etp, links_crossed(work), id(timer)
        if key not in self._costs:
            self._costs[key] = self._costs_of(work, timer)
        return self._costs[key]

    def _costs_of(self, work: TimedStep, timer: StepTimer) -> StackCosts:
        rates, parts = timer.rates(work), timer.parts(work)

        def cost(kind: str) -> int:
            return round(sum(float(pass_seconds(pass_terms({kind: 1.0}, parts, run), rates)) for run in (0, 1)) * SECOND_NS)

        each = {kind: cost(kind) for kind in self._counts}
        return StackCosts(tuple([each[kind] for kind in self._kinds]), cost("embedding"), cost("head"), unit="ns")

    def most_cost(self, spec: Spec, limit_ns: int) -> int | None:
        """Costs do not add up to a step, but a rank's work on the device, or its host's launches, are a share of them.

        A step takes at least g (m t + (T − t) / v + x) + o, where t is the time of the rank with the slot, T that of the whole model, x the
        least exposed time, and o the optimizer and fixed time. t is at least that share of the slot's cost.
        """
        work, timer = self._whole(spec)
        mesh, rates = work.mesh, timer.rates(work)
        forward, backward = (float(pass_seconds(terms, rates)) for terms in self._passes(work, timer))
        once, exchanged = self._exchanged(work, rates)
        exposed = float(exposed_seconds(exchanged, once, rates, *overlapped_passes(forward, backward, exchanged, once, rates)))
        left = limit_ns / SECOND_NS / work.machine.step_factor - float(optimizer_seconds(once, rates)) - rates["fixed"]
        times = work.batch.num_microbatches - 1 / mesh.vpp
        if times <= 0:
            return None
        longest = (left / float(grown(1.0, rates["growth"], once.log2_nodes)) - exposed - (forward + backward) / mesh.vpp) / times
        return int(longest / self._share_of_costs(work, timer) * SECOND_NS / SLACK) + ROUNDED * len(self._kinds)

    def _share_of_costs(self, work: TimedStep, timer: StepTimer) -> float:
        """The device's part of every block's cost, or the host's if that is larger; each sums to a rank's."""
        rates, parts = timer.rates(work), timer.parts(work)
        device, host = [], []
        for kind in (*self._counts, "embedding", "head"):
            passes = [pass_terms({kind: 1.0}, parts, run) for run in (0, 1)]
            cost = sum(float(pass_seconds(terms, rates)) for terms in passes)
            if cost:
                device.append(sum(float(pass_seconds(terms._replace(launched=0.0), rates)) for terms in passes) / cost)
                host.append(sum(terms.launched * rates["host"] for terms in passes) / cost)
        return float(max(min(device), min(host)))

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The step, as `planned_time` computes it."""
        work = self._cut(spec, spans)
        return round(self._timer(work).time(work.mesh, work.batch, work.stages).seconds * SECOND_NS)

    def variants(self, specs: Sequence[Spec]) -> Iterator[tuple[str, StepOf]]:
        """Changes of each constant that the steps use; the model has no term for uneven routing."""
        known = values()
        works = [self._whole(spec)[0] for spec in specs]
        used = {name for work in works for factors in names_of(work).values() for name in factors}
        for name in sorted(used & known.keys()):
            for text, percent in CHANGES:
                yield f"{name} {text}", FittedClock(self._inventory, known | {name: known[name] * percent / 100}).step_ns

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Terms of the step, as `planned_time` computes them."""
        work = self._cut(spec, spans)
        step = self._timer(work).time(work.mesh, work.batch, work.stages)
        return {name: round(seconds * SECOND_NS) for name, seconds in step.terms.items()}

    def _timer(self, work: TimedStep) -> StepTimer:
        key = work.software, work.recomputed, work.spec.mesh.vocab_parallel, work.spec.precision.grads
        if key not in self._timers:
            self._timers[key] = StepTimer(work, self._constants)
        return self._timers[key]

    def _cut(self, spec: Spec, spans: Spans) -> TimedStep:
        where, pp = placement(spec.schedule.kind), spec.mesh.pp
        return self._step(spec, spans, [slot_owner(where, slot, pp)[0] for slot in range(len(spans))])

    def _whole(self, spec: Spec) -> tuple[TimedStep, StepTimer]:
        """The step with all blocks on one stage."""
        work = self._step(spec, ((0, len(self._kinds)),), [0])
        return work, self._timer(work)

    def _step(self, spec: Spec, spans: Spans, owners: Sequence[int]) -> TimedStep:
        found = timed_step(spec, self._inventory, spans, owners, step_of(spec), self._machine)
        self._machine = found.machine
        return found


def _plus(terms: PassTerms, other: PassTerms, times: int) -> PassTerms:
    return PassTerms(*(one + times * two for one, two in zip(terms, other, strict=True)))
