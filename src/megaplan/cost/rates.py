"""The time of an op's passes: by kind if the device has measured constants, else by the modelled rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import NamedTuple

from megakernels.facts import MEMORY, PRODUCT, KindWork, Pass
from megakernels.ops.fp8_linear.facts import ROUND, SCALED_PRODUCT, ScaledPass
from megaplan.blocks.work import OpWork
from megaplan.devices import Device
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.measured.constants import Measured, measured
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec

SECOND_NS = 10**9
LINEARS = frozenset({*FAMILIES, "head"})
"""Parts whose products have the rate of linears."""
PARTS = 10_000


class Protocol(NamedTuple):
    """A protocol in which NCCL moves the bytes of a collective.

    Attributes:
        fabric_ns: Time of one step from a rank to the next in its node, in addition to the bytes.
        network_ns: The same to another node.
        percent: Percent of a link's rate that it reaches.
    """

    fabric_ns: int
    network_ns: int
    percent: int


RINGS = (Protocol(1_900, 4_000, 92), Protocol(3_400, 9_600, 100))
"""LL128 and Simple around a ring. Source: `hwLat` and `ncclTopoTuneModel` of NVIDIA/nccl@01afd20a, src/graph/tuning.cc."""
TREE = Protocol(1_200, 8_500, 82)
"""LL128 in a tree; 0.9 · 0.915 of the rate. Source: the same as for `RINGS`."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Reached rates of one device.

    Attributes:
        device: Peaks.
        percent: Percent of its peak that each part reaches, see `megaplan.devices.Device.efficiency`.
        launch_ns: Time of one kernel in addition to its work.
        latency_ns: Time of one send or collective in addition to its bytes.
        step_ns: Time of one step of a recurrence.
        reached: Share of the peak that products of linears reach, by dtype in ten-thousandths, if the spec gives it instead of `percent`.
        own: Percentages of the device's data file, without those that the spec gives.
        measured: Shares of the counted floors that kinds of kernels reach, if steps were profiled and kernels run; else None.
        rings: Protocols of collectives over several nodes; none if bytes alone count.
    """

    device: Device
    percent: dict[str, int]
    launch_ns: int
    latency_ns: int
    step_ns: int
    reached: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    measured: Measured | None = None
    rings: tuple[Protocol, ...] = RINGS

    @property
    def issue_ns(self) -> int:
        """Host time of a launch of forward and backward; 0 where launches are not counted."""
        return 0 if self.measured is None else self.measured.issue_ns

    def kind_ns(self, kind: str, num_bytes: int, flops: int, part: str, dtype: DType) -> int:
        """Time of one kind of kernels without their launches: the counted floor over the measured share, or the modelled rates.

        A percentage of the spec scales the share by its ratio to the device's own percentage.
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
        """Dependent steps of a recurrence; without a measurement, a step of backward takes as long as two steps of forward."""
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

    def host_ns(self, num_bytes: int) -> int:
        """Time of bytes that one device copies to host memory or from there."""
        return _ceil(num_bytes * 100 * SECOND_NS, self.device.host_bandwidth.value * self.percent["host"])


def rates_of(spec: Spec, *, modelled: bool = False) -> Rates:
    """The rates that a spec plans with; `modelled` without the device's measured constants.

    Raises:
        MegaplanError: MP504, the data file has no such device.
    """
    section, device = spec.device, device_of(spec.device)
    percent = {part: figure.value for part, figure in device.efficiency.items()}
    plain = Rates(device, percent, device.launch.value, device.collective_latency.value, device.recurrence_step.value, own=percent)
    found = measured(section.name) if spec.host.uses_triton and not modelled else None
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
    """Rates with a device's measured constants instead of its modelled ones."""
    percent = {part: figure.value for part, figure in rates.device.efficiency.items()} | dict(found.percent)
    step = found.step_ns or rates.step_ns
    return replace(rates, percent=percent, own=percent, launch_ns=found.launch_ns, step_ns=step, measured=found)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


LIBRARY = "D"
"""Plain torch multiplies with the GEMM library, like dense linears."""
FORWARD, INPUT, WEIGHT = "F", "I", "W"
Parts = tuple[KindWork, ...]
Note = tuple[str, KindWork, int]
"""The letter of a pass, a kind of kernels in it, and the nanoseconds that it takes."""


class Seen:
    """Kinds of kernels that run in some passes.

    Attributes:
        kinds: Names of the kinds; an operation without kinds has its own name.
        notes: Each kind of each pass; None if they are not listed.
    """

    def __init__(self, notes: list[Note] | None = None) -> None:
        self.kinds, self.notes = set[str](), notes


