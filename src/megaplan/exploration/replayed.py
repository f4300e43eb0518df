"""The clock of hosts without fitted constants: megarun's step, and bounds of it for all cuts."""

from __future__ import annotations

from megaplan.cost.replay import ReplayTimer, Sums
from megaplan.exploration.clock import Terms
from megaplan.exploration.paths import at_slot, least, mean_path
from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans
from megaplan.partition.values import StackCosts
from megaplan.spec.models import Spec


class ReplayClock:
    """`megaplan.cost.replay` on many layouts."""

    basis = "replay of the schedule with layer times from the device's rates; data parallelism modelled; uncalibrated"

    def __init__(self, inventory: Inventory, spec: Spec) -> None:
        """`spec`: any of those that are timed; they differ in what a search varies."""
        self._timer = ReplayTimer(inventory, spec)

    def bound_ns(self, spec: Spec) -> int:
        """A rank has at least its share of the layers, or the largest of them, every microbatch."""
        sums = self._timer.sums(spec)
        mesh, count = spec.mesh, spec.schedule.microbatches_per_update
        step = max(count * max(-(-sums.total // mesh.pp), sums.largest), sums.chain)
        if mesh.pp > 1 and spec.schedule.kind in ("1f1b", "gpipe"):
            step = max(step, filled(sums.total, mesh.pp, count))
        return step + self._timer.beside(spec, sums)

    def tight_bound_ns(self, spec: Spec) -> int:
        """From a mean of the paths through the schedule."""
        timer, mesh, count = self._timer, spec.mesh, spec.schedule.microbatches_per_update
        sums: Sums = timer.sums(spec)
        if mesh.pp == 1:
            return count * sums.total + timer.beside(spec, sums)
        numbers, turns = mean_path(spec.schedule.kind, mesh.pp, mesh.vpp, count)
        last = timer.inventory.layers[-1]
        found = at_slot(numbers, 0, sums.first) + at_slot(numbers, -1, sums.last) + least(numbers, timer.layer(spec, last, "none"))
        for block, often in timer.makes:
            found += often * least(numbers, timer.layer(spec, block, spec.recompute.of(block.family)))
        return -(-found // turns) + timer.beside(spec, sums)

    def costs(self, spec: Spec) -> StackCosts:
        """F + I + W."""
        times = self._timer.times(spec)
        layers = tuple([layer.total_ns for layer in times.layers])
        return StackCosts(layers, times.first.total_ns, times.last.total_ns, unit="ns")

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """As `planned_time` says it."""
        return self._timer.step_ns(spec, spans)

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """As `planned_time` says them."""
        return self._timer.terms(spec, spans)


def filled(total: int, pp: int, count: int) -> int:
    """A bound of 1F1B's and GPipe's step: T ≥ W / (1 − (1 − 1/m)^p), W the time of one microbatch on all p ranks.

    A rank's m microbatches wait for the forwards of those before it, and the backwards of those follow: m · t_r + Σ_{s < r} t_s ≤ T. The
    largest Σ t_r that this allows is T (1 − (1 − 1/m)^p).
    """
    whole, left = count**pp, (count - 1) ** pp
    return int(-(-total * whole // (whole - left)))
