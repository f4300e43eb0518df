"""Work of G blocks: the gated delta rule in chunks, and its projections."""

from __future__ import annotations

from megaplan.blocks.costs import FP32_BYTES, causal_conv1d, gated_norm, linear_op, residual_op
from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention

PART = "G"


def delta_rule(load: Workload, linear: GatedDeltaNet | KimiDeltaAttention) -> Work:
    """S' = (diag(decay) − β k kᵀ diag(decay)) S + β k vᵀ, y = S'ᵀ q, in chunks of Q positions, whole Q × Q tiles computed.

    Forward per token and value head: k kᵀ and q kᵀ 2·Q·K each; a triangular system solved for V columns, Q·V; (q kᵀ) times the new values
    2·Q·V; k S, q S and the state's update 2·K·V each. Backward: twice the forward's products, and once more all but the outputs, q S and
    (q kᵀ) times the new values, because only every `save_every`-th state is kept. Bytes: q, k, v, decay, β and y, and the kept fp32 states.

    Source: arXiv:2412.06464, section 3.3 (the chunkwise form); counting multiply-adds.
    """
    heads, key_heads = linear.num_value_heads // load.tp, linear.num_key_heads // load.tp
    key, value = linear.key_dim, linear.value_dim
    chunk = min(linear.chunk_size, linear.save_every, load.seq_length)
    again = heads * (4 * chunk * key + chunk * value + 4 * key * value)
    forward = again + heads * (2 * chunk * value + 2 * key * value)
    decays = heads * (key if isinstance(linear, KimiDeltaAttention) else 1)
    inputs, width = 2 * key_heads * key + heads * value + heads + decays, heads * value
    states = -(-load.seq_length // linear.save_every) * heads * key * value * FP32_BYTES
    written = load.per_token(states)
    return Work(
        forward,
        2 * forward + again,
        0,
        again,
        moved_forward=(inputs + width) * load.itemsize + written,
        moved_input=(2 * inputs + width) * load.itemsize + written,
    )


def linear_attention_work(load: Workload, linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int, _variant: None = None) -> Ops:
    """One G block, pre-norm and residual included: projections, two convolutions, the delta rule, a gated norm a head, output.

    `tp` shards the heads; the latents of Kimi delta attention are projected on every rank.

    Source: arXiv:2412.06464, figure 1; arXiv:2510.26692, section 4.
    """
    heads, kernel = linear.num_value_heads // load.tp, linear.conv_kernel
    keys, values = linear.num_key_heads // load.tp * linear.key_dim, heads * linear.value_dim
    if isinstance(linear, KimiDeltaAttention):
        width = linear.head_dim
        gates: Ops = (
            linear_op(load, "latent_proj", PART, hidden_size, 2 * width),
            linear_op(load, "decay_up", PART, width, heads * width),
            linear_op(load, "gate_up", PART, width, heads * width),
        )
    else:
        gates = (
            linear_op(load, "decay_proj", PART, hidden_size, heads),
            linear_op(load, "gate_proj", PART, hidden_size, values),
        )
    return (
        residual_op(load, PART, hidden_size),
        linear_op(load, "qk_proj", PART, hidden_size, 2 * keys),
        linear_op(load, "v_proj", PART, hidden_size, values),
        linear_op(load, "beta_proj", PART, hidden_size, heads),
        *gates,
        Op("conv_qk", PART, causal_conv1d(load, 2 * keys, kernel)),
        Op("conv_v", PART, causal_conv1d(load, values, kernel)),
        Op("delta_rule", "scan", delta_rule(load, linear)),
        Op("gated_norm", PART, gated_norm(load, values, heads)),
        linear_op(load, "out_proj", PART, values, hidden_size, closes=True),
    )
