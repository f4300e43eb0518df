"""Triton kernels of Mamba-2's scan.

A chunk is a sequence of tiles, at whose start the state is saved; the rows of a state are independent, so P columns of a head at a time.

- Forward: tables of steps and running sums; what each chunk adds to the state (`ssd_chunk_kernel`); the states before all chunks from that,
  an element at a time (`ssd_pass_kernel`); the outputs of each chunk (`ssd_output_kernel`). Only the third is serial over chunks.
- Backward: the tables again, and the same two kernels backwards for the gradients of the states after all chunks. Then for some chunks at a
  time: states before all tiles and gradients of those after them (`ssd_state_kernel`), the pairs of positions of each tile, which give the
  gradients of x (`ssd_pair_kernel`), and those of B and C: the share of some heads through the state (`ssd_edge_kernel`), then the sum
  (`ssd_group_kernel`). At last the gradients of dt and the parameters (`ssd_step_kernel`).

No program adds to another's result: results are bitwise reproducible. The formulas are the reference's. Sums of log decays start in each
tile; their differences are masked before they are exponentiated. Operands of products have the input's dtype, products and the state
carried over tiles and chunks accumulate in fp32; a chunk's addition to it is rounded to the input's dtype once.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.ssd.facts import PASS_COLUMNS, SsdExtents
from megakernels.ops.ssd.inputs import SsdInputs
from megakernels.ops.ssd.kernel_outputs import ssd_output_kernel
from megakernels.ops.ssd.kernel_states import ssd_chunk_kernel, ssd_pass_kernel, ssd_table_kernel
from megakernels.ops.ssd.launch import counts_of, flags_of, heads_of_table, launched
from megakernels.ops.ssd.launch_backward import segment_gradients, step_gradients
from megakernels.ops.ssd.sizes import sizes_of


def forward(state: Tensor | None, scan: SsdInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    scan, sizes = _dense(scan), sizes_of(scan).extents()
    x, starts = scan.x, scan.x if scan.starts is None else scan.starts
    batch, _, num_heads, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, sizes.chunks, num_heads, width, scan.B.shape[3], dtype=x.dtype, device=x.device)
    last = torch.empty(batch, num_heads, width, scan.B.shape[3], dtype=torch.float32, device=x.device)
    if last.numel():
        with on_device_of(x):
            tables = make_tables(scan, sizes)
            chunk_states(x, scan.B, tables, state, scan, sizes, states, last, gradients=False)
            ssd_output_kernel[(sizes.chunks, num_heads * sizes.blocks, batch)](
                x, scan.B, scan.C, scan.D, tables, starts, states, y, x.shape[1], sizes.chunks, scan.chunk_size, *counts_of(scan),
                *x.stride()[:3], *scan.B.stride()[:3], *scan.C.stride()[:3],
                **launched("output", x, **sizes.sides, **flags_of(scan)),
            )  # fmt: skip
    return y, states, last


def backward(grad_state: Tensor | None, grad_y: Tensor, scan: SsdInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Follows the contract of `reference.backward`."""
    scan, sizes = _dense(scan), sizes_of(scan).extents()
    x, dt, A_log, B, C, D, dt_bias = scan[:7]
    grad_y, states = unit_stride(grad_y.to(x.dtype)), states.contiguous()
    grad_x, grad_dt, grad_B, grad_C = (torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (x, dt, B, C))
    parameters = [torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (A_log, D, dt_bias)]
    grad_first = torch.empty(states.shape[0], *states.shape[2:], dtype=torch.float32, device=x.device)
    shares = torch.empty(x.shape[0], sizes.chunks * sizes.tiles, 3, x.shape[2], dtype=torch.float32, device=x.device)
    if grad_first.numel():
        with on_device_of(x):
            tables, grad_states = make_tables(scan, sizes), torch.empty_like(states)
            chunk_states(grad_y, C, tables, grad_state, scan, sizes, grad_states, grad_first, gradients=True)
            rows, tiles = segment_gradients(grad_y, scan, sizes, tables, states, grad_states, (grad_x, grad_B, grad_C))
            step_gradients(scan, sizes, rows, tiles, grad_dt, shares)
            del rows, tiles, tables, grad_states  # the inputs of the shares are freed before the shares are summed
    for made, total in zip(parameters, shares.sum((0, 1)), strict=True):
        made.copy_(total)
    return (grad_x, grad_dt, parameters[0], grad_B, grad_C, *parameters[1:]), grad_first


def make_tables(scan: SsdInputs, sizes: SsdExtents) -> Tensor:
    """`kernel_tiles` documents their contents."""
    x, dt, num_positions = scan.x, scan.dt, scan.x.shape[1]
    batch, num_heads = x.shape[0], x.shape[2]
    tables = torch.empty(sizes.tables, batch, num_heads, num_positions, dtype=torch.float32, device=x.device)
    heads = heads_of_table(num_heads)
    ssd_table_kernel[(sizes.chunks * sizes.tiles, triton.cdiv(num_heads, heads), batch)](
        dt, scan.A_log, scan.dt_bias, tables, num_positions, scan.chunk_size, sizes.tiles, num_heads, tables[0].numel(),
        *dt.stride(),
        scan.dt_min, scan.dt_max,
        **launched("table", x, H=heads, Q=sizes.sides["Q"], PRECISE=flags_of(scan)["PRECISE"]),
    )  # fmt: skip
    return tables


def chunk_states(
    rows: Tensor, keys: Tensor, tables: Tensor, outer: Tensor | None,
    scan: SsdInputs, sizes: SsdExtents,
    states: Tensor, last: Tensor,
    *, gradients: bool,
) -> None:  # fmt: skip
    """Fills the states before all chunks and after the last; with `gradients` those of the states after all chunks and before the first."""
    x = scan.x
    batch, num_positions, num_heads, width = x.shape
    through = torch.empty(batch, sizes.chunks, num_heads, dtype=torch.float32, device=x.device)
    ssd_chunk_kernel[(sizes.chunks, num_heads * sizes.blocks, batch)](
        rows, keys, tables, rows if scan.starts is None else scan.starts, states, last, through, num_positions, sizes.chunks,
        scan.chunk_size, *counts_of(scan),
        *rows.stride()[:3], *keys.stride()[:3],
        **launched("chunk", x, **sizes.sides, **flags_of(scan), GRADIENTS=gradients),
    )  # fmt: skip
    size = width * keys.shape[3]
    ssd_pass_kernel[(batch * num_heads, triton.cdiv(size, PASS_COLUMNS))](
        states if outer is None else outer.contiguous(), states, last, through, sizes.chunks, num_heads, size,
        **launched("pass", x, COLUMNS=PASS_COLUMNS, HAS_OUTER=outer is not None, GRADIENTS=gradients),
    )  # fmt: skip


def _dense(scan: SsdInputs) -> SsdInputs:
    """The inputs as the kernels take them: dense rows, contiguous parameters and starts."""
    found: dict[str, Any] = {name: unit_stride(getattr(scan, name)) for name in ("x", "B", "C")}
    found |= {name: getattr(scan, name).contiguous() for name in ("A_log", "D", "dt_bias")}
    if scan.starts is not None:
        found |= {"starts": scan.starts.contiguous()}
    return scan._replace(**found)
