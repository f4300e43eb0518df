"""Time of one microbatch on one rank: forward (F), gradients of the inputs (I) and of the weights (W), in whole nanoseconds.

Each op takes max(FLOPs / reached peak, bytes / reached bandwidth, dependent steps) + launch in each of its passes, on this rank:

- cp divides the tokens of every op. Under sequence parallelism (tp > 1) tp divides the tokens of norms, routing, experts, MLA's down
  projections, those of the indexer, and head and embedding without `vocab_parallel`; of every other op it divides the widths.
- ep and etp divide expert banks; rows that arrive make up for the experts that left, on the busiest rank `moe.routing_skew` times as many,
  at most `capacity_factor` times.
- dp axes divide nothing: a microbatch is a data rank's.

An operation that megarun runs as plain torch takes what `megaplan.cost.plain` says instead, and one that several kernels of megakernels run
what `megaplan.cost.kernels` says; linears and banks in eight bits take what `megaplan.cost.scaled` and `scaled_experts` say.

W is what a split backward of megarun leaves for later: the weight gradients of linears, the head included. Those of expert banks, router,
convolutions and the recurrence are made together with I. Recompute is part of I: `full` runs the block again without the product that ends
it, `selective` the ops that its family names; the model's last layer and MTP run nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megaplan.blocks.work import Op, Ops, Workload
from megaplan.cost.blocks import end_ops, layer_ops, rank_workload
from megaplan.cost.kernels import Kernels, Pass
from megaplan.cost.parts import ADD, Part
from megaplan.cost.plain import PlainTorch
from megaplan.cost.prices import FORWARD, INPUT, WEIGHT, Prices, Seen
from megaplan.cost.rates import Rates, rates_of
from megaplan.cost.scaled import ScaledLinears, ScaledPass, in_eight_bits, sharing
from megaplan.cost.scaled_experts import ScaledBank
from megaplan.cost.transfers import (
    Transfers,
    block_transfers,
    boundary_ns,
    layer_transfers,
    vocabulary_transfers,
)
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory
from megaplan.spec.depths import depth_blocks
from megaplan.spec.models import Spec

Passed = tuple[Op, tuple[ScaledPass, ScaledPass, ScaledPass] | None]
"""An op, and F, I and W of a linear or a bank in eight bits; None for other ops."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of one layer, or of one end of the model, for one microbatch on one rank.

    Attributes:
        forward_ns: F.
        input_ns: I: everything that a split backward computes before it sends its gradient on, recompute included.
        weight_ns: W: the weight gradients that a split backward leaves for later, those of linears.
        forward_launches: Kernels that the host launches in F; 0 where launches are not counted.
        backward_launches: The same of I and W.
    """

    forward_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0
    forward_launches: int = 0
    backward_launches: int = 0

    @property
    def backward_ns(self) -> int:
        """A whole backward, B = I + W."""
        return self.input_ns + self.weight_ns

    @property
    def total_ns(self) -> int:
        """F + I + W."""
        return self.forward_ns + self.input_ns + self.weight_ns

    def __add__(self, other: LayerTime) -> LayerTime:
        return LayerTime(
            self.forward_ns + other.forward_ns,
            self.input_ns + other.input_ns,
            self.weight_ns + other.weight_ns,
            self.forward_launches + other.forward_launches,
            self.backward_launches + other.backward_launches,
        )


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Times of a whole model.

    Attributes:
        layers: One per layer, in model order.
        first: Added to the first slot: token and side embeddings.
        last: Added to the last slot: final norm, head and loss, and every MTP depth.
        boundary_ns: One microbatch's residual stream, sent from one pipeline rank to the next over the slowest of these links; 0 at pp 1.
    """

    layers: tuple[LayerTime, ...]
    first: LayerTime
    last: LayerTime
    boundary_ns: int = 0

    def of_slots(self, spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
        """Time of each slot, the ends included; `spans` are half-open and in model order."""
        times = [sum(self.layers[start:stop], start=LayerTime()) for start, stop in spans]
        times[0] += self.first
        times[-1] += self.last
        return tuple(times)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Memory of one layer or end on its rank.

    Attributes:
        static_bytes: What stays for the whole step; None where a costs file leaves it to the budget.
        activation_bytes: What one microbatch in flight keeps; None where a costs file leaves it to the budget.
    """

    static_bytes: int | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What a costs file holds.

    Attributes:
        times: Of each layer and of both ends.
        digest: `sha256:` and the hex digest of the file's values; spaces and the order of keys do not count.
        static_bytes: Of each layer, as `StoredBytes.static_bytes`.
        activation_bytes: Of each layer, as `StoredBytes.activation_bytes`.
        first: Memory of what `times.first` stands for.
        last: Memory of what `times.last` stands for.
    """

    times: ModelTimes
    digest: str
    static_bytes: tuple[int | None, ...]
    activation_bytes: tuple[int | None, ...]
    first: StoredBytes = StoredBytes()
    last: StoredBytes = StoredBytes()


def model_times(spec: Spec, inventory: Inventory) -> ModelTimes:
    """Times of every part of the model, from its FLOPs and bytes and the device's rates.

    Args:
        spec: A checked spec.
        inventory: Its inventory.

    Raises:
        MegaplanError: MP504, the device is unknown.
        ValueError: The inventory is another model's.
    """
    rates, made = rates_of(spec), dict[tuple[int, str, bool], LayerTime]()
    layers = []
    for index, block in enumerate(inventory.layers):
        make = id(block), spec.policy(index, block.family), spec.multiplies_in_eight_bits(index, block.family)
        if make not in made:
            made[make] = layer_time(spec, rates, block, make[1], scaled=make[2])
        layers.append(made[make])
    first, last, boundary = end_times(spec, rates)
    return ModelTimes(tuple(layers), first, last, boundary)


def end_times(spec: Spec, rates: Rates, *, fused: bool = False, seen: Seen | None = None) -> tuple[LayerTime, LayerTime, int]:
    """Times added to the first and to the last slot, and nanoseconds of a boundary between ranks; options as for `layer_time`."""
    timer = _Timer(spec, rates, spec.precision.params, fused=fused, seen=seen)
    ends = end_ops(timer.load, spec)
    looked_up, projected = vocabulary_transfers(rates, spec, timer.load)
    last = timer.time(ends.head) + _waiting(projected)
    if ends.mtp_depth:
        depth = timer.time(ends.mtp) + _waiting(looked_up) + _waiting(projected)
        for block in depth_blocks(spec.model):
            exchanges = block.family.exchanges(block.section, spec.model.hidden_size)
            depth += _waiting(block_transfers(rates, spec, timer.load, exchanges))
        last = sum([depth] * ends.mtp_depth, start=last)
    first = timer.time((*ends.embedding, *ends.side_embeddings)) + _waiting(looked_up)
    return first, last, boundary_ns(rates, spec, timer.load)


def layer_time(
    spec: Spec, rates: Rates, block: Block, policy: str, *, scaled: bool, fused: bool = False, seen: Seen | None = None
) -> LayerTime:
    """Of one layer under a recompute policy.

    Args:
        spec: A checked spec.
        rates: Its rates.
        block: The layer.
        policy: Of recompute.
        scaled: Whether its linears and banks multiply in eight bits.
        fused: As if one kernel ran each op that runs as plain torch.
        seen: Notes what kinds of kernels run, where the device has measured constants.
    """
    timer = _Timer(spec, rates, spec.precision.of(block.family), fused=fused, scaled=scaled, policy=policy, seen=seen)
    ops, family = layer_ops(timer.load, spec.model, block), FAMILIES[block.family]
    reruns = family.selective(family.section_of(spec.model), block.variant).reruns
    waits = layer_transfers(rates, spec, timer.load, block)
    again = timer.again(_repeated(ops, policy, reruns))
    return timer.time(ops) + _waiting(waits) + again + LayerTime(input_ns=waits.repeated_ns(policy))


def _repeated(ops: Ops, policy: str, reruns: frozenset[str]) -> Ops:
    """The ops that a policy runs again before backward; `reruns` are those of selective recompute."""
    match policy:
        case "none":
            return ()
        case "selective":
            return tuple(op for op in ops if op.runs_in(reruns))
        case _:
            return tuple(op for op in ops if not op.closes)


def _waiting(transfers: Transfers) -> LayerTime:
    return LayerTime(transfers.forward_ns, transfers.input_ns)


class _Timer:
    """Times ops of one dtype on one rank."""

    def __init__(
        self,
        spec: Spec,
        rates: Rates,
        dtype: DType,
        *,
        fused: bool = False,
        scaled: bool = False,
        policy: str = "none",
        seen: Seen | None = None,
    ) -> None:
        load = rank_workload(spec, dtype)
        self.load: Workload = load._replace(gathers=True) if scaled else load
        self._dtype, self._grad_bytes = dtype, spec.precision.grads.bytes
        self._skew, self._plain = _skew(spec), None if fused else PlainTorch(spec, self.load)
        self._kernels = Kernels(spec, self.load)
        self._scaled = ScaledLinears(spec, dtype.of_products.bytes) if scaled else None
        self._bank = ScaledBank(spec, self.load, self._grad_bytes, policy) if scaled else None
        self._prices, self._counts = Prices(spec, rates, dtype, self.load, seen or Seen()), rates.measured is not None

    def time(self, ops: Ops) -> LayerTime:
        """F, I and W of ops one after another."""
        found = self._scaled_passes(ops)
        forward, launched = self._forwards_ns(found), self._prices.taken()
        inputs = sum(
            self._input_ns(op) if passes is None else self._prices.scaled_ns(op, passes[1], 0, INPUT) for op, passes in found
        ) + self._sums_ns(ops)
        weights = sum(
            self._weight_ns(op)
            if passes is None
            else self._prices.scaled_ns(op, passes[2], op.weights * 2 * self._grad_bytes * op.is_linear, WEIGHT)
            for op, passes in found
        )
        return LayerTime(forward, inputs, weights, launched, self._prices.taken())

    def again(self, ops: Ops) -> LayerTime:
        """F of ops one after another, before their backward."""
        return LayerTime(input_ns=self._forwards_ns(self._scaled_passes(ops)), backward_launches=self._prices.taken())

    def _forwards_ns(self, found: Sequence[Passed]) -> int:
        return sum(self._forward_ns(op) if passes is None else self._prices.scaled_ns(op, passes[0], 0, FORWARD) for op, passes in found)

    def _scaled_passes(self, ops: Ops) -> list[Passed]:
        """Passes of linears and banks in eight bits; None for other ops."""
        if self._scaled is None or self._bank is None:
            return [(op, None) for op in ops]
        shared = sharing(ops)
        return [
            (
                op,
                self._scaled.passes(op, self._tokens(op), shares=index in shared)
                if in_eight_bits(op)
                else self._bank.passes(op, self._tokens(op)),
            )
            for index, op in enumerate(ops)
        ]

    def _sums_ns(self, ops: Ops) -> int:
        """Gradients of one input that several linears read, added up; linears in eight bits have them among their copies."""
        if not self._counts or self._scaled is not None:
            return 0
        size, found = self._dtype.of_products.bytes, 0
        for index in sharing(ops):
            op = ops[index]
            added = Part(ADD, 3 * op.in_width * size * self._tokens(op), 0, 1)
            found += self._prices.parts_ns(op, (added,), 0, INPUT)
        return found

    def _forward_ns(self, op: Op) -> int:
        passes, weights = self._kernels.passes(op, self._tokens(op)), op.weights * self._dtype.bytes
        if passes is not None:
            fused = self._prices.kernels_ns(op, passes[0], weights, op.num_steps, FORWARD)
        else:
            fused = self._pass_ns(op, op.work.forward, op.work.moved_forward, weights, op.num_steps, FORWARD)
        return fused if self._plain is None else self._prices.run_ns(op, fused, self._plain.forward(op, self._tokens(op)))

    def _input_ns(self, op: Op) -> int:
        """I; for an op that is no linear, with its weight gradient, in one pass over memory."""
        flops, moved, weights = op.work.input_grad, op.work.moved_input, op.weights * self._dtype.bytes
        if op.is_linear and not flops:
            return 0
        if not op.is_linear:
            flops, moved = flops + op.work.weight_grad, moved + op.work.moved_weight
            weights += op.weights * 2 * self._grad_bytes if op.work.weight_grad else 0
        passes = self._kernels.passes(op, self._tokens(op))
        if passes is not None:
            fused = self._prices.kernels_ns(op, passes[1], weights, op.num_steps, INPUT)
        else:
            fused = self._pass_ns(op, flops, moved, weights, op.num_steps, INPUT)
        return fused if self._plain is None else self._prices.run_ns(op, fused, self._plain.backward(op, self._tokens(op)))

    def _weight_ns(self, op: Op) -> int:
        """W: a linear's product, added to the gradient that accumulates."""
        if not op.is_linear or not op.work.weight_grad:
            return 0
        return self._pass_ns(op, op.work.weight_grad, op.work.moved_weight, op.weights * 2 * self._grad_bytes, 0, WEIGHT)

    def _pass_ns(self, op: Op, flops: int, moved_bytes: int, weight_bytes: int, num_steps: int, letter: str) -> int:
        """One pass of an op by one kernel; `flops` and `moved_bytes` are per token."""
        tokens = self._tokens(op)
        return self._prices.kernels_ns(op, Pass(moved_bytes * tokens, flops * tokens, 1), weight_bytes, num_steps, letter)

    def _tokens(self, op: Op) -> int:
        tokens = self.load.num_tokens // (self.load.tp if op.own_tokens else 1)
        return -(-tokens * self._skew.numerator // self._skew.denominator) if op.is_routed else tokens


def _skew(spec: Spec) -> Fraction:
    """Rows of the busiest expert rank over the even share: all rows at most, the capacity at most."""
    moe, ep = spec.model.moe, spec.mesh.ep
    if moe is None:
        return Fraction(1)
    skew = min(Fraction(str(moe.routing_skew)), Fraction(ep)) if ep > 1 else Fraction(1)
    return skew if moe.capacity_factor is None else min(skew, Fraction(str(moe.capacity_factor)))
