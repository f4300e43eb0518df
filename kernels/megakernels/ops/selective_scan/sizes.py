"""What the kernels of the selective scan accept, their tiles, and the bytes that they hold inside themselves. Needs no triton."""

from torch import Tensor

from megakernels._common.blocks import block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes
from megakernels.ops.selective_scan.inputs import GRADIENTS, SelectiveScan

LARGEST_STATE = 16
"""Numbers of a channel's state; more do not fit the backward's registers and use the reference."""
FORWARD_CHANNELS, BACKWARD_CHANNELS = 32, 128
"""Channels of a program. The backward's sum over them is what gradients of B and C are written as."""
GROUP = 2
"""Positions of which the backward keeps one state in memory."""


def accepts(given: SelectiveScan) -> bool:
    """Whether the kernels take this width of a state."""
    return 0 < given.A_log.shape[1] <= LARGEST_STATE


def tile_of(given: SelectiveScan, most: int) -> dict[str, int]:
    """Sides of a tile of states, at most `most` channels."""
    channels, states = given.A_log.shape
    return {"CHANNELS": min(most, block_of(channels, 32)), "STATES": block_of(states)}


def num_groups(given: SelectiveScan) -> int:
    """Groups of positions of a segment."""
    return -(-min(given.save_every, given.x.shape[1]) // GROUP)


def num_blocks(given: SelectiveScan) -> int:
    """Programs of the backward that share a sequence."""
    return -(-given.A_log.shape[0] // tile_of(given, BACKWARD_CHANNELS)["CHANNELS"])


def again_bytes(given: SelectiveScan) -> int:
    """Of the states that backward makes again, those of a segment that are kept."""
    tile = tile_of(given, BACKWARD_CHANNELS)
    return SUMS_BYTES * given.x.shape[0] * num_blocks(given) * num_groups(given) * tile["CHANNELS"] * tile["STATES"]


def forward_bytes(state: Tensor | None, given: SelectiveScan) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    x, last = given.x, SUMS_BYTES * given.x.shape[0] * given.A_log.numel()
    segments = -(-x.shape[1] // given.save_every)
    copied = _copies(given, (state,)) if x.numel() else 0
    return KernelBytes(x.numel() * x.element_size() + segments * last, last, copied + _row_copies(given))


def backward_bytes(grad_last: Tensor | None, grad_y: Tensor, given: SelectiveScan, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands.

    The parts of the gradients of B and C, states of a segment and sums of parameters are there throughout; with them either copies of
    operands, or one sum over programs or sequences.
    """
    (batch, num_positions, _), (channels, width) = given.x.shape, given.A_log.shape
    of_keys, of_parameters = SUMS_BYTES * batch * num_positions * width, SUMS_BYTES * channels * (width + 2)
    held = 2 * num_blocks(given) * of_keys + again_bytes(given) + batch * of_parameters
    copied = _copies(given, (states, grad_last)) if given.x.numel() else 0
    scratch = held + max(copied, of_keys, of_parameters) + _row_copies(given, grad_y)
    results = sum(getattr(given, name).nbytes for name in GRADIENTS)
    return KernelBytes(results, SUMS_BYTES * batch * channels * width, scratch)


def forward_cost(_state: Tensor | None, given: SelectiveScan) -> Cost:
    """Cost of `kernel.forward`: no products; position by position."""
    return Cost({}, steps=given.x.shape[1])


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: SelectiveScan, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`: x, Δ and a segment's states are read twice, and the states written for each segment."""
    x, segments = given.x, -(-given.x.shape[1] // given.save_every)
    return Cost({}, steps=2 * x.shape[1], again_bytes=2 * x.nbytes + max(0, 2 * segments - 1) * again_bytes(given))


def _copies(given: SelectiveScan, others: tuple[Tensor | None, ...]) -> int:
    """Bytes of dense copies of parameters, starts and others that are not contiguous."""
    dense = (given.A_log, given.D, given.dt_bias, given.starts, *others)
    return copies_bytes(each for each in dense if each is not None)


def _row_copies(given: SelectiveScan, *others: Tensor) -> int:
    return copies_bytes(rows=(given.x, given.dt, given.B, given.C, *others))
