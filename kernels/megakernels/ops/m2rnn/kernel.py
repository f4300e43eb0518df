"""Triton kernels of the M²RNN recurrence: one program per sequence and head, with the state in registers.

The forward saves the state before every segment. The backward processes spans of segments from the last, as long as SPAN_BYTES allows:

- `m2rnn_recompute_kernel`: one program per sequence, head and segment: the states before all positions and their tanh.
- `m2rnn_walk_kernel`: one program per sequence and head, from the span's end: the gradients of the states, which alone wait for each other.
- `m2rnn_gradient_kernel`: one program per sequence, head and few positions: everything that follows from them.

q and k are shared by the heads, so their gradients are sums over programs: each program writes its part, and the parts of a span are summed
in a fixed order. No program adds to another's result: results are bitwise repeatable, and do not depend on the spans. The formulas are the
reference's.
"""

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels._common.tuning import with_options
from megakernels.facts import SMALLEST_DOT, block_of
from megakernels.ops.m2rnn.inputs import M2rnnInputs
from megakernels.ops.m2rnn.kernel_backward import m2rnn_gradient_kernel, m2rnn_recompute_kernel, m2rnn_walk_kernel
from megakernels.ops.m2rnn.kernel_forward import m2rnn_forward_kernel
from megakernels.ops.m2rnn.sizes import sizes_of


def sides_of(key_width: int, value_width: int) -> dict[str, int]:
    """Tile sides for a shape."""
    return {"K": block_of(key_width, SMALLEST_DOT), "V": block_of(value_width, SMALLEST_DOT)}


def spread_options(key_width: int) -> dict[str, int]:
    """Options of the kernel in which no position waits for another."""
    return {"num_warps": 4 if block_of(key_width, SMALLEST_DOT) <= 64 else 8, "num_stages": 1}


def walk_options(key_width: int) -> dict[str, int]:
    """Options of kernels that take positions in order, with a warp for 32 rows: more warps would wait for each other at every position.

    Measured with a state of 64 x 16 on an H200, where the next position's loads start early: 3.99 ms with two warps, 4.50 with four.
    """
    return {"num_warps": max(1, block_of(key_width, SMALLEST_DOT) // 32)}


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
                HAS_STARTS=starts is not None, HAS_INITIAL=state is not None, **sides_of(key_width, value_width), **walk_options(key_width),
            )  # fmt: skip
    return y, states


def backward(grad_last: Tensor | None, grad_y: Tensor, given: M2rnnInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Follows the contract of `reference.backward`."""
    q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every = given
    sizes = sizes_of(given)
    batch, num_positions, num_heads, key_width, value_width, _, _ = sizes
    q, k, v, grad_y = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(grad_y)
    states = states.contiguous()
    grad_q, grad_k, grad_v, grad_f = (torch.empty(like.shape, dtype=like.dtype, device=q.device) for like in (q, k, v, f))
    grad_state = states.new_zeros(batch, num_heads, key_width, value_width)
    if grad_last is not None:
        grad_state += grad_last
    widths = num_heads, key_width, value_width
    shares = states.new_zeros(batch, sizes.segments * sizes.segment_tiles, num_heads, sizes.share)
    heads = [each.contiguous() for each in (state_map, D, dt_bias, A_log)]
    marks, packed = q if starts is None else starts.contiguous(), starts is not None
    tiles = sides_of(key_width, value_width)

    def launched(kernel: str, default: dict[str, int], **constants: int) -> dict[str, int]:
        return with_options(f"m2rnn_{kernel}_kernel", default, {**tiles, **constants}, q.device)

    for first, stop, positions in sizes.spans() if states.numel() else ():
        length = positions.stop - positions.start
        before, candidates, grad_states = states.new_empty(3, batch, num_heads, length, key_width, value_width)
        parts = states.new_empty(2, batch, length, num_heads, key_width)
        with on_device_of(q):
            m2rnn_recompute_kernel[(batch, num_heads, stop - first)](
                k, v, f, *heads, marks, states, before, candidates, num_positions, sizes.segments, first, length, save_every, *widths,
                *k.stride()[:2], *v.stride()[:3], *f.stride(),
                **launched("recompute", walk_options(key_width), HAS_STARTS=packed),
            )  # fmt: skip
            m2rnn_walk_kernel[(batch, num_heads)](
                grad_y, q, f, *heads, marks, candidates, grad_states, grad_state, num_positions, positions.start, length, *widths,
                *grad_y.stride()[:3], *q.stride()[:2], *f.stride(),
                **launched("walk", walk_options(key_width), HAS_STARTS=packed),
            )  # fmt: skip
            m2rnn_gradient_kernel[((stop - first) * sizes.segment_tiles, num_heads, batch)](
                grad_y, k, v, f, *heads, before, candidates, grad_states, *parts, grad_v, grad_f, shares, num_positions, first, length,
                save_every, shares.shape[1], sizes.segment_tiles, *widths,
                *grad_y.stride()[:3], *k.stride()[:2], *v.stride()[:3], *f.stride(),
                **launched("gradient", spread_options(key_width), T=sizes.tile),
            )  # fmt: skip
        del before, candidates, grad_states
        grad_q[:, positions], grad_k[:, positions] = parts.sum(3)
        del parts  # free these before the next span's are allocated
    totals = torch.split(shares.sum((0, 1)), [value_width * value_width, value_width, 1, 1], 1)
    del shares
    parameters = [torch.empty(like.shape, dtype=like.dtype, device=q.device) for like in (state_map, D, dt_bias, A_log)]
    for made, total in zip(parameters, totals, strict=True):
        made.copy_(total.view(made.shape) if made.dim() == 1 else torch.unflatten(total, 1, made.shape[1:]))
    return (grad_q, grad_k, grad_v, grad_f, *parameters), grad_state
