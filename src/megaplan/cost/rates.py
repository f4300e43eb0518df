"""Rates of a device and its links: the data file's figures, or those that the spec gives in their place; all are whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megaplan.devices import Device
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.measured.constants import Measured, measured
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
        launch_ns: Time of one kernel in addition to its work.
        latency_ns: Time of one send or collective in addition to its bytes.
        step_ns: Time of one step of a recurrence.
        reached: Share of the peak that products of linears reach by dtype, in ten-thousandths, where the spec gives it and not `percent`.
        own: Percentages without those that the spec gives.
        measured: Shares of the counted floors that kinds of kernels reach, if steps were profiled and kernels run; else None.
    """

    device: Device
    percent: dict[str, int]
    launch_ns: int
    latency_ns: int
    step_ns: int
    reached: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    measured: Measured | None = None

    def kind_ns(self, kind: str, num_bytes: int, flops: int, part: str, dtype: DType) -> int:
        """Time of one kind of kernels beside their launches: the counted floor over the measured share, or the modelled rates.

        A percentage that the spec gives changes the share as it changes the device's own.
        """
        share = None if self.measured is None else self.measured.shares.get(kind)
        if share is None:
            return max(self.compute_ns(flops, part, dtype), self.memory_ns(num_bytes))
        own, memory = self.own, self.percent["memory"]
        moved = _ceil(num_bytes * PARTS * SECOND_NS * own["memory"], self.device.memory_bandwidth.value * share * memory)
        if not flops:
            return moved
        if part in LINEARS and dtype in self.reached:
            return max(moved, self.compute_ns(flops, part, dtype))
        peak = self.device.peak_flops[dtype].value
        return max(moved, _ceil(flops * PARTS * SECOND_NS * own[part], peak * share * self.percent[part]))

    def steps_ns(self, kind: str, steps: int, *, backward: bool) -> int:
        """Dependent steps of a recurrence; each of backward takes two of forward where nothing was measured."""
        found = None if self.measured is None else self.measured.steps_ns.get(kind)
        if self.measured is None or found is None:
            return steps * self.step_ns * (1 + backward)
        return steps * found * self.step_ns // self.measured.step_ns

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
    plain = Rates(device, percent, device.launch.value, device.collective_latency.value, device.recurrence_step.value, own=percent)
    found = measured(section.name) if spec.host.uses_triton else None
    rates = plain if found is None else rates_with(plain, found)
    return replace(
        rates,
        percent=rates.percent | dict(section.efficiency_percent),
        launch_ns=_given(section.launch_ns, rates.launch_ns),
        latency_ns=_given(section.collective_latency_ns, rates.latency_ns),
        step_ns=_given(section.recurrence_step_ns, rates.step_ns),
        reached={dtype: max(1, round(share * PARTS)) for dtype, share in section.reached.items()},
    )


def rates_with(rates: Rates, found: Measured) -> Rates:
    """Rates with a device's measured constants in the place of its modelled ones."""
    percent = {part: figure.value for part, figure in rates.device.efficiency.items()} | dict(found.percent)
    step = found.step_ns or rates.step_ns
    return replace(rates, percent=percent, own=percent, launch_ns=found.launch_ns, step_ns=step, measured=found)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
