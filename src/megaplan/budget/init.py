"""The peak while a rank's stages are built: slot by slot, parameters, then buffers.

A slot's modules get storage in order, each shard with its true rows. FSDP2 pads the short shards of a group when the module of the group
is filled: an expert bank's, then its layer's; those of the slot's own group when everything else of the slot exists. A shard exists twice
while it is padded. Later slots have allocated nothing at that point.

Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py (`FSDPModule._apply`), _fsdp_param.py (`reset_sharded_param`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.hosts.megarun.storage import BlockStorage, Shard
from megaplan.hosts.megarun.towers import RotaryTable
from megaplan.tuples import new

TABLES, IN_PLACE = "rotary tables being computed", "parameters in place"


class SlotInit(NamedTuple):
    """Tensors that building a slot allocates.

    Attributes:
        resident_bytes: All its shards, padded: of replicated, tensor-parallel and expert-parallel tensors.
        storages: Storages of its blocks in module order, if any has short shards; else empty.
        layers: True for each block that is a layer, with its own groups.
        buffer_bytes: Sums of a step.
        tables: Rotary tables in the order in which they are made, after everything else.
    """

    resident_bytes: tuple[int, int, int]
    storages: Sequence[BlockStorage]
    layers: Sequence[bool]
    buffer_bytes: int
    tables: Sequence[RotaryTable]


class InitPeak(NamedTuple):
    """The peak of building.

    Attributes:
        resident_bytes: Parameters in place: of replicated, tensor-parallel and expert-parallel tensors.
        buffer_bytes: Buffers in place.
        scratch_bytes: Shards that are not padded yet, or scratch of a table.
        where: Description.
    """

    resident_bytes: tuple[int, int, int]
    buffer_bytes: int
    scratch_bytes: int
    where: str

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self.resident_bytes) + self.buffer_bytes + self.scratch_bytes


def init_peak(slots: Sequence[SlotInit], dense_index: int, expert_index: int) -> InitPeak:
    """The peak of the rank with these indices among the ranks that share dense tensors and expert banks."""
    rank = _Building(dense_index, expert_index)
    for slot in slots:
        rank.build(slot)
    return rank.peak


class _Building:
    """A rank while its slots are built."""

    def __init__(self, dense_index: int, expert_index: int) -> None:
        self._dense, self._expert = dense_index, expert_index
        self._resident, self._buffers, self._unpadded, self._total = [0, 0, 0], 0, 0, 0
        self.peak = InitPeak((0, 0, 0), 0, 0, "")

    def build(self, slot: SlotInit) -> None:
        """Builds a slot."""
        if slot.storages:
            own: list[tuple[Shard, int]] = []
            last = {id(storage): position for position, storage in enumerate(slot.storages)}
            for position, (storage, layer) in enumerate(zip(slot.storages, slot.layers, strict=True)):
                # A layer that is divided evenly needs no padding, so the last of several equal layers has the peak.
                if storage.shards and not (layer and last[id(storage)] > position):
                    own += self._fill(storage.shards, layer=layer)
                else:
                    self._add(storage.resident_bytes)
            self._pad(own)
        else:
            self._add(slot.resident_bytes)
        self._buffers += slot.buffer_bytes
        for table in slot.tables:
            self._buffers += table.num_bytes
            self._note(table.scratch_bytes, TABLES)
        if not slot.tables:
            self._note(0, IN_PLACE)

    def _add(self, resident: Sequence[int]) -> None:
        replicated, tensor_parallel, expert_parallel = self._resident
        self._resident = [replicated + resident[0], tensor_parallel + resident[1], expert_parallel + resident[2]]

    def _fill(self, shards: Sequence[Shard], *, layer: bool) -> list[tuple[Shard, int]]:
        """Fills a block that has short shards, and pads them."""
        short: list[tuple[Shard, int]] = []
        bank: list[tuple[Shard, int]] = []
        for position, shard in enumerate(shards):
            true = shard.true_bytes(self._expert if shard.expert else self._dense)
            if true == shard.padded_bytes:
                self._resident[shard.column] += true
            else:
                self._unpadded += true
                (bank if shard.expert else short).append((shard, true))
            if shard.expert and not any(later.expert for later in shards[position + 1 :]):
                self._pad(bank)
        if layer:
            self._pad(short)
            return []
        return short

    def _pad(self, shards: Sequence[tuple[Shard, int]]) -> None:
        for shard, true in shards:
            self._resident[shard.column] += shard.padded_bytes
            self._note(0, "padding of a short shard")
            self._unpadded -= true

    def _note(self, scratch: int, where: str) -> None:
        replicated, tensor_parallel, expert_parallel = self._resident
        total = replicated + tensor_parallel + expert_parallel + self._buffers + self._unpadded + scratch
        if total >= self._total:
            self._total = total
            at = (replicated, tensor_parallel, expert_parallel), self._buffers, self._unpadded + scratch, where
            self.peak = new(InitPeak, at)
