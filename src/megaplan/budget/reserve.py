"""The device's reserve: memory outside torch's allocator, item by item (R-45).

Of the mesh only one property changes it: whether a rank has peers, because only then NCCL has communicators. No axis has its own part
(R-41).
"""

from __future__ import annotations

from megaplan.budget.values import DeviceBudget, ReserveItem
from megaplan.columns import Basis
from megaplan.devices import Device

OF_PEERS = "nccl"


def device_budget(device: Device, num_ranks: int) -> DeviceBudget:
    """Capacity and itemised reserve of a device, as the data file states them; items of a spec apply to one rank too.

    Args:
        device: The device, with the spec's figures.
        num_ranks: Number of ranks of the job.
    """
    reserve = [
        ReserveItem(name, figure.value, figure.basis, figure.source)
        for name, figure in device.reserve
        if name != OF_PEERS or num_ranks > 1 or figure.basis is Basis.GIVEN
    ]
    return DeviceBudget(device.name, device.capacity.value, device.capacity.basis, tuple(reserve))
