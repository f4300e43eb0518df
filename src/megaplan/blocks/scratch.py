"""Bytes that operations hold inside their Triton kernels, in addition to operands and results, at the highest moment of each direction.

The facts of each operation say them (`megakernels.ops.<operation>.facts`). Where a model's sizes stay with plain torch, nothing is counted,
as of any plain torch. Under CP both directions are done a lane of heads and a piece of positions at a time, and what is made is copied to
where the whole lies.
"""

from __future__ import annotations

from typing import NamedTuple

from megakernels.facts import KernelBytes, KernelScratch
from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import Op
from megaplan.blocks.relay import ARRIVING, HANDED, PIECES, num_lanes
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType

INSIDE, INSIDE_BACKWARD = "inside", "inside_backward"
"""Names of the storages that stand for it."""


class Lane(NamedTuple):
    """Sizes of one run: positions, heads, groups, number of lanes, and the document starts that are copied because they are a view."""

    positions: int
    heads: int
    groups: int
    lanes: int
    copied_starts: int

    def copied_states(self, dims: Dims, num_states: int, nbytes: int) -> int:
        """Bytes of saved states that are copied, a piece's and lane's part of them, unless that part is one run of memory."""
        return nbytes if dims.batch > 1 or (self.lanes > 1 and num_states > 1) else 0

    def inside(
        self, dims: Dims, forward: KernelBytes, backward: KernelBytes, num_states: int, state_bytes: int, *, with_starts: bool = True
    ) -> KernelScratch:
        """Bytes inside a scan, which copies document starts and saved states that are views.

        Args:
            dims: Local sizes.
            forward: Bytes of one run's forward.
            backward: Bytes of one run's backward.
            num_states: Saved states of the run.
            state_bytes: Bytes of one of them.
            with_starts: True to add the copies of document starts; False if `forward` and `backward` have them.
        """
        if dims.cp == 1:
            return KernelScratch(forward.last + forward.scratch, backward.last + backward.scratch)
        starts = self.copied_starts if with_starts else 0
        copied = self.copied_states(dims, num_states, num_states * state_bytes) + starts
        return KernelScratch(forward.results + forward.scratch + starts, backward.results + backward.scratch + copied)


def lane_of(dims: Dims, heads: int, groups: int) -> Lane:
    """Sizes of one run on a rank with these heads and groups of heads."""
    if dims.cp == 1:
        return Lane(dims.tokens, heads, groups, 1, 0)
    lanes, positions = num_lanes(groups, dims.cp), dims.tokens // PIECES
    starts = dims.batch * positions * DType.INT32.bytes if dims.packed and dims.batch > 1 else 0
    return Lane(positions, heads // lanes, groups // lanes, lanes, starts)


def inside_storages(dims: Dims, inside: KernelScratch | None) -> Shapes:
    """The storages that stand for what an operation holds, counted in elements of activations; none for plain torch."""
    if inside is None:
        return {}
    counts = {INSIDE: (inside.forward // dims.dtype.bytes,), INSIDE_BACKWARD: (inside.backward // dims.dtype.bytes,)}
    return storages(dims.dtype, Column.WORKSPACE, counts)


def scan_op(
    name: str,
    inputs: tuple[str, ...],
    makes: str,
    saved: tuple[str, ...],
    params: tuple[str, ...],
    *,
    handed: bool,
    summed: bool,
    inside: tuple[bool, bool],
    fetches: tuple[str, ...] = (),
) -> Op:
    """A scan, which keeps its inputs and its own saved tensors.

    Args:
        name: Name of the operation.
        inputs: Storages that it reads.
        makes: Output of the scan.
        saved: Further results, which it keeps.
        params: Parameters of the scan.
        handed: True if a CP group hands its state from piece to piece.
        summed: True if parameters' gradients are sums of pieces in a wider dtype.
        inside: True for each direction whose kernels hold scratch.
        fetches: Storages that its backward makes for itself, in addition to the state on its way and the scratch.
    """
    state = (HANDED, ARRIVING) if handed else ()
    forward, backward = (((each,) if there else ()) for each, there in zip((INSIDE, INSIDE_BACKWARD), inside, strict=True))
    return Op(
        name,
        inputs,
        (makes, *saved, *state, *forward),
        keeps=(*inputs, *saved),
        params=params,
        fetches=(*state, *fetches, *backward),
        sums=("summed",) if summed else (),
    )
