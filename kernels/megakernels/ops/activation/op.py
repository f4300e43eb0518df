"""Activation functions. Saved: their inputs."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common import fake_like, operation, require, runs_triton
from megakernels.ops.activation import reference

__all__ = ["geglu", "gelu", "relu2", "swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up.

    Args:
        gate: any shape.
        up: the same shape.

    Returns:
        The same shape, contiguous, in gate's dtype.

    Triton:
        One kernel forward, one backward.

    Raises:
        ValueError: the shapes differ.

    Source: arXiv:2002.05202, equation 5.
    """
    require(gate.shape == up.shape, "swiglu", "gate and up must have one shape", gate=gate.shape, up=up.shape)
    y: Tensor = _swiglu(gate, up)
    return y


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up, gelu in its tanh form.

    Args:
        gate: any shape.
        up: the same shape.

    Returns:
        The same shape, contiguous, in gate's dtype.

    Triton:
        One kernel forward, one backward.

    Raises:
        ValueError: the shapes differ.

    Source: arXiv:2002.05202, equation 6.
    """
    require(gate.shape == up.shape, "geglu", "gate and up must have one shape", gate=gate.shape, up=up.shape)
    y: Tensor = _geglu(gate, up)
    return y


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)², same shape and dtype, contiguous.

    Triton:
        One kernel forward, one backward.

    Source: arXiv:2109.08668, section 4.
    """
    y: Tensor = _relu2(x)
    return y


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, same shape and dtype, contiguous.

    Triton:
        One kernel forward, one backward.

    Source: arXiv:1606.08415, section 2.
    """
    y: Tensor = _gelu(x)
    return y


def _registered(
    name: str, arguments: Sequence[str], forward: Callable[..., Tensor], backward: Callable[..., Sequence[Tensor | None]]
) -> CustomOpDef:
    """Register the torch op of an activation; `forward` and `backward` are the reference's, the latter with required gradients."""

    def run(given: tuple[Tensor, ...]) -> tuple[Tensor]:
        if runs_triton(given[0]):
            from megakernels.ops.activation import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

            return (kernel.forward(kernel.KINDS[name], *given),)
        return (forward(*given),)

    def run_backward(grad_y: Tensor, given: tuple[Tensor, ...], needs: list[bool]) -> Sequence[Tensor | None]:
        if runs_triton(given[0]):
            from megakernels.ops.activation import kernel  # noqa: PLC0415

            return kernel.backward(kernel.KINDS[name], grad_y, *given, needs=needs)
        return backward(grad_y, *given, needs)

    def fake(given: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (fake_like(given[0]),)

    def bind(**values: Tensor) -> tuple[Tensor, ...]:
        return tuple(values.values())

    types = dict.fromkeys(arguments, Tensor)
    return operation(name, types, bind, outputs=("y",), saved=(), gradients=arguments, forward=run, backward=run_backward, fake=fake)[0]


_swiglu = _registered("swiglu", ("gate", "up"), reference.swiglu_forward, reference.swiglu_backward)
_geglu = _registered("geglu", ("gate", "up"), reference.geglu_forward, reference.geglu_backward)
_relu2 = _registered("relu2", ("x",), reference.relu2_forward, lambda grad_y, x, _needs: [reference.relu2_backward(grad_y, x)])
_gelu = _registered("gelu", ("x",), reference.gelu_forward, lambda grad_y, x, _needs: [reference.gelu_backward(grad_y, x)])
