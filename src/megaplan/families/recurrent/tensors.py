"""Parameters of R blocks: M²RNN."""

from megaplan.families.recurrent.section import MatrixRecurrence
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, ParamTensor


def recurrent_tensors(recurrent: MatrixRecurrence, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one R block (arXiv:2603.14360), its pre-norm included.

    One q and one k serve all heads, so their projection and convolution are replicated under TP; the projection is two matrices to Muon.
    Everything else belongs to a head and shards with it.
    """
    heads, value_dim = recurrent.num_heads, recurrent.value_dim
    inner, shared, kernel = heads * value_dim, 2 * recurrent.key_dim, recurrent.conv_kernel
    return (
        norm("norm.weight", hidden_size),
        replicated("qk_proj.weight", (shared, hidden_size), Group.MATRIX, num_matrices=2),
        column("v_proj.weight", inner, hidden_size),
        column("forget_proj.weight", heads, hidden_size),
        column("gate_proj.weight", inner, hidden_size),
        replicated("conv_qk.weight", (shared, kernel), Group.OTHER, Init.CONV),
        replicated("conv_qk.bias", (shared,), Group.OTHER, Init.ZEROS),
        per_head("conv_v.weight", (inner, kernel), Init.CONV),
        per_head("conv_v.bias", (inner,), Init.ZEROS),
        per_head("state_map", (heads, value_dim, value_dim), Init.NORMAL),
        per_head("D", (heads, value_dim), Init.ONES),
        per_head("dt_bias", (heads,), Init.DT_BIAS),
        per_head("A_log", (heads,), Init.A_LOG),
        per_head("gated_norm.weight", (inner,), Init.ONES),
        row("out_proj.weight", hidden_size, inner),
    )
