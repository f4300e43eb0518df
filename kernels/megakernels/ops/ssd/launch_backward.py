"""Launches of the scan's backward kernels over tiles and steps."""

import torch
import triton
from torch import Tensor

from megakernels.ops.ssd.facts import HEADS_PER_PART, SsdExtents
from megakernels.ops.ssd.inputs import SsdInputs
from megakernels.ops.ssd.kernel_groups import ssd_edge_kernel, ssd_group_kernel
from megakernels.ops.ssd.kernel_pairs import ssd_pair_kernel, ssd_value_kernel
from megakernels.ops.ssd.kernel_states import ssd_state_kernel
from megakernels.ops.ssd.kernel_steps import ssd_step_kernel
from megakernels.ops.ssd.launch import counts_of, flags_of, heads_of_table, launched


def segment_gradients(
    grad_y: Tensor, scan: SsdInputs, sizes: SsdExtents, tables: Tensor, states: Tensor, grad_states: Tensor, gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Fills the gradients of x, B and C, some chunks at a time.

    Returns:
        Per block of columns, position and head [3 or 4, blocks, B, H, T]: the gradient of a step that only scales x, and the parts of that
        of a log decay within the tile. Per block, tile and head [2, blocks, B, tiles, H]: the gradients of a log decay across the tile, and
        of D.
    """
    x, B, C = scan.x, scan.B, scan.C
    batch, num_positions, num_heads, _ = x.shape
    num_groups = B.shape[2]
    grad_x, grad_B, grad_C = gradients
    starts = x if scan.starts is None else scan.starts
    rows = torch.empty(sizes.rows, sizes.blocks, batch, num_heads, num_positions, dtype=torch.float32, device=x.device)
    tiles = torch.empty(2, sizes.blocks, batch, sizes.chunks * sizes.tiles, num_heads, dtype=torch.float32, device=x.device)
    dtypes = x.dtype, x.dtype, torch.float32, torch.float32
    tile_states, tile_gradients, pairs, edges = (
        torch.empty(sizes.at_once * each, dtype=dtype, device=x.device) for each, dtype in zip(sizes.stored, dtypes, strict=True)
    )
    settings = {**sizes.sides, **flags_of(scan)}
    extent = num_positions, sizes.chunks, scan.chunk_size, sizes.tiles, *counts_of(scan)
    without_chunks = num_positions, *extent[2:]
    for first in range(0, sizes.chunks, max(1, sizes.at_once)):
        count = min(sizes.at_once, sizes.chunks - first)
        of_heads, of_parts = (count, num_heads * sizes.blocks, batch), (count * sizes.tiles, num_groups * sizes.parts, batch)
        for own, keys, edge, is_gradient in ((x, B, states, False), (grad_y, C, grad_states, True)):
            ssd_state_kernel[of_heads](
                own, keys, tables, own if scan.starts is None else starts, edge, tile_states, tile_gradients, tiles[0], *extent, first,
                *own.stride()[:3], *keys.stride()[:3],
                **launched("state", x, **settings, GRADIENTS=is_gradient),
            )  # fmt: skip
        strides = *grad_y.stride()[:3], *x.stride()[:3], *B.stride()[:3], *C.stride()[:3]
        ssd_pair_kernel[of_parts](
            grad_y, x, B, C, tables, starts, pairs, rows[1], rows[-1], tiles[1], *extent, first,
            *strides,
            **launched("pair", x, **settings, SPAN=HEADS_PER_PART),
        )  # fmt: skip
        ssd_value_kernel[of_parts](
            grad_y, x, B, C, scan.D, tables, starts, tile_gradients, grad_x, rows[0], rows[1], *without_chunks, first,
            *strides,
            **launched("value", x, **settings, SPAN=HEADS_PER_PART),
        )  # fmt: skip
        for own, keys, others, boundary, found in ((grad_y, C, B, tile_states, grad_C), (x, B, C, tile_gradients, grad_B)):
            ssd_edge_kernel[of_parts](
                own, keys, tables, own if scan.starts is None else starts, boundary, edges, rows[2], *without_chunks, first,
                *own.stride()[:3], *keys.stride()[:3],
                **launched("edge of C" if found is grad_C else "edge of B", x, **settings, SPAN=HEADS_PER_PART, QUERIES=found is grad_C),
            )  # fmt: skip
            ssd_group_kernel[(count * sizes.tiles, num_groups, batch)](
                others, pairs, edges, found, num_positions, scan.chunk_size, sizes.tiles, B.shape[3], sizes.parts, first,
                *others.stride()[:3],
                **launched("group", x, Q=sizes.sides["Q"], S=sizes.sides["S"], QUERIES=found is grad_C),
            )  # fmt: skip
    return rows, tiles


def step_gradients(scan: SsdInputs, sizes: SsdExtents, rows: Tensor, tiles: Tensor, grad_dt: Tensor, shares: Tensor) -> None:
    """Fills the gradient of dt, and the tiles' shares of the parameters' gradients."""
    dt = scan.dt
    batch, num_positions, num_heads = dt.shape
    heads = heads_of_table(num_heads)
    ssd_step_kernel[(sizes.chunks * sizes.tiles, triton.cdiv(num_heads, heads), batch)](
        dt, scan.A_log, scan.dt_bias, *rows[:3], rows[-1], *tiles, grad_dt, shares, num_positions, sizes.blocks, scan.chunk_size,
        sizes.tiles, num_heads, rows[0, 0].numel(),
        *dt.stride(),
        scan.dt_min, scan.dt_max,
        **launched("step", scan.x, H=heads, Q=sizes.sides["Q"], PRECISE=flags_of(scan)["PRECISE"]),
    )  # fmt: skip
