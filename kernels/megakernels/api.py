"""The public operations; `megakernels` exports them."""

from megakernels._common.device import use_kernels
from megakernels._common.numerics import accumulator_dtype
from megakernels._common.scratch import scratch_bytes
from megakernels.libraries import use_libraries
from megakernels.ops.activation.op import geglu, gelu, relu2, relu2glu, swiglu, xielu
from megakernels.ops.attention.op import attention
from megakernels.ops.attention.pieces import attention_pieces, attention_pieces_backward
from megakernels.ops.causal_conv1d.op import causal_conv1d
from megakernels.ops.causal_conv1d.pieces import conv_pieces, conv_pieces_backward
from megakernels.ops.chosen_attention.op import chosen_attention
from megakernels.ops.chosen_attention.pieces import chosen_attention_pieces, chosen_attention_pieces_backward
from megakernels.ops.cross_entropy.op import check_labels, cross_entropy, slice_gradient, slice_statistics
from megakernels.ops.depth_attention.op import attend_depth
from megakernels.ops.fp8_attention.op import fp8_attention
from megakernels.ops.fp8_experts.op import fp8_experts, fp8_experts_backward
from megakernels.ops.fp8_linear.op import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients
from megakernels.ops.gated_conv1d.op import gated_conv1d
from megakernels.ops.gated_conv1d.pieces import gated_conv_pieces, gated_conv_pieces_backward
from megakernels.ops.gated_delta.op import gated_delta
from megakernels.ops.gated_delta.piece import gated_delta_piece, gated_delta_piece_backward
from megakernels.ops.head_gated_norm.op import head_gated_norm
from megakernels.ops.hyper_connection.op import collapse_streams, expand_streams
from megakernels.ops.indexed_attention.op import indexed_attention, indexed_attention_choice
from megakernels.ops.indexed_attention.pieces import (
    index_keys,
    index_keys_backward,
    indexed_attention_pieces,
    indexed_attention_pieces_backward,
    indexed_attention_pieces_choice,
)
from megakernels.ops.linear_cross_entropy.op import linear_cross_entropy, linear_slice_gradients, linear_slice_statistics
from megakernels.ops.m2rnn.op import m2rnn
from megakernels.ops.m2rnn.piece import m2rnn_piece, m2rnn_piece_backward
from megakernels.ops.mamba3.op import mamba3
from megakernels.ops.mamba3.piece import mamba3_ahead, mamba3_ahead_backward, mamba3_piece, mamba3_piece_backward
from megakernels.ops.matrix_lstm.op import mlstm
from megakernels.ops.moe.grouped_mlp import experts
from megakernels.ops.moe.losses import router_losses
from megakernels.ops.moe.permutation import arrival_plan, capacity_plan, combine, dispatch, dispatch_plan
from megakernels.ops.moe.routed_mlp import routed_experts
from megakernels.ops.moe.routing import route, route_scored
from megakernels.ops.newton_schulz.op import newton_schulz_
from megakernels.ops.optimizer.op import adamw_, decayed_add_, nesterov_
from megakernels.ops.packed_weight.op import unpacked
from megakernels.ops.rms_norm.op import (
    add_rms_norm,
    gated_dot,
    gated_rms_norm,
    gated_scale,
    gated_scale_gradients,
    gated_square_sum,
    rms_norm,
    row_dot,
    row_gradients,
    row_scale,
    row_square_sum,
)
from megakernels.ops.rope.op import mla_kv, mla_kv_backward, rope
from megakernels.ops.selective_scan.op import selective_scan
from megakernels.ops.selective_scan.piece import selective_scan_piece, selective_scan_piece_backward
from megakernels.ops.side_embedding.op import gated_add, ngram_rows
from megakernels.ops.ssd.op import ssd
from megakernels.ops.ssd.piece import ssd_piece, ssd_piece_backward

__all__ = [
    "accumulator_dtype", "adamw_", "add_rms_norm", "arrival_plan", "attend_depth", "attention", "attention_pieces",
    "attention_pieces_backward", "capacity_plan", "causal_conv1d", "check_labels", "chosen_attention",
    "chosen_attention_pieces", "chosen_attention_pieces_backward",
    "collapse_streams", "combine", "conv_pieces", "conv_pieces_backward", "cross_entropy", "decayed_add_", "dispatch", "dispatch_plan",
    "expand_streams", "experts", "fp8_attention", "fp8_experts", "fp8_experts_backward", "fp8_input_gradients", "fp8_linears",
    "fp8_quantize",
    "fp8_weight_gradients", "gated_add", "gated_conv1d", "gated_conv_pieces", "gated_conv_pieces_backward", "gated_delta",
    "gated_delta_piece", "gated_delta_piece_backward", "gated_dot", "gated_rms_norm", "gated_scale", "gated_scale_gradients",
    "gated_square_sum", "geglu", "gelu", "head_gated_norm", "index_keys", "index_keys_backward", "indexed_attention",
    "indexed_attention_choice", "indexed_attention_pieces", "indexed_attention_pieces_backward", "indexed_attention_pieces_choice",
    "linear_cross_entropy", "linear_slice_gradients", "linear_slice_statistics", "m2rnn", "m2rnn_piece", "m2rnn_piece_backward",
    "mamba3", "mamba3_ahead", "mamba3_ahead_backward", "mamba3_piece", "mamba3_piece_backward", "mla_kv", "mla_kv_backward", "mlstm",
    "nesterov_", "newton_schulz_", "ngram_rows", "relu2", "relu2glu", "rms_norm", "rope", "route", "route_scored", "routed_experts",
    "router_losses", "row_dot", "row_gradients", "row_scale", "row_square_sum", "scratch_bytes", "selective_scan",
    "selective_scan_piece", "selective_scan_piece_backward", "slice_gradient", "slice_statistics", "ssd", "ssd_piece",
    "ssd_piece_backward", "swiglu", "unpacked", "use_kernels", "use_libraries", "xielu",
]  # fmt: skip
