"""Reasons that the first row of a search is far above its bound: the layouts that hold the bound down, and their loose terms."""

from megaplan.exploration.engine import Explored
from megaplan.exploration.values import LayoutChoice, Outcome
from megaplan.units import format_gib
from megaplan.wording import plural


def loose_terms(found: Explored) -> str:
    """Names of the loose terms.

    Memory: layouts whose tried cuts do not fit, without a proof for all cuts: the bound on memory excludes temporary tensors of a running
    block. Time: layouts whose best cuts take longer than the bound of their schedule.

    Args:
        found: A search with a row.
    """
    best = found.rows[0].step_ns
    below = sorted((each for each in found.outcomes.values() if each.bound_ns < best), key=lambda each: (each.bound_ns, each.layout))
    unproven, timed = [each for each in below if each.best is None], [each for each in below if each.best is not None]
    parts = []
    if unproven:
        least = min((each.bound_ns for each in timed), default=best)
        parts.append(
            f"memory: {plural(len(unproven), 'layout')} with a smaller bound exceed it with all cuts that were tried, but this is not "
            f"proven for all cuts; first {_named(unproven[0].layout)}{_over(unproven[0])}; "
            f"without them the gap is {100 * (best / least - 1):.1f} %"
        )
    if timed and timed[0].best is not None:
        share = 100 * (timed[0].best.step_ns / timed[0].bound_ns - 1)
        parts.append(
            f"time: {plural(len(timed), 'layout')} with a smaller bound are slower than it; first {_named(timed[0].layout)}, whose "
            f"best cuts that fit take {share:.1f} % more than the bound of its schedule"
        )
    left = found.left[:1]
    if left and left[0][0] < best:
        parts.append(f"not explored: {_named(left[0][1])}")
    return "; ".join(parts)


def _named(layout: LayoutChoice) -> str:
    return f"pp {layout.pp}, {layout.kind}, vpp {layout.vpp}, tp {layout.tp}, cp {layout.cp}, micro-batch {layout.micro_batch}"


def _over(outcome: Outcome) -> str:
    return f", over by {format_gib(outcome.over_bytes)} GiB" if outcome.over_bytes > 0 else ""
