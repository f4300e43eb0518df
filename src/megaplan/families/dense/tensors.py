"""Parameters of D blocks, and of every gated or ungated MLP inside other blocks."""

from megaplan.families.dense.section import INNER_NORM, Mlp
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, ParamTensor
from megaplan.scalars import GATED, DenseActivation


def mlp_matrices(
    hidden_size: int, ffn_hidden_size: int, activation: DenseActivation, prefix: str = "", *, bias: bool = False
) -> tuple[ParamTensor, ...]:
    """The tensors of one MLP: three matrices for swiglu and geglu (arXiv:2002.05202, section 2), two for relu2 and gelu, and biases."""
    up_names = ("gate_proj", "up_proj") if activation in GATED else ("up_proj",)
    matrices = (
        *(column(f"{prefix}{name}.weight", ffn_hidden_size, hidden_size) for name in up_names),
        row(f"{prefix}down_proj.weight", hidden_size, ffn_hidden_size),
    )
    if not bias:
        return matrices
    return (
        *matrices,
        *(per_head(f"{prefix}{name}.bias", (ffn_hidden_size,), Init.ZEROS) for name in up_names),
        replicated(f"{prefix}down_proj.bias", (hidden_size,), Group.OTHER, Init.ZEROS),
    )


def dense_tensors(mlp: Mlp, hidden_size: int, variant: int | None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one D block, its pre-norm included."""
    width = variant or mlp.ffn_hidden_size
    alphas = (replicated("alphas", (2,), Group.OTHER, Init.XIELU),) if mlp.activation == "xielu" else ()
    inner = (per_head(f"{INNER_NORM}.weight", (width,), Init.ONES),) if mlp.inner_norm else ()
    return (
        norm("norm.weight", hidden_size),
        *alphas,
        *inner,
        *mlp_matrices(hidden_size, width, mlp.activation, bias=mlp.bias),
    )
