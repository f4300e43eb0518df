"""Layer spans: one half-open `[start, stop)` for each slot, tiling the layers in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location

Spans = tuple[tuple[int, int], ...]


def spans_of(cuts: Sequence[int], num_layers: int) -> Spans:
    """The spans between sorted cuts; a cut c separates layers c − 1 and c."""
    edges = (0, *cuts, num_layers)
    return tuple(pairwise(edges))


def cuts_of(spans: Spans) -> tuple[int, ...]:
    """The cuts between spans: one fewer than slots."""
    return tuple(start for start, _ in spans[1:])


def num_filled(spans: Spans) -> int:
    """Number of slots with layers: a host may give some only an end of the model."""
    return sum(start < stop for start, stop in spans)


def span_problems(spans: Spans, num_layers: int, pp: int, vpp: int, *, may_be_empty: bool = False) -> list[Diagnostic]:
    """Reasons that the spans cannot be the slots of a model (MP324 … MP326); empty if they can.

    Args:
        spans: One half-open span of global layer indices for each slot, in model order.
        num_layers: Layers of the model.
        pp: Pipeline degree.
        vpp: Slots per rank.
        may_be_empty: True if a slot may have no layer.
    """
    found = []
    if len(spans) != pp * vpp:
        found.append(("MP324", f"{len(spans)} spans, and mesh.pp · mesh.vpp = {pp} · {vpp} = {pp * vpp} slots"))
    reached = 0
    for slot, (start, stop) in enumerate(spans):
        if stop < start or (stop == start and not may_be_empty):
            found.append(("MP326", f"slot {slot} is empty: [{start}, {stop})"))
        if start != reached:
            what = f"layers [{reached}, {start}) are in no slot" if start > reached else f"layers [{start}, {reached}) are in two slots"
            found.append(("MP325", f"slot {slot} starts at layer {start}, and the slot before stops at {reached}: {what}"))
        reached = stop
    if reached != num_layers:
        found.append(("MP325", f"the last slot stops at layer {reached}, and model.num_layers = {num_layers}"))
    return [diagnostic(code, detail, Location(key="split.spans")) for code, detail in found]
