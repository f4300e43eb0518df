"""Cells whose linears multiply in eight bits, emulated.

Rounding to eight bits makes a unit in the last place of a sum, which every layout sums in its own order, a step of 2^-4 of an element now
and then. So only layouts whose sums are one process's are held to its bits; for others the tolerance is what such steps make of the
gradients and of three updates. Scales do not add to it: they are powers of two (`megakernels.fp8_linears`).
"""

from parity_cells import C2, RESHARD, SELECTIVE, T2, Cell, pattern

ROWS = {"precision.recipe": {"name": "fp8_rowwise"}}
CURRENT = {"precision.recipe": {"name": "fp8_current"}}
STEPPED = 1e-5
LOW_PRECISION_CELLS = [
    Cell("low-pp2-rows", {"pp": 2}, spec=pattern("AMDR", 4) | ROWS, ci=True),
    Cell("low-pp2-current-selective", {"pp": 2}, spec=pattern("AMDR", 4) | CURRENT | SELECTIVE),
    Cell("low-tp2-rows", T2, spec=pattern("AMD", 3) | ROWS, ci=True, tolerance=STEPPED),
    Cell("low-tp2-current-selective", T2, spec=pattern("AMD", 3) | CURRENT | SELECTIVE, tolerance=STEPPED),
    Cell("low-dp2-current-reshard", {"dp_shard": 2}, spec=pattern("AMD", 3) | CURRENT | RESHARD, tolerance=STEPPED),
    Cell("low-cp2-rows", C2, spec=pattern("AD", 2) | ROWS, tolerance=STEPPED),
]
