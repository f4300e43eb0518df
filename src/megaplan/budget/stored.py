"""FSDP2's storage of an inventory, independent of the computation of its blocks: of every block, slot and pipeline rank.

It follows from the inventory and the sizes alone, so specs that differ in batch, schedule or recompute share it (`stored`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from megaplan.families.registry import FAMILIES
from megaplan.hosts.megarun.listed import fsdp_order
from megaplan.hosts.megarun.offload import TensorState, on_host, state_of
from megaplan.hosts.megarun.sizes import AT_END, Cast, GroupBytes, LastPeak, MatrixScratch, Sizes, last_peak, together
from megaplan.hosts.megarun.storage import BlockStorage, block_storage, root_casting_bytes
from megaplan.hosts.megarun.streams import GroupPools, Reserving, group_pools, pools_together
from megaplan.hosts.megarun.units import Member, unit_group
from megaplan.inventory.tensors import Inventory, Outside, fsdp_units, has_groups
from megaplan.inventory.towers import PATCHES, PROJECTOR
from megaplan.layout.ranks import Slot
from megaplan.spec.models import SIDES
from megaplan.tuples import new

ENDS = ("embedding", *SIDES)
"""Blocks with a copy on the last slot, which a tied head or the depths of multi-token prediction use there."""
ATTENDING = frozenset(family.letter for family in FAMILIES.values() if family.rotary is not None)


Ends = tuple[bool, bool]
"""Two flags: True if a slot is the first of a copy of the model, and True if it is the last."""


class SlotStorage(NamedTuple):
    """Storage of a slot's parameters.

    Attributes:
        names: Names of its blocks that run, in execution order; `head` for a tied head too.
        owned: True for each block whose input is a storage of the slot's chunk, or of the chunk before if that does not keep it.
        is_last: True if it ends the model.
        has_mtp: True if MTP depths run in it before the head.
        blocks: Storage of its blocks, in the order of its modules: copies of embeddings first.
        layers: True for each block that is a layer or a prediction depth, with its own groups.
        families: Number of its blocks of each family.
        root: The slot's own group.
        layers_together: The groups of all layers.
        joined: Groups of several layers, by their names.
        pools: Bytes of its groups in FSDP2's streams.
        largest_flat_bytes: The largest all-gather output of a layer.
        largest_reduction_bytes: The largest buffers of a reduction.
        largest_casting_bytes: Most bytes in addition to gathered parameters while they are filled from casts.
        adamw_shard_bytes: Gradient shards that AdamW's update frees: of groups without tensors of Muon, or of single tensors.
        attends: True if any block needs rotary tables.
        whole_parameters: Elements of the full tensors, copies included.
        resident_bytes: Parameter shards: of replicated, tensor-parallel and expert-parallel tensors.
        matrix_state_bytes: Muon's moments of evenly sharded tensors.
        other_state_bytes: AdamW's moments of evenly sharded tensors.
        uneven: True if any tensor shards unevenly.
        matrices: Tensors that Muon updates, by kind, with their number.
        casts: Gradients that are cast for AdamW, in the order of updates.
        slack_bytes: Allocator rounding of shards.
        state_slack_bytes: Allocator rounding of moments.
        parameters: Elements after TP and EP.
        states: Optimizer state of each tensor in the order of updates, if part of it is in host memory; else empty.
    """

    names: tuple[str, ...]
    owned: tuple[bool, ...]
    is_last: bool
    has_mtp: bool
    blocks: tuple[BlockStorage, ...]
    layers: tuple[bool, ...]
    families: Mapping[str, int]
    root: GroupBytes
    layers_together: GroupBytes
    joined: Mapping[tuple[str, ...], GroupBytes]
    pools: GroupPools
    largest_flat_bytes: int
    largest_reduction_bytes: int
    largest_casting_bytes: int
    adamw_shard_bytes: int
    attends: bool
    whole_parameters: int
    resident_bytes: tuple[int, int, int]
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: bool
    matrices: Mapping[MatrixScratch, int]
    casts: tuple[Cast, ...]
    slack_bytes: int
    state_slack_bytes: int
    parameters: int
    states: tuple[TensorState, ...] = ()


class Updates(NamedTuple):
    """Values that depend on a rank's index among the ranks that share its parameters.

    Attributes:
        matrix_bytes: State of the matrix group on the device.
        other_bytes: State of the rest on the device.
        adamw: Peaks of AdamW's steps.
        momenta_bytes: Momenta of Muon, all allocated before its first round.
        scratch_bytes: The largest scratch of a round of Muon's.
        state_slack_bytes: Allocator rounding of these.
        host_bytes: State in host memory.
        buffer_bytes: The device buffer through which an update reads and writes the state in host memory.
    """

    matrix_bytes: int
    other_bytes: int
    adamw: LastPeak
    momenta_bytes: int
    scratch_bytes: int
    state_slack_bytes: int
    host_bytes: int = 0
    buffer_bytes: int = 0


class RankStorage:
    """Storage of a pipeline rank's parameters, equal for all its data ranks except for `updates`.

    Attributes:
        slots: Slots of the rank, by chunk.
        blocks: Storage of all their blocks, in the order of updates.
        resident_bytes: Parameter shards: of replicated, tensor-parallel and expert-parallel tensors.
        shard_bytes: Gradient shards.
        pools: Bytes of its groups in FSDP2's streams.
        adamw_shard_bytes: The same of all slots.
        slack_bytes: Allocator rounding of shards.
        state_slack_bytes: Allocator rounding of moments.
        parameters: Elements after TP and EP.
        offload: Fraction of optimizer state that is in host memory.
        uneven: Storages with tensors that shard unevenly, and the number of blocks with each.
        reservings: Reserving of the rank, by the settings of its chunks (`megaplan.budget.rank`).
    """

    def __init__(self, slots: Sequence[SlotStorage], offload: float = 0.0) -> None:
        """Computes the sums; `slots` are those of the rank, by chunk."""
        self.slots, self.offload = tuple(slots), offload
        self.blocks = tuple(chain.from_iterable(map(attrgetter("blocks"), slots)))
        self.resident_bytes = _added(map(attrgetter("resident_bytes"), slots))
        self.shard_bytes = sum([slot.root.shard_bytes + slot.layers_together.shard_bytes for slot in slots])
        self.adamw_shard_bytes = _total(slots, "adamw_shard_bytes")
        self.pools = pools_together([slot.pools for slot in slots])
        self.slack_bytes, self.state_slack_bytes = _total(slots, "slack_bytes"), _total(slots, "state_slack_bytes")
        self.parameters = _total(slots, "parameters")
        self.uneven = _uneven(self.blocks) if any(slot.uneven for slot in slots) else ()
        self._matrix, self._other = _total(slots, "matrix_state_bytes"), _total(slots, "other_state_bytes")
        self._casts = tuple(chain.from_iterable(map(attrgetter("casts"), slots)))
        self._matrices = _kinds(slots)
        self._states = tuple(chain.from_iterable(map(attrgetter("states"), slots)))
        self._updates: dict[tuple[int, int], Updates] = {}
        self.reservings: dict[tuple[bool, bool, bool, bool], Reserving] = {}

    def updates(self, dense_index: int, expert_index: int) -> Updates:
        """Values of the rank with these indices among the ranks that share dense tensors and expert banks."""
        place = dense_index, expert_index
        if place not in self._updates:
            self._updates[place] = self._at(dense_index, expert_index)
        return self._updates[place]

    def _at(self, dense_index: int, expert_index: int) -> Updates:
        matrix, other = self._matrix, self._other
        for storage, count in self.uneven:
            for tensor in storage.uneven:
                size = count * tensor.state_bytes(expert_index if tensor.expert else dense_index)
                if tensor.matrix:
                    matrix += size
                else:
                    other += size
        scratch = max([kind.at(number, dense_index, expert_index) for kind, number in self._matrices.items()], default=0)
        adamw = last_peak(self._casts, dense_index, expert_index) if self._casts else AT_END
        found = new(Updates, (matrix, other, adamw, matrix if self._matrices else 0, scratch, self.state_slack_bytes, 0, 0))
        if not self.offload:
            return found
        kept = on_host(self._states, self.offload, (dense_index, expert_index))
        all_matrix, all_other = (
            sum([each.number * each.at((dense_index, expert_index)) for each in self._states if each.matrix is wanted])
            for wanted in (True, False)
        )
        return found._replace(
            matrix_bytes=matrix - all_matrix + kept.matrix_bytes,
            other_bytes=other - all_other + kept.other_bytes,
            state_slack_bytes=kept.slack_bytes,
            host_bytes=kept.host_bytes,
            buffer_bytes=kept.buffer_bytes,
        )


class StoredState:
    """FSDP2's storage of an inventory with these sizes."""

    MOST = 4096
    """Number of cached slots and ranks: a search for cuts evaluates thousands."""

    def __init__(self, sizes: Sizes, inventory: Inventory) -> None:
        """Every block at once."""
        self._inventory, self._sizes = inventory, sizes
        self._ahead, self._whole = sizes.gathers_ahead, sizes.whole_state
        self._named = dict(inventory.blocks())
        self._blocks: dict[int | tuple[int, bool], BlockStorage] = {}
        self._made: dict[int, tuple[TensorState, ...]] = {}
        packs, self._keys = sizes.packs, dict[str, int | tuple[int, bool]]()
        for name, block in self._named.items():
            packed = packs is not None and packs.covers(name, block.family)
            key: int | tuple[int, bool] = (id(block), True) if packed else id(block)
            self._keys[name] = key
            if key not in self._blocks:
                self._blocks[key] = block_storage(sizes, block, packed=packed)
        ahead = {letter for _, block in inventory.outside if block.family is Outside.MTP for _, letter in block.variant}
        self._has_mtp, self._attends_ahead = bool(ahead), not ahead.isdisjoint(ATTENDING)
        self._slots: dict[tuple[Slot, Ends], SlotStorage] = {}
        self._ranks: dict[tuple[tuple[Slot, ...], tuple[Ends, ...]], RankStorage] = {}

    def block(self, name: str) -> BlockStorage:
        """Storage of one block, by its name in the inventory."""
        return self._blocks[self._keys[name]]

    def slot(self, slot: Slot, ends: Ends) -> SlotStorage:
        """Storage of a slot."""
        key = slot, ends
        found = self._slots.get(key)
        if found is None:
            if len(self._slots) >= self.MOST:
                self._slots.clear()
            found = self._slots[key] = self._of_slot(slot, *ends)
        return found

    def rank(self, slots: tuple[Slot, ...], ends: tuple[Ends, ...]) -> RankStorage:
        """Storage of a pipeline rank with these slots."""
        key = slots, ends
        found = self._ranks.get(key)
        if found is None:
            if len(self._ranks) >= self.MOST:
                self._ranks.clear()
            found = self._ranks[key] = RankStorage(list(map(self.slot, slots, ends)), self._sizes.offload)
        return found

    def _of_slot(self, slot: Slot, is_first: bool, is_last: bool) -> SlotStorage:
        blocks = [(name, self.block(name), has_groups(name) and self._sizes.unit_layers > 0) for name in slot.blocks]
        runs = [*slot.blocks, "head"] if is_last and self._inventory.tied else list(slot.blocks)
        idle = {name for name in slot.copies if name in ENDS and not is_first} | {Outside.TOWERS.value}.intersection(slot.blocks)
        if idle:
            blocks.sort(key=lambda block: block[0] not in idle)
            runs = [name for name in runs if name not in idle]
        has_mtp = is_last and self._has_mtp
        normed = self._inventory.normed_ahead
        if has_mtp:  # depths run before the head, and before the final norm unless they read its output; the layout lists both before them
            behind = ("head",) if normed else ("final_norm", "head")
            runs.sort(key=lambda name: (name in behind, name == "head"))
        merges = PROJECTOR in runs
        owned, owns = [], is_first  # true if the stream at this point is allocated by this chunk, not a receive buffer
        for name in runs:
            owned.append(owns and not reads_other_input(name, has_mtp=has_mtp, normed=normed, merges=merges))
            owns = owns or name != "relation_bias"
        return self._summed(slot, runs, owned, blocks, is_last=is_last, has_mtp=has_mtp)

    def _summed(
        self,
        slot: Slot,
        names: Sequence[str],
        owned: Sequence[bool],
        blocks: Sequence[tuple[str, BlockStorage, bool]],
        *,
        is_last: bool,
        has_mtp: bool,
    ) -> SlotStorage:
        """Storage of a slot with these blocks; only the blocks in `names` run."""
        _, storages, layers = zip(*blocks, strict=True)
        runs = frozenset(names)
        copies = [(name, storage.dense) for name, storage, _ in blocks if name not in runs]
        outside = [(name, storage.both) for name, storage, layer in blocks if not layer and name in runs]
        root = self._root([*copies, *sorted(outside, key=lambda each: fsdp_order(each[0]))])
        units = self._units(slot)
        groups = [together(unit) for unit in units.values()]
        running = [root, *groups, *[group for _, group in outside]]
        held = [self._named[name] for name in slot.blocks]
        families = Counter([block.family for block in held])
        return SlotStorage(
            names=tuple(names),
            owned=tuple(owned),
            is_last=is_last,
            has_mtp=has_mtp,
            blocks=storages,
            layers=layers,
            families=families,
            root=root,
            layers_together=together(groups),
            joined={names: group for names, (group, *_) in units.items() if len(names) > 1},
            pools=group_pools(root, list(units.values()), ahead=self._ahead),
            largest_flat_bytes=max(map(attrgetter("flat_bytes"), groups), default=0),
            largest_reduction_bytes=max(map(attrgetter("reduction_bytes"), running)),
            largest_casting_bytes=max(map(attrgetter("casting_bytes"), running[1:]), default=0),
            adamw_shard_bytes=_total(storages, "adamw_shard_bytes") if self._whole else self._by_adamw(blocks, units, root),
            attends=not families.keys().isdisjoint(ATTENDING) or (has_mtp and self._attends_ahead),
            whole_parameters=_total(held, "elements"),
            resident_bytes=_added(map(attrgetter("resident_bytes"), storages)),
            matrix_state_bytes=_total(storages, "matrix_state_bytes"),
            other_state_bytes=_total(storages, "other_state_bytes"),
            uneven=any(map(attrgetter("uneven"), storages)),
            matrices=_kinds(storages, "matrix_scratch"),
            casts=tuple(chain.from_iterable(map(attrgetter("casts"), storages))),
            slack_bytes=_total(storages, "resident_slack_bytes"),
            state_slack_bytes=_total(storages, "state_slack_bytes"),
            parameters=_total(storages, "parameters"),
            states=tuple(chain.from_iterable([self._states_of(name) for name, _, _ in blocks])) if self._sizes.offload else (),
        )

    def _root(self, listed: Sequence[tuple[str, GroupBytes]]) -> GroupBytes:
        """The group of a stage: these blocks outside its layers, and copies, in FSDP2's order."""
        found = together([group for _, group in listed])
        if not found.casting_bytes:
            return found
        gathered = [self._named[name] for name, group in listed if group.gathered_bytes]
        return found._replace(casting_bytes=root_casting_bytes(self._sizes, gathered))

    def _units(self, slot: Slot) -> dict[tuple[str, ...], tuple[GroupBytes, ...]]:
        """The groups of each unit of a slot: the dense one, then its banks."""
        found = {}
        for names in fsdp_units(slot.blocks, self._sizes.unit_layers):
            storages = [self.block(name) for name in names]
            if len(names) == 1:
                dense = storages[0].dense
            else:
                members = [Member(name, self._named[name], storage) for name, storage in zip(names, storages, strict=True)]
                dense = unit_group(self._sizes, members)
            found[names] = (dense, *[storage.experts for storage in storages])
        return found

    def _by_adamw(self, blocks: Sequence[tuple[str, BlockStorage, bool]], units: Iterable[tuple[str, ...]], root: GroupBytes) -> int:
        """Gradient shards of groups that have no tensors of Muon: each unit is a group, and the rest of the slot is another group."""
        muon_in_root = any(storage.matrix_scratch for _, storage, layer in blocks if not layer)
        total = 0 if muon_in_root else root.shard_bytes
        for names in units:
            storages = [self.block(name) for name in names]
            own = [storage.adamw_shard_bytes for storage in storages]
            total += sum(own) if own == [storage.dense.shard_bytes for storage in storages] or len(own) == 1 else 0
        return total

    def _states_of(self, name: str) -> tuple[TensorState, ...]:
        block = self._named[name]
        found = self._made.get(id(block))
        if found is None:
            found = self._made[id(block)] = state_of(self._sizes, block)
        return found


