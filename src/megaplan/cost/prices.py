"""The time of an op's passes: kind by kind where the device has measured constants, else by the modelled rates."""

from __future__ import annotations

from math import isqrt

from megakernels.facts import MEMORY, PRODUCT, KindWork, Pass
from megakernels.ops.fp8_linear.facts import ROUND, SCALED_PRODUCT, ScaledPass
from megaplan.blocks.work import OpWork
from megaplan.cost.rates import Rates
from megaplan.dtypes import DType

LIBRARY = "D"
"""Products of plain torch are those of the GEMM library, as dense linears' are."""
FORWARD, INPUT, WEIGHT = "F", "I", "W"
Parts = tuple[KindWork, ...]
Note = tuple[str, KindWork, int]
"""The letter of a pass, a kind of kernels in it, and the nanoseconds that it takes."""


class Seen:
    """Kinds of kernels that run in some passes.

    Attributes:
        kinds: Names of the kinds; an operation without kinds has its own name.
        notes: Each kind of each pass; None where they are not listed.
    """

    def __init__(self, notes: list[Note] | None = None) -> None:
        self.kinds, self.notes = set[str](), notes


class Prices:
    """Times of one dtype's ops on one rank; counts launches as it goes.

    Args:
        rates: Rates of the device.
        dtype: Dtype of the weights.
        seen: Notes what runs.
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
        """A pass by one kernel, or as plain torch; products that stay in the weights' dtype take as long there as in one kernel."""
        rates = self._rates
        memory, launched = rates.memory_ns(plain.num_bytes), plain.launches * rates.launch_ns
        if plain.is_fp32:
            memory += rates.compute_ns(plain.flops, LIBRARY, DType.FP32)
        elif op.weights:
            memory += fused_ns
        return isqrt(launched**2 + memory**2)
