"""Activation functions. Saved: their inputs."""

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed, require, runs_triton
from megakernels.ops.activation import reference

__all__ = ["gelu", "relu2", "swiglu"]


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


@custom_op("megakernels::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if runs_triton(gate):
        from megakernels.ops.activation import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel.forward(kernel.SWIGLU, gate, up)
    return reference.swiglu_forward(gate, up)


@custom_op("megakernels::swiglu_backward", mutates_args=())
def _swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor, needs: list[bool]) -> list[Tensor]:
    if runs_triton(gate):
        from megakernels.ops.activation import kernel  # noqa: PLC0415

        return only_needed(kernel.backward(kernel.SWIGLU, grad_y, gate, up, needs))
    return only_needed(reference.swiglu_backward(grad_y, gate, up, needs))


@_swiglu.register_fake
def _(gate: Tensor, _up: Tensor) -> Tensor:
    return fake_like(gate)


join(_swiglu, _swiglu_backward, outputs=("y",), gradients=("gate", "up"))


@custom_op("megakernels::relu2", mutates_args=())
def _relu2(x: Tensor) -> Tensor:
    if runs_triton(x):
        from megakernels.ops.activation import kernel  # noqa: PLC0415

        return kernel.forward(kernel.RELU2, x, None)
    return reference.relu2_forward(x)


@custom_op("megakernels::relu2_backward", mutates_args=())
def _relu2_backward(grad_y: Tensor, x: Tensor, needs: list[bool]) -> list[Tensor]:
    if runs_triton(x):
        from megakernels.ops.activation import kernel  # noqa: PLC0415

        return only_needed(kernel.backward(kernel.RELU2, grad_y, x, None, [needs[0], False]))
    return [reference.relu2_backward(grad_y, x)] if needs[0] else []


_relu2.register_fake(fake_like)
join(_relu2, _relu2_backward, outputs=("y",), gradients=("x",))


@custom_op("megakernels::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    if runs_triton(x):
        from megakernels.ops.activation import kernel  # noqa: PLC0415

        return kernel.forward(kernel.GELU, x, None)
    return reference.gelu_forward(x)


@custom_op("megakernels::gelu_backward", mutates_args=())
def _gelu_backward(grad_y: Tensor, x: Tensor, needs: list[bool]) -> list[Tensor]:
    if runs_triton(x):
        from megakernels.ops.activation import kernel  # noqa: PLC0415

        return only_needed(kernel.backward(kernel.GELU, grad_y, x, None, [needs[0], False]))
    return [reference.gelu_backward(grad_y, x)] if needs[0] else []


_gelu.register_fake(fake_like)
join(_gelu, _gelu_backward, outputs=("y",), gradients=("x",))
