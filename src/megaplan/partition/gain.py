"""The gain of the best cuts over existing ones: the figures against which a manual split is judged (R-25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, cuts_of, num_filled, spans_of
from megaplan.partition.memory import Memory
from megaplan.partition.stack import stack_of
from megaplan.partition.step import Pipeline
from megaplan.partition.values import stack_costs
from megaplan.partition.weigh import fitting_cuts
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts


@dataclass(frozen=True, slots=True)
class Gain:
    """Existing cuts, and the bottleneck optimum under the same constraints and memory.

    Attributes:
        cuts: Cuts of the optimum, with no slot empty; the existing ones if they leave slots empty and are better.
        bottleneck: Cost of the largest slot, or rank, of the existing cuts and of the optimum.
        unit: Unit of that cost.
        step_ns: Replayed step of the existing cuts and of the optimum.
        peak_bytes: Largest peak of any rank, of the existing cuts and of the optimum.
    """

    cuts: tuple[int, ...]
    bottleneck: tuple[int, int]
    unit: str
    step_ns: tuple[int, int]
    peak_bytes: tuple[int, int]


def gain_of_optimum(spec: Spec, inventory: Inventory, spans: Spans, measured: MeasuredCosts | None = None) -> Gain:
    """Compare cuts with the best ones.

    Args:
        spec: A checked spec, whose constraints also hold for the optimum.
        inventory: Parameter tensors of the spec.
        spans: The existing cuts.
        measured: A costs file.
    """
    stack = stack_of(spec, stack_costs(spec, inventory, measured), cuts_of(spans))
    best = spans
    if not stack.rules.problems(stack.num_layers, len(spans)):
        filled = spans_of(fitting_cuts(spec, inventory, stack, measured).cuts, len(inventory.layers))
        worse = stack.bottleneck(filled) > stack.bottleneck(spans)
        best = spans if worse and num_filled(spans) < len(spans) else filled  # an empty slot may be better than none
    pipeline, memory = Pipeline(spec, inventory, measured), Memory(spec, inventory)
    both: Sequence[Spans] = (spans, best)
    before, after = (stack.bottleneck(each) for each in both)
    now, then = (pipeline.step.of(cuts_of(each)) for each in both)
    peak, lower_peak = (memory.largest_peak(each) for each in both)
    return Gain(cuts_of(best), (before, after), stack.costs.unit, (now, then), (peak, lower_peak))
