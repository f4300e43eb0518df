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
    x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, dt_min, dt_max = scan
    batch, num_positions, num_heads, width = x.shape
    num_chunks, num_groups, state_width = states.shape[1], B.shape[2], B.shape[3]
    x, B, C, grad_y = unit_stride(x), unit_stride(B), unit_stride(C), unit_stride(grad_y.to(x.dtype))
    A_log, dt_bias, states = A_log.contiguous(), dt_bias.contiguous(), states.contiguous()
    sides = tile_sides(chunk_size, width, state_width, x.dtype)
    packed, documents = starts is not None, x if starts is None else starts.contiguous()
    tiles_per_chunk = triton.cdiv(min(chunk_size, num_positions), sides["Q"])
    num_tiles, num_blocks = num_chunks * tiles_per_chunk, triton.cdiv(width, sides["P"])
    extents = (num_heads, num_heads // num_groups, width, state_width)
    rows = (num_positions, num_chunks, chunk_size)
    grad_states = torch.empty_like(states)
    grad_first = torch.empty(batch, num_heads, width, state_width, dtype=torch.float32, device=x.device)
    if grad_first.numel():
        with on_device_of(x):
            ssd_state_gradient_kernel[(batch, num_heads, num_blocks)](
                grad_y,
                x if grad_state is None else grad_state.contiguous(),
                dt,
                A_log,
                C,
                dt_bias,
                documents,
                grad_states,
                grad_first,
                *rows,
                *extents,
                *grad_y.stride()[:3],
                *dt.stride(),
                *C.stride()[:3],
                dt_min,
                dt_max,
                HAS_STARTS=packed,
                HAS_FINAL=grad_state is not None,
                num_warps=WARPS["state_gradient"],
                **sides,
            )
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_dt_parts = torch.empty(num_blocks, *dt.shape, dtype=torch.float32, device=x.device)
    shares = torch.zeros(num_blocks, batch, num_tiles, 3, num_heads, dtype=torch.float32, device=x.device)
    if x.numel() and state_width:
        with on_device_of(x):
            ssd_backward_kernel[(num_tiles, num_heads * num_blocks, batch)](
                grad_y,
                x,
                dt,
                A_log,
                B,
                C,
                D.contiguous(),
                dt_bias,
                documents,
                states,
                grad_states,
                grad_x,
                grad_dt_parts,
                shares,
                *rows,
                tiles_per_chunk,
                *extents,
                *grad_y.stride()[:3],
                *x.stride()[:3],
                *dt.stride(),
                *B.stride()[:3],
                *C.stride()[:3],
                dt_min,
                dt_max,
                HAS_STARTS=packed,
                num_warps=WARPS["backward"],
                **sides,
            )
    grad_dt = grad_dt_parts.sum(0).to(dt.dtype)
    del grad_dt_parts  # free before further allocations
    parameters = [shares[:, :, :, index].sum((0, 1, 2)).to(like.dtype) for index, like in enumerate((A_log, D, dt_bias))]
    del shares
    grad_B, grad_C = (torch.empty(like.shape, dtype=like.dtype, device=x.device) for like in (B, C))
    if x.numel() and state_width:
        steps, sums, rests = torch.empty(3, batch, num_heads, num_positions, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            ssd_sums_kernel[(num_chunks, num_heads, batch)](
                dt,
                A_log,
                dt_bias,
                steps,
                sums,
                rests,
                num_positions,
                chunk_size,
                num_heads,
                *dt.stride(),
                dt_min,
                dt_max,
                Q=sides["Q"],
                num_warps=WARPS["sums"],
            )
            for own, other, keys, edges, gradient in ((grad_y, x, B, states, grad_C), (x, grad_y, C, grad_states, grad_B)):
                ssd_group_kernel[(num_tiles, num_groups, batch)](
                    own,
                    other,
                    keys,
                    edges,
                    steps,
                    sums,
                    rests,
                    documents,
                    gradient,
                    *rows,
                    tiles_per_chunk,
                    *extents,
                    *own.stride()[:3],
                    *other.stride()[:3],
                    *keys.stride()[:3],
                    QUERIES=gradient is grad_C,
                    HAS_STARTS=packed,
                    num_warps=WARPS["group"],
                    **sides,
                )
    return (grad_x, grad_dt, parameters[0], grad_B, grad_C, *parameters[1:]), grad_first
