"""Triton kernels of the M²RNN recurrence: one program per sequence and head, with the state in registers.

The forward saves the state before every segment. The backward processes the segments from the last: it recomputes the segment's states into
scratch of one segment, runs backwards over it, and finally multiplies the states with their gradients, for the map. q and k are shared by
the heads, so their gradients are sums over programs: each program writes its part, the parts of a span of segments are summed in a fixed
order, and a span is as long as PARTS_BYTES allows. Values carried between spans (the state's gradient and the sums over positions) are
stored in memory. The formulas are the reference's.
"""

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.facts import SMALLEST_DOT, block_of
from megakernels.ops.m2rnn.facts import MAP_ROWS
from megakernels.ops.m2rnn.inputs import M2rnnInputs
from megakernels.ops.m2rnn.kernel_backward import m2rnn_backward_kernel
from megakernels.ops.m2rnn.kernel_forward import m2rnn_forward_kernel
from megakernels.ops.m2rnn.sizes import sizes_of


def launch_options(key_width: int, value_width: int) -> dict[str, int]:
    """Tile sides for a shape, and warps of the backward."""
    keys = block_of(key_width, SMALLEST_DOT)
    return {"K": keys, "V": block_of(value_width, SMALLEST_DOT), "num_warps": 4 if keys <= 64 else 8}


def forward_options(key_width: int, value_width: int) -> dict[str, int]:
    """The same of the forward, with a warp for 32 rows: more of them wait for each other at every position.

    Measured with a state of 64 x 16 on an H200, where the next position's loads start early: 3.99 ms with two warps, 4.50 with four.
    """
    options = launch_options(key_width, value_width)
    return options | {"num_warps": max(1, options["K"] // 32)}


def forward(state: Tensor | None, given: M2rnnInputs) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every = given
    batch, num_positions, key_width = q.shape
    num_heads, value_width = v.shape[2:]
    num_segments = triton.cdiv(num_positions, save_every)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    y = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    states = torch.empty(batch, num_segments + 1, num_heads, key_width, value_width, dtype=torch.float32, device=q.device)
    if not num_positions:
        states.zero_() if state is None else states.copy_(state[:, None])
    elif states.numel():
        with on_device_of(q):
            m2rnn_forward_kernel[(batch, num_heads)](
                q, k, v, f, state_map.contiguous(), D.contiguous(), dt_bias.contiguous(), A_log.contiguous(),
                q if starts is None else starts.contiguous(), q if state is None else state.contiguous(), y, states, num_positions,
                num_segments, save_every, num_heads, key_width, value_width,
                *q.stride()[:2], *k.stride()[:2], *v.stride()[:3], *f.stride(),
                HAS_STARTS=starts is not None, HAS_INITIAL=state is not None, **forward_options(key_width, value_width),
            )  # fmt: skip
    return y, states


def backward(grad_last: Tensor | None, grad_y: Tensor, given: M2rnnInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Follows the contract of `reference.backward`."""
    q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every = given
    batch, num_positions, key_width = q.shape
    num_heads, value_width = v.shape[2:]
    num_segments = states.shape[1] - 1
    q, k, v, grad_y = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(grad_y)
    states = states.contiguous()
    grad_q, grad_k, grad_v, grad_f = (torch.empty(like.shape, dtype=like.dtype, device=q.device) for like in (q, k, v, f))
    recomputed = states.new_empty(batch, num_heads, 2, save_every, key_width, value_width)
    grad_state = states.new_zeros(batch, num_heads, key_width, value_width)
    if grad_last is not None:
        grad_state += grad_last
    grad_map = states.new_zeros(batch, num_heads, value_width, value_width)
    grad_D = states.new_zeros(batch, num_heads, value_width)
    grad_scalars = states.new_zeros(batch, num_heads, 2)
    for first, stop, positions in sizes_of(given).spans() if states.numel() else ():
        parts = states.new_empty(2, batch, positions.stop - positions.start, num_heads, key_width)
        with on_device_of(q):
            m2rnn_backward_kernel[(batch, num_heads)](
                grad_y, q, k, v, f, state_map.contiguous(), D.contiguous(), dt_bias.contiguous(), A_log.contiguous(),
                q if starts is None else starts.contiguous(), states, recomputed, parts[0], parts[1], grad_v, grad_f, grad_state, grad_map,
                grad_D, grad_scalars, num_positions, num_segments, first, stop, save_every, num_heads, key_width, value_width,
                *grad_y.stride()[:3], *q.stride()[:2], *k.stride()[:2], *v.stride()[:3], *f.stride(),
                HAS_STARTS=starts is not None, ROWS=MAP_ROWS, **launch_options(key_width, value_width),
            )  # fmt: skip
        grad_q[:, positions], grad_k[:, positions] = parts.sum(3)
        del parts  # free before the next span's are allocated
    del recomputed
    sums = grad_map, grad_D, *grad_scalars.unbind(2)
    parameters = [total.sum(0).to(like.dtype) for total, like in zip(sums, (state_map, D, dt_bias, A_log), strict=True)]
    return (grad_q, grad_k, grad_v, grad_f, *parameters), grad_state
