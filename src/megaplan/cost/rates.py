"""How fast a device and its links are: the data file's figures, with what the spec puts in their place; whole numbers throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaplan.devices import Device
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.spec.device import device_of
from megaplan.spec.models import Spec

SECOND_NS = 10**9
LINEARS = frozenset({*FAMILIES, "head"})
"""Parts whose products are those of linears."""
PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Rates:
    """Reached rates of one device.

    Attributes:
        device: Peaks.
        percent: Percent of its peak that each part reaches, see `megaplan.devices.Device.efficiency`.
        launch_ns: Of one kernel beside its work.
        latency_ns: Of one send or collective beside its bytes.
        step_ns: Of one step of a recurrence.
        reached: Share of the peak that products of linears reach by dtype, in ten-thousandths, where the spec gives it and not `percent`.
    """

    device: Device
    percent: dict[str, int]
    launch_ns: int
    latency_ns: int
    step_ns: int
    reached: Mapping[str, int] = field(default_factory=dict)

    def compute_ns(self, flops: int, part: str, dtype: DType) -> int:
        """Time of contractions of one part in one dtype, at the rate that the part reaches."""
        peak = self.device.peak_flops[dtype].value
        if part in LINEARS and dtype in self.reached:
            return _ceil(flops * PARTS * SECOND_NS, peak * self.reached[dtype])
        return _ceil(flops * 100 * SECOND_NS, peak * self.percent[part])

    def memory_ns(self, num_bytes: int) -> int:
        """Time to read and write bytes of device memory."""
        return _ceil(num_bytes * 100 * SECOND_NS, self.device.memory_bandwidth.value * self.percent["memory"])

    def node_ns(self, num_bytes: int) -> int:
        """Time of bytes that one device sends to others of its node, without latency."""
        return _ceil(num_bytes * 100 * SECOND_NS, self.device.node_bandwidth.value * self.percent["node"])

    def network_ns(self, num_bytes: int, num_nics: int = 1) -> int:
        """Time of bytes that leave a node through the network adapters of `num_nics` devices, without latency."""
        return _ceil(num_bytes * 100 * SECOND_NS, self.device.network_bandwidth.value * self.percent["network"] * num_nics)


def rates_of(spec: Spec) -> Rates:
    """The rates that a spec plans with.

    Raises:
        MegaplanError: MP504, the data file has no such device.
    """
    section, device = spec.device, device_of(spec.device)
    percent = {part: figure.value for part, figure in device.efficiency.items()}
    return Rates(
        device=device,
        percent=percent | dict(section.efficiency_percent),
        launch_ns=_given(section.launch_ns, device.launch.value),
        latency_ns=_given(section.collective_latency_ns, device.collective_latency.value),
        step_ns=_given(section.recurrence_step_ns, device.recurrence_step.value),
        reached={dtype: max(1, round(share * PARTS)) for dtype, share in section.reached.items()},
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
