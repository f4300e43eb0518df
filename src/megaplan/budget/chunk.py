"""One chunk of a rank: its blocks in execution order, the bytes that they keep together, and the parts of the peak while it runs.

A peak (`megaplan.budget.actions`) is a sum of five parts, so that its cells and its total cannot differ: bytes kept by the
blocks before, the running block's own bytes, and the gradients, communication buffers and other activations allocated at that time.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

from megaplan.blocks.ops import OUTPUT, SHARED
from megaplan.blocks.payload import PACK, UNPACK
from megaplan.budget.gathers import Later, later_gathers, next_ahead, several_ahead
from megaplan.budget.stored import SlotStorage
from megaplan.budget.tape import Ahead, Point
from megaplan.budget.unit import Handed, Peak, Unit, adds_nothing
from megaplan.budget.values import ACTIVATIONS, COMMUNICATION, GRADIENTS, NO_BYTES, WORKSPACE
from megaplan.columns import Column
from megaplan.families.residual import VIEWED
from megaplan.hosts.megarun.head import depth_sums
from megaplan.hosts.megarun.offload import aligned
from megaplan.hosts.megarun.sizes import GroupBytes
from megaplan.schedules.actions import ActionKind
from megaplan.schedules.states import BACKWARDED, FORWARDED, REDUCED, UNTOUCHED, ChunkState
from megaplan.tuples import new


class ChunkPolicy(NamedTuple):
    """Settings of the host for running a chunk.

    Attributes:
        pipelined: A torch pipeline schedule runs the chunk: gradients accumulate unsharded and are reduced once.
        reshard: Gathered parameters of layers are freed after forward.
        splits_backward: The schedule computes weight gradients in their own action.
        in_place: True if gradients of the slot's own parameters accumulate in the dtype in which autograd makes them; a layer's flag is in
            its block.
        replicated: Reduced gradients are summed over replicas, which holds every reduction's output until the backward has ended.
        gathers_ahead: Number of later units that each unit's forward gathers first. Without a number in the spec it is one unit with EP,
            where the host waits for counts of rows.
        boundary_bytes: One microbatch's residual stream.
        whole: True without FSDP2: after a group's backward one launch casts its gradients to the dtype of the stored parameters.
        sums_first: The first microbatch is the only one: its backward sums gradients over copies of the parameters.
        separate_shards: True if gradient shards and activations are in the pools of different streams.
        prefetch: Units that each unit's backward gathers ahead, as the spec says; 0 for FSDP2's own order, group by group.
    """

    pipelined: bool
    reshard: bool
    splits_backward: bool
    in_place: bool
    replicated: bool
    gathers_ahead: int
    boundary_bytes: int
    whole: bool = False
    separate_shards: bool = False
    prefetch: int = 0
    sums_first: bool = False

    def has_buckets(self, *, first: bool) -> bool:
        """True if any backward may cast gradients to sum them over copies of the parameters."""
        return self.whole and not self.pipelined and (self.sums_first or not first)


class Chunk:
    """A slot's units with the sums that a budget needs.

    Attributes:
        late_bytes: Part of its unsharded gradients that the weight half of a split backward makes.
        waiting_bytes: Bytes that a microbatch keeps between the two halves of a split backward.
        waiting_slack_bytes: Bytes that the allocator's rounding adds to them.
        kept_input_bytes: Bytes of an input that a microbatch keeps for the second half, because the previous stage on the same rank has
            sent it.
        input_bytes: A microbatch's input that another stage has sent; 0 if the chunk has the embedding, or without a pipeline.
        output_bytes: A microbatch's output for another stage; 0 if it ends the model, or without a pipeline.
        packs: True if its last unit makes that output of several values.
        held_values: Values that the stage holds for later layers as each unit's forward begins, and while it runs.
        value_sums: Gradient sums of such values that exist when each unit's backward begins.
        offloaded: True for each unit whose kept tensors are in host memory between its forward and its backward.
        before: Bytes that earlier units keep on the device while a unit runs, inputs included, by unit; last, the bytes between passes.
            The saved tensors of an offloaded unit leave the device while the next unit runs forward, and return while that unit runs
            backward.
        on_host: Bytes of each offloaded unit in host memory for a microbatch, with aligned tensors.
    """

    late_bytes = waiting_bytes = waiting_slack_bytes = kept_input_bytes = 0

    def __init__(
        self,
        stored: SlotStorage,
        units: Sequence[Unit],
        policy: ChunkPolicy,
        handed: Handed,
        offloaded: Sequence[bool] = (),
    ) -> None:
        """Computes the sums.

        Args:
            stored: Storage of the slot's parameters, and the names of its blocks that run.
            units: The blocks of these names.
            policy: Settings of the host.
            handed: Boundaries of the chunk, and values that its layers pass on; units that pack and unpack them are among the units.
            offloaded: See the class; none if empty.
        """
        self.names, self.units, self.policy, self.has_mtp, self.root = stored.names, tuple(units), policy, stored.has_mtp, stored.root
        self.input_bytes = 0 if "embedding" in self.names or not policy.pipelined else handed.received_bytes
        # the stage output, held until backward, and its received gradient
        self.output_bytes = 0 if stored.is_last or not policy.pipelined else handed.sent_bytes
        self.packs = self.names[-1] == PACK
        self.offloaded = tuple(offloaded) or (False,) * len(units)
        self.before, self.on_host = _kept_before(units, self.offloaded)
        self.saved_bytes: int = self.before[-1] + self.output_bytes
        self.held_values = handed.held_bytes(len(units))
        self.value_sums, self._first_added = handed.summed_bytes(len(units)), handed.first_added_bytes(len(units))
        self.slack_bytes: int = sum([unit.slack_bytes * (not away) for unit, away in zip(units, self.offloaded, strict=True)])
        self.layers_gathered_bytes = stored.layers_together.gathered_bytes
        self.gathered_bytes = self.root.gathered_bytes + self.layers_gathered_bytes
        self.unsharded_bytes: int = self.root.unsharded_bytes + stored.layers_together.unsharded_bytes
        self.shard_bytes: int = self.root.shard_bytes + stored.layers_together.shard_bytes
        layers_flat = stored.largest_flat_bytes
        # all-gather outputs of a group, and of the layers that are gathered next
        flats = max(self.root.flat_bytes, layers_flat) + max(policy.gathers_ahead, 1) * layers_flat
        self.parts_bytes: int = stored.layers_together.part_bytes
        largest = max(map(add, map(add, self.before, [held for held, _ in self.held_values]), [unit.forward_bytes for unit in units]))
        filling = self.root.gathered_bytes + self.root.casting_bytes
        largest += self.parts_bytes + max([max(unit.closes.cutting_bytes, unit.bank.cutting_bytes) for unit in units])
        self.forward_bound: int = max(largest + self.gathered_bytes + flats + stored.largest_casting_bytes, filling)
        """Upper bound on the bytes of a forward, without accumulated gradients."""
        self.reduce_bound: int = self.unsharded_bytes + self.shard_bytes + self.gathered_bytes + stored.largest_reduction_bytes
        """Upper bound on the bytes at a reduction: everything allocated before, every shard, and the largest buffers."""
        self.head = self.names.index("head") if "head" in self.names else -1
        self.ties = self.head >= 0 and self.units[self.head].storage is None and "embedding" in self.names
        self.embedding = self.names.index("embedding") if "embedding" in self.names else -1
        """True if a tied head and the embedding are one parameter of this chunk, whose gradient has a part from each."""
        held = policy.pipelined and self.head >= 0
        ends = self.units[self.head].block.part.tensors if held else {}
        self.logits_bytes = ends.get("logits", ends[OUTPUT])[0] if ends else 0  # the output of the last stage, or the loss instead
        self.received_from = self._received_from()
        self.backward_extra = self._backward_extra(handed.in_buffer_bytes(len(units)))
        self.waiting_from = [0] * len(units)  # if W runs later: bytes that each unit and the units after it leave to W

    @cached_property
    def first_layer(self) -> int:
        """The first layer, if no product runs before it; else −1."""
        first = next((index for index, unit in enumerate(self.units) if unit.layer), -1)
        return first if set(self.names[:first]) <= {"embedding", "relation_bias", UNPACK} else -1

    @cached_property
    def passed_on(self) -> frozenset[str]:
        """Blocks outside the layers whose gradients the first MTP depth passes on."""
        first = self.units[self.names.index("mtp.0")].shared
        return frozenset({"head", *(name.partition(".")[0] for name in first)})

    def saved_cells(self, count: int) -> dict[Column, int]:
        """Bytes that `count` microbatches keep."""
        return self._kept(count, 0, self.output_bytes * count)

    def peak_cells(self, peak: Peak, others: int = 0) -> dict[Column, int]:
        """The parts of a peak by column, which sum to its total, and the saved bytes of the `others` microbatches."""
        cells = self._kept(others, max(peak.unit, 0), peak.activations + self.output_bytes * others)
        if peak.live is not None:
            self.units[peak.unit].block.add_to(cells, peak.live, peak.params)
        cells[GRADIENTS] += peak.gradients
        cells[COMMUNICATION] += peak.communication
        cells[WORKSPACE] -= peak.absent
        return cells

    def action_cells(self, kind: ActionKind, peak: Peak, others: int = 0) -> dict[Column, int]:  # noqa: ARG002 (split backwards differ)
        """`peak_cells` of an action's peak."""
        return self.peak_cells(peak, others)

    def waiting_cells(self, count: int) -> dict[Column, int]:  # noqa: ARG002 (nothing without a split backward)
        """Bytes that `count` microbatches keep between the two halves of a split backward."""
        return {}

    def held(self, state: ChunkState, *, weight_grads: bool = True) -> tuple[int, int]:
        """Gradients and gathered parameters of the chunk while another chunk runs.

        `weight_grads`: True if linear weights have gradients.
        """
        if state is REDUCED:
            return self.shard_bytes, 0
        gradients = 0
        if state > FORWARDED:
            gradients = self.unsharded_bytes - (0 if weight_grads else self.late_bytes) if self.policy.pipelined else self.shard_bytes
        if state is UNTOUCHED:
            return gradients, 0
        kept = not self.policy.reshard or state is BACKWARDED
        return gradients, self.gathered_bytes if kept else self.root.gathered_bytes + self.parts_bytes

    def peak(self, index: int, point: Point, gradients: int, communication: int, activations: int, absent: int = 0) -> Peak:
        """A point of a unit's segment plus a level: the bytes that earlier units keep, and the given bytes."""
        size, where, live, params, own_gradients, own_communication, own_activations = point
        total = self.before[index] + size + gradients + communication + activations - absent
        gradients, communication, activations = gradients + own_gradients, communication + own_communication, activations + own_activations
        return new(
            Peak, (total, where.format(self.names[index]), index, live, params, gradients, communication, activations, absent, 0, None)
        )

    def idle_peak(self, where: str, gradients: int, communication: int, activations: int = 0) -> Peak:
        """The point at which the chunk has no microbatch in flight; it includes only the given activations."""
        total = gradients + communication + activations
        return Peak(total, where, 0, None, (), gradients, communication, activations)

    @cached_property
    def ahead(self) -> list[Ahead]:
        """The all-gathers of earlier layers that each unit's backward begins, by unit."""
        if self.policy.prefetch:
            return several_ahead(self.units, self.policy.prefetch, headless=self.head < 0)
        return next_ahead(self.units)

    @cached_property
    def later(self) -> tuple[list[Later], int]:
        """The bytes gathered ahead of each unit in a forward, and their maximum while the stage begins the first gathers."""
        return later_gathers(self.units, self.policy.gathers_ahead, again=False)

    @cached_property
    def later_again(self) -> tuple[list[Later], int]:
        """The same as `later`, if parameters are gathered from kept parts."""
        return later_gathers(self.units, self.policy.gathers_ahead, again=True)

    def groups(self) -> Iterator[tuple[str, GroupBytes]]:
        """FSDP2 groups by name: the slot's own group, then those of its layers and their experts."""
        yield "the slot's own parameters", self.root
        for name, unit in zip(self.names, self.units, strict=True):
            yield name, unit.opens
            yield f"{name}.experts", unit.bank

    @property
    def reduced_groups(self) -> list[GroupBytes]:
        """FSDP2's groups in the order in which they are reduced."""
        groups = [group for _, group in self.groups() if group.reduce_bytes and not self.policy.whole]
        if not self.policy.pipelined:  # experts in their layer's backward, the layer after it, the slot's rest last
            groups.reverse()
        return groups

    def passed_bytes(self, index: int) -> int:
        """Gradients that a layer's backward passes on: of the stream, and of the norm that it shares with the layer before.

        For a prediction depth they include the waiting gradient that final norm or head made for the depth's input; if layers pass values
        on, also the gradients that the layer made of earlier values, and the sums of later layers' gradients.
        """
        if self.names[index].startswith("mtp."):
            return 2 * self.policy.boundary_bytes
        passed = self.policy.boundary_bytes + self.units[index].given_bytes + self.value_sums[index]
        tensors = self.units[index].block.part.tensors
        if SHARED not in tensors:
            return passed
        return passed + tensors[VIEWED][0] - (self._received_bytes if index > self.received_from else 0)

    def first_sums(self, index: int) -> int:
        """Bytes after the first layer that adds to gradients from the next stage; 0 if no layer does.

        They are the gradients that it passes on, and new sums.

        Autograd frees a Python function's results when all are added.
        """
        added = self._first_added[index]
        return self.passed_bytes(index) + added if added else 0

    def waiting_sums(self, index: int) -> int:
        """Sums of shared parameters' gradients that wait after a prediction depth, until the depth before adds to them."""
        name = self.names[index]
        return depth_sums(self.units[index - 1].block.part) if name.startswith("mtp.") and name != "mtp.0" else 0

    @cached_property
    def sums_in_place(self) -> bool:
        """True if some of its gradients are added in place to earlier ones."""
        return self.policy.in_place or any(unit.block.in_place for unit in self.units)

    @cached_property
    def lasting(self) -> list[int]:
        """Gradients of the slot's own parameters that stay after each unit; none for a layer, which has its own group.

        With MTP the first depth passes on the gradients of embedding, head and used side embeddings; for a tied embedding the head's part
        stays until the embedding's is added to it.
        """
        return [0 if unit.layer and not unit.shared else self._lasting(index, unit) for index, unit in enumerate(self.units)]

    def _lasting(self, index: int, unit: Unit) -> int:
        if unit.layer:
            return sum([unit.block.gradients[name] for name in unit.shared])
        if self.has_mtp and self.names[index] in self.passed_on:
            return 0
        added = unit.block.gradients.get("weight", 0) if self.ties and self.names[index] == "embedding" else 0
        return sum(unit.block.gradients.values()) - added

    @cached_property
    def summed_later(self) -> list[int]:
        """Gradients of the slot's own parameters that wait after each unit for a part that another unit makes.

        Autograd adds them to the gradients of earlier microbatches at that unit, because it waits for all parts.
        """
        found = [0] * len(self.units)
        if self.has_mtp:
            first, names = self.names.index("mtp.0"), frozenset(self.names)
            unit = self.units[first]
            found[first] = sum([unit.block.gradients[name] for name in unit.shared if name.partition(".")[0] in names - {"head"}])
        elif self.ties:
            found[self.head] = self.units[self.embedding].block.gradients.get("weight", 0)  # LoRA may freeze it
        return found

    def tied_sum_bytes(self) -> int:
        """Bytes of the sum of a tied embedding's two gradients if autograd allocates a third storage for it; else 0.

        The head's part exists first. It is a transposed view of a product if the head is a linear; after MTP's depths it is already a sum.
        """
        if not self.ties or self.has_mtp:
            return 0
        ops = self.units[self.head].block.part.replay.program.graph.ops
        return self.units[self.embedding].block.gradients["weight"] if any(op.params and op.hands_views for op in ops) else 0

    def _kept(self, count: int, stop: int, activations: int) -> dict[Column, int]:
        """Bytes that `count` microbatches keep, bytes of one more microbatch up to a unit, and other activations."""
        cells = NO_BYTES.copy()
        cells[ACTIVATIONS] = activations + count * self.before[-1] + self.before[stop]
        for index, unit in enumerate(self.units):
            number = count + (index < stop) if not self.offloaded[index] else int(index == stop - 1)
            for column, size in unit.elsewhere:
                kept = size * number
                cells[column] += kept
                cells[ACTIVATIONS] -= kept
        return cells

    @property
    def _received_bytes(self) -> int:
        """The gradient of its last layer's output in the receive buffer."""
        return self.policy.boundary_bytes if self.output_bytes else 0

    def _received_from(self) -> int:
        """First layer whose output's gradient is in the receive buffer: a unit that shares its norm adds nothing to the passed gradient."""
        index = len(self.units) - 1 - self.packs
        while self.output_bytes and adds_nothing(self.units[index]):
            index -= 1
        return index

    def _backward_extra(self, received: Sequence[int]) -> list[int]:
        """Bytes by which each unit's backward exceeds its ledger, or less.

        The gradient of a stage's output is in a receive buffer, which is counted there. The last stage's output, the logits, is held
        until the backward has ended. The gradient of the first MTP depth's input that final norm or head made waits until that depth
        adds its own. A stage that sends values receives their gradients in one buffer, of which its last layer's is a view. `received` are
        gradients of values that the units count and that are also in this buffer.
        """
        carried = [sums - buffered for sums, buffered in zip(self.value_sums, received, strict=True)]
        for index in range(self.received_from, len(carried)):
            carried[index] -= self._received_bytes
        carried[-1] -= self.output_bytes - self._received_bytes
        for index in range(self.head):
            carried[index] += self.logits_bytes
        if self.has_mtp:
            for index, name in enumerate(self.names):
                carried[index] += self.policy.boundary_bytes if name.startswith("mtp.") else 0
        return carried


def _kept_before(units: Sequence[Unit], offloaded: Sequence[bool]) -> tuple[list[int], list[int]]:
    """`Chunk.before` and `Chunk.on_host` of units of which some are offloaded."""
    before, on_host = [0, *accumulate([0 if away else unit.kept_bytes for unit, away in zip(units, offloaded, strict=True)])], []
    for index, unit in enumerate(units):
        if offloaded[index]:
            before[index + 1] += unit.kept_bytes if index + 1 < len(units) else 0
            kept = unit.block.part.replay.of_saved(unit.block.part.tensors)
            on_host.append(sum([aligned(tensor[0]) for tensor in kept]) + aligned(unit.input_bytes))
    return before, on_host
