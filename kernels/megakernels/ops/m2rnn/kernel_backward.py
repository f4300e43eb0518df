"""The recurrence's backward kernel."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, sigmoid
from megakernels.ops.m2rnn.kernel_step import gain_of, kept_of, operands_at, parameters_of, quick_tanh


@triton.jit  # type: ignore[untyped-decorator]
def m2rnn_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one position's formulas, in order
    grad_y, q, k, v, f, state_map, D, dt_bias, A_log, starts, states, recomputed, grad_q_parts, grad_k_parts, grad_v, grad_f, grad_state,
    grad_map, grad_D, grad_scalars, num_positions, num_segments, first_segment, stop_segment, save_every, num_heads, key_width, value_width,
    grad_stride_b, grad_stride_t, grad_stride_h, q_stride_b, q_stride_t, k_stride_b, k_stride_t, v_stride_b, v_stride_t, v_stride_h,
    f_stride_b, f_stride_t, f_stride_h,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Segments [first_segment, stop_segment) of one sequence and head, from the last; sums over positions are accumulated."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    program = batch * num_heads + head
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    in_k, in_v = ks < key_width, vs < value_width
    in_state, in_map = in_k[:, None] & in_v[None, :], in_v[:, None] & in_v[None, :]
    within, of_map = ks[:, None] * value_width + vs[None, :], vs[:, None] * value_width + vs[None, :]
    num_elements = key_width * value_width
    weights, skip, bias, rate = parameters_of(state_map, D, dt_bias, A_log, head, value_width, vs, in_v)
    carried = tl.load(grad_state + program * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
    sum_D = tl.load(grad_D + program * value_width + vs, mask=in_v, other=0.0).to(tl.float32)
    sum_bias = tl.load(grad_scalars + program * 2).to(tl.float32)
    sum_A_log = tl.load(grad_scalars + program * 2 + 1).to(tl.float32)
    prev_states = recomputed + program * 2 * save_every * num_elements  # state before each position of the segment
    preacts = prev_states + save_every * num_elements  # tanh values in the forward pass, then gradients of its arguments
    span_begin = first_segment * save_every
    span_length = tl.minimum(stop_segment * save_every, num_positions) - span_begin
    k, v, f = k + batch * k_stride_b, v + batch * v_stride_b + head * v_stride_h, f + batch * f_stride_b + head * f_stride_h
    q, strides = q + batch * q_stride_b, (k_stride_t, v_stride_t, f_stride_t)
    grad_y += batch * grad_stride_b + head * grad_stride_h
    for back in range(stop_segment - first_segment):
        segment = stop_segment - 1 - back
        begin = segment * save_every
        length = tl.minimum(begin + save_every, num_positions) - begin
        place = ((batch * (num_segments + 1) + segment) * num_heads + head) * num_elements
        state = tl.load(states + place + within, mask=in_state, other=0.0).to(tl.float32)
        keys, values, gate = operands_at(k, v, f, begin, strides, ks, vs, in_k, in_v)
        for index in range(length):
            next_keys, next_values, next_gate = operands_at(k, v, f, begin + tl.minimum(index + 1, length - 1), strides, ks, vs, in_k, in_v)
            _raw, _log_decay, gain = gain_of(gate, bias, rate)
            state = state * kept_of(starts, batch * num_positions, begin + index, HAS_STARTS)
            candidate = quick_tanh(dot(state, weights) + keys[:, None] * values[None, :])
            tl.store(prev_states + index * num_elements + within, state, mask=in_state)
            tl.store(preacts + index * num_elements + within, candidate, mask=in_state)
            state += gain * (candidate - state)
            keys, values, gate = next_keys, next_values, next_gate
        tl.debug_barrier()  # other threads of the program may read what one has written
        last = tl.cast(begin + length - 1, tl.int64)  # its operands are those that the loop above has ended with
        queries = tl.load(q + last * q_stride_t + ks, mask=in_k, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + last * grad_stride_t + vs, mask=in_v, other=0.0).to(tl.float32)
        before = tl.load(prev_states + (length - 1) * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
        candidate = tl.load(preacts + (length - 1) * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
        for index_back in range(length):
            index = length - 1 - index_back
            far = tl.cast(begin + index, tl.int64)
            sooner = tl.maximum(index - 1, 0)
            near = tl.cast(begin + sooner, tl.int64)
            next_keys, next_values, next_gate = operands_at(k, v, f, near, strides, ks, vs, in_k, in_v)
            next_queries = tl.load(q + near * q_stride_t + ks, mask=in_k, other=0.0).to(tl.float32)
            next_grad = tl.load(grad_y + near * grad_stride_t + vs, mask=in_v, other=0.0).to(tl.float32)
            next_before = tl.load(prev_states + sooner * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
            next_candidate = tl.load(preacts + sooner * num_elements + within, mask=in_state, other=0.0).to(tl.float32)
            raw, log_decay, gain = gain_of(gate, bias, rate)
            moved = candidate - before
            after = before + gain * moved
            carried += queries[:, None] * grad[None, :]
            inner = carried * gain * (1.0 - candidate * candidate)
            tl.store(preacts + index * num_elements + within, inner, mask=in_state)

            part = ((batch * span_length + (far - span_begin)) * num_heads + head) * key_width + ks
            tl.store(grad_q_parts + part, tl.sum(after * grad[None, :], 1), mask=in_k)
            tl.store(grad_k_parts + part, tl.sum(inner * values[None, :], 1), mask=in_k)
            row = (batch * num_positions + far) * num_heads + head
            found = tl.sum(inner * keys[:, None], 0) + skip * grad
            tl.store(grad_v + row * value_width + vs, narrow(found, grad_v.dtype.element_ty), mask=in_v)
            grad_log_decay = -tl.exp(log_decay) * tl.sum(tl.sum(moved * carried, 1), 0)
            grad_raw = grad_log_decay * rate * sigmoid(raw)
            tl.store(grad_f + row, narrow(grad_raw, grad_f.dtype.element_ty))
            sum_D += grad * values
            sum_bias += grad_raw
            sum_A_log += grad_log_decay * log_decay
            carried = (1.0 - gain) * carried + dot(inner, tl.trans(weights))
            carried = carried * kept_of(starts, batch * num_positions, begin + index, HAS_STARTS)
            keys, values, gate = next_keys, next_values, next_gate
            queries, grad, before, candidate = next_queries, next_grad, next_before, next_candidate
        tl.debug_barrier()
        # The map's gradient, over all rows of the segment's states: outside the sequential loop.
        sum_map = tl.load(grad_map + program * value_width * value_width + of_map, mask=in_map, other=0.0).to(tl.float32)
        for first_row in range(0, length * key_width, ROWS):
            rows = first_row + tl.arange(0, ROWS)
            in_rows = (rows < length * key_width)[:, None] & in_v[None, :]
            at = rows[:, None] * value_width + vs[None, :]
            read = tl.load(prev_states + at, mask=in_rows, other=0.0).to(tl.float32)
            sum_map += dot(tl.trans(read), tl.load(preacts + at, mask=in_rows, other=0.0).to(tl.float32))
        tl.store(grad_map + program * value_width * value_width + of_map, sum_map, mask=in_map)
        tl.debug_barrier()  # the next segment overwrites this one's scratch
    tl.store(grad_state + program * num_elements + within, carried, mask=in_state)
    tl.store(grad_D + program * value_width + vs, sum_D, mask=in_v)
    tl.store(grad_scalars + program * 2, sum_bias)
    tl.store(grad_scalars + program * 2 + 1, sum_A_log)
