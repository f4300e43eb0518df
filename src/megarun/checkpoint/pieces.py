"""A rank's pieces of a full tensor, as PyTorch's distributed checkpoint (DCP) reads and writes them.

TP, EP and FSDP2 leave a rank some rows of a part of each tensor; a part of a fused projection is several ranges of the full tensor. Saved
as boxes of the full tensor, a checkpoint is independent of the layout: any other sharding of the same tensor reads the boxes that it
overlaps. Replicas state the same box, and DCP writes it once (R-70).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megakernels.ops.packed_weight.facts import Packing
from megaplan.inventory.tensors import Owner, ParamTensor
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.packed import parts_of


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive indices along one dim: start in the rank's tensor, start in the full tensor, and length."""

    local: int
    full: int
    length: int

    def within(self, start: int, length: int) -> "Range | None":
        """The part of this range within the `length` local indices from `start`, relative to `start`; None if it is empty."""
        first, stop = max(self.local, start), min(self.local + self.length, start + length)
        return Range(first - start, self.full + first - self.local, stop - first) if first < stop else None


class Pieces:
    """The pieces of a tensor on one rank; DCP reads and writes through the three methods with underscores.

    Attributes:
        local: The rank's local tensor.
        shape: Shape of the full tensor.
        boxes: The rank's pieces, each with one range per dim of the full tensor; empty if the rank has no row. For an expert bank, which
            is stored as rows, the local start of the first range is a row number.

    Source: torch/distributed/_checkpointable.py, the protocol.
    """

    def __init__(self, local: Tensor, shape: tuple[int, ...], boxes: tuple[tuple[Range, ...], ...]) -> None:
        self.local, self.shape, self.boxes = local, torch.Size(shape), boxes

    @classmethod
    def unsharded(cls, tensor: Tensor) -> "Pieces":
        """The pieces of a tensor that is not sharded."""
        return cls(tensor, tuple(tensor.shape), (tuple(Range(0, 0, size) for size in tensor.shape),))

    def on_cpu(self, into: "Pieces | None" = None) -> "Pieces":
        """The same pieces of a copy in host memory; `into`, an earlier copy, is overwritten."""
        host = into.local if into is not None else torch.empty_like(self.local, device="cpu", pin_memory=self.local.is_cuda)
        host.copy_(self.local, non_blocking=True)
        return Pieces(host, tuple(self.shape), self.boxes)

    def size(self) -> torch.Size:
        """Shape of the full tensor; DCP compares it with the saved shape."""
        return self.shape

    def _chunk(self, box: tuple[Range, ...]) -> ChunkStorageMetadata:
        offsets, sizes = torch.Size([each.full for each in box]), torch.Size([each.length for each in box])
        return ChunkStorageMetadata(offsets=offsets, sizes=sizes)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        chunks = [self._chunk(box) for box in self.boxes]
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if torch.Size([each.full for each in box]) == index.offset:
                found = self.local
                if found.dim() < len(box):
                    experts, rows = box[:2]
                    lengths = tuple(each.length for each in box)
                    return found.narrow(0, experts.local, experts.length * rows.length).view(lengths)
                for dim, each in enumerate(box):
                    found = found.narrow(dim, each.local, each.length)
                return found
        raise KeyError(f"{index.fqn}: no piece at {index.offset}")


def pieces_of(tensor: ParamTensor, value: Tensor, mesh: RankMesh) -> Pieces:
    """A rank's pieces of a parameter, or of optimizer state of its shape.

    Args:
        tensor: Inventory entry: full shape, and the dims that TP and EP shard.
        value: This rank's part, sharded by FSDP2 or not.
        mesh: This rank's position in the mesh.
    """
    return pieces_of_local(tensor, *local_of(value), mesh)


