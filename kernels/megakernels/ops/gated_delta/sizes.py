"""Sizes supported by the delta rule's kernels, their tiles, their scratch bytes and their cost; needs no triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes
from megakernels.ops.gated_delta.inputs import DeltaRule

LARGEST_WIDTHS = {torch.bfloat16: (128, 256), torch.float16: (128, 256), torch.float32: (64, 64)}
"""Maximum widths of a key and of a value; wider heads use the reference. An fp32 product stores each operand as two TF32 values."""
LARGEST_TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Positions of a tile."""
PART_BYTES = 2**29
"""Scratch bytes for the slots of as many segments as fit; at least one segment."""


def accepts(given: DeltaRule) -> bool:
    """Whether the kernels support these sizes and dtypes; products need one dtype."""
    q, k, v = given.q, given.k, given.v
    keys, values = LARGEST_WIDTHS.get(q.dtype, (0, 0))
    return q.dtype == k.dtype == v.dtype and q.shape[3] <= keys and v.shape[3] <= values


class Extents(NamedTuple):
    """What the kernels are launched with.

    Attributes:
        segments: Number of segments.
        tiles: Tiles of a segment.
        at_once: Segments of a launch.
        sides: Positions of a tile, and padded widths of a key and of a value.
        elements: Elements of each buffer per slot, by name.
        slots: Slots of a launch.
    """

    segments: int
    tiles: int
    at_once: int
    sides: dict[str, int]
    elements: dict[str, int]
    slots: int

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of all buffers."""
        return self.slots * _slot_bytes(self.elements, dtype)


SUMMED = ("systems", "strengths", "carries", "sums", "unread", "falls")
"""Buffers in fp32; all others have the dtype of q."""


def extents(given: DeltaRule, *, backward: bool) -> Extents:
    """Sizes of one direction."""
    (batch, num_positions, _, key_width), (num_heads, value_width), dtype = given.q.shape, given.v.shape[2:], given.q.dtype
    Q = min(LARGEST_TILE[dtype], block_of(min(given.chunk_size, given.save_every), SMALLEST_DOT))
    K, V = block_of(key_width, SMALLEST_DOT), block_of(value_width, SMALLEST_DOT)
    elements = {
        **dict.fromkeys(("queries", "keys", "reads"), Q * K),
        **dict.fromkeys(("scores", "systems", "inverses"), Q * Q),
        "strengths": Q,
        "carries": K,
    }
    if rows(given):
        elements["sums"] = planes(dtype) * Q * K
    if backward:
        elements |= dict.fromkeys(("between", "grad_between"), K * V) | dict.fromkeys(("written", "solved"), Q * V) | {"unread": Q}
        elements |= {"falls": planes(dtype) * Q * K} if rows(given) else {}
    segments, tiles = -(-num_positions // given.save_every), -(-min(given.save_every, num_positions) // Q)
    of_segment = batch * num_heads * tiles
    at_once = min(segments, max(1, PART_BYTES // max(1, of_segment * _slot_bytes(elements, dtype))))
    return Extents(segments, tiles, at_once, {"Q": Q, "K": K, "V": V}, elements, at_once * of_segment)


def rows(given: DeltaRule) -> bool:
    """Whether each row of a state has a decay of its own."""
    return given.decay.dim() == 4


def planes(dtype: torch.dtype) -> int:
    """Numbers per running sum of log decays, and per sum for their gradients."""
    return 2 if dtype == torch.float32 else 1


def num_shares(given: DeltaRule) -> int:
    """Sums per tile and head, for A_log and dt_bias."""
    return 1 + (given.q.shape[3] if rows(given) else 1)


def _slot_bytes(elements: dict[str, int], dtype: torch.dtype) -> int:
    return sum(count * (SUMS_BYTES if name in SUMMED else dtype.itemsize) for name, count in elements.items())


def forward_bytes(state: Tensor | None, given: DeltaRule) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    sizes, states = extents(given, backward=False), _state_bytes(given)
    copied = _copied_bytes(given) + copies_bytes(() if state is None else (state,))
    made = given.v.numel() * given.q.element_size() + sizes.segments * states
    return KernelBytes(made, states, sizes.nbytes(given.q.dtype) + copied)


def backward_bytes(grad_last: Tensor | None, grad_y: Tensor, given: DeltaRule, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands.

    The peak is while the kernels run, or while the parts of the parameters' gradients are summed.
    """
    sizes, dtype = extents(given, backward=True), given.q.dtype
    shares = SUMS_BYTES * given.q.shape[0] * sizes.segments * sizes.tiles * given.v.shape[2] * num_shares(given)
    summed = SUMS_BYTES * given.v.shape[2] * num_shares(given)
    parameters = given.A_log.nbytes + given.dt_bias.nbytes
    own = grad_y.numel() * dtype.itemsize if grad_y.dtype != dtype else copies_bytes(rows=(grad_y,))
    peak = max(sizes.nbytes(dtype) + copies_bytes(() if grad_last is None else (grad_last,)) - parameters, summed)
    made = sum(each.nbytes for each in given[:5]) + parameters
    return KernelBytes(made, _state_bytes(given), shares + own + _copied_bytes(given) + copies_bytes((states,)) + peak)


