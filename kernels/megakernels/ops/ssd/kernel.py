"""Triton kernels of Mamba-2's scan: one forward, four kinds backward.

Positions are processed one tile at a time; a chunk is a sequence of tiles, at whose start the state is saved. A head's columns are
processed P at a time, because the rows of a state are independent.

- `ssd_forward_kernel`: one program per sequence, head and P columns, the state in registers from the first tile to the last.
- `ssd_state_gradient_kernel`: the same loop backwards, for the gradient of the state at each chunk's end.
- `ssd_backward_kernel`: one program per sequence, tile, head and P columns, for x, dt and the parameters: it recomputes the tile's first
  state and the gradient of its last from those of the chunk. Sums over columns are written in parts and summed in a fixed order.
- `ssd_sums_kernel`, then `ssd_group_kernel` for C and again for B: one program per sequence, tile and group of heads, over whose pairs of
  positions it sums before the product with B or C that they share.

No program adds to another's result: results are bitwise reproducible. The formulas are the reference's. The sums of log decays are fp64, or
two fp32 numbers where pairs are made of them, and differences are masked before they are exponentiated. Operands of products have the
input's dtype, products accumulate in fp32, and so does the state that is carried.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.ssd.inputs import Scan
from megakernels.ops.ssd.kernel_backward import ssd_backward_kernel, ssd_state_gradient_kernel
from megakernels.ops.ssd.kernel_forward import ssd_forward_kernel
from megakernels.ops.ssd.kernel_groups import ssd_group_kernel, ssd_sums_kernel
from megakernels.ops.ssd.sizes import tile_sides

WARPS = {"forward": 8, "state_gradient": 8, "backward": 8, "sums": 4, "group": 8}
"""Launch options of each kernel, for all shapes."""


def forward(state: Tensor | None, scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as `reference.forward`, for fp32, bf16 and fp16."""
    x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, dt_min, dt_max = scan
    batch, num_positions, num_heads, width = x.shape
    state_width = B.shape[3]
    num_chunks = triton.cdiv(num_positions, chunk_size)
    x, B, C = unit_stride(x), unit_stride(B), unit_stride(C)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, num_chunks, num_heads, width, state_width, dtype=x.dtype, device=x.device)
    last = torch.empty(batch, num_heads, width, state_width, dtype=torch.float32, device=x.device)
    sides = tile_sides(chunk_size, width, state_width, x.dtype)
    if last.numel():
        with on_device_of(x):
            ssd_forward_kernel[(batch, num_heads, triton.cdiv(width, sides["P"]))](
                x,
                dt,
                A_log.contiguous(),
                B,
                C,
                D.contiguous(),
                dt_bias.contiguous(),
                x if starts is None else starts.contiguous(),
                x if state is None else state.contiguous(),
                y,
                states,
                last,
                num_positions,
                num_chunks,
                chunk_size,
                num_heads,
                num_heads // B.shape[2],
                width,
                state_width,
                *x.stride()[:3],
                *dt.stride(),
                *B.stride()[:3],
                *C.stride()[:3],
                dt_min,
                dt_max,
                HAS_STARTS=starts is not None,
                HAS_INITIAL=state is not None,
                num_warps=WARPS["forward"],
                **sides,
            )
    return y, states, last