@lru_cache(maxsize=256)
def stored(sizes: Sizes, inventory: Inventory) -> StoredState:
    """FSDP2's storage of an inventory with these sizes, computed on demand."""
    return StoredState(sizes, inventory)


def _total(parts: Iterable[object], field: str) -> int:
    return sum(map(attrgetter(field), parts))


def _added(sizes: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    first, second, third = map(sum, zip(*sizes, strict=True))
    return first, second, third


def _kinds(parts: Iterable[object], field: str = "matrices") -> dict[MatrixScratch, int]:
    """Numbers of Muon's tensors by kind, added up."""
    found: dict[MatrixScratch, int] = {}
    for part in parts:
        for kind, number in getattr(part, field).items():
            found[kind] = found.get(kind, 0) + number
    return found


def _uneven(storages: Sequence[BlockStorage]) -> tuple[tuple[BlockStorage, int], ...]:
    """Storages with tensors that shard unevenly, and the number of blocks with each; equal layers share one."""
    found: dict[int, tuple[BlockStorage, int]] = {}
    for storage in storages:
        if storage.uneven:
            _, count = found.get(id(storage), (storage, 0))
            found[id(storage)] = storage, count + 1
    return tuple(found.values())


def reads_other_input(name: str, *, has_mtp: bool, normed: bool, merges: bool) -> bool:
    """True if a block's input is not a storage of the chunk, or is counted for an earlier block that reads it too.

    Args:
        name: Name of the block.
        has_mtp: True if MTP depths run in its slot.
        normed: True if the first of them reads the final norm's output, as the head does; else the final norm's input.
        merges: True if the embedding reads the rows of a projection.
    """
    if name in ("embedding", "relation_bias", PATCHES):
        return not merges or name != "embedding"
    return has_mtp and (name == ("head" if normed else "final_norm") or (name.startswith("mtp.") and name != "mtp.0"))
