"""Working values of a call: every variant of block evaluated once, and the contents of each slot of a layout."""

from collections.abc import Hashable, Sequence
from copy import copy
from typing import NamedTuple

from megakernels.ops.fp8_linear.facts import delayed_bytes
from megaplan.blocks.ops import Dims
from megaplan.blocks.payload import PACK, UNPACK
from megaplan.budget.chunk import Chunk, ChunkPolicy
from megaplan.budget.rank import EqualRanks
from megaplan.budget.split_backward import SplitBackwardChunk, holding_above, split_unit
from megaplan.budget.stored import RankStorage, SlotStorage, stored
from megaplan.budget.unit import Handed, Unit, handed_values, joined_units, make_unit
from megaplan.hosts.megarun.embedding import (
    boundary_bytes,
    boundary_part,
    every_stage_bytes,
    further_loss_bytes,
    graph_bytes,
    input_bytes,
    label_bytes,
    rotary_tables,
    step_sum_bytes,
)
from megaplan.hosts.megarun.head import shared_names
from megaplan.hosts.megarun.ledger import block_bytes, drops, named_variants, taken_values
from megaplan.hosts.megarun.listed import LAST_OWN
from megaplan.hosts.megarun.parts import NOTHING_ARRIVES, Arriving, BlockBytes, summarize_with_arriving, weigh
from megaplan.hosts.megarun.sizes import Sizes, storage_sizes
from megaplan.hosts.megarun.storage import BlockStorage
from megaplan.hosts.megarun.streams import SHARDS, ShardsPool
from megaplan.hosts.megarun.towers import stream_bytes, tower_rotary_tables
from megaplan.hosts.values import BlockVariant
from megaplan.inventory.tensors import Block, Inventory, Outside, has_groups
from megaplan.layout.ranks import Layout, Slot
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.spec.host import device_of
from megaplan.spec.local import Boundary, Part, boundary, delayed_weights, local_dims, payload_parts
from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import replays_graphs, replays_update
from megaplan.tuples import new


class Evaluated:
    """A variant of block.

    Attributes:
        family: Family of the block.
        layer: True if it is a layer or a prediction depth, with its own groups.
        splits: True if a schedule may split its backward, which only layers allow.
        shared: Parameters of other blocks whose gradients the block passes on; only a prediction depth has any.
        sums: Sums of its ledger.
        storage: FSDP2's storage of its parameters; None for a tied head, whose parameters are the embedding's.
    """

    __slots__ = ("_arrived", "_input_bytes", "_units", "family", "layer", "shared", "splits", "storage", "sums")

    def __init__(self, block: Block, sums: BlockBytes, storage: BlockStorage | None, *, layer: bool, input_bytes: int) -> None:
        ahead = block.family is Outside.MTP
        self.splits, self.shared = layer and not ahead, shared_names(sums.gradients) if ahead else ()
        self.family, self.layer, self.sums, self.storage = block.family, layer, sums, storage
        self._input_bytes = input_bytes
        self._units: dict[tuple[bool, int], Unit] = {}
        self._arrived: dict[Arriving, BlockBytes] = {}

    def with_sums(self, sums: BlockBytes) -> "Evaluated":
        """This block with other sums of its ledger."""
        found = copy(self)
        found.sums, found._units, found._arrived = sums, {}, {}
        return found

    def unit(self, owned: bool, policy: ChunkPolicy, arriving: Arriving) -> Unit:
        """The block as a unit of its chunk, with the sums that this case needs.

        Args:
            owned: True if the chunk itself allocated the input, so that saving it costs bytes.
            policy: Policy of the chunk.
            arriving: Gradients from other slots and blocks.
        """
        sums = self.sums if arriving == NOTHING_ARRIVES else self._with_arriving(arriving, policy)
        key = owned, id(sums)
        unit = self._units.get(key)
        if unit is None:
            owned_bytes, last_own = self._input_bytes if owned else 0, LAST_OWN.get(self.family, "")
            has_experts = self.layer and self.storage is not None and self.storage.experts.has_tasks
            unit = make_unit(sums, self.storage, self.layer, owned_bytes, last_own, has_experts, self.shared)
            if policy.splits_backward and self.splits:
                unit = split_unit(unit, owns_input=owned)
            self._units[key] = unit
        return unit

    def _with_arriving(self, arriving: Arriving, policy: ChunkPolicy) -> BlockBytes:
        if arriving not in self._arrived:
            self._arrived[arriving] = summarize_with_arriving(self.sums, arriving, splittable=policy.splits_backward)
        return self._arrived[arriving]


