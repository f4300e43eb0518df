"""Time of one microbatch on one rank: forward (F), gradients of the inputs (I) and of the weights (W), in whole nanoseconds.

Each op takes max(FLOPs / reached peak, bytes / reached bandwidth, dependent steps) + launch in each of its passes, on this rank:

- cp divides the tokens of every op. Under sequence parallelism (tp > 1) tp divides the tokens of norms, routing, experts, MLA's down
  projections, those of the indexer, and head and embedding without `vocab_parallel`; of every other op it divides the widths.
- ep and etp divide expert banks; rows that arrive make up for the experts that left, on the busiest rank `moe.routing_skew` times as many;
  with a capacity `capacity_factor` times on every rank.
- dp axes divide nothing: a microbatch is a data rank's.

Operations that megarun runs by kernels of megakernels or as plain torch, and linears and banks in eight bits, take these figures from their
facts instead (`megakernels.ops.<operation>.facts`). Kernels of an operation hand intermediates to one another through memory, make products
again, and are launched one by one:

    max(FLOPs / reached peak, bytes / reached bandwidth, dependent steps · step) + launches · launch

In plain torch every intermediate goes through memory, in fp32; some kernels are bound by their launch and others by their work, so a pass
takes

    √((launches · launch)² + (bytes / bandwidth + FLOPs / fp32 peak)²)

W is the deferred part of a split backward of megarun: the weight gradients of linears, the head included. Those of expert banks, router,
convolutions and the recurrence are made together with I. Recompute is part of I: `full` runs the block again without the product that ends
it, `selective` the ops that its family names; the model's last layer and MTP run nothing again.
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import add
from typing import NamedTuple

from megakernels.facts import ADD, KindWork, Pass, Passes
from megakernels.ops.fp8_linear.facts import ScaledPasses
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.cost.blocks import end_works, layer_works, rank_workload
from megaplan.cost.low_precision import EightBits, saved_by_attention, sharing
from megaplan.cost.offload import with_copies
from megaplan.cost.rates import FORWARD, INPUT, WEIGHT, Prices, Rates, Seen, rates_of
from megaplan.cost.towers import tower_works
from megaplan.cost.transfers import (
    Transfers,
    block_transfers,
    boundary_times,
    layer_transfers,
    rows_ns,
    tower_transfers,
    vocabulary_transfers,
)
from megaplan.cost.turns import Priced, Waits, legs_of, stops_of
from megaplan.cost.values import LayerTime, ModelTimes
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory
from megaplan.spec.models import Spec
from megaplan.spec.pattern import depth_blocks
from megaplan.spec.towers import Towers


def model_times(spec: Spec, inventory: Inventory, rates: Rates | None = None) -> ModelTimes:
    """Times of every part of the model, from its FLOPs and bytes and the device's rates.

    Args:
        spec: A checked spec.
        inventory: Inventory of the spec.
        rates: Rates of the device; those of the spec if None.

    Raises:
        MegaplanError: MP504, the device is unknown.
        ValueError: The inventory is another model's.
    """
    rates, made = rates or rates_of(spec), dict[tuple[int, str, bool], LayerTime]()
    layers = []
    for index, block in enumerate(inventory.layers):
        make = id(block), spec.policy(index, block.family), spec.multiplies_in_eight_bits(index, block.family)
        if make not in made:
            made[make] = layer_time(spec, rates, block, make[1], scaled=make[2])
        layers.append(made[make])
    if spec.host.activation_offload:
        layers = with_copies(spec, inventory, rates, layers)
    return ModelTimes(tuple(layers), *end_times(spec, rates), rates.issue_ns)


def end_times(spec: Spec, rates: Rates, *, fused: bool = False, seen: Seen | None = None) -> tuple[LayerTime, LayerTime, tuple[int, ...]]:
    """Times added to the first and to the last slot, and nanoseconds of boundaries between ranks; options as for `layer_time`."""
    recipe = spec.precision.recipe
    timer = _Timer(spec, rates, spec.precision.params, fused=fused, scales_head=recipe is not None and recipe.head, seen=seen)
    ends = end_works(timer.load, spec)
    looked_up, projected = vocabulary_transfers(rates, spec, timer.load)
    last = timer.time(ends.head) + _waiting(projected)
    if ends.mtp_depth:
        depth = timer.time(ends.mtp) + _waiting(looked_up) + _waiting(projected)
        for block in depth_blocks(spec.model):
            exchanges = block.family.exchanges(block.section, spec.model.hidden_size, block.variant)
            depth += _waiting(block_transfers(rates, spec, timer.load, exchanges))
        last = sum([depth] * ends.mtp_depth, start=last)
    first = timer.time((*ends.embedding, *ends.side_embeddings)) + _waiting(looked_up)
    if spec.model.towers is not None:
        first = sum(_tower_times(spec, spec.model.towers, rates, fused=fused, seen=seen), start=first)
    return first, last, boundary_times(rates, spec)


def _tower_times(spec: Spec, towers: Towers, rates: Rates, *, fused: bool, seen: Seen | None) -> Iterator[LayerTime]:
    """Times of the blocks of a stated encoder and of its projection."""
    dtype = spec.precision.params
    for part in tower_works(spec, towers, dtype, spec.mesh.tower_tp):
        timer, waits = _Timer(spec, rates, dtype, fused=fused, seen=seen), tower_transfers(rates, spec, part)
        timer.load = part.load
        again = timer.again(_repeated(part.ops, part.policy, part.reruns)) + LayerTime(input_ns=waits.repeated_ns(part.policy))
        yield from [timer.time(part.ops) + _waiting(waits) + again] * part.times


def layer_time(
    spec: Spec, rates: Rates, block: Block, policy: str, *, scaled: bool, fused: bool = False, seen: Seen | None = None
) -> LayerTime:
    """Times of one layer under a recompute policy.

    Args:
        spec: A checked spec.
        rates: Rates of the device.
        block: The layer.
        policy: Recompute policy.
        scaled: True if its linears and banks multiply in eight bits.
        fused: True to count one kernel for each op that runs as plain torch.
        seen: Records the kinds of kernels that run, if the device has measured constants.
    """
    timer = _Timer(spec, rates, spec.precision.of(block.family), fused=fused, scaled=scaled, policy=policy, seen=seen)
    ops, family = layer_works(timer.load, spec.model, block), FAMILIES[block.family]
    reruns = family.selective(family.section_of(spec.model), block.variant).reruns
    waits, repeated = layer_transfers(rates, spec, timer.load, block), _repeated(ops, policy, reruns)
    again, (time, priced) = timer.again(repeated), timer.priced(ops)
    time += _waiting(waits) + again + LayerTime(input_ns=waits.repeated_ns(policy))
    exchanges = family.exchanges(family.section_of(spec.model), spec.model.hidden_size, block.variant)
    stops = stops_of(spec, timer.load, block, exchanges) if spec.interleaves_pairs else None
    if stops is None:
        return time
    waited = Waits(*rows_ns(rates, spec, timer.load, exchanges), waits.forward_ns, waits.input_ns)
    forward, backward = legs_of(stops, ops, priced, waited, (repeated, again.input_ns))
    return replace(time, forward_legs=forward, backward_legs=backward)


def _repeated(ops: Works, policy: str, reruns: frozenset[str]) -> Works:
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


class _Passes(NamedTuple):
    """The passes of one operation.

    Attributes:
        op: The operation.
        scaled: F, I and W of a linear or a bank in eight bits; None for other operations.
        kernels: Forward and backward by Triton kernels; None for one kernel that is ideal.
        plain: Forward and backward by plain torch, if that runs.
    """

    op: OpWork
    scaled: ScaledPasses | None
    kernels: Passes | None
    plain: Passes | None


class _Timer:
    """Times operations of one dtype on one rank."""

    def __init__(
        self,
        spec: Spec,
        rates: Rates,
        dtype: DType,
        *,
        fused: bool = False,
        scaled: bool = False,
        scales_head: bool = False,
        policy: str = "none",
        seen: Seen | None = None,
    ) -> None:
        load = rank_workload(spec, dtype)
        self.load: Workload = load._replace(gathers=True, low=True) if scaled else load
        self._dtype, self._grad_bytes, self._spec = dtype, spec.precision.grads.bytes, spec
        self._runs_kernels, self._runs_plain = spec.host.uses_triton, spec.host.has_kernels and not fused
        self._scaled = EightBits(spec, dtype.of_products.bytes, policy) if scaled else None
        self._head = EightBits(spec, dtype.of_products.bytes, policy) if scales_head else None
        self._prices, self._counts = Prices(rates, dtype, seen or Seen()), rates.measured is not None

    def time(self, ops: Works) -> LayerTime:
        """F, I and W of operations one after another."""
        return self.priced(ops)[0]

    def priced(self, ops: Works) -> tuple[LayerTime, Priced]:
        """The same, and the times of each."""
        found = self._passes(ops)
        forward, launched = list(map(self._forward_ns, found)), self._prices.taken()
        inputs = list(map(self._input_ns, found))
        for index, added in self._sums_ns(ops):
            inputs[index] += added
        weights = list(map(self._weight_ns, found))
        time = LayerTime(sum(forward), sum(inputs), sum(weights), launched, self._prices.taken())
        return time, Priced(forward, list(map(add, inputs, weights)))

    def again(self, ops: Works) -> LayerTime:
        """F of operations one after another, before their backward."""
        return LayerTime(input_ns=sum(map(self._forward_ns, self._passes(ops))), backward_launches=self._prices.taken())

    def _passes(self, ops: Works) -> list[_Passes]:
        shared, saved = (sharing(ops), saved_by_attention(ops)) if self._scaled is not None else (frozenset[int](),) * 2
        found = []
        for index, op in enumerate(ops):
            tokens, facts = self._tokens(op), op.facts
            scaled = None if self._head is None else self._head.of_head(op, tokens)
            if self._scaled is not None:
                scaled = self._scaled.passes(op, tokens, shares=index in shared, keeps=index not in saved)
            kernels = facts.kernels(op.work, tokens) if facts is not None and self._runs_kernels and scaled is None else None
            plain = facts.plain(op.work, tokens) if facts is not None and self._runs_plain and kernels is None and scaled is None else None
            found.append(_Passes(op, scaled, kernels, plain))
        return found

    def _sums_ns(self, ops: Works) -> Iterator[tuple[int, int]]:
        """Additions of the gradients of one input that several linears read, by linear; eight-bit linears count them among their copies."""
        if not self._counts or self._scaled is not None:
            return
        size = self._dtype.of_products.bytes
        for index in sharing(ops):
            op = ops[index]
            added = KindWork(ADD, 3 * op.in_width * size * self._tokens(op), 0, 1)
            yield index, self._prices.parts_ns(op, (added,), 0, INPUT)

    def _forward_ns(self, passes: _Passes) -> int:
        op, scaled, kernels, plain = passes
        unpacking = self._unpacking_ns(op, FORWARD)
        if scaled is not None:
            return unpacking + self._prices.scaled_ns(op, scaled[0], 0, FORWARD)
        done = kernels[0] if kernels is not None else self._ideal(op, op.work.forward, op.work.moved_forward)
        fused = self._prices.kernels_ns(op, done, op.weights * self._dtype.bytes, op.num_steps, FORWARD)
        return unpacking + (fused if plain is None else self._prices.run_ns(op, fused, plain[0]))

    def _input_ns(self, passes: _Passes) -> int:
        """I; for an operation that is not a linear, with its weight gradient, in one pass over memory."""
        op, scaled, kernels, plain = passes
        if scaled is not None:
            inputs = self._prices.scaled_ns(op, scaled[1], 0, INPUT) + self._unpacking_ns(op, INPUT)
            return inputs if op.is_linear else inputs + self._prices.scaled_ns(op, scaled[2], 0, WEIGHT)
        flops, moved, weights = op.work.input_grad, op.work.moved_input, op.weights * self._dtype.bytes
        if op.is_linear and not flops:
            return 0
        if not op.is_linear:
            flops, moved = flops + op.work.weight_grad, moved + op.work.moved_weight
            weights += op.weights * 2 * self._grad_bytes if op.work.weight_grad else 0
        done = kernels[1] if kernels is not None else self._ideal(op, flops, moved)
        fused = self._prices.kernels_ns(op, done, weights, op.num_steps, INPUT)
        return self._unpacking_ns(op, INPUT) + (fused if plain is None else self._prices.run_ns(op, fused, plain[1]))

    def _unpacking_ns(self, op: OpWork, letter: str) -> int:
        """The pass before a product that makes its matrix of packed rows."""
        if self.load.packing is None or not any(op.unpacked):
            return 0
        made = self.load.packing.unpacking(*op.unpacked, self._dtype.bytes, fused=self._runs_kernels or not self._runs_plain)
        return self._prices.moved_ns(op, made, letter)

    def _weight_ns(self, passes: _Passes) -> int:
        """W: a linear's product, added to the gradient that accumulates."""
        op, scaled, _, _ = passes
        summed = op.weights * 2 * self._grad_bytes
        if not op.is_linear or not op.work.weight_grad:
            return 0
        if scaled is not None:
            return self._prices.scaled_ns(op, scaled[2], summed, WEIGHT)
        return self._prices.kernels_ns(op, self._ideal(op, op.work.weight_grad, op.work.moved_weight), summed, 0, WEIGHT)

    def _ideal(self, op: OpWork, flops: int, moved_bytes: int) -> Pass:
        """One pass of an operation by one kernel; `flops` and `moved_bytes` are per token."""
        tokens = self._tokens(op)
        return Pass(moved_bytes * tokens, flops * tokens, 1)

    def _tokens(self, op: OpWork) -> int:
        tokens = self.load.num_tokens // (self.load.tp if op.own_tokens else 1)
        moe = self._spec.model.moe
        if op.skew is None or moe is None:
            return tokens
        skew = moe.busiest_share(op.skew, self._spec.mesh.ep)
        return -(-tokens * skew.numerator // skew.denominator)
