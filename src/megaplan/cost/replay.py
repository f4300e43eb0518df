"""The step of megarun: layer times from the device's rates, the schedule replayed with them, data ranks, and the optimizer.

One timer computes the steps of many specs of one model in a search, or of one spec in an estimate. All times are integers, in nanoseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from megakernels.facts import KindWork
from megaplan.cost.blocks import rank_workload
from megaplan.cost.data import DataTimes, copies_ns, data_times, exchanges, exposed_ns, held_of, host_ns, part_ns
from megaplan.cost.elements import LocalElements, local_elements, with_recipe
from megaplan.cost.offload import waits_of, with_copies
from megaplan.cost.outside_layers import adamw_parts, clip_parts, delayed_parts, gather_parts, muon_parts, reduce_parts, sum_parts
from megaplan.cost.rates import Note, Rates, Seen, rates_of
from megaplan.cost.times import end_times, layer_time
from megaplan.cost.transfers import layer_transfers
from megaplan.cost.values import LayerTime, ModelTimes, replayed
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory
from megaplan.schedules import LinkedOrders, actions, link, num_copies, placement
from megaplan.spec.host import fabric_size
from megaplan.spec.models import RecomputePolicy, Spec

K = TypeVar("K")
V = TypeVar("V")
Change = Callable[[Rates], Rates]
SlotSpans = Sequence[tuple[int, int]]
"""One half-open span of layers for each slot, in model order."""
MOST_KEPT = 20_000
"""Number of cached values per kind of a timer; at this number the cache is emptied."""
BUBBLE, EXPOSED, PLAIN, COPIES, HOST = "bubble", "exposed", "plain torch", "sharding copies", "host"
"""Names of terms: idle pipeline ranks; prefix of exposed transfers; additional time of operations without a kernel; FSDP2's casts and
copies; time for which the device waits for the host."""


class Sums(NamedTuple):
    """Sums of one microbatch on all pipeline ranks.

    Attributes:
        total: F, I and W.
        computing: F, I and W without exchanges that the other microbatch of a pair may hide.
        forward: F.
        chain: F and I, which the first microbatch runs one after another.
        largest: The largest of: each layer, and each end of the model together with its layer.
        first: Time of the first slot without its layers.
        last: Time of the last slot without its layers.
        forward_launches: Kernels that the host launches in F.
        backward_launches: The same of I and W.
    """

    total: int
    computing: int
    forward: int
    chain: int
    largest: int
    first: LayerTime
    last: LayerTime
    forward_launches: int
    backward_launches: int


WITHOUT_RECOMPUTE = {"recompute": Spec.model_fields["recompute"].default}
"""Update of a spec without recompute."""
_MODULES: dict[tuple[str, str], RecomputePolicy] = {("A", "core_attn"): "selective", ("D", "mlp"): "full", ("E", "moe"): "full"}
"""Policies that correspond to a module of Megatron's selective recompute; other modules recompute little."""


def policy_of(spec: Spec, letter: str) -> RecomputePolicy:
    """The recompute policy of a letter's layers; Megatron's full and selective recompute are keys of its host."""
    if spec.host.recompute_num_layers:
        return "full"
    modules = [policy for (own, module), policy in _MODULES.items() if own == letter and module in spec.host.recompute_modules]
    return modules[0] if modules else spec.recompute.of(letter)


def _layer_policy(spec: Spec, layer: int, letter: str) -> RecomputePolicy:
    """The policy of one layer; the last one is not recomputed."""
    return "none" if layer == spec.model.num_layers - 1 else policy_of(spec, letter)