def _state_bytes(given: DeltaRule) -> int:
    return SUMS_BYTES * given.q.shape[0] * given.v.shape[2] * given.q.shape[3] * given.v.shape[3]


def _copied_bytes(given: DeltaRule) -> int:
    """Bytes of the copies of operands."""
    dense = [each for each in (given.A_log, given.dt_bias, given.starts) if each is not None]
    return copies_bytes(dense, rows=(given.q, given.k, given.v, *((given.decay,) if rows(given) else ())))


def forward_cost(_state: Tensor | None, given: DeltaRule) -> Cost:
    """Cost of `kernel.forward`: per tile and head scores, system and its inverse; three products with a state and two within the tile."""
    own, inverse = _prepared(given)
    num, Q, K, V = _tiles(given)
    return _cost(given, own + num * 2 * Q * (3 * K * V + 2 * Q * V), inverse)


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: DeltaRule, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`.

    The forward's products but for those of y; the walk of the gradient, three with a state and two within the tile; two within the tile for
    systems and scores; three with a state for queries and keys; and pairs of positions, their scores again among them.
    """
    own, inverse = _prepared(given)
    num, Q, K, V = _tiles(given)
    pairs = 3 * Q * (Q - SMALLEST_DOT) // 2 * 2 if rows(given) else 6 * Q * Q
    return _cost(given, own + num * 2 * (Q * (8 * K * V + 5 * Q * V) + pairs * K), inverse)


def _tiles(given: DeltaRule) -> tuple[int, int, int, int]:
    """Tiles of all heads and sequences, and their sides."""
    Q, K, V = extents(given, backward=False).sides.values()
    whole, rest = divmod(given.q.shape[1], given.save_every)
    return given.q.shape[0] * given.v.shape[2] * (whole * -(-given.save_every // Q) + -(-rest // Q)), Q, K, V


def _prepared(given: DeltaRule) -> tuple[int, int]:
    """FLOPs of scores and systems; and in fp32 of the inverse.

    One decay a row: only pairs of different blocks of 16 positions are products.
    """
    num, Q, K, _ = _tiles(given)
    pairs = Q * (Q - SMALLEST_DOT) // 2 if rows(given) else Q * Q
    inverse, side = 0, SMALLEST_DOT
    while side < Q:
        inverse += Q // (2 * side) * 2 * 2 * side**3
        side *= 2
    return num * 2 * 2 * pairs * K, num * inverse


def _cost(given: DeltaRule, own: int, inverse: int) -> Cost:
    found = {given.q.dtype: own}
    found[torch.float32] = found.get(torch.float32, 0) + inverse
    return Cost(found)
