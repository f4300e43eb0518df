"""Devices: memory, speed and what lies outside torch's allocator, each number with its basis and source (`devices.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megaplan.columns import Basis
from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError

DATA = Path(__file__).with_name("devices.json")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with where it comes from."""

    value: int
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the data file.

    Attributes:
        name: As specs name it.
        capacity: Bytes torch reports as the device's total.
        reserve: Bytes outside torch's allocator, by item.
        gemm_workspace: Bytes that GEMM libraries take inside torch's allocator.
        peak_flops: Dense multiply-add FLOPs per second, by short dtype name.
        memory_bandwidth: Bytes per second of device memory.
        node_bandwidth: Bytes per second to the other devices of a node, one direction.
        network_bandwidth: Bytes per second of one device to other nodes, one direction.
        efficiency: Percent of a peak that is reached: of FLOPs for the linears of a letter's blocks and of the `head`, and for
            the kernels `attention`, `scan`, `experts` and `recurrence`; of `memory`, `node` and `network` bandwidth.
        launch: Nanoseconds of one kernel beside its work.
        collective_latency: Nanoseconds of one send or collective beside its bytes.
        recurrence_step: Nanoseconds of one step of a recurrence that cannot run in parallel over positions.
    """

    name: str
    capacity: Figure
    reserve: tuple[tuple[str, Figure], ...]
    gemm_workspace: Figure
    peak_flops: dict[str, Figure]
    memory_bandwidth: Figure
    node_bandwidth: Figure
    network_bandwidth: Figure
    efficiency: dict[str, Figure]
    launch: Figure
    collective_latency: Figure
    recurrence_step: Figure

    @property
    def gemm_workspace_bytes(self) -> int:
        """Bytes of GEMM workspaces."""
        return self.gemm_workspace.value


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))["devices"]
    return found


def device_names() -> tuple[str, ...]:
    """The devices of the data file."""
    return tuple(_data())


@cache
def load_device(name: str) -> Device:
    """The device called `name`.

    Raises:
        MegaplanError: MP504 if the data file has none.
    """
    if name not in _data():
        detail = f"device.name = {name}; the data file has {', '.join(device_names())}"
        raise MegaplanError([diagnostic("MP504", detail, Location(key="device.name"), [f"--set device.name={device_names()[0]}"])])
    record = _data()[name]
    return Device(
        name=name,
        capacity=_figure(record["capacity_bytes"]),
        reserve=tuple((item, _figure(figure)) for item, figure in record["reserve_bytes"].items()),
        gemm_workspace=_figure(record["gemm_workspace_bytes"]),
        peak_flops={dtype: _figure(figure) for dtype, figure in record["peak_flops"].items()},
        memory_bandwidth=_figure(record["memory_bytes_per_second"]),
        node_bandwidth=_figure(record["node_bytes_per_second"]),
        network_bandwidth=_figure(record["network_bytes_per_second"]),
        efficiency={part: _figure(figure) for part, figure in record["efficiency_percent"].items()},
        launch=_figure(record["launch_ns"]),
        collective_latency=_figure(record["collective_latency_ns"]),
        recurrence_step=_figure(record["recurrence_step_ns"]),
    )


def _figure(record: dict[str, Any]) -> Figure:
    return Figure(record["value"], Basis(record["basis"]), record["source"])
