"""Work of R blocks: M²RNN's sequential recurrence and its projections."""

from __future__ import annotations

from megaplan.cost.ops import FP32_BYTES, causal_conv1d, gated_norm, linear, residual_norm
from megaplan.cost.work import Work, Workload
from megaplan.spec.models import MatrixRecurrence


def m2rnn(load: Workload, recurrent: MatrixRecurrence) -> Work:
    """The recurrence Z = tanh(H W + k vᵀ), H' = f H + (1 − f) Z, y = qᵀ H' + D ⊙ v.

    Forward per token and head: H W 2·K·V², k vᵀ 2·K·V, qᵀ H' 2·K·V. Backward: dH 2·K·V², dk, dv, dq and dH' 2·K·V each, dW 2·K·V²; and
    H W + k vᵀ once more, because only every `save_every`-th state is kept. Bytes: q, k, v, f, y, and the kept fp32 states.

    Source: arXiv:2603.14360, its state update; counting multiply-adds.
    """
    heads, key, value = recurrent.num_heads, recurrent.key_dim, recurrent.value_dim
    mapped, outer = 2 * key * value * value * heads, 2 * key * value * heads
    recomputed = mapped + outer
    inputs, width = 2 * key + heads * value + heads, heads * value
    num_states = -(-load.seq_length // recurrent.save_every) + 1
    states = load.per_token(2 * num_states * heads * key * value * FP32_BYTES)
    operands = (inputs + width) + (2 * inputs + width)
    return Work(mapped + 2 * outer, mapped + 4 * outer + recomputed, mapped, recomputed, operands * load.itemsize + states)


def recurrent_block(load: Workload, recurrent: MatrixRecurrence, hidden_size: int) -> Work:
    """One R block, pre-norm and residual included: projections, two convolutions, recurrence, gated norm, output.

    Source: arXiv:2603.14360.
    """
    inner, shared = recurrent.num_heads * recurrent.value_dim, 2 * recurrent.key_dim
    projections = linear(load, hidden_size, shared) + linear(load, hidden_size, inner) * 2 + linear(load, hidden_size, recurrent.num_heads)
    convolutions = causal_conv1d(load, shared, recurrent.conv_kernel) + causal_conv1d(load, inner, recurrent.conv_kernel)
    out = gated_norm(load, inner, 1) + linear(load, inner, hidden_size)
    return residual_norm(load, hidden_size) + projections + convolutions + m2rnn(load, recurrent) + out
