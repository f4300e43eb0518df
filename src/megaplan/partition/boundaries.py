"""Warnings about the positions of cuts (R-24).

A *routing region* is a maximal run of neighbouring E blocks, a *state region* one of neighbouring R blocks. A cut inside such a run warns;
a cut at its end, or next to a single E or R, does not: dispatch and combine stay within one block, and a recurrence scans over time within
one block, so no state crosses a boundary and the residual stream is all that is sent (R-14).
"""

from __future__ import annotations

from collections.abc import Sequence

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Inventory
from megaplan.partition.constraints import Constraints

_REGIONS = {family.letter: family.region for family in FAMILIES.values() if family.region is not None}


def boundary_warnings(inventory: Inventory, cuts: Sequence[int], owners: Sequence[int], constraints: Constraints) -> list[Diagnostic]:
    """One warning for each cut inside a run of E or of R blocks.

    Args:
        inventory: Layers of the model.
        cuts: Cuts, ascending.
        owners: pp rank of each slot, for the message.
        constraints: Constraints in force, so that the hint to keep the run together is given only if a split remains.
    """
    families = [block.family for block in inventory.layers]
    found = []
    for slot, cut in enumerate(cuts):
        if not 0 < cut < len(families):
            continue  # an end of the pipeline without a layer
        family = families[cut]
        if families[cut - 1] != family or family not in _REGIONS:
            continue
        start, stop = _run(families, cut)
        detail = (
            f"layers [{start}, {stop}) are a run of {stop - start} {family} blocks, and cut {cut} puts layers {cut - 1} and {cut} on slots "
            f"{slot} and {slot + 1}, pp ranks {owners[slot]} and {owners[slot + 1]}"
        )
        kept = Constraints(constraints.forbid, constraints.pin, (*constraints.together, (start, stop)))
        hints = () if kept.problems(len(families), len(owners)) else (f"split: {{together: [[{start}, {stop}]]}}",)
        found.append(diagnostic(_REGIONS[family], detail, Location(key="split"), hints, Severity.WARNING))
    return found


def _run(families: Sequence[str], inside: int) -> tuple[int, int]:
    """The maximal run of one family around a layer, half-open."""
    start = stop = inside
    while start > 0 and families[start - 1] == families[inside]:
        start -= 1
    while stop < len(families) and families[stop] == families[inside]:
        stop += 1
    return start, stop
