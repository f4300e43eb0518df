"""Sizes supported by the scan's kernels, their tiles, scratch bytes and cost; needs no triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes
from megakernels.ops.mamba3.chunk import GRADIENTS, Scan

LARGEST_WIDTH = {torch.bfloat16: (64, 128), torch.float16: (64, 128), torch.float32: (32, 32)}
"""Maximum widths of a head and of a state; wider ones use the reference. An fp32 product stores each operand as two TF32 values."""
LARGEST_RANK = 4
"""More ranks use the reference: a tile would have few positions."""
LARGEST_TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Rows of a tile, ranks of positions; at least `SMALLEST_DOT`."""
TILES_PER_SHARE = 4
"""Tiles whose gradients of parameters one program of the backward sums."""
STATES_BYTES = 2**30
"""Of the states before every tile, their gradients and those of rotated rows and outputs, which are stored for as many segments as fit, and
at least one."""
CHAIN = 32
"""Positions whose angles are summed at once."""
NUM_TABLES = 4
"""Values per position and head that the kernels over tiles read."""
SHARING = (("x", "z"), ("B", "C"), ("dt", "A", "trapezoid"))
"""Inputs that the kernels read with the same strides."""
CONTIGUOUS = ("B_bias", "C_bias", "D", "dt_bias", "mimo_x", "mimo_z", "mimo_o", "starts")


class Extents(NamedTuple):
    """Sizes of a launch.

    Attributes:
        sides: Rows and positions of a tile, ranks, columns of a head and of half a state: powers of two.
        tiles: Tiles of a segment.
        pieces: Programs of the backward that share the tiles of a segment.
        segments: Segments of a sequence.
        at_once: Segments whose states are stored at once.
        stored: Elements that the backward stores per segment, for all sequences and heads: states, their gradients, those of queries, of
            keys and of outputs.
    """

    sides: dict[str, int]
    tiles: int
    pieces: int
    segments: int
    at_once: int
    stored: tuple[int, ...]


def accepts(scan: Scan) -> bool:
    """Whether the kernels support these sizes and dtypes."""
    width, state_width, rank = scan.x.shape[3], scan.B.shape[4], scan.B.shape[2]
    widest, widest_state = LARGEST_WIDTH[scan.x.dtype]
    return 0 < width <= widest and 1 < state_width <= widest_state and 0 < rank <= LARGEST_RANK and scan.z.dtype == scan.x.dtype


