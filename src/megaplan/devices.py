"""Devices: memory, speed and memory outside torch's allocator, each number with its basis and source (`devices.json`)."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.columns import Basis
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError

DEFAULT = "h200"
TPU = "tpu"
"""Generation of Google's devices."""
DATA = Path(__file__).with_name("devices.json")
ALIASES = {
    **dict.fromkeys(("h100", "h100-80gb", "h100-sxm5", "h100-80gb-hbm3", "h100-hbm3"), "h100-sxm"),
    **dict.fromkeys(("a100", "a100-sxm", "a100-sxm4", "a100-sxm4-80gb", "a100-sxm-80gb"), "a100-80gb"),
    **dict.fromkeys(("a100-sxm4-40gb", "a100-sxm-40gb"), "a100-40gb"),
    **dict.fromkeys(("h200-sxm", "h200-141gb"), "h200"),
    **dict.fromkeys(("a800-sxm4-80gb", "a800-sxm", "a800-sxm4"), "a800-80gb"),
    **dict.fromkeys(("rtx-pro-6000-blackwell", "rtx-pro-6000-blackwell-server-edition"), "rtx-pro-6000"),
    **dict.fromkeys(("v5p", "tpu-v5"), "tpu-v5p"),
    **dict.fromkeys(("v6e", "trillium", "tpu-v6"), "tpu-v6e"),
    **dict.fromkeys(("v7", "tpu7x", "v7x", "ironwood"), "tpu-v7"),
    **{"h800-sxm5": "h800-sxm", "b200-sxm": "b200", "b300-sxm": "b300", "b300-sxm6-ac": "b300", "mi300": "mi300x", "mi355": "mi355x"},
}
"""Other names of devices; the name of a generation means its most common device."""


class Figure(NamedTuple):
    """A number with its source."""

    value: int
    basis: Basis
    source: str


class Device(NamedTuple):
    """One device of the data file.

    Attributes:
        name: Name in specs.
        generation: Generation of its kernels; devices of one generation share the kernels' efficiencies (`ampere`, `hopper`, `blackwell`,
            `cdna`, `tpu`).
        num_sms: Multiprocessors, or compute units.
        note: Note to read before using the figures; None for none.
        capacity: Bytes torch reports as the device's total.
        reserve: Bytes outside torch's allocator, by item.
        gemm_workspace: Bytes that GEMM libraries take inside torch's allocator.
        peak_flops: Dense multiply-add FLOPs per second, by short dtype name; dtypes that the device does not multiply are absent.
        memory_bandwidth: Bytes per second of device memory.
        node_bandwidth: Bytes per second to the other devices of a node, one direction.
        network_bandwidth: Bytes per second of one device to other nodes, one direction: its adapter.
        host_bandwidth: Bytes per second between one device and host memory, one direction.
        domain: Number of devices that reach each other at `node_bandwidth`.
        efficiency: Percent of a peak that is reached: of FLOPs for the linears of a letter's blocks and of the `head`, and for
            the kernels `attention`, `scan`, `experts` and `recurrence`; of `memory`, `node`, `network` and `host` bandwidth.
        launch: Nanoseconds of one kernel in addition to its work.
        collective_latency: Nanoseconds of one send or collective in addition to the transfer of its bytes.
        recurrence_step: Nanoseconds of one step of a recurrence that cannot run in parallel over positions.
        power: Watts of the board at its limit; None if unknown.
    """

    name: str
    generation: str
    num_sms: Figure
    note: str | None
    capacity: Figure
    reserve: tuple[tuple[str, Figure], ...]
    gemm_workspace: Figure
    peak_flops: dict[str, Figure]
    memory_bandwidth: Figure
    node_bandwidth: Figure
    network_bandwidth: Figure
    host_bandwidth: Figure
    domain: Figure
    efficiency: dict[str, Figure]
    launch: Figure
    collective_latency: Figure
    recurrence_step: Figure
    power: Figure | None = None

    def with_reserve(self, given: Mapping[str, Figure]) -> "Device":
        """The device with other or additional items of its reserve."""
        return self._replace(reserve=tuple((dict(self.reserve) | dict(given)).items()))

    def with_peaks(self, given: Mapping[str, Figure]) -> "Device":
        """The device with other peaks."""
        return self._replace(peak_flops=self.peak_flops | dict(given))


@cache
def _data() -> dict[str, Any]:
    """Every device's record: shared values, overridden by the device's own."""
    document: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: document["shared"] | record for name, record in document["devices"].items()}


def device_names() -> tuple[str, ...]:
    """The devices of the data file."""
    return tuple(_data())


def canonical_name(name: str) -> str:
    """The data file's name of a device: in lower case, without the maker, an alias or the start of one name alone resolved.

    An unknown name is unchanged.
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = plain.removeprefix("nvidia-").removeprefix("amd-").removeprefix("instinct-")
    plain = ALIASES.get(plain, plain)
    starts = [known for known in _data() if known.startswith(f"{plain}-")]
    return plain if plain in _data() else starts[0] if len(starts) == 1 else name


def named_device(name: str, option: str) -> str:
    """The data file's name of a device that an option of the command line names.

    Args:
        name: The name as it was typed.
        option: The option with the character before its value: `--device `.

    Raises:
        MegaplanError: MP504, the data file lacks the device; the hints are for this option.
    """
    known = canonical_name(name)
    if known not in _data():
        raise MegaplanError([_unknown(name, option, option, Location())])
    return known


def _unknown(name: str, said: str, option: str, location: Location) -> Diagnostic:
    """MP504, with the names that the device may have meant as values of an option."""
    from difflib import get_close_matches  # noqa: PLC0415  (only when something is wrong)

    near = [known for known in device_names() if known.startswith(f"{name.lower()}-")]
    near = near or get_close_matches(name.lower(), device_names(), n=1) or [DEFAULT]
    detail = f"{said}{name}; the data file has {', '.join(device_names())}"
    return diagnostic("MP504", detail, location, [*(f"{option}{one}" for one in near), "megaplan devices"])


@cache
def load_device(name: str) -> Device:
    """The device with this name.

    Raises:
        MegaplanError: MP504 if the data file has none.
    """
    if name not in _data():
        raise MegaplanError([_unknown(name, "device.name = ", "--set device.name=", Location(key="device.name"))])
    record = _data()[name]
    return Device(
        name=name,
        generation=record["generation"],
        num_sms=_figure(record["num_sms"]),
        note=record.get("note"),
        capacity=_figure(record["capacity_bytes"]),
        reserve=tuple((item, _figure(figure)) for item, figure in record["reserve_bytes"].items()),
        gemm_workspace=_figure(record["gemm_workspace_bytes"]),
        peak_flops={dtype: _figure(figure) for dtype, figure in record["peak_flops"].items()},
        memory_bandwidth=_figure(record["memory_bytes_per_second"]),
        node_bandwidth=_figure(record["node_bytes_per_second"]),
        network_bandwidth=_figure(record["network_bytes_per_second"]),
        host_bandwidth=_figure(record["host_bytes_per_second"]),
        domain=_figure(record["domain"]),
        efficiency={part: _figure(figure) for part, figure in record["efficiency_percent"].items()},
        launch=_figure(record["launch_ns"]),
        collective_latency=_figure(record["collective_latency_ns"]),
        recurrence_step=_figure(record["recurrence_step_ns"]),
        power=_figure(record["power_watts"]) if "power_watts" in record else None,
    )


def _figure(record: dict[str, Any]) -> Figure:
    return Figure(record["value"], Basis(record["basis"]), record["source"])
