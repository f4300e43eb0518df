"""Work of R blocks: M²RNN's sequential recurrence and its projections."""

from __future__ import annotations

from megaplan.blocks.costs import FP32_BYTES, causal_conv1d, gated_norm, linear_op, residual_op
from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.families.recurrent.section import MatrixRecurrence

PART = "R"


def m2rnn(load: Workload, recurrent: MatrixRecurrence) -> Work:
    """The recurrence Z = tanh(H W + k vᵀ), H' = f H + (1 − f) Z, y = qᵀ H' + D ⊙ v.

    Forward per token and head: H W 2·K·V², k vᵀ 2·K·V, qᵀ H' 2·K·V. Backward: dH 2·K·V², dk, dv, dq and dH' 2·K·V each, dW 2·K·V²; and
    H W + k vᵀ once more, because only every `save_every`-th state is kept. Bytes: q, k, v, f, y, and the kept fp32 states.

    Source: arXiv:2603.14360, its state update; counting multiply-adds.
    """
    heads, key, value = recurrent.num_heads // load.tp, recurrent.key_dim, recurrent.value_dim
    mapped, outer = 2 * key * value * value * heads, 2 * key * value * heads
    recomputed = mapped + outer
    inputs, width = 2 * key + heads * value + heads, heads * value
    num_states = -(-load.seq_length // recurrent.save_every) + 1
    states = num_states * heads * key * value * FP32_BYTES
    written, moved = load.per_token(states), load.per_token(2 * states)
    return Work(
        mapped + 2 * outer,
        mapped + 4 * outer + recomputed,
        mapped,
        recomputed,
        moved_forward=(inputs + width) * load.itemsize + written,
        moved_input=(2 * inputs + width) * load.itemsize + moved - written,
    )


def recurrent_work(load: Workload, recurrent: MatrixRecurrence, hidden_size: int, _variant: None = None) -> Ops:
    """One R block, pre-norm and residual included: projections, two convolutions, recurrence, gated norm, output.

    `tp` shards the heads; q and k, which serve all of them, are projected on every rank. The recurrence takes a step for each position of a
    sequence, whatever runs beside it.

    Source: arXiv:2603.14360.
    """
    heads, shared, kernel = recurrent.num_heads // load.tp, 2 * recurrent.key_dim, recurrent.conv_kernel
    inner = heads * recurrent.value_dim
    return (
        residual_op(load, PART, hidden_size),
        linear_op(load, "qk_proj", PART, hidden_size, shared),
        linear_op(load, "v_proj", PART, hidden_size, inner),
        linear_op(load, "forget_proj", PART, hidden_size, heads),
        linear_op(load, "gate_proj", PART, hidden_size, inner),
        Op("conv_qk", PART, causal_conv1d(load, shared, kernel)),
        Op("conv_v", PART, causal_conv1d(load, inner, kernel)),
        Op("m2rnn", "recurrence", m2rnn(load, recurrent), num_steps=load.seq_length),
        Op("gated_norm", PART, gated_norm(load, inner, 1)),
        linear_op(load, "out_proj", PART, inner, hidden_size, closes=True),
    )
