"""Parameters of G blocks: gated delta net and Kimi delta attention.

Under TP every tensor of a head shards with it. The latents of Kimi delta attention's decay and gate are shared by all heads, so their
projection is replicated, and also the shared scale of the norm. Projections are orthogonalised per key head, as in attention.
"""

from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor


def linear_attention_tensors(
    linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int, _variant: None = None
) -> tuple[ParamTensor, ...]:
    """Tensors of one G block, its pre-norm included."""
    key_heads, heads = linear.num_key_heads, linear.num_value_heads
    keys, values = key_heads * linear.key_dim, heads * linear.value_dim
    per_channel = isinstance(linear, KimiDeltaAttention)
    gates = _latent_gates(linear, hidden_size) if linear.has_latents else _gates(linear, hidden_size, linear.key_dim if per_channel else 1)
    return (
        norm("norm.weight", hidden_size),
        _queries_and_keys(keys, key_heads, hidden_size),
        column("v_proj.weight", values, hidden_size, num_matrices=key_heads),
        column("beta_proj.weight", heads, hidden_size),
        *gates,
        per_head("conv_qk.weight", (2 * keys, linear.conv_kernel), Init.CONV, (keys, keys)),
        per_head("conv_v.weight", (values, linear.conv_kernel), Init.CONV),
        per_head("A_log", (heads,), Init.A_LOG),
        per_head("dt_bias", (heads, linear.key_dim) if per_channel else (heads,), Init.DT_BIAS),
        norm("gated_norm.weight", linear.value_dim),
        row("out_proj.weight", hidden_size, values),
    )


def _queries_and_keys(keys: int, key_heads: int, hidden_size: int) -> ParamTensor:
    """Rows of all queries, then of all keys; a matrix is the part of one head in each of the two."""
    shape = (2 * keys, hidden_size)
    return ParamTensor("qk_proj.weight", shape, Owner.TENSOR_PARALLEL, Group.MATRIX, Init.NORMAL, 0, (keys, keys), 2 * key_heads)


def _gates(linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int, decays: int) -> tuple[ParamTensor, ...]:
    """Decays of each head, and a gate as wide as the values (arXiv:2412.06464, section 3.4)."""
    heads = linear.num_value_heads
    return (
        column("decay_proj.weight", heads * decays, hidden_size),
        column("gate_proj.weight", heads * linear.value_dim, hidden_size, num_matrices=linear.num_key_heads),
    )


def _latent_gates(linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Decays as wide as the keys and a gate as wide as the values, through latents of a head's width (arXiv:2510.26692, section 4)."""
    heads, width = linear.num_value_heads, linear.key_dim
    return (
        replicated("latent_proj.weight", (2 * width, hidden_size), Group.MATRIX, num_matrices=2),
        column("decay_up.weight", heads * width, width),
        column("gate_up.weight", heads * width, width),
    )
