"""`weighted`: the best cuts for the objective that fit the memory, their certificate, and notes about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import spans_of
from megaplan.partition.memory import Memory
from megaplan.partition.stack import Stack, certify
from megaplan.partition.values import Balance, Certificate
from megaplan.schedules.placement import slots_of_rank
from megaplan.spec.models import Spec
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts
    from megaplan.partition.fitting import Fitted, Overflow


@dataclass(frozen=True)
class Weighted:
    """Decided cuts.

    Attributes:
        cuts: Cuts, ascending.
        certify: Function that computes the certificate.
        notes: MP501 without remedies if the cuts do not fit (`megaplan.advice` adds remedies), MP334 if memory moved them.
    """

    cuts: tuple[int, ...]
    certify: Callable[[], Certificate]
    notes: tuple[Diagnostic, ...] = ()

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate of the cuts."""
        return self.certify()


def fitting_cuts(
    spec: Spec,
    inventory: Inventory,
    stack: Stack,
    measured: MeasuredCosts | None,
    memory: Memory | None = None,
    limited: Stack | None = None,
) -> Weighted:
    """The best bottleneck cuts that fit; the closest to fitting if none do.

    `memory` has the spec's budgets that are known, `limited` is the stack with the sums that every fitting split keeps.
    """
    found, num_layers = stack.best_free, len(inventory.layers)
    free = Weighted(found.cuts, partial(certify, stack, spans_of(found.cuts, num_layers), found.value))
    memory = memory or Memory(spec, inventory, measured)
    if max(memory.excesses(spans_of(found.cuts, num_layers))) <= 0:
        return free
    from megaplan.partition.fitting import Fitted, Overflow, best_fitting, min_overflow_bytes  # noqa: PLC0415

    if spec.mesh.pp * spec.mesh.vpp > 1:
        limited = limited or replace(stack, sums=memory.sums(spans_of(found.cuts, num_layers)))
        fitted = best_fitting(limited, memory)
        if fitted is None:
            overflow = min_overflow_bytes(limited, memory, found.cuts)
            if overflow.overflow_bytes <= 0:  # the search reached cuts that fit
                fitted = Fitted(Balance(overflow.cuts, 0), found.value)
        if fitted is not None:
            certificate = certify(stack, spans_of(fitted.balance.cuts, num_layers), fitted.lower_bound)
            values = f"{free.certificate.value:,} {certificate.unit} there, {certificate.value:,} here"
            note = moved_by_memory(stack, memory, free.cuts, "are the best for cost", f"largest {certificate.measures}: {values}")
            return Weighted(fitted.balance.cuts, lambda: certificate, (note,))
    else:
        (most,) = memory.excesses(spans_of(found.cuts, num_layers))
        overflow = Overflow(found.cuts, most, most)
    closest = partial(certify, stack, spans_of(overflow.cuts, num_layers), found.value)
    return Weighted(overflow.cuts, closest, (_nothing_fits(stack, memory, overflow),))


def cuts_that_fit(stack: Stack, memory: Memory, found: Balance) -> Fitted | None:
    """The cuts of `fitting_cuts` if it finds fitting ones without a descent from cuts that do not fit; else None.

    Args:
        stack: Layer costs, placement and constraints.
        memory: Budgets of its splits.
        found: The best cuts without memory limits.
    """
    from megaplan.partition.fitting import best_fitting  # noqa: PLC0415

    return best_fitting(replace(stack, sums=memory.sums(spans_of(found.cuts, stack.num_layers))), memory)


def moved_by_memory(stack: Stack, memory: Memory, free: tuple[int, ...], praise: str, values: str) -> Diagnostic:
    """The note that memory moved the cuts (MP334).

    Args:
        stack: Layer costs, placement and constraints.
        memory: Budgets of its splits.
        free: The best cuts without limits, which do not fit.
        praise: Criterion by which they are the best.
        values: Values of the given cuts and of the chosen ones.
    """
    excesses = memory.excesses(spans_of(free, stack.num_layers))
    worst = max(range(stack.pp), key=lambda rank: excesses[rank])
    detail = f"cuts {list(free)} {praise} and exceed the memory of pp rank {worst} by {format_bytes(excesses[worst])}\n{values}"
    return diagnostic("MP334", detail, Location(key="split"), (), Severity.NOTE)


def _nothing_fits(stack: Stack, memory: Memory, overflow: Overflow) -> Diagnostic:
    spans = spans_of(overflow.cuts, stack.num_layers)
    excesses = memory.excesses(spans)
    worst = max(range(stack.pp), key=lambda rank: excesses[rank])
    owned = [
        f"slot {slot} with layers [{spans[slot][0]}, {spans[slot][1]})" for slot in slots_of_rank(stack.where, worst, stack.pp, stack.vpp)
    ]
    detail = f"pp rank {worst}, {' and '.join(owned)}, is over by {format_bytes(overflow.overflow_bytes)}"
    if stack.num_layers > 1 and len(spans) > 1:
        detail += (
            "; no split needs less"
            if overflow.lower_bound_bytes == overflow.overflow_bytes
            else (f", the least that was found; no split is over by less than {format_bytes(overflow.lower_bound_bytes)}")
        )
    return diagnostic(DOES_NOT_FIT, detail, Location(key="mesh.pp"), (), Severity.WARNING)
