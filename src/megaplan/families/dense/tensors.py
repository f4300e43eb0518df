"""Parameters of D blocks, and of every gated or ungated MLP inside other blocks."""

from __future__ import annotations

from megaplan.families.dense.section import Mlp
from megaplan.inventory.makers import column, norm, row
from megaplan.inventory.tensors import ParamTensor
from megaplan.scalars import Activation


def mlp_matrices(hidden_size: int, ffn_hidden_size: int, activation: Activation, prefix: str = "") -> tuple[ParamTensor, ...]:
    """The matrices of one MLP: three for swiglu (arXiv:2002.05202, equation 6), two for relu2 and gelu."""
    up_names = ("gate_proj", "up_proj") if activation == "swiglu" else ("up_proj",)
    return (
        *(column(f"{prefix}{name}.weight", ffn_hidden_size, hidden_size) for name in up_names),
        row(f"{prefix}down_proj.weight", hidden_size, ffn_hidden_size),
    )


def dense_tensors(mlp: Mlp, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one D block, its pre-norm included."""
    return (norm("norm.weight", hidden_size), *mlp_matrices(hidden_size, mlp.ffn_hidden_size, mlp.activation))