class ReplayTimer:
    """Steps of one model on one kind of device, by any mesh, schedule, batch and recompute policy."""

    def __init__(self, inventory: Inventory, spec: Spec, change: Change | None = None, *, fused: bool = False) -> None:
        """`spec`: one of the timed specs, which differ in the varied keys of a search.

        `change`: of the rates of each spec; none if None. `fused` as for `layer_time`.
        """
        self.inventory, self._change, self._fused = inventory, change, fused
        self._rates: dict[str, Rates] = {}
        self.scaled = [spec.multiplies_in_eight_bits(index, block.family) for index, block in enumerate(inventory.layers)]
        """True for each layer whose linears and banks multiply in eight bits."""
        makes: dict[tuple[int, bool], tuple[Block, bool, int]] = {}
        for block, scaled in zip(inventory.layers[:-1], self.scaled, strict=False):
            make = id(block), scaled
            makes[make] = block, scaled, makes.get(make, (block, scaled, 0))[2] + 1
        self.makes = list(makes.values())
        """Blocks of all layers but the last, whether their products multiply in eight bits, and how often each occurs."""
        self._layers: dict[tuple[object, ...], LayerTime] = {}
        self._ends: dict[tuple[object, ...], tuple[LayerTime, LayerTime, tuple[int, ...]]] = {}
        self._sums: dict[tuple[object, ...], Sums] = {}
        self._times: dict[tuple[object, ...], ModelTimes] = {}
        self._replays: dict[tuple[object, ...], tuple[int, int]] = {}
        self._data: dict[tuple[object, ...], DataTimes] = {}
        self._elements: dict[tuple[int, int, int], LocalElements] = {}
        self.seen = Seen()
        """Kinds of kernels of all layers and ends that were timed."""

    def rates(self, spec: Spec) -> Rates:
        """Rates of a spec, which differ between kernels and plain torch."""
        found = self._rates.get(spec.host.kernels)
        if found is None:
            own = rates_of(spec)
            found = self._rates[spec.host.kernels] = own if self._change is None else self._change(own)
        return found

    def times(self, spec: Spec) -> ModelTimes:
        """Times of each layer and both ends, as `model_times` gives them."""
        key = (*self.work_key(spec), spec.mesh.pp > 1)
        found = self._times.get(key)
        if found is None:
            found = kept(self._times)[key] = self._times_of(spec)
        return found

    def work_key(self, spec: Spec) -> tuple[object, ...]:
        """The values that decide the work of one microbatch; not the schedule, pipeline, data ranks or resharding."""
        mesh = spec.mesh
        policies = tuple([policy_of(spec, block.family) for block, _, _ in self.makes])
        degrees = mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.vocab_parallel
        return policies, degrees, spec.batch.micro_batch_size, spec.host.kernels, spec.host.activation_offload, _around(spec)

    def _times_of(self, spec: Spec) -> ModelTimes:
        found = self.running(spec)
        if spec.host.activation_offload:
            found = replace(found, layers=tuple(with_copies(spec, self.inventory, self.rates(spec), found.layers)))
        return found

    def running(self, spec: Spec) -> ModelTimes:
        """The times without the waits of layers for copies of saved tensors."""
        return ModelTimes(tuple(self._without_copies(spec)), *self._end(spec), self.rates(spec).issue_ns)

    def _without_copies(self, spec: Spec) -> list[LayerTime]:
        """Times of each layer without copies of kept tensors to host memory."""
        makes, found = dict[tuple[int, str, bool], LayerTime](), list[LayerTime]()
        for index, block in enumerate(self.inventory.layers):
            make = id(block), _layer_policy(spec, index, block.family), self.scaled[index]
            time = makes.get(make)
            if time is None:
                time = makes[make] = self.layer(spec, block, make[1], scaled=make[2])
            found.append(time)
        return found

    def _copied(self, spec: Spec) -> LayerTime:
        """Times that layers wait for copies of kept tensors, of one microbatch on all ranks."""
        return waits_of(self.times(spec).layers, self._without_copies(spec)) if spec.host.activation_offload else LayerTime()

    def _running(self, spec: Spec) -> int:
        """F and B of a microbatch without waits for copies."""
        return self.sums(spec).total - self._copied(spec).total_ns

    def step_ns(self, spec: Spec, spans: SlotSpans) -> int:
        """The replay's makespan, and the additional time of data ranks and optimizer."""
        sums = self.sums(spec)
        return self._replayed(spec, sums, spans)[0] + self.outside_layers(spec, sums)

    def turns_ns(self, spec: Spec, spans: SlotSpans) -> tuple[int, int]:
        """Exchanges of rows in a step at which pairs take turns, and the time that these hide, on a mean pipeline rank."""
        sums, count = self.sums(spec), spec.schedule.microbatches_per_update
        return count * (sums.total - sums.computing) // spec.mesh.pp, self._replayed(spec, sums, spans)[1] // spec.mesh.pp

    def terms(self, spec: Spec, spans: SlotSpans) -> dict[str, int]:
        """Nanoseconds by term, which add up to the step's.

        The terms are those of an average pipeline rank: its layers, their additional time as plain torch, recompute, exposed transfers;
        then idle time, data ranks and the optimizer.
        """
        count, pp, sums = spec.schedule.microbatches_per_update, spec.mesh.pp, self.sums(spec)
        once = spec.model_copy(update=WITHOUT_RECOMPUTE)
        kept, fused = self._running(once), ReplayTimer(self.inventory, once, self._change, fused=True)._running(once)
        waits = self._waits(spec) + self._copied(spec).total_ns
        plain, recompute, exposed = (count * each // pp for each in (kept - fused, self._running(spec) - kept, waits))
        makespan, hidden = self._replayed(spec, sums, spans)
        busy, exposed = count * sums.total // pp - hidden // pp, exposed - hidden // pp
        found = terms_of(makespan, busy, plain, recompute, exposed) | self.outside_terms(spec, sums)
        return without_unmeasured(found, self.rates(spec))

    def kinds(self, spec: Spec) -> list[Note]:
        """Every kind of kernels of a step, all pipeline ranks together, with its counts and its time; none without measured constants.

        Kinds outside the layers have the empty letter.
        """
        if self.rates(spec).measured is None:
            return []
        notes: list[Note] = []
        seen = Seen(notes)
        layers, count = self.inventory.layers, spec.schedule.microbatches_per_update
        for index, block in enumerate(layers):
            layer_time(spec, self.rates(spec), block, spec.policy(index, block.family), scaled=self.scaled[index], seen=seen)
        end_times(spec, self.rates(spec), seen=seen)
        return notes * count + [("", part, part_ns(spec, self.rates(spec), part)) for part in self._parts_outside(spec)]

    def kinds_seen(self, spec: Spec) -> set[str]:
        """Names of the kinds of kernels of the timed layers, and of a step outside its layers."""
        return self.seen.kinds | {part.kind for part in self._parts_outside(spec)}

    def _parts_outside(self, spec: Spec) -> list[KindWork]:
        local = local_elements(self.inventory, spec.mesh.tp, spec.mesh.ep, spec.mesh.etp, spec.packing)
        held = held_of(spec, with_recipe(spec, self.inventory, local))
        gathers, reductions = exchanges(spec)
        return [
            *list(gather_parts(spec, held)) * gathers,
            *list(reduce_parts(spec, held)) * reductions,
            *list(sum_parts(spec, held)) * (reductions - 1),
            *clip_parts(spec, held),
            *delayed_parts(spec, held),
            *adamw_parts(spec, held),
            *muon_parts(spec, held, self.rates(spec).device.num_sms.value),
        ]

    def outside_layers(self, spec: Spec, sums: Sums) -> int:
        """Time of a step outside its microbatches: waits for data ranks and for the host, FSDP2's copies, and the optimizer."""
        return sum(self.outside_terms(spec, sums).values())

    def outside_terms(self, spec: Spec, sums: Sums) -> dict[str, int]:
        """The parts of `outside_layers` by term; `sums` are of the computation that hides exchanges."""
        data = self._data_of(spec)
        exposed, copies = exposed_ns(spec, data, sums.forward, sums.total), copies_ns(spec, data)
        return {f"{EXPOSED} data": exposed, COPIES: copies, "optimizer": data.optimizer_ns, HOST: self._host(spec, sums)}

    def _host(self, spec: Spec, sums: Sums) -> int:
        found = self.rates(spec).measured
        return 0 if found is None else self.host_ns(spec, sums, found.issue_ns, found.update_ns)

    def host_ns(self, spec: Spec, sums: Sums, issue: int, update: int) -> int:
        """Time that a mean pipeline rank waits for its host, phase by phase; `issue` and `update` as for `megaplan.cost.data.host_ns`."""
        pp = spec.mesh.pp
        forward = sums.forward // pp, sums.forward_launches // pp
        backward = (sums.total - sums.forward) // pp, sums.backward_launches // pp
        return host_ns(spec, issue, update, self._data_of(spec), forward, backward)

    def sums(self, spec: Spec) -> Sums:
        """The sums of one microbatch on all pipeline ranks."""
        key = self.work_key(spec)
        found = self._sums.get(key)
        if found is None:
            found = kept(self._sums)[key] = self._add_up(spec)
        return found

    def _add_up(self, spec: Spec) -> Sums:
        policies = [policy_of(spec, block.family) for block, _, _ in self.makes]
        first, last, _ = self._end(spec)
        layers = self.inventory.layers
        end = self.layer(spec, layers[-1], "none", scaled=self.scaled[-1])
        start = self.layer(spec, layers[0], _layer_policy(spec, 0, layers[0].family), scaled=self.scaled[0])
        each = [
            (self.layer(spec, block, policy, scaled=scaled), count)
            for (block, scaled, count), policy in zip(self.makes, policies, strict=True)
        ]
        largest = max([first.total_ns + start.total_ns, last.total_ns + end.total_ns, *[time.total_ns for time, _ in each]])
        each.append((self._copied(spec), 1))
        total = first.total_ns + last.total_ns + end.total_ns + sum([time.total_ns * count for time, count in each])
        computing = first.compute_ns + last.compute_ns + end.compute_ns + sum([time.compute_ns * count for time, count in each])
        forward = first.forward_ns + last.forward_ns + end.forward_ns + sum([time.forward_ns * count for time, count in each])
        weight = first.weight_ns + last.weight_ns + end.weight_ns + sum([time.weight_ns * count for time, count in each])
        launches = first.forward_launches + last.forward_launches + end.forward_launches
        launches += sum([time.forward_launches * count for time, count in each])
        back = first.backward_launches + last.backward_launches + end.backward_launches
        back += sum([time.backward_launches * count for time, count in each])
        return Sums(total, computing, forward, total - weight, largest, first, last, launches, back)

    def layer(self, spec: Spec, block: Block, policy: str, *, scaled: bool) -> LayerTime:
        """One layer under a recompute policy; `scaled` as for `layer_time`."""
        mesh = spec.mesh
        experts = (mesh.ep, mesh.etp) if FAMILIES[block.family].banks else ()
        key = (
            id(block),
            policy,
            scaled,
            mesh.tp,
            mesh.cp,
            spec.batch.micro_batch_size,
            spec.host.kernels,
            experts,
            _around(spec),
            _images(spec),
        )
        found = self._layers.get(key)
        if found is None:
            found = kept(self._layers)[key] = layer_time(
                spec, self.rates(spec), block, policy, scaled=scaled, fused=self._fused, seen=self.seen
            )
        return found

    def _end(self, spec: Spec) -> tuple[LayerTime, LayerTime, tuple[int, ...]]:
        mesh = spec.mesh
        experts = (mesh.ep, mesh.etp) if spec.model.features.mtp is not None else ()  # of prediction depths
        degrees = mesh.tp, mesh.cp, mesh.vocab_parallel, mesh.pp > 1
        key = (*degrees, spec.batch.micro_batch_size, spec.host.kernels, experts, _around(spec), _images(spec))
        found = self._ends.get(key)
        if found is None:
            found = kept(self._ends)[key] = end_times(spec, self.rates(spec), fused=self._fused, seen=self.seen)
        return found

    def _waits(self, spec: Spec) -> int:
        """Transfers of one microbatch that layers wait for."""
        found = 0
        for index, block in enumerate(self.inventory.layers):
            load = rank_workload(spec, spec.precision.of(block.family))._replace(low=self.scaled[index])
            waits = layer_transfers(self.rates(spec), spec, load, block)
            found += waits.forward_ns + waits.input_ns
        return found

    def _data_of(self, spec: Spec) -> DataTimes:
        mesh = spec.mesh
        degrees = mesh.tp, mesh.ep, mesh.etp
        key = (
            *degrees,
            mesh.pp,
            spec.num_copies,
            mesh.cp,
            mesh.dp_replicate,
            mesh.dp_shard,
            spec.sharding.mode,
            spec.host.kernels,
            spec.host.optimizer_offload,
            spec.precision.reduce.bytes,
            spec.precision.grads.bytes,
        )
        found = self._data.get(key)
        if found is None:
            if degrees not in self._elements:
                self._elements[degrees] = local_elements(self.inventory, *degrees, spec.packing)
            found = kept(self._data)[key] = data_times(spec, self.rates(spec), with_recipe(spec, self.inventory, self._elements[degrees]))
        return found

    def _replayed(self, spec: Spec, sums: Sums, spans: SlotSpans) -> tuple[int, int]:
        """Time of all microbatches of an update, and the time that turns hide on all ranks.

        The schedule runs `steps_per_update` times, and fills and drains each time.
        """
        schedule, mesh = spec.schedule, spec.mesh
        if len(spans) == 1:
            return schedule.microbatches_per_update * sums.total, 0
        times = self.times(spec)
        lengths = replayed([times] * len(spans), spans, spec.num_copies)
        orders = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches
        hop_ns = times.widest_ns([stop for _, stop in spans[:-1]])
        key = (*orders, lengths, hop_ns)
        found = self._replays.get(key)
        if found is None:
            linked = linked_orders(*orders)
            found = kept(self._replays)[key] = linked.makespan(lengths, p2p=hop_ns), linked.hidden(lengths)
        makespan, hidden = found
        return schedule.steps_per_update * makespan, schedule.steps_per_update * hidden


def _around(spec: Spec) -> tuple[bool, int, tuple[str, ...], bool]:
    """Settings that decide times of every layer.

    True if groups of ranks may span nodes, which decides over which links they exchange; bytes of an accumulated gradient; libraries; True
    if pairs take turns.
    """
    leaves = spec.mesh.world_size > fabric_size(spec.device)
    return leaves, spec.precision.grads.bytes, spec.host.libraries, spec.interleaves_pairs


def _images(spec: Spec) -> tuple[int, str, str]:
    """Settings of a stated encoder outside the model."""
    return spec.batch.images, spec.recompute.towers, spec.mesh.towers


def kept(known: dict[K, V]) -> dict[K, V]:
    """The cache, emptied if it is full."""
    if len(known) >= MOST_KEPT:
        known.clear()
    return known


@lru_cache(maxsize=512)
def linked_orders(kind: str, pp: int, vpp: int, count: int) -> LinkedOrders:
    """A linked schedule; it is cached, because specs with the same schedule share it."""
    copies = num_copies(placement(kind))
    return link(actions(kind, pp, vpp, count), pp * vpp * copies, copies)


def terms_of(makespan: int, busy: int, plain: int, recompute: int, exposed: int) -> dict[str, int]:
    """Nanoseconds by term of the microbatches: the busy time of an average pipeline rank, three parts of it, and idle time."""
    shares = {PLAIN: plain, "recompute": recompute, f"{EXPOSED} transfers": exposed}
    return {"layers": busy - sum(shares.values()), **shares, BUBBLE: makespan - busy}


def without_unmeasured(terms: dict[str, int], rates: Rates) -> dict[str, int]:
    """The terms without plain torch if its term is 0, and without host and copies if no measured constant gives them."""
    absent = {name for name in (PLAIN,) if not terms[name]} | ({COPIES, HOST} if rates.measured is None else set())
    return {name: value for name, value in terms.items() if name not in absent}