def backward(grad_state: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Same contract as `reference.backward`."""
    x, B, C = unit_stride(scan.x), unit_stride(scan.B), unit_stride(scan.C)
    scan = scan._replace(x=x, B=B, C=C, A_log=scan.A_log.contiguous(), dt_bias=scan.dt_bias.contiguous())
    scan = scan if scan.starts is None else scan._replace(starts=scan.starts.contiguous())
    grad_y, states = unit_stride(grad_y.to(x.dtype)), states.contiguous()
    grad_states, grad_first = _state_gradients(grad_state, grad_y, scan, states)
    grad_x, grad_dt, parameters = _head_gradients(grad_y, scan, states, grad_states)
    grad_B, grad_C = _group_gradients(grad_y, scan, states, grad_states)
    return (grad_x, grad_dt, parameters[0], grad_B, grad_C, *parameters[1:]), grad_first


class _Extents(NamedTuple):
    """The sizes that the backward kernels take.

    Attributes:
        sides: Of a tile.
        rows: Positions, chunks, and positions of a chunk.
        tiles_per_chunk: Tiles of positions in a chunk.
        columns: Heads, heads of a group, and the two widths of a state.
    """

    sides: dict[str, int]
    rows: tuple[int, int, int]
    tiles_per_chunk: int
    columns: tuple[int, int, int, int]

    @property
    def num_tiles(self) -> int:
        return self.rows[1] * self.tiles_per_chunk

    @property
    def num_blocks(self) -> int:
        """Of a head's columns."""
        return -(-self.columns[2] // self.sides["P"])


def _extents(scan: Scan) -> _Extents:
    num_positions, num_heads, width = scan.x.shape[1:]
    num_groups, state_width = scan.B.shape[2:]
    sides = tile_sides(scan.chunk_size, width, state_width, scan.x.dtype)
    tiles_per_chunk = triton.cdiv(min(scan.chunk_size, num_positions), sides["Q"])
    rows = (num_positions, triton.cdiv(num_positions, scan.chunk_size), scan.chunk_size)
    return _Extents(sides, rows, tiles_per_chunk, (num_heads, num_heads // num_groups, width, state_width))


def _state_gradients(grad_state: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> tuple[Tensor, Tensor]:
    """Of the states at the ends of all chunks, and of the initial one."""
    x, C, sizes = scan.x, scan.C, _extents(scan)
    grad_states = torch.empty_like(states)
    grad_first = torch.empty(states.shape[0], *states.shape[2:], dtype=torch.float32, device=x.device)
    if grad_first.numel():
        with on_device_of(x):
            ssd_state_gradient_kernel[(x.shape[0], x.shape[2], sizes.num_blocks)](
                grad_y,
                x if grad_state is None else grad_state.contiguous(),
                scan.dt,
                scan.A_log,
                C,
                scan.dt_bias,
                x if scan.starts is None else scan.starts,
                grad_states,
                grad_first,
                *sizes.rows,
                *sizes.columns,
                *grad_y.stride()[:3],
                *scan.dt.stride(),
                *C.stride()[:3],
                scan.dt_min,
                scan.dt_max,
                HAS_STARTS=scan.starts is not None,
                HAS_FINAL=grad_state is not None,
                num_warps=WARPS["state_gradient"],
                **sizes.sides,
            )
    return grad_states, grad_first


def _head_gradients(grad_y: Tensor, scan: Scan, states: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of x, of dt, and of A_log, D and dt_bias."""
    x, dt, B, C, sizes = scan.x, scan.dt, scan.B, scan.C, _extents(scan)
    batch, num_heads = x.shape[0], x.shape[2]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_dt_parts = torch.empty(sizes.num_blocks, *dt.shape, dtype=torch.float32, device=x.device)
    shares = torch.zeros(sizes.num_blocks, batch, sizes.num_tiles, 3, num_heads, dtype=torch.float32, device=x.device)
    if x.numel() and B.shape[3]:
        with on_device_of(x):
            ssd_backward_kernel[(sizes.num_tiles, num_heads * sizes.num_blocks, batch)](
                grad_y,
                x,
                dt,
                scan.A_log,
                B,
                C,
                scan.D.contiguous(),
                scan.dt_bias,
                x if scan.starts is None else scan.starts,
                states,
                grad_states,
                grad_x,
                grad_dt_parts,
                shares,
                *sizes.rows,
                sizes.tiles_per_chunk,
                *sizes.columns,
                *grad_y.stride()[:3],
                *x.stride()[:3],
                *dt.stride(),
                *B.stride()[:3],
                *C.stride()[:3],
                scan.dt_min,
                scan.dt_max,
                HAS_STARTS=scan.starts is not None,
                num_warps=WARPS["backward"],
                **sizes.sides,
            )
    grad_dt = grad_dt_parts.sum(0).to(dt.dtype)
    del grad_dt_parts  # what is summed goes before more is made
    parameters = [shares[:, :, :, index].sum((0, 1, 2)).to(like.dtype) for index, like in enumerate((scan.A_log, scan.D, scan.dt_bias))]
    return grad_x, grad_dt, parameters


def _group_gradients(grad_y: Tensor, scan: Scan, states: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor]:
    """Of B and of C, which the heads of a group share."""
    x, dt, B, C, sizes = scan.x, scan.dt, scan.B, scan.C, _extents(scan)
    batch, num_positions, num_heads, _ = x.shape
    grad_B, grad_C = (torch.empty(like.shape, dtype=like.dtype, device=x.device) for like in (B, C))
    if not (x.numel() and B.shape[3]):
        return grad_B, grad_C
    steps, sums, rests = torch.empty(3, batch, num_heads, num_positions, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        ssd_sums_kernel[(sizes.rows[1], num_heads, batch)](
            dt,
            scan.A_log,
            scan.dt_bias,
            steps,
            sums,
            rests,
            num_positions,
            scan.chunk_size,
            num_heads,
            *dt.stride(),
            scan.dt_min,
            scan.dt_max,
            Q=sizes.sides["Q"],
            num_warps=WARPS["sums"],
        )
        for own, other, keys, edges, gradient in ((grad_y, x, B, states, grad_C), (x, grad_y, C, grad_states, grad_B)):
            ssd_group_kernel[(sizes.num_tiles, B.shape[2], batch)](
                own,
                other,
                keys,
                edges,
                steps,
                sums,
                rests,
                x if scan.starts is None else scan.starts,
                gradient,
                *sizes.rows,
                sizes.tiles_per_chunk,
                *sizes.columns,
                *own.stride()[:3],
                *other.stride()[:3],
                *keys.stride()[:3],
                QUERIES=gradient is grad_C,
                HAS_STARTS=scan.starts is not None,
                num_warps=WARPS["group"],
                **sizes.sides,
            )
    return grad_B, grad_C
