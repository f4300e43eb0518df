"""The recurrence's forward kernel."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.m2rnn.kernel_step import gain_of, kept_of, operands_at, parameters_of, quick_tanh


@triton.jit  # type: ignore[untyped-decorator]
def m2rnn_forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, f, state_map, D, dt_bias, A_log, starts, initial, y, states, num_positions, num_segments, save_every, num_heads, key_width,
    value_width,
    q_stride_b, q_stride_t, k_stride_b, k_stride_t, v_stride_b, v_stride_t, v_stride_h, f_stride_b, f_stride_t, f_stride_h,
    K: tl.constexpr, V: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """All positions of one sequence and head."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    in_k, in_v = ks < key_width, vs < value_width
    in_state = in_k[:, None] & in_v[None, :]
    within = ks[:, None] * value_width + vs[None, :]
    weights, skip, bias, rate = parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v)
    state = tl.zeros([K, V], dtype=tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + (batch * num_heads + head) * key_width * value_width + within, mask=in_state, other=0.0).to(tl.float32)
    k, v, f = k + batch * k_stride_b, v + batch * v_stride_b + head * v_stride_h, f + batch * f_stride_b + head * f_stride_h
    q, strides = q + batch * q_stride_b, (k_stride_t, v_stride_t, f_stride_t)
    keys, values, gate = operands_at(k, v, f, 0, strides, ks, vs, in_k, in_v)
    queries = tl.load(q + ks, mask=in_k, other=0.0).to(tl.float32)
    for segment in range(num_segments):
        place = ((batch * (num_segments + 1) + segment) * num_heads + head) * key_width * value_width
        tl.store(states + place + within, state, mask=in_state)
        for t in range(segment * save_every, tl.minimum((segment + 1) * save_every, num_positions)):
            ahead = tl.minimum(t + 1, num_positions - 1)
            next_keys, next_values, next_gate = operands_at(k, v, f, ahead, strides, ks, vs, in_k, in_v)
            next_queries = tl.load(q + tl.cast(ahead, tl.int64) * q_stride_t + ks, mask=in_k, other=0.0).to(tl.float32)
            _raw, _log_decay, gain = gain_of(gate, bias, rate)
            state = state * kept_of(starts, batch * num_positions, t, HAS_STARTS)
            candidate = quick_tanh(dot(state, weights) + keys[:, None] * values[None, :])
            state += gain * (candidate - state)
            found = tl.sum(state * queries[:, None], 0) + skip * values
            out = ((batch * num_positions + t) * num_heads + head) * value_width + vs
            tl.store(y + out, narrow(found, y.dtype.element_ty), mask=in_v)
            keys, values, queries, gate = next_keys, next_values, next_queries, next_gate
    place = ((batch * (num_segments + 1) + num_segments) * num_heads + head) * key_width * value_width
    tl.store(states + place + within, state, mask=in_state)
