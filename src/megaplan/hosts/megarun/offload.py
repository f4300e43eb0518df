"""Tensors in host memory: the optimizer moments that are there, the device buffer of an update, and saved activations.

An update processes units, which are sets of parameters updated at once: each AdamW parameter separately, then each round of Muon, in the
order of updates. The first units are on the host. The device has room for two consecutive units while it updates (`megarun.optim`). The
runtime and the estimate share these functions.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from megaplan.hosts.allocator import slack_bytes
from megaplan.hosts.megarun.sizes import Sizes, Uneven
from megaplan.inventory.tensors import Block, Group, MatrixRound, Outside, Owner, matrix_round
from megaplan.tuples import new

ALIGNMENT = 512
"""Alignment of a moment in bytes, as in torch's allocator: kernels read vectors from there."""
OF_ADAMW, OF_MUON = 2, 1
"""Moments of a parameter."""


def aligned(num_bytes: int) -> int:
    """Bytes of a moment in the memory of its unit."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def num_on_host(elements: Sequence[int], fraction: float) -> int:
    """Number of units on the host: the first units, up to the given fraction of the state's elements.

    Args:
        elements: Elements of each unit's moments in the order of updates, on all ranks that shard them.
        fraction: `host.optimizer_offload`, above 0 and at most 1.
    """
    wanted, found = fraction * sum(elements), 0
    for index, own in enumerate(elements):
        if found >= wanted:
            return index
        found += own
    return len(elements)


def buffer_bytes(units: Sequence[int]) -> int:
    """Bytes of the two largest consecutive units."""
    return max([first + second for first, second in pairwise((*units, 0))], default=0)


class RoundKind(NamedTuple):
    """Facts that the tensors of Muon's rounds share, as in `megarun.optim.muon`."""

    round: MatrixRound
    rows: int
    parts: int
    share_elements: int
    uneven_rows: int
    expert: bool


class TensorState(NamedTuple):
    """The moments of a tensor.

    Attributes:
        elements: Elements of the tensor on all ranks that share it.
        share_bytes: One moment on a rank with a full shard.
        matrix: True if it belongs to the matrix group.
        expert: True if it belongs to an expert bank.
        uneven: Given if the rows do not divide evenly by the shard degree.
        kind: Rounds in which Muon updates it; None for AdamW.
    """

    elements: int
    share_bytes: int
    matrix: bool
    expert: bool
    uneven: Uneven | None
    kind: RoundKind | None

    @property
    def number(self) -> int:
        """Number of moments."""
        return OF_ADAMW if self.kind is None else OF_MUON

    def at(self, place: tuple[int, int]) -> int:
        """Bytes of one moment on the rank with these indices among the ranks that share dense tensors and expert banks."""
        if self.uneven is None:
            return self.share_bytes
        return self.share_bytes * self.uneven.local_rows(place[self.expert]) // self.uneven.chunk_rows


def state_of(sizes: Sizes, block: Block) -> tuple[TensorState, ...]:
    """The moments of a block's trained tensors, in the order of updates."""
    padded, found = sizes.padded and block.family is not Outside.TOWERS, list[TensorState]()
    for tensor in block.tensors:
        if tensor.group in (Group.FROZEN, Group.PACKED):
            continue
        expert, shape = tensor.owner is Owner.EXPERT_PARALLEL, tensor.local_shape(sizes.tp, sizes.ep, sizes.etp)
        elements, degree = prod(shape), sizes.degrees[expert]
        rows = shape[0] * shape[1] if expert else shape[0]
        chunk_rows, width = -(-rows // degree), elements // rows
        share = chunk_rows * width if padded else -(-elements // degree)
        matrix, uneven = tensor.group is Group.MATRIX, None
        if padded and rows % degree:
            uneven = Uneven(rows, chunk_rows, degree, width * sizes.moments, width * sizes.master, expert, matrix)
        kind = None
        if matrix and sizes.iteration:
            count, cut = tensor.local_matrices(sizes.tp, sizes.ep), tensor.cut_dim(sizes.tp, sizes.etp)
            parts = 1 if cut is None else sizes.etp if expert else sizes.tp
            columns = tensor.shape[-1] if cut != 1 else elements // count // shape[-1]
            dealt = matrix_round(count, elements * parts // count, degree)
            kind = RoundKind(dealt, dealt.elements // columns, parts, share, rows if uneven else 0, expert)
        found.append(new(TensorState, (elements, share * sizes.moments, matrix, expert, uneven, kind)))
    return tuple(found)


class OnHost(NamedTuple):
    """Places of a rank's moments.

    Attributes:
        matrix_bytes: Moments of the matrix group on the device.
        other_bytes: Moments of the rest on the device.
        slack_bytes: Allocator rounding of these.
        host_bytes: All others, in host memory.
        buffer_bytes: The buffer on the device during an update.
    """

    matrix_bytes: int
    other_bytes: int
    slack_bytes: int
    host_bytes: int
    buffer_bytes: int


def on_host(moments: Sequence[TensorState], fraction: float, place: tuple[int, int]) -> OnHost:
    """Places of the moments of the rank at this place; `moments` are those of all its tensors, in the order of updates."""
    made = units(moments)
    number = num_on_host([sum([each.elements * each.number for each in unit]) for unit in made], fraction)
    sizes = [sum([each.number * aligned(each.at(place)) for each in unit]) for unit in made[:number]]
    kept = [(each.matrix, each.number, each.at(place)) for unit in made[number:] for each in unit]
    matrix, other = (sum([number * size for found, number, size in kept if found is wanted]) for wanted in (True, False))
    slack = slack_bytes([size for _, number, size in kept for _ in range(number)])
    return OnHost(matrix, other, slack, sum(sizes), buffer_bytes(sizes))


def units(moments: Iterable[TensorState]) -> list[list[TensorState]]:
    """The units of an update: AdamW's tensors, then Muon's rounds, kind by kind."""
    return list(_units(list(moments)))


def _units(moments: Sequence[TensorState]) -> Iterator[list[TensorState]]:
    kinds: dict[RoundKind, list[TensorState]] = {}
    for each in moments:
        if each.kind is None:
            yield [each]
        else:
            kinds.setdefault(each.kind, []).append(each)
    for kind, members in kinds.items():
        most = kind.round.num_tensors
        for start in range(0, len(members), most):
            yield members[start : start + most]
