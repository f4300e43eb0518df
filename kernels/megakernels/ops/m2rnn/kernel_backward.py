"""The recurrence's backward kernels: recomputed states, the recurrence of the state's gradient, and results at each position."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, sigmoid
from megakernels.ops.m2rnn.kernel_step import gain_of, kept_of, operands_at, parameters_of, quick_tanh


@triton.jit  # type: ignore[untyped-decorator]
def m2rnn_recompute_kernel(  # type: ignore[no-untyped-def]
    k, v, f, state_map, D, dt_bias, A_log, starts, states, before, candidates, num_positions, num_segments, first_segment, span_length,
    save_every, num_heads, key_width, value_width,
    k_stride_b, k_stride_t, v_stride_b, v_stride_t, v_stride_h, f_stride_b, f_stride_t, f_stride_h,
    K: tl.constexpr, V: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """One segment of one sequence and head: `before` and `candidates` [B, H, span, K, V], the state before each position and its tanh."""
    batch, head, segment = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), first_segment + tl.program_id(2)
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    in_k, in_v = ks < key_width, vs < value_width
    in_state, num_elements = in_k[:, None] & in_v[None, :], key_width * value_width
    within = ks[:, None] * value_width + vs[None, :]
    weights, _skip, bias, rate = parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v)
    k, v, f = k + batch * k_stride_b, v + batch * v_stride_b + head * v_stride_h, f + batch * f_stride_b + head * f_stride_h
    strides = k_stride_t, v_stride_t, f_stride_t
    begin, end = segment * save_every, tl.minimum((segment + 1) * save_every, num_positions)
    place = ((batch * (num_segments + 1) + segment) * num_heads + head) * num_elements
    state = tl.load(states + place + within, mask=in_state, other=0.0).to(tl.float32)
    in_span = ((batch * num_heads + head) * span_length - first_segment * save_every) * num_elements + within
    keys, values, gate = operands_at(k, v, f, begin, strides, ks, vs, in_k, in_v)
    for t in range(begin, end):
        next_keys, next_values, next_gate = operands_at(k, v, f, tl.minimum(t + 1, end - 1), strides, ks, vs, in_k, in_v)
        _raw, _log_decay, gain = gain_of(gate, bias, rate)
        state = state * kept_of(starts, batch * num_positions, t, HAS_STARTS)
        candidate = quick_tanh(dot(state, weights) + keys[:, None] * values[None, :])
        at = in_span + tl.cast(t, tl.int64) * num_elements
        tl.store(before + at, state, mask=in_state)
        tl.store(candidates + at, candidate, mask=in_state)
        state += gain * (candidate - state)
        keys, values, gate = next_keys, next_values, next_gate


@triton.jit  # type: ignore[untyped-decorator]
def m2rnn_walk_kernel(  # type: ignore[no-untyped-def]
    grad_y, q, f, state_map, D, dt_bias, A_log, starts, candidates, grad_states, grad_state, num_positions, span_begin, span_length,
    num_heads, key_width, value_width,
    grad_stride_b, grad_stride_t, grad_stride_h, q_stride_b, q_stride_t, f_stride_b, f_stride_t, f_stride_h,
    K: tl.constexpr, V: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """A span of one sequence and head, from its end: `grad_states` [B, H, span, K, V], the gradients of the states after its positions.

    `grad_state` has the gradient of the state after the span, and then of the one before it. Everything that no later step waits for is
    left to `m2rnn_gradient_kernel`.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    in_k, in_v = ks < key_width, vs < value_width
    in_state, num_elements = in_k[:, None] & in_v[None, :], key_width * value_width
    within = ks[:, None] * value_width + vs[None, :]
    weights, _skip, bias, rate = parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v)
    back_map = tl.trans(weights)
    program = batch * num_heads + head
    carried = tl.load(grad_state + program * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
    q, f = q + batch * q_stride_b, f + batch * f_stride_b + head * f_stride_h
    grad_y += batch * grad_stride_b + head * grad_stride_h
    in_span = program * span_length * num_elements + within
    last = tl.cast(span_length - 1, tl.int64)
    far = span_begin + last
    gate = tl.load(f + far * f_stride_t).to(tl.float32)
    queries = tl.load(q + far * q_stride_t + ks, mask=in_k, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + far * grad_stride_t + vs, mask=in_v, other=0.0).to(tl.float32)
    candidate = tl.load(candidates + in_span + last * num_elements, mask=in_state, other=0.0).to(tl.float32)
    for back in range(span_length):
        index = span_length - 1 - back
        sooner = tl.cast(tl.maximum(index - 1, 0), tl.int64)
        near = span_begin + sooner
        next_gate = tl.load(f + near * f_stride_t).to(tl.float32)
        next_queries = tl.load(q + near * q_stride_t + ks, mask=in_k, other=0.0).to(tl.float32)
        next_grad = tl.load(grad_y + near * grad_stride_t + vs, mask=in_v, other=0.0).to(tl.float32)
        next_candidate = tl.load(candidates + in_span + sooner * num_elements, mask=in_state, other=0.0).to(tl.float32)
        _raw, _log_decay, gain = gain_of(gate, bias, rate)
        carried += queries[:, None] * grad[None, :]
        tl.store(grad_states + in_span + tl.cast(index, tl.int64) * num_elements, carried, mask=in_state)
        inner = carried * gain * (1.0 - candidate * candidate)
        carried = (1.0 - gain) * carried + dot(inner, back_map)
        carried = carried * kept_of(starts, batch * num_positions, span_begin + index, HAS_STARTS)
        gate, queries, grad, candidate = next_gate, next_queries, next_grad, next_candidate
    tl.store(grad_state + program * num_elements + within, carried, mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def m2rnn_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y, k, v, f, state_map, D, dt_bias, A_log, before, candidates, grad_states, grad_q_parts, grad_k_parts, grad_v, grad_f, shares,
    num_positions, first_segment, span_length, save_every, num_tiles, tiles_per_segment, num_heads, key_width, value_width,
    grad_stride_b, grad_stride_t, grad_stride_h, k_stride_b, k_stride_t, v_stride_b, v_stride_t, v_stride_h,
    f_stride_b, f_stride_t, f_stride_h,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Up to T positions of a segment of one sequence and head: gradients of v and f, and the head's part of those of q and k.

    `grad_q_parts` and `grad_k_parts` are [B, span, H, K]. `shares` [B, tiles, H, V · V + V + 2] has the sums over these positions for the
    gradients of the map, D, dt_bias and A_log, one after the other.
    """
    in_span, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    segment, tile = first_segment + in_span // tiles_per_segment, in_span % tiles_per_segment
    begin = segment * save_every + tile * T
    end = tl.minimum(tl.minimum(begin + T, (segment + 1) * save_every), num_positions)
    span_begin = first_segment * save_every
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    in_k, in_v = ks < key_width, vs < value_width
    in_state, num_elements = in_k[:, None] & in_v[None, :], key_width * value_width
    within = ks[:, None] * value_width + vs[None, :]
    _weights, skip, bias, rate = parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v)
    k, v, f = k + batch * k_stride_b, v + batch * v_stride_b + head * v_stride_h, f + batch * f_stride_b + head * f_stride_h
    grad_y += batch * grad_stride_b + head * grad_stride_h
    sum_map, sum_D = tl.zeros([V, V], dtype=tl.float32), tl.zeros([V], dtype=tl.float32)
    sum_bias, sum_A_log = 0.0, 0.0
    for t in range(begin, end):
        far = tl.cast(t, tl.int64)
        keys, values, gate = operands_at(k, v, f, t, (k_stride_t, v_stride_t, f_stride_t), ks, vs, in_k, in_v)
        grad = tl.load(grad_y + far * grad_stride_t + vs, mask=in_v, other=0.0).to(tl.float32)
        at = ((batch * num_heads + head) * span_length + (far - span_begin)) * num_elements + within
        state = tl.load(before + at, mask=in_state, other=0.0).to(tl.float32)
        candidate = tl.load(candidates + at, mask=in_state, other=0.0).to(tl.float32)
        carried = tl.load(grad_states + at, mask=in_state, other=0.0).to(tl.float32)
        raw, log_decay, gain = gain_of(gate, bias, rate)
        moved = candidate - state
        inner = carried * gain * (1.0 - candidate * candidate)
        part = ((batch * span_length + (far - span_begin)) * num_heads + head) * key_width + ks
        tl.store(grad_q_parts + part, tl.sum((state + gain * moved) * grad[None, :], 1), mask=in_k)
        tl.store(grad_k_parts + part, tl.sum(inner * values[None, :], 1), mask=in_k)
        row = (batch * num_positions + far) * num_heads + head
        found = tl.sum(inner * keys[:, None], 0) + skip * grad
        tl.store(grad_v + row * value_width + vs, narrow(found, grad_v.dtype.element_ty), mask=in_v)
        grad_log_decay = -tl.exp(log_decay) * tl.sum(tl.sum(moved * carried, 1), 0)
        grad_raw = grad_log_decay * rate * sigmoid(raw)
        tl.store(grad_f + row, narrow(grad_raw, grad_f.dtype.element_ty))
        sum_map += dot(tl.trans(state), inner)
        sum_D += grad * values
        sum_bias += grad_raw
        sum_A_log += grad_log_decay * log_decay
    width = value_width * value_width
    share = shares + ((batch * num_tiles + first_segment * tiles_per_segment + in_span) * num_heads + head) * (width + value_width + 2)
    of_map, in_map = vs[:, None] * value_width + vs[None, :], in_v[:, None] & in_v[None, :]
    tl.store(share + of_map, sum_map, mask=in_map)
    tl.store(share + width + vs, sum_D, mask=in_v)
    tl.store(share + width + value_width, sum_bias)
    tl.store(share + width + value_width + 1, sum_A_log)