def packed_pieces(tensor: ParamTensor, rows: Tensor, packing: Packing, mesh: RankMesh) -> Iterator[tuple[str, Pieces]]:
    """A rank's pieces of the parts of a packed weight, by name; the local tensors are columns of the rank's bytes."""
    local, sizes, offsets = local_of(rows)
    start = 0
    for name, part in parts_of(tensor, packing):
        cut = mesh.size("tp") if part.owner is Owner.TENSOR_PARALLEL and part.tp_dim == 1 else 1
        width = part.shape[1] // cut
        if width:
            yield name, pieces_of_local(part, local.narrow(1, start, width), (sizes[0], width), offsets, mesh)
        start += width


def local_of(value: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's part of a tensor that FSDP2 may shard, its shape, and its first indices."""
    if not isinstance(value, DTensor):
        return value.detach(), tuple(value.shape), (0,) * value.dim()
    return value.to_local().detach(), *compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)


def pieces_of_local(tensor: ParamTensor, local: Tensor, sizes: tuple[int, ...], offsets: tuple[int, ...], mesh: RankMesh) -> Pieces:
    """The pieces of a rank's local part of a tensor, of this shape and with these first indices after TP and EP."""
    if tensor.owner is Owner.EXPERT_PARALLEL:
        return Pieces(local, tensor.shape, tuple(_bank_boxes(tensor, mesh, offsets[0], sizes[0])))
    ranges: list[tuple[Range, ...]] = [(Range(0, 0, size),) for size in tensor.shape]
    if tensor.owner is Owner.TENSOR_PARALLEL and tensor.tp_dim is not None:
        ranges[tensor.tp_dim] = _tensor_ranges(tensor, mesh.coordinate["tp"], mesh.size("tp"))
    kept = [
        tuple(found for each in of_dim if (found := each.within(start, length)) is not None)
        for of_dim, start, length in zip(ranges, offsets, sizes, strict=True)
    ]
    return Pieces(local, tensor.shape, tuple(product(*kept)))


def _bank_boxes(tensor: ParamTensor, mesh: RankMesh, start: int, length: int) -> Iterator[tuple[Range, ...]]:
    """The boxes of `length` rows from `start` of a rank's bank.

    They are the tail of one expert, complete experts, and the head of another; each may be absent. ETP leaves a rank a slice of every
    expert: some of its rows, or some of its columns.
    """
    first, index = mesh.expert_coordinate["ep"] * (tensor.shape[0] // mesh.expert_size("ep")), mesh.expert_coordinate["etp"]
    sliced = list(tensor.shape)
    if tensor.tp_dim is not None:
        sliced[tensor.tp_dim] //= mesh.expert_size("etp")
    _, skipped, *columns = (Range(0, index * own if own != whole else 0, own) for own, whole in zip(sliced, tensor.shape, strict=True))
    rows = skipped.length
    row, stop = start, start + length
    while row < stop:
        expert, inside = divmod(row, rows)
        count = (stop - row) // rows if inside == 0 else 0  # complete experts
        taken = min(rows - inside, stop - row) if count == 0 else rows
        yield Range(row - start, first + expert, count or 1), Range(0, skipped.full + inside, taken), *columns
        row += taken * (count or 1)


def _tensor_ranges(tensor: ParamTensor, index: int, degree: int) -> tuple[Range, ...]:
    """The ranges of TP rank `index`: one, or one per part of a fused projection."""
    size = tensor.shape[tensor.tp_dim or 0]
    if degree == 1:
        return (Range(0, 0, size),)
    ranges, local, full = [], 0, 0
    for part in tensor.tp_parts or (size,):
        own = part // degree
        ranges.append(Range(local, full + index * own, own))
        local, full = local + own, full + part
    return tuple(ranges)


class PiecesSavePlanner(DefaultSavePlanner):
    """Plans the saving of a flat dict of `Pieces`; torch's planner supports only tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The piece at an offset."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of a flat dict of `Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keep values that are not tensors; torch's own method replaces them by None."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The piece at an offset."""
        found: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return found
