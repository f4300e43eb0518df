"""D blocks and the MLP body that E's shared expert uses too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megakernels.activation import gelu, relu2, swiglu
from megaplan.spec.models import Activation
from megarun.model.norm import RMSNorm, linear
from megarun.model.rotary import Rotary

ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {"swiglu": swiglu, "relu2": relu2, "gelu": gelu}


class Mlp(nn.Module):
    """up → activation → down; swiglu has a gate beside up."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        if activation == "swiglu":
            self.gate_proj = linear(hidden_size, ffn_hidden_size)
        self.up_proj = linear(hidden_size, ffn_hidden_size)
        self.down_proj = linear(ffn_hidden_size, hidden_size)

    def body(self, x: Tensor) -> Tensor:
        """[..., h] in and out."""
        if self.activation == "swiglu":
            return self.contract(self.gate_proj(x), self.up_proj(x))
        return self.contract(self.up_proj(x))

    def contract(self, *expanded: Tensor) -> Tensor:
        """Gate and up, or up alone, [..., F] -> [..., h]: activation and down_proj."""
        out: Tensor = self.down_proj(ACTIVATIONS[self.activation](*expanded))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] in and out."""
        return self.body(x)


class DenseBlock(Mlp):
    """D: x + mlp(norm(x))."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: Activation, eps: float) -> None:
        super().__init__(hidden_size, ffn_hidden_size, activation)
        self.norm = RMSNorm(hidden_size, eps)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:  # noqa: ARG002  every block has one signature
        """Residual stream [B, T, h] in and out."""
        return x + self.body(self.norm(x))
