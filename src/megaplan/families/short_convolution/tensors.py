"""Parameters of C blocks: three projections, a depthwise convolution, the output. Under TP all except the pre-norm shard by channels."""

from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, ParamTensor

PROJECTIONS = ("input_gate", "output_gate", "value")
"""Results of the three projections: y = output_gate · conv(input_gate · value)."""


def short_convolution_tensors(short: ShortConvolution, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one C block, its pre-norm included."""
    return (
        norm("norm.weight", hidden_size),
        *(column(f"{name}_proj.weight", hidden_size, hidden_size) for name in PROJECTIONS),
        per_head("conv.weight", (hidden_size, short.conv_kernel), Init.CONV),
        row("out_proj.weight", hidden_size, hidden_size),
        *(_biases(hidden_size) if short.bias else ()),
    )


def _biases(hidden_size: int) -> tuple[ParamTensor, ...]:
    return (
        *(per_head(f"{name}_proj.bias", (hidden_size,), Init.ZEROS) for name in PROJECTIONS),
        per_head("conv.bias", (hidden_size,), Init.ZEROS),
        replicated("out_proj.bias", (hidden_size,), Group.OTHER, Init.ZEROS),
    )
