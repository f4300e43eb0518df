"""A block as a step of a chunk, and a point of one microbatch on it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from megaplan.blocks.ops import GIVEN
from megaplan.budget.values import ACTIVATIONS
from megaplan.columns import Column
from megaplan.hosts.megarun.halves import HalvedBytes
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.megarun.program import LiveSet
from megaplan.hosts.megarun.sizes import NOTHING
from megaplan.hosts.megarun.storage import BlockStorage
from megaplan.tuples import new


class SplitUnit(NamedTuple):
    """A layer under a split backward.

    Attributes:
        halves: Sums of both halves.
        input_half: The layer with its input half instead of its backward, and the gradients that this half makes.
        late_bytes: Whole gradients that the weight half makes, in `precision.grads`.
    """

    halves: HalvedBytes
    input_half: Unit
    late_bytes: int


class Unit(NamedTuple):
    """A block as one step of a chunk; equal layers share one.

    Attributes:
        block: Sums of its ledger.
        storage: FSDP2's storage of its parameters; None if they are those of another unit or of a copy on the slot (a tied head).
        layer: True if it is a layer or a prediction depth, with groups of its own; everything else is the slot's group.
        input_bytes: Input of the block, if it keeps it and the chunk owns it.
        kept_bytes: Bytes that it keeps in all columns, its input included.
        forward_bytes: Allocated bytes at the peak of its forward, its input included; the same for the next two.
        backward_bytes: Allocated bytes at the peak of its backward.
        accumulating_bytes: Allocated bytes at the peak of a backward that adds gradients in place.
        gathered_bytes: Gathered parameters of a layer; 0 for a unit of the slot's group, the same for the next four.
        flat_bytes: The all-gather's own output.
        part_bytes: The part of the gathered parameters that is kept between forward and backward, if only a part is.
        unsharded_bytes: Whole gradients.
        shard_bytes: Gradient shards.
        slack_bytes: Bytes that the allocator's rounding adds to the kept tensors.
        elsewhere: Kept bytes in columns other than activations.
        has_experts: True if it is a layer with experts, which have their own group.
        passing_bytes: Input of the block, if the chunk owns it and it does not keep it: allocated until its forward has ended.
        last_own: The tensor of a layer that FSDP2 lists after those of its children; "" if there is none.
        shared: Parameters of other blocks whose gradients the first prediction depth passes on.
        split: The two halves of a layer with a split backward.
        given_bytes: Gradients that it makes of values of earlier blocks, in addition to that of its input.
        segments: Segments of the tape (`megaplan.budget.tape`), by action and settings.
    """

    block: BlockBytes
    storage: BlockStorage | None
    layer: bool
    input_bytes: int
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    accumulating_bytes: int
    gathered_bytes: int
    flat_bytes: int
    part_bytes: int
    unsharded_bytes: int
    shard_bytes: int
    slack_bytes: int
    elsewhere: tuple[tuple[Column, int], ...]
    has_experts: bool
    passing_bytes: int
    last_own: str
    shared: tuple[str, ...]
    split: SplitUnit | None
    given_bytes: int
    segments: dict[Hashable, Any]


def make_unit(
    block: BlockBytes,
    storage: BlockStorage | None,
    layer: bool,
    owned_input_bytes: int,
    last_own: str = "",
    has_experts: bool = False,
    shared: tuple[str, ...] = (),
) -> Unit:
    """A unit; `owned_input_bytes` is its input, if the chunk owns that."""
    group = NOTHING if storage is None else storage.both
    own = group if layer else NOTHING
    kept_input, tensors = owned_input_bytes if block.keeps_input else 0, block.part.tensors
    passing = 0 if block.part.replay.counts_input else owned_input_bytes - kept_input
    return new(
        Unit,
        (
            block,
            storage,
            layer,
            kept_input,
            block.saved_bytes + kept_input,
            block.forward_bytes + kept_input + passing,
            block.backward_bytes + kept_input,
            block.accumulating_bytes + kept_input,
            own.gathered_bytes,
            own.flat_bytes,
            own.part_bytes,
            own.unsharded_bytes,
            own.shard_bytes,
            block.saved_slack_bytes,
            tuple([item for item in block.saved.items() if item[0] is not ACTIVATIONS]),
            has_experts,
            passing,
            last_own,
            shared,
            None,
            sum([tensors[name][0] for name in block.part.replay.backward[-1].gradients if name.startswith(GIVEN)]),
            {},
        ),
    )


class Peak(NamedTuple):
    """A point of one microbatch on a chunk.

    Attributes:
        total: Allocated bytes without the chunk's other microbatches and the rank's persistent state: the sum of all below and of
            the bytes that the blocks before keep.
        where: Description.
        unit: The running block; −1 before the first.
        live: Live set of the running block; None between blocks.
        params: Parameter gradients of that block.
        gradients: Other gradients: accumulated ones, and those of the slot's own parameters.
        communication: Gathered parameters and reduce buffers.
        activations: Other activations, the block's input included while that is allocated.
        absent: Workspace of the libraries, which exists from the first product on; not in `total`.
        earlier: The largest total before the slot's own parameters are reduced, in a backward that reduces; 0 otherwise.
        partner: The backward's part of a pair in turns, whose forward's part this is, with the sum of both in `total`; else None.
    """

    total: int
    where: str
    unit: int
    live: LiveSet | None
    params: tuple[str, ...]
    gradients: int
    communication: int
    activations: int
    absent: int = 0
    earlier: int = 0
    partner: Peak | None = None
