"""The device's reserve: memory outside torch's allocator, item by item (R-45). No axis of the mesh changes it (R-41)."""

from __future__ import annotations

from megaplan.budget.values import DeviceBudget, ReserveItem
from megaplan.devices import Device


def device_budget(device: Device) -> DeviceBudget:
    """Capacity and itemised reserve of a device, as the data file states them."""
    reserve = tuple(ReserveItem(name, figure.value, figure.basis, figure.source) for name, figure in device.reserve)
    return DeviceBudget(device.name, device.capacity.value, device.capacity.basis, reserve)
