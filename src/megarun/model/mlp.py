"""D blocks, and the MLP that E's shared expert also uses."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernels import geglu, gelu, relu2, relu2glu, swiglu, xielu
from megaplan.scalars import GATED, DenseActivation
from megaplan.spec import models as spec
from megarun.model.norm import Block, RMSNorm, RowLinear, linear
from megarun.model.rotary import Rotary
from megarun.parallel.groups.tensor import ALONE, TensorParallel
from megarun.parallel.groups.tensor_norm import row_rms_norm

ACTIVATIONS: dict[DenseActivation, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "relu2": relu2,
    "gelu": gelu,
    "geglu": geglu,
    "relu2glu": relu2glu,
}


class Mlp(nn.Module):
    """up → activation → down; a gated activation also has a gate projection. Under TP a rank has a share of the inner width."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, activation: DenseActivation, tp: TensorParallel = ALONE, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.inner_norm: RMSNorm | None = None
        self.activation, self.tp, width = activation, tp, tp.share(ffn_hidden_size)
        self.gate_multiplier = 1.0
        self.alphas = nn.Parameter(torch.empty(2)) if activation == "xielu" else None
        if activation in GATED:
            self.gate_proj = linear(hidden_size, width, bias)
        self.up_proj = linear(hidden_size, width, bias)
        self.down_proj = RowLinear(width, hidden_size, bias, tp)

    def body(self, x: Tensor) -> Tensor:
        """Local tokens [B, t, h] in and out."""
        expanding = (self.gate_proj, self.up_proj) if self.activation in GATED else (self.up_proj,)
        return self.contract(*self.tp.project(x, *expanding))

    def contract(self, *expanded: Tensor) -> Tensor:
        """Gate and up, or up alone, [B, T, F] -> [B, t, h]: activation and down_proj."""
        if self.alphas is not None:
            return self.down_proj.reduce(self.down_proj(self.normed(xielu(expanded[0], self.alphas))))
        return self.down_proj.reduce(self.down_proj(self.normed(ACTIVATIONS[self.activation](*self.scaled(*expanded)))))

    def normed(self, inner: Tensor) -> Tensor:
        """Inner values [B, T, F], normed over the whole width if the MLP has a norm."""
        return inner if self.inner_norm is None else row_rms_norm(self.tp, inner, self.inner_norm.weight, self.inner_norm.eps)

    def scaled(self, first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Gate and up, the gate times its factor."""
        return (first if self.gate_multiplier == 1 else first * self.gate_multiplier), *others

    def forward(self, x: Tensor) -> Tensor:
        """Local tokens [B, t, h] in and out."""
        return self.body(x)


class DenseBlock(Mlp, Block):
    """D: x + mlp(norm(x))."""

    def __init__(self, hidden_size: int, config: spec.Mlp, eps: float, tp: TensorParallel = ALONE) -> None:
        super().__init__(hidden_size, config.ffn_hidden_size, config.activation, tp, bias=config.bias)
        self.norm, self.gate_multiplier = RMSNorm(hidden_size, eps), config.gate_multiplier
        self.inner_norm = RMSNorm(tp.share(config.ffn_hidden_size), eps) if config.inner_norm else None

    def forward(self, x: Tensor, rotary: Rotary | None = None, starts: Tensor | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream, local tokens [B, t, h], in and out."""
        return self.add(x, self.body(self.norm(x)))
