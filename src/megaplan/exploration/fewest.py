"""The smallest number of devices on which a model fits, for a search in which no layout does."""

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from megaplan.exploration.engine import SearchTask
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.report import LayoutRow, row_of
from megaplan.exploration.space import Space
from megaplan.exploration.start import first_outcomes
from megaplan.exploration.values import Exact

DOUBLINGS = 8
"""Doublings of the number of devices that are tried."""
STEPS = 8
"""Parts of the numbers between the last doubling that does not fit and the first that does, which are halved."""


class FewestDevices(NamedTuple):
    """A number of devices on which a layout fits.

    Attributes:
        devices: The number.
        row: The layout.
    """

    devices: int
    row: LayoutRow


def fewest_devices(task: SearchTask, ends: float) -> FewestDevices | None:
    """The smallest of the tried numbers of devices, each with the usual layouts; None if none fits within the allowed time.

    Args:
        task: The search in which nothing fits.
        ends: Time after which no further number is tried, a value of `time.monotonic`.
    """
    devices, found = task.space.devices, None
    for number in (devices << power for power in range(1, DOUBLINGS + 1)):
        found = _fitting(task, number, ends)
        if found is not None or monotonic() >= ends:
            break
    if found is None:
        return None
    left = _between(found.devices // 2, found.devices, task.space.base.device.per_node)
    while left and monotonic() < ends:
        middle = len(left) // 2
        smaller = _fitting(task, left[middle], ends)
        found, left = (found, left[middle + 1 :]) if smaller is None else (smaller, left[:middle])
    return found


def _between(low: int, high: int, per_node: int) -> Sequence[int]:
    """Whole nodes between two numbers of devices, or single devices within a node, ascending."""
    step = max(per_node if low >= per_node else 1, (high - low) // STEPS)
    return range(low + step, high, step)


def _fitting(task: SearchTask, devices: int, ends: float) -> FewestDevices | None:
    """The first layout on a number of devices that fits; None after the time at which it ends."""
    if monotonic() >= ends:
        return None
    space = Space(task.space.base, devices, task.space.fixed, tuple(task.space.varied))
    own = Evaluator(space, task.headroom_bytes, deadline=ends)
    if own.fits_on_no_mesh() > 0:
        return None
    best: Exact | None = next((outcome.best for outcome in first_outcomes(own, limited=True) if outcome.best is not None), None)
    return None if best is None else FewestDevices(devices, row_of(best, own))
