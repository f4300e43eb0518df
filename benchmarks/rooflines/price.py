"""Lower bound of the time of counted work on a device, at its peak rates."""

from collections.abc import Mapping
from functools import lru_cache

from megaplan.cost.rates import SECOND_NS, Rates, rates_of
from megaplan.cost.transfers import RankGroup, exchange_ns, gather_ns
from megaplan.spec.models import Spec
from rooflines.work import Kernel, Transfer, Work

WHOLE_PERCENT = 100
TF32_OF_BF16 = 2
"""TF32 products run at half of bf16's rate. Source: NVIDIA H100 data sheet, SXM, TF32 and BFLOAT16 tensor core."""
FP64_OF_FP32 = 2
"""FP64 arithmetic runs at half of FP32's rate. Source: NVIDIA H100 data sheet, SXM, FP64 and FP32."""


def whole_rates(spec: Spec) -> Rates:
    """Rates of the spec's device at 100 % of its peaks; launch time, latency and recurrence step from the data file or the spec.

    Raises:
        MegaplanError: MP504, the data file has no such device.
    """
    plain = spec.model_copy(update={"host": spec.host.model_copy(update={"kernels": "reference"})})  # measured constants are not bounds
    rates = rates_of(plain)
    return Rates(rates.device, dict.fromkeys(rates.percent, WHOLE_PERCENT), rates.launch_ns, rates.latency_ns, rates.step_ns)


class Prices:
    """Times of work on the device of a spec, in seconds."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.rates = spec, whole_rates(spec)
        self.launch = self.rates.launch_ns / SECOND_NS
        self._bandwidth, self._step = self.rates.device.memory_bandwidth.value, self.rates.step_ns / SECOND_NS
        self._peaks = {dtype: figure.value for dtype, figure in self.rates.device.peak_flops.items()}
        self._peaks.setdefault("tf32", self._peaks["bf16"] // TF32_OF_BF16)
        self._peaks.setdefault("fp64", self._peaks["fp32"] // FP64_OF_FP32)
        self.work = lru_cache(maxsize=None)(self._work)
        self.launching = lru_cache(maxsize=None)(self._launching)

    def _work(self, work: Work) -> float:
        """Time of one operation: its kernels in sequence, at least the time of its products, bytes or sequential steps."""
        kernels = sum(max(self._busy(kernel), kernel.launches * self.launch) for kernel in work.kernels)
        return max(kernels, self._products(work.products), work.num_bytes / self._bandwidth, work.steps * self._step)

    def _launching(self, work: Work) -> float:
        """Part of that due to launch time above the time of bytes and FLOPs."""
        busy = sum(map(self._busy, work.kernels))
        return self._work(work) - max(busy, self._products(work.products), work.num_bytes / self._bandwidth, work.steps * self._step)

    def transfer(self, transfer: Transfer) -> float:
        """Time of one collective; messages between pipeline ranks are part of the schedule."""
        group = RankGroup(transfer.size, transfer.stride)
        if transfer.kind == "gather":
            nanoseconds = gather_ns(self.rates, self._spec, group, transfer.payload_bytes)
        elif transfer.kind == "reduce":  # a reduce-scatter and an all-gather, with one latency
            nanoseconds = 2 * gather_ns(self.rates, self._spec, group, transfer.payload_bytes) - self.rates.latency_ns
        else:
            nanoseconds = exchange_ns(self.rates, self._spec, group, transfer.payload_bytes) if transfer.kind == "exchange" else 0
        return max(0, nanoseconds) / SECOND_NS

    def _busy(self, kernel: Kernel) -> float:
        other = kernel.other_flops / self._peaks["fp32"]
        return max(kernel.num_bytes / self._bandwidth, self._products(kernel.products), other)

    def _products(self, products: Mapping[str, int]) -> float:
        return sum(flops / self._peak(dtype) for dtype, flops in products.items())

    def _peak(self, dtype: str) -> int:
        if dtype not in self._peaks:
            raise ValueError(f"products in {dtype}, of which device.peak_flops of {self.rates.device.name} has no rate")
        return self._peaks[dtype]
