"""Launches of the scan's kernels of tables, states and outputs, and values shared by all launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from megakernels._common.tuning import with_options
from megakernels.ops.mamba3.chunk import Mamba3Inputs
from megakernels.ops.mamba3.facts import (
    CHAIN,
    MAMBA3_HEADS_PER_TABLE,
    NUM_TABLES,
    TILES_PER_SHARE,
    Mamba3Extents,
    halves_turned,
    step_sides,
)
from megakernels.ops.mamba3.kernel_outputs import mamba3_output_kernel
from megakernels.ops.mamba3.kernel_states import mamba3_state_kernel
from megakernels.ops.mamba3.kernel_tables import mamba3_angle_kernel, mamba3_table_kernel, mamba3_turn_kernel
from megakernels.ops.mamba3.sizes import trigonometric_dtype

OPTIONS = {
    "table": {"num_warps": 4},
    "turn": {"num_warps": 4},
    "angle": {"num_warps": 4},
    "state": {"num_warps": 4, "num_stages": 1},
    "output": {"num_warps": 4, "num_stages": 1},
    "state_gradient": {"num_warps": 4, "num_stages": 1},
    "pair": {"num_warps": 4, "num_stages": 1},
    "value": {"num_warps": 4, "num_stages": 1},
    "group": {"num_warps": 8},
    "last_phase": {"num_warps": 4},
    "phase_gradient": {"num_warps": 4},
    "step_gradient": {"num_warps": 4},
}
"""Default launch options of each kernel. Loads of a later tile are not started early: the registers are those of one tile."""


def launched(key: str, x: Tensor, **constants: Any) -> dict[str, Any]:
    """Compile-time constants of a launch, with its options on the device of x."""
    return with_options(f"mamba3_{key}_kernel", OPTIONS[key], constants, x.device)


def outputs(scan: Mamba3Inputs, state: Tensor | None, tables: list[Tensor], sizes: Mamba3Extents, made: tuple[Tensor, ...]) -> None:
    """Writes y, the states before segments and the last one, from the initial one: as many segments at once as the backward has."""
    x, z, B, C, _, _, _, _, B_bias, C_bias, D, _, mimo_x, mimo_z, mimo_o, _ = (scan.x if each is None else each for each in scan[:16])
    (batch, num_heads, _, _, _), (y, states, last) = sizes_of(scan), made
    counts, flags, strides = counts_of(scan), flags_of(scan), strides_of(scan)[:7]
    between = torch.empty(sizes.at_once * sizes.stored[0], dtype=x.dtype, device=x.device)
    if not sizes.segments:
        last.zero_() if state is None else last.copy_(state)
    for first in range(0, sizes.segments, max(1, sizes.at_once)):
        count = min(sizes.at_once, sizes.segments - first)
        mamba3_state_kernel[(2 * batch, num_heads, 1)](
            x, B, B_bias, mimo_x, *tables, x if state is None else state, states, between, last, *counts, sizes.segments, first, count,
            sizes.tiles,
            *strides,
            **launched("state", x, **flags, **sizes.sides, HAS_INITIAL=state is not None, WALKS=True),
        )  # fmt: skip
        state = last
        mamba3_output_kernel[(count * sizes.pieces, num_heads, batch)](
            x, x, z, B, C, B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, *tables, between, y, x, x, x, x, *counts, 0, sizes.segments, first,
            count, sizes.tiles, sizes.pieces, 0, 0, 0,
            *strides,
            **launched("output", x, **flags, **sizes.sides, SPAN=TILES_PER_SHARE, GRADIENTS=False),
        )  # fmt: skip


def make_tables(
    scan: Mamba3Inputs, ahead: Tensor | None, phase: Tensor | None, sizes: Mamba3Extents, made: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    """Documents' starts and the tables; x for absent ones.

    With `made`, the phases before segments and after the last, which it writes, from the initial phase; without, `phase` has those before
    segments.
    """
    x = scan.x
    batch, num_heads, _, _, num_angles = sizes_of(scan)
    num_positions, starts = x.shape[1], x if scan.starts is None else scan.starts
    strides, has_starts = strides_of(scan)[7:], scan.starts is not None
    tables = torch.empty(NUM_TABLES, batch, num_heads, num_positions, dtype=torch.float32, device=x.device)
    heads = min(MAMBA3_HEADS_PER_TABLE, triton.next_power_of_2(num_heads))
    mamba3_table_kernel[(sizes.segments, triton.cdiv(num_heads, heads), batch)](
        scan.dt, scan.A, scan.trapezoid, scan.dt_bias, starts, x if ahead is None else ahead, tables, num_positions, num_heads,
        scan.save_every, tables[0].numel(),
        *strides[:3],
        **launched("table", x, H=heads, Q=sizes.sides["Q"], HAS_STARTS=has_starts, HAS_AHEAD=ahead is not None, HEAVY_TAIL=scan.heavy_tail),
    )  # fmt: skip
    if scan.angles is None:
        return [starts, tables, x, x]
    shape = batch, num_heads, num_positions, num_angles
    cosines, sines = (torch.empty(shape, dtype=trigonometric_dtype(x.dtype), device=x.device) for _ in range(2))
    turns = torch.empty(batch, num_positions, num_angles, dtype=torch.float32, device=x.device)
    sides = {"T": CHAIN, "N": step_sides(num_angles)["N"]}
    mamba3_turn_kernel[(triton.cdiv(num_positions, CHAIN), batch)](
        *(scan.angles, turns, num_positions, num_angles, *strides[3:]), **launched("turn", x, **sides)
    )
    mamba3_angle_kernel[(batch, num_heads, 1 if made else sizes.segments)](
        scan.dt, scan.dt_bias, turns, starts, x if phase is None else phase, cosines, sines, *(made or (x, x)), num_positions, num_heads,
        num_angles, scan.save_every, sizes.segments,
        *strides[:3],
        **launched("angle", x, **sides, HAS_STARTS=has_starts, HAS_INITIAL=phase is not None, FORWARD=made is not None),
    )  # fmt: skip
    return [starts, tables, cosines, sines]


def sizes_of(scan: Mamba3Inputs) -> tuple[int, int, int, int, int]:
    """Sequences, heads, widths of a head and of a state, angles."""
    batch, _, num_heads, width = scan.x.shape
    return batch, num_heads, width, scan.B.shape[4], 0 if scan.angles is None else scan.angles.shape[2]


def counts_of(scan: Mamba3Inputs) -> tuple[int, ...]:
    """Positions, heads, heads of a group, ranks, widths, angles, positions of a segment, and positions of all sequences and heads."""
    _, num_heads, width, state_width, num_angles = sizes_of(scan)
    rank, num_groups = scan.B.shape[2:4]
    num_rows = scan.x.shape[0] * scan.x.shape[1] * num_heads
    return scan.x.shape[1], num_heads, num_heads // num_groups, rank, width, state_width, num_angles, scan.save_every, num_rows


def strides_of(scan: Mamba3Inputs) -> tuple[int, ...]:
    """Strides of x and z, of B and C, of dt, A and trapezoid, and of the angles."""
    angles = (0, 0) if scan.angles is None else scan.angles.stride()[:2]
    return (*scan.x.stride()[:3], *scan.B.stride()[:4], *scan.dt.stride(), *angles)


def flags_of(scan: Mamba3Inputs) -> dict[str, int]:
    """Constants of the kernels over tiles."""
    return {
        "HAS_STARTS": scan.starts is not None,
        "HAS_MIMO": scan.mimo_x is not None,
        "TURNS": halves_turned(sizes_of(scan)[4], scan.B.shape[4]),
        "PRECISE": scan.x.dtype == torch.float32,
    }
