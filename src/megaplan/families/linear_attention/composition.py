"""Work of the operations of G blocks: projections, two convolutions, the gated delta rule in chunks, a gated norm per head, output.

Source: arXiv:2412.06464, figure 1; arXiv:2510.26692, section 4.
"""

from __future__ import annotations

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.gated_delta.facts import DeltaSizes
from megakernels.ops.rms_norm.facts import GATED_NORM, gated_norm
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import lane_of
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention

PART = "G"


def delta_sizes(
    linear: GatedDeltaNet | KimiDeltaAttention, batch: int, positions: int, heads: int, key_heads: int, itemsize: int
) -> DeltaSizes:
    """Sizes of the delta rule over these heads."""
    rows, settings = isinstance(linear, KimiDeltaAttention), (linear.chunk_size, linear.save_every, itemsize)
    return DeltaSizes(batch, positions, heads, key_heads, linear.key_dim, linear.value_dim, rows, *settings)


def delta_inside(
    dims: Dims, linear: GatedDeltaNet | KimiDeltaAttention, heads: int, key_heads: int, parameters: DType
) -> KernelScratch | None:
    """Kernel scratch of the delta rule, in bytes.

    Args:
        dims: Local sizes.
        linear: The model's section.
        heads: Value heads of this rank.
        key_heads: Key heads of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None where the kernels do not take these sizes.
    """
    run = lane_of(dims, heads, key_heads)
    sizes = delta_sizes(linear, dims.batch, run.positions, run.heads, run.groups, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    forward, backward = sizes.forward_bytes(), sizes.backward_bytes(parameters.bytes * run.heads * sizes.shares)
    return run.inside(dims, forward, backward, sizes.states[1], forward.last)


def linear_attention_work(load: Workload, linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int, _variant: None = None) -> Works:
    """One G block, pre-norm and residual included; `tp` shards the heads; every rank projects the latents of Kimi delta attention."""
    heads, kernel, size = linear.num_value_heads // load.tp, linear.conv_kernel, load.itemsize
    key_heads = linear.num_key_heads // load.tp
    keys, values = key_heads * linear.key_dim, heads * linear.value_dim
    if linear.has_latents:
        width = linear.key_dim
        gates: Works = (
            linear_work(load, "latent_proj", PART, hidden_size, 2 * width),
            linear_work(load, "decay_up", PART, width, heads * width),
            linear_work(load, "gate_up", PART, width, heads * width),
        )
    else:
        gates = (
            linear_work(load, "decay_proj", PART, hidden_size, keys if isinstance(linear, KimiDeltaAttention) else heads),
            linear_work(load, "gate_proj", PART, hidden_size, values),
        )
    rule = delta_sizes(linear, load.sequences, load.positions, heads, key_heads, size)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qk_proj", PART, hidden_size, 2 * keys),
        linear_work(load, "v_proj", PART, hidden_size, values),
        linear_work(load, "beta_proj", PART, hidden_size, heads),
        *gates,
        OpWork("conv_qk", PART, causal_conv1d(2 * keys, kernel, size), CONVOLUTION),
        OpWork("conv_v", PART, causal_conv1d(values, kernel, size), CONVOLUTION),
        OpWork("delta_rule", "scan", rule.work(load.seq_length), rule),
        OpWork("gated_norm", PART, gated_norm(values, heads, size), GATED_NORM),
        linear_work(load, "out_proj", PART, values, hidden_size, closes=True),
    )
