"""The `device` section: the device, and figures that replace those of its data file."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from megaplan.columns import Basis
from megaplan.devices import Device, Figure, canonical_name, load_device
from megaplan.errors import MegaplanError
from megaplan.families.registry import Rated
from megaplan.scalars import (
    Degree,
    Nanoseconds,
    NaturalInt,
    PeakType,
    Percent,
    PositiveInt,
    Rate,
    RecipeType,
    ReserveName,
    Section,
    Share,
    StepFactor,
    Text,
)


class DeviceRef(Section):
    """The device. Every key after `per_node` replaces a figure of the data file (`megaplan devices NAME`).

    Attributes:
        name: Name of a device of the data file.
        per_node: Devices per node, which share its fast fabric.
        efficiency_percent: Percent of peak for a letter's linears, the head, a kernel, memory, node or network; others are the data file's.
        launch_ns: Launch time of one kernel in addition to its work; null for the data file's.
        collective_latency_ns: Latency of one send or collective in addition to the transfer of its bytes; null for the data file's.
        recurrence_step_ns: Time of one step of a recurrence; null for the data file's.
        capacity: Bytes that torch reports as the device's total; null for the data file's.
        reserve: Bytes outside torch's allocator, by item; items that are not given are the data file's.
        peak_flops: Dense FLOPs per second by dtype; dtypes that are not given are the data file's.
        memory_bytes_per_second: Bandwidth of device memory; null for the data file's.
        node_bytes_per_second: Bandwidth to the other devices of a node, one direction; null for the data file's.
        network_bytes_per_second: Bandwidth of a device's adapter, one direction; null for the data file's.
        domain: Devices that reach each other at node_bytes_per_second; null for the data file's.
        reached: Share of the peak that large products reach under training load, by recipe; used for the time of a step.
        step_factor: Measured over modelled seconds of a step, of a host with fitted constants (`megaplan calibrate`); null for 1.
    """

    name: Text = "h200"
    per_node: Degree = 8
    efficiency_percent: dict[Rated, Percent] = Field(default_factory=dict)
    launch_ns: Nanoseconds | None = None
    collective_latency_ns: Nanoseconds | None = None
    recurrence_step_ns: Nanoseconds | None = None
    capacity: PositiveInt | None = None
    reserve: dict[ReserveName, NaturalInt] = Field(default_factory=dict)
    peak_flops: dict[PeakType, Rate] = Field(default_factory=dict)
    memory_bytes_per_second: Rate | None = None
    node_bytes_per_second: Rate | None = None
    network_bytes_per_second: Rate | None = None
    domain: Degree | None = None
    reached: dict[RecipeType, Share] = Field(default_factory=dict)
    step_factor: StepFactor | None = None

    @field_validator("name")
    @classmethod
    def _of_data_file(cls, name: str) -> str:
        """The data file's name: `H100` is h100-sxm."""
        return canonical_name(name)

    @model_serializer(mode="wrap")
    def _given_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes only figures that are given, so that a key of a later version changes no plan's digest."""
        return {key: value for key, value in handler(self).items() if key in _ALWAYS or value not in (None, {})}


_ALWAYS = frozenset({"name", "per_node", "efficiency_percent", "launch_ns", "collective_latency_ns", "recurrence_step_ns"})
_FIGURES = {
    "capacity": "capacity",
    "memory_bytes_per_second": "memory_bandwidth",
    "node_bytes_per_second": "node_bandwidth",
    "network_bytes_per_second": "network_bandwidth",
    "domain": "domain",
}
"""Key of the section to the field of `Device`."""


NODE = 8
"""Devices of a node: a domain up to this size is inside a node, a larger one joins nodes."""


def fabric_size(section: DeviceRef) -> int:
    """Devices that reach each other over the fast fabric: a domain that joins nodes, such as NVL72's, or the devices of a node."""
    if section.domain is not None:
        return section.domain
    try:
        domain = load_device(section.name).domain.value
    except MegaplanError:  # reported by a rule of its own
        return section.per_node
    return domain if domain > NODE else section.per_node


def device_of(section: DeviceRef) -> Device:
    """The device of the data file with the section's figures, which have the basis `given`.

    Raises:
        MegaplanError: MP504 if the data file has no such device.
    """
    device = load_device(section.name)
    found: dict[str, Any] = {field: _given(key, value) for key, field in _FIGURES.items() if (value := getattr(section, key)) is not None}
    if found:
        device = device._replace(**found)
    if section.reserve:
        device = device.with_reserve({item: _given(f"reserve.{item}", value) for item, value in section.reserve.items()})
    if section.peak_flops:
        device = device.with_peaks({dtype: _given(f"peak_flops.{dtype}", value) for dtype, value in section.peak_flops.items()})
    return device


def _given(key: str, value: int) -> Figure:
    return Figure(value, Basis.GIVEN, f"device.{key} of the spec")