def tile_sides(rank: int, chunk_size: int, width: int, state_width: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows and positions of a tile, ranks, columns of a head and of half a state."""
    ranks = block_of(rank)
    positions = min(LARGEST_TILE[dtype] // ranks, block_of(chunk_size, max(1, SMALLEST_DOT // ranks)))
    half = half_width(state_width)
    return {"M": positions * ranks, "Q": positions, "R": ranks, "P": block_of(width, SMALLEST_DOT), "S": half}


def extents(scan: Scan) -> Extents:
    """The sizes of a launch for these inputs."""
    batch, num_positions, num_heads, width = scan.x.shape
    rank, _, state_width = scan.B.shape[2:]
    sides = tile_sides(rank, min(scan.chunk_size, scan.save_every), width, state_width, scan.x.dtype)
    tiles, segments = -(-min(scan.save_every, max(1, num_positions)) // sides["Q"]), -(-num_positions // scan.save_every)
    padded = 2 * sides["S"]
    of_tile = width * padded, width * padded, sides["M"] * padded, sides["M"] * padded, sides["M"] * width
    stored = tuple(batch * tiles * num_heads * each for each in of_tile)
    at_once = min(segments, max(1, STATES_BYTES // max(1, sum(stored) * scan.x.element_size())))
    return Extents(sides, tiles, -(-tiles // TILES_PER_SHARE), segments, at_once, stored)


def same_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors if their last dim is dense and their strides are equal, else contiguous copies."""
    return tuple(each.contiguous() for each in tensors) if _unlike(*tensors) else tensors


def _unlike(*tensors: Tensor) -> Sequence[Tensor]:
    """The tensors if they do not have dense last dims and equal strides."""
    first = tensors[0]
    fits = all(each.stride() == first.stride() and (each.stride(-1) == 1 or each.shape[-1] == 1) for each in tensors)
    return () if fits else tensors


def dense(scan: Scan) -> Scan:
    """The inputs as the kernels take them: tensors that share strides, angles with dense rows, and contiguous parameters."""
    found: dict[str, Any] = {}
    for names in SHARING:
        found |= zip(names, same_strides(*(getattr(scan, name) for name in names)), strict=True)
    found |= {name: getattr(scan, name).contiguous() for name in CONTIGUOUS if getattr(scan, name) is not None}
    if scan.angles is not None:
        found |= {"angles": same_strides(scan.angles)[0]}
    return scan._replace(**found)


def num_shares(scan: Scan) -> int:
    """Partial gradients of a head's parameters: both biases, the three rank projections if there are any, and D."""
    per_head = [scan.B_bias, scan.C_bias, scan.D, scan.mimo_x, scan.mimo_z, scan.mimo_o]
    return sum(each[0].numel() for each in per_head if each is not None)


def trigonometric_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of cosines and sines, which fp16 has more bits for than bf16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def half_width(state_width: int) -> int:
    """Columns of half a state."""
    return block_of(-(-state_width // 2), SMALLEST_DOT)


def halves_turned(num_angles: int, state_width: int) -> int:
    """Halves of a state that angles rotate: each has as many pairs as half its columns."""
    return min(2, -(-num_angles // (half_width(state_width) // 2)))


def step_sides(num_angles: int) -> dict[str, int]:
    """Positions, heads and angles of a tile of the last two kernels."""
    return {"T": 16, "H": 8, "N": block_of(num_angles, SMALLEST_DOT)}


def phase_rows(positions: int) -> int:
    """Rows of a program that sums the angles' gradients of a tile's positions."""
    return max(positions, SMALLEST_DOT)


def forward_bytes(scan: Scan, *initial: Tensor | None) -> KernelBytes:
    """Bytes of `kernel.forward_from` with the same operands."""
    (batch, _, num_heads, width), sizes = scan.x.shape, extents(scan)
    state, phase = width * scan.B.shape[4], _num_angles(scan)
    last = SUMS_BYTES * batch * num_heads * (state + phase)
    results = scan.x.nbytes + batch * sizes.segments * num_heads * (state * scan.x.element_size() + phase * SUMS_BYTES)
    copies = _dense_bytes(scan) + copies_bytes(each for each in initial if each is not None)
    between = sizes.at_once * sizes.stored[0] * scan.x.element_size()
    return KernelBytes(results, last, copies + _table_bytes(scan) + max(between, _turn_bytes(scan)))


def backward_bytes(
    grad_state: Tensor | None, grad_phase: Tensor | None, grad_y: Tensor, scan: Scan, ahead: Tensor | None, states: Tensor, phases: Tensor
) -> KernelBytes:
    """Bytes of `kernel.backward_from` with the same operands.

    The peak is that of the tables, the stored states and their gradients, or of the sums of partial gradients after them.
    """
    (batch, num_positions, num_heads, width), sizes = scan.x.shape, extents(scan)
    state, num_angles, per_head = width * scan.B.shape[4], _num_angles(scan), num_shares(scan)
    results = sum(getattr(scan, name).nbytes for name in GRADIENTS if getattr(scan, name) is not None)
    last = SUMS_BYTES * batch * num_heads * (state + num_angles)
    own = grad_y.numel() * scan.x.element_size() if grad_y.dtype != scan.x.dtype else copies_bytes(rows=(grad_y,))
    copies = _dense_bytes(scan) + own + copies_bytes(each for each in (states, phases, ahead) if each is not None)
    rows = batch * num_positions * num_heads
    shares = batch * sizes.segments * sizes.pieces * num_heads * per_head
    ends = batch * sizes.segments * sizes.tiles * num_heads * num_angles
    always = SUMS_BYTES * (rows * (num_angles + 3) + ends + shares)
    between = sizes.at_once * sum(sizes.stored) * scan.x.element_size()
    tiles = SUMS_BYTES * batch * -(-num_positions // step_sides(num_angles)["T"]) * num_heads
    peaks = (
        _table_bytes(scan) + max(between + copies_bytes(() if grad_state is None else (grad_state,)), _turn_bytes(scan)),
        0 if grad_phase is None or scan.angles is None else copies_bytes((grad_phase,)) + SUMS_BYTES * grad_phase.numel(),
        tiles + SUMS_BYTES * num_heads * (per_head + 1),
    )
    return KernelBytes(results, last, copies + always + max(peaks))


def _table_bytes(scan: Scan) -> int:
    """Bytes of what the kernels over tiles read per position and head: `NUM_TABLES` values, and cosines and sines of the angles."""
    rows = scan.x.shape[0] * scan.x.shape[1] * scan.x.shape[2]
    return rows * (NUM_TABLES * SUMS_BYTES + 2 * _num_angles(scan) * trigonometric_dtype(scan.x.dtype).itemsize)


def _turn_bytes(scan: Scan) -> int:
    """Bytes of the turns per position, from which the angles of all heads are made before any state is stored."""
    return SUMS_BYTES * scan.x.shape[0] * scan.x.shape[1] * _num_angles(scan)


def forward_cost(scan: Scan) -> Cost:
    """Cost of `kernel.forward`: per tile and head the scores, their product with the values, and two products with the state."""
    products, whole = _products(scan), _whole_bytes(scan)
    given = 4 * whole["x"] + 3 * whole["B"] + 2 * whole["tables"] + whole["states"]
    return _cost(scan, products.scores + products.values + 2 * products.state, 0, given)


def backward_cost(scan: Scan) -> Cost:
    """Cost of `kernel.backward`.

    Per tile and head a product each for the states and their gradients; scores and two products with values and state for the outputs; for
    queries and keys scores, two products of their size, one of that of the values and two with a state; for values scores, one product of
    the size of the values and one with a state.
    """
    products, whole = _products(scan), _whole_bytes(scan)
    rows = phase_rows(extents(scan).sides["Q"])
    given = 8 * whole["x"] + 10 * whole["B"] + 5 * whole["tables"] + 2 * whole["angles"] + whole["states"]
    given += 4 * whole["steps"] + whole["turned"] + whole["ends"] + 4 * whole["shares"]
    return _cost(scan, 5 * products.scores + 3 * products.values + 6 * products.state, rows * rows, given)


def _whole_bytes(scan: Scan) -> dict[str, int]:
    """Bytes of what every launch over a part of the segments is given whole; the cost counts how many of these launches have it."""
    (batch, num_positions, num_heads, width), sizes, num_angles = scan.x.shape, extents(scan), _num_angles(scan)
    rows = batch * num_positions * num_heads
    return {
        "x": scan.x.nbytes,
        "B": scan.B.nbytes,
        "tables": _table_bytes(scan),
        "angles": rows * 2 * num_angles * trigonometric_dtype(scan.x.dtype).itemsize,
        "states": batch * sizes.segments * num_heads * width * scan.B.shape[4] * scan.x.element_size(),
        "steps": 3 * rows * SUMS_BYTES,
        "turned": rows * num_angles * SUMS_BYTES,
        "ends": batch * sizes.segments * sizes.tiles * num_heads * num_angles * SUMS_BYTES,
        "shares": batch * sizes.segments * sizes.pieces * num_heads * num_shares(scan) * SUMS_BYTES,
    }


class _Products(NamedTuple):
    """FLOPs of products of a tile: of rows by rows over a state's width and over a head's, of rows by a state."""

    scores: int
    values: int
    state: int


def _products(scan: Scan) -> _Products:
    rows, _, _, width, half = extents(scan).sides.values()
    state = 2 * half
    return _Products(2 * rows * rows * state, 2 * rows * rows * width, 2 * rows * width * state)


def _cost(scan: Scan, per_tile: int, pairs: int, given: int) -> Cost:
    """Products in x's dtype, and, where rows hold several documents, fp32 sums of angles' gradients over `pairs` of positions of a tile.

    Launches over a part of the segments are given `given` bytes whole.
    """
    sizes, (batch, num_positions, num_heads, _) = extents(scan), scan.x.shape
    whole, rest = divmod(num_positions, scan.save_every)
    tiles = batch * num_heads * (whole * sizes.tiles + -(-rest // sizes.sides["Q"]))
    found = {scan.x.dtype: tiles * per_tile}
    if pairs and scan.angles is not None and scan.starts is not None:
        sums = 2 * tiles * pairs * step_sides(scan.angles.shape[2])["N"]
        found[torch.float32] = found.get(torch.float32, 0) + sums
    launches = -(-sizes.segments // max(1, sizes.at_once))
    return Cost(found, untouched_bytes=max(0, launches - 1) * given)


def _num_angles(scan: Scan) -> int:
    return 0 if scan.angles is None else scan.angles.shape[2]


def _dense_bytes(scan: Scan) -> int:
    """Bytes of the copies that `dense` makes."""
    copied = [each for names in SHARING for each in _unlike(*(getattr(scan, name) for name in names))]
    copied += [] if scan.angles is None else _unlike(scan.angles)
    return copies_bytes([*copied, *(getattr(scan, name) for name in CONTIGUOUS if getattr(scan, name) is not None)])
