"""Jobs on a device that has less memory than they need."""

from typing import Any

import megaplan


def without_room(document: dict[str, Any], share: float) -> dict[str, Any]:
    """The job on an H200 of this share of its peak, or of the largest smaller one at which it does not fit."""
    before = megaplan.estimate(document)
    reserve = before.budget.device.capacity_bytes - before.budget.device.usable_bytes
    while True:  # other cuts may need less
        found = document | {"device": {"name": "h200", "capacity": round(before.peak_bytes * share) + reserve}}
        if not megaplan.estimate(found).fits:
            return found
        share *= 0.9