class BlockMemo:
    """Evaluated blocks of specs with one inventory that differ only in mesh, schedule, batch, recompute, sharding and kernels.

    A block depends on its variant, the local sizes, the degrees that shard its parameters, and the schedule's settings; the rest of the
    spec is the same for all.
    """

    MOST = 1000
    """Largest number of cached specs that differ in more than variants; the cache is then emptied, which bounds a long search."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, dict[BlockVariant, Evaluated]] = {}

    def of(self, spec: Spec, dims: Dims, sizes: Sizes) -> dict[BlockVariant, Evaluated]:
        """The cached blocks by variant; blocks that are added are found by the next spec of the same sizes."""
        mesh, splits = spec.mesh, spec.schedule.kind in SPLIT_BACKWARD
        if len(self._blocks) >= self.MOST:
            self._blocks.clear()
        return self._blocks.setdefault((dims, sizes, mesh.vocab_parallel, mesh.is_pipelined, splits), {})


class SlotParts(NamedTuple):
    """Contents of a slot.

    Attributes:
        chunk: Blocks of the slot as units.
        stored: Storage of its parameters.
        step_sum_bytes: Sums that its layers keep over the microbatches of a step, largest magnitudes of its packed weights, and numbers and
            histories of delayed scaling.
    """

    chunk: Chunk
    stored: SlotStorage
    step_sum_bytes: int


class Evaluation:
    """The values of one rank of a CP group, the last one or another.

    Attributes:
        blocks: Blocks by name; `head` is included for a tied head too.
        equal_ranks: Ranks of a stage with equal bytes of each, by identity of the storages with unevenly sharded tensors; for all
            layouts.
    """

    _values: Sequence[tuple[Part, bool]] = ()  # tensors that layers pass on, each with True if the layer that makes it does not keep it
    _taking: frozenset[str] = frozenset()  # layers that keep one of these tensors

    def __init__(
        self,
        spec: Spec,
        inventory: Inventory,
        layout: Layout,
        *,
        is_last_cp_rank: bool = True,
        padded: bool = True,
        memo: BlockMemo | None = None,
        shards: ShardsPool = SHARDS,
    ) -> None:
        """Evaluate every block.

        Args:
            spec: A checked spec.
            inventory: Parameter tensors of the spec.
            layout: Slots of the spec.
            is_last_cp_rank: True if it is the last rank of its CP group.
            padded: True if shards are padded, as FSDP2 does.
            memo: Blocks of other specs of a search.
            shards: Pool of gradient shards.
        """
        self.spec, self.inventory, self.layout = spec, inventory, layout
        self.dims: Dims = local_dims(spec, is_last_cp_rank=is_last_cp_rank)
        self.boundary_bytes = boundary_bytes(self.dims)
        self.rotary_tables, self.tower_rotary_tables = rotary_tables(spec), tower_rotary_tables(spec)
        self.input_bytes, self.label_bytes, self.every_stage_bytes = input_bytes(spec), label_bytes(spec), every_stage_bytes(spec)
        self.step_sum_bytes, self.further_loss_bytes = step_sum_bytes(spec), further_loss_bytes(spec)
        self.replays, self.replays_update, self.graph_bytes = replays_graphs(spec), replays_update(spec), graph_bytes(spec)
        self.workspace_bytes, self.uses_muon = device_of(spec.device).gemm_workspace.value, spec.optimizer.uses_muon
        sizes = storage_sizes(spec, padded=padded)
        if shards is ShardsPool.REDUCE_SCATTER:  # the pool of a version in which FSDP2 also wrapped stages with one data rank
            sizes = sizes._replace(whole_state=False)
        self.stored = stored(sizes, inventory)
        evaluated = {} if memo is None else memo.of(spec, self.dims, sizes)
        self.blocks: dict[str, Evaluated] = {}
        for variant, names in named_variants(spec, inventory).items():
            found, name = evaluated.get(variant), names[0]
            if found is None:
                tied = name == "head" and inventory.tied
                block = inventory.block("embedding" if tied else name)
                sums, storage = block_bytes(spec, self.dims, name, block), None if tied else self.stored.block(name)
                found = evaluated[variant] = Evaluated(
                    block,
                    sums,
                    storage,
                    layer=has_groups(name) and sizes.unit_layers > 0,
                    input_bytes=stream_bytes(spec, self.dims, name),
                )
            self.blocks.update(dict.fromkeys(names, found))
        mesh = spec.mesh
        self.policy = ChunkPolicy(
            pipelined=mesh.is_pipelined,
            reshard=spec.sharding.reshard_after_forward,
            splits_backward=spec.schedule.kind in SPLIT_BACKWARD and mesh.is_pipelined,
            in_place=spec.precision.activations is spec.precision.grads,
            replicated=mesh.dp_replicate > 1,
            gathers_ahead=sizes.gathers_ahead,
            boundary_bytes=self.boundary_bytes,
            whole=sizes.whole_state,
            separate_shards=shards is ShardsPool.REDUCE_SCATTER or sizes.recasts,
            prefetch=spec.sharding.prefetch or 0,
            sums_first=spec.schedule.microbatches_per_update == 1,
        )
        self.shards, self.expands_segments = shards, spec.host.expands_segments
        self.num_reductions = 1 if mesh.is_pipelined else spec.schedule.microbatches_per_update
        self._parts: dict[int, SlotParts] = {}
        self._given: dict[int, Evaluated] = {}
        values = [(value, part, drops(spec, value)) for value, part in payload_parts(spec, self.dims)]
        self._values = [(part, dropped) for _, part, dropped in values]
        self._taking = frozenset([f"layers.{value.readers[0]}" for value, _, dropped in values if dropped])
        self.equal_ranks: dict[frozenset[int], tuple[EqualRanks, ...]] = {}

    def of_layout(self, layout: Layout) -> "Evaluation":
        """The same blocks in other slots of the same spec."""
        other = copy(self)
        other.layout, other._parts = layout, {}
        return other

    def parts(self, slot: Slot) -> SlotParts:
        """Contents of one of the layout's slots, computed on demand."""
        found = self._parts.get(slot.index)
        if found is None:
            found = self._parts[slot.index] = self._make(slot)
        return found

    def _on_the_same_rank(self, slot: Slot, step: int) -> bool:
        """True if the slot before (step −1) or after (1) exists, and is on a slot's rank."""
        is_end = self.layout.bounds(slot)[step > 0]
        return not is_end and self.layout.slots[slot.index + step].pp_rank == slot.pp_rank

    def _arrived(self, names: Sequence[str]) -> frozenset[str]:
        """Blocks of a slot whose output gradient comes from another slot.

        They are the last block, and blocks after which all blocks share its norm.
        """
        precision, layers = self.spec.precision, self.inventory.layers
        adding_nothing = [layer for layer in self.spec.model.parallel_layers if precision.of(layers[layer].family) is precision.params]
        found, sharing = [names[-1]], {f"layers.{layer}" for layer in adding_nothing}
        while found[-1] in sharing:
            found.append(names[len(names) - 1 - len(found)])
        return frozenset(found)

    def _make(self, slot: Slot) -> SlotParts:
        policy, stored = self.policy, self.stored.slot(slot, self.layout.bounds(slot))
        arrived = self._arrived(stored.names) if policy.pipelined and not stored.is_last else frozenset()
        named, handed, boundaries = self._handed(slot, stored)
        begins = int(named.names[0] == UNPACK)
        units = [
            self._in_stage(name, slot.start).unit(owned, policy, handed.arriving(index + begins, output=name in arrived))
            for index, (name, owned) in enumerate(zip(stored.names, stored.owned, strict=True))
        ]
        if policy.splits_backward:
            units = [
                unit._replace(split=self._holding(name, slot, owned, policy).split, segments={}) if held else unit
                for name, owned, unit, held in zip(stored.names, stored.owned, units, holding_above(units), strict=True)
            ]
        if stored.joined:
            units = joined_units(stored.names, units, stored.joined)
        units = [*([self._boundary(boundaries[0], packs=False)] if begins else ()), *units]
        units += [self._boundary(boundaries[1], packs=True)] if named.names[-1] == PACK else ()
        if policy.splits_backward:
            sends, receives = (self._on_the_same_rank(slot, step) for step in (1, -1))
            chunk: Chunk = SplitBackwardChunk(named, units, policy, handed, sends_locally=sends, receives_locally=receives)
        else:
            chunk = Chunk(named, units, policy, handed, self._offloaded(named.names))
        step_sums = sum([count * self.step_sum_bytes.get(family, 0) for family, count in stored.families.items()])
        step_sums += sum([storage.maxima_bytes for storage in stored.blocks])
        recipe = self.spec.precision.recipe
        if recipe is not None:
            delayed = [len(delayed_weights(self.spec, self.inventory, name)) for name in stored.names]
            step_sums += delayed_bytes(sum(delayed), recipe.amax_history)
        return new(SlotParts, (chunk, stored, step_sums))

    def _holding(self, name: str, slot: Slot, owned: bool, policy: ChunkPolicy) -> Unit:
        """A block of a slot whose output gradient waits for the W of a later layer."""
        return self._in_stage(name, slot.start).unit(owned, policy, Arriving(output=True))

    def _in_stage(self, name: str, start: int) -> Evaluated:
        """A block of the slot that begins with a layer: a layer keeps no values that another slot has sent."""
        found = self.blocks[name]
        if name not in self._taking or taken_values(self.spec, int(name.removeprefix("layers.")), start):
            return found
        if id(found) not in self._given:
            sums = block_bytes(self.spec, self.dims, name, self.inventory.block(name), start=start)
            self._given[id(found)] = found.with_sums(sums)
        return self._given[id(found)]

    def _offloaded(self, names: Sequence[str]) -> tuple[bool, ...]:
        """True for each block of a slot whose kept tensors are in host memory between its passes; empty without any."""
        spec, layers = self.spec, self.inventory.layers
        if not spec.host.activation_offload:
            return ()
        numbers = [int(name.removeprefix("layers.")) if name.startswith("layers.") else -1 for name in names]
        return tuple([index >= 0 and spec.offloads(index, layers[index].family) for index in numbers])

    def _handed(self, slot: Slot, stored: SlotStorage) -> tuple[SlotStorage, Handed, tuple[Boundary, ...]]:
        """A slot's values, its boundaries if any, and the names of the units that unpack the received tensor and pack the sent one."""
        if not self._values:
            return stored, Handed(self.boundary_bytes, self.boundary_bytes), ()
        names, (received, sent) = stored.names, tuple([boundary(self.spec, self.dims, cut) for cut in (slot.start, slot.stop)])
        if self.policy.pipelined:
            names = (UNPACK, *names) if received.values and "embedding" not in names else names
            names = (*names, PACK) if sent.values and not stored.is_last else names
        places = {int(name.removeprefix("layers.")): index for index, name in enumerate(names) if name.startswith("layers.")}
        if stored.is_last:
            places[self.spec.model.num_layers] = names.index("final_norm")
        values = handed_values(self._values, places, (slot.start, slot.stop), ends=stored.is_last)
        return stored._replace(names=names), Handed(received.bytes, sent.bytes, values), (received, sent)

    def _boundary(self, sent: Boundary, *, packs: bool) -> Unit:
        return make_unit(weigh(boundary_part(sent, packs=packs), {}, in_place=True), None, False, self.boundary_bytes if packs else 0)

    def of_rank(self, slots: tuple[Slot, ...]) -> RankStorage:
        """Storage of the parameters of a pipeline rank with these slots."""
        return self.stored.rank(slots, tuple(map(self.layout.bounds, slots)))