class Prices:
    """Times of one dtype's ops on one rank; also counts launches.

    Args:
        rates: Rates of the device.
        dtype: Dtype of the weights.
        seen: Collects the kinds that run.
    """

    def __init__(self, rates: Rates, dtype: DType, seen: Seen) -> None:
        self._rates, self._dtype = rates, dtype
        self._seen, self._counts, self._launches = seen, rates.measured is not None, 0

    def taken(self) -> int:
        """Launches since the last call."""
        found, self._launches = self._launches, 0
        return found

    def scaled_ns(self, op: OpWork, done: ScaledPass, weight_bytes: int, letter: str) -> int:
        """One pass of a linear or a bank in eight bits: its copies, then the products."""
        rates, (copies, product) = self._rates, done
        if self._counts and op.is_linear:
            parts = (
                KindWork(ROUND, copies.num_bytes, 0, copies.launches),
                KindWork(SCALED_PRODUCT, product.num_bytes, product.flops, product.launches),
            )
            return self.parts_ns(op, parts, 0, letter, DType.FP8)
        self._launches += copies.launches + product.launches
        self._seen.kinds.add(f"fp8 {op.name}")
        compute, memory = rates.compute_ns(product.flops, op.part, DType.FP8), rates.memory_ns(product.num_bytes + weight_bytes)
        return rates.memory_ns(copies.num_bytes) + max(compute, memory) + (copies.launches + product.launches) * rates.launch_ns

    def kernels_ns(self, op: OpWork, done: Pass, weight_bytes: int, num_steps: int, letter: str) -> int:
        """One pass of an op by its kernels."""
        rates, dtype = self._rates, self._dtype if op.weights else self._dtype.of_products
        if self._counts:
            moved = done._replace(num_bytes=done.num_bytes + weight_bytes)
            if op.is_linear:
                return self.parts_ns(op, (KindWork(PRODUCT, moved.num_bytes, moved.flops, moved.launches),), 0, letter)
            parts = moved.parts() if moved.kinds else () if moved.flops else (KindWork(MEMORY, moved.num_bytes, 0, moved.launches),)
            if parts:
                return self.parts_ns(op, parts, num_steps, letter)
            self._launches += done.launches
            self._seen.kinds.add(op.name)
        compute, memory = rates.compute_ns(done.flops, op.part, dtype), rates.memory_ns(done.num_bytes + weight_bytes)
        steps = num_steps * rates.step_ns * (1 + (letter == INPUT))
        return max(compute, memory, steps) + done.launches * rates.launch_ns

    def moved_ns(self, op: OpWork, done: Pass, letter: str) -> int:
        """An additional pass over memory."""
        if self._counts:
            return self.parts_ns(op, (KindWork(MEMORY, done.num_bytes, 0, done.launches),), 0, letter)
        self._launches += done.launches
        return self._rates.memory_ns(done.num_bytes) + done.launches * self._rates.launch_ns

    def parts_ns(self, op: OpWork, parts: Parts, num_steps: int, letter: str, dtype: DType | None = None) -> int:
        """Kinds of kernels one after another."""
        rates, total = self._rates, 0
        used = dtype or (self._dtype if op.weights else self._dtype.of_products)
        for part in parts:
            took = rates.kind_ns(part.kind, part.num_bytes, part.flops, op.part, used)
            if num_steps:
                took = max(took, rates.steps_ns(part.kind, num_steps, backward=letter == INPUT))
            took += part.launches * rates.launch_ns
            self._launches += part.launches
            total += took
            self._seen.kinds.add(part.kind)
            if self._seen.notes is not None:
                place = FORWARD if part.kind == PRODUCT and not op.is_linear else letter  # logits that backward makes again
                self._seen.notes.append((place, part._replace(steps=num_steps), took))
        return total

    def run_ns(self, op: OpWork, fused_ns: int, plain: Pass) -> int:
        """A pass as plain torch, which takes at least as long as one kernel.

        Products that stay in the dtype of the weights have the same time as in a kernel.
        """
        rates = self._rates
        memory, launched = rates.memory_ns(plain.num_bytes), plain.launches * rates.launch_ns
        if plain.is_fp32:
            memory += rates.compute_ns(plain.flops, LIBRARY, DType.FP32)
        elif op.weights:
            memory += fused_ns
        return max(fused_ns, isqrt(launched**2 + memory**2))
