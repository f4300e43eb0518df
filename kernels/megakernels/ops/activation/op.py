"""Activation functions. Saved: their inputs, for xielu its two numbers, too."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common import fake_like, operation, require, runs_triton
from megakernels.ops.activation import reference

__all__ = ["geglu", "gelu", "relu2", "relu2glu", "swiglu", "xielu"]


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


def relu2glu(gate: Tensor, up: Tensor) -> Tensor:
    """max(gate, 0)² · up.

    Args:
        gate: any shape.
        up: the same shape.

    Returns:
        The same shape, contiguous, in gate's dtype.

    Triton:
        One kernel forward, one backward.

    Raises:
        ValueError: the shapes differ.

    Source: the gated units of arXiv:2002.05202, section 2, with the square of arXiv:2109.08668, as in BitNet b1.58 2B4T (arXiv:2504.12285).
    """
    require(gate.shape == up.shape, "relu2glu", "gate and up must have one shape", gate=gate.shape, up=up.shape)
    y: Tensor = _relu2glu(gate, up)
    return y


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, same shape and dtype, contiguous.

    Triton:
        One kernel forward, one backward.

    Source: arXiv:1606.08415, section 2.
    """
    y: Tensor = _gelu(x)
    return y


def xielu(x: Tensor, alphas: Tensor) -> Tensor:
    """xIELU: a x² + x/2 for positive x, b (exp(x) − 1 − x) + x/2 for others, a = softplus(alphas[0]), b = 1/2 + softplus(alphas[1]).

    Args:
        x: any shape.
        alphas: [2].

    Returns:
        The same shape as x, contiguous, in x's dtype.

    Triton:
        One kernel forward; two backward, of which the second adds up the sums of the first's programs.

    Raises:
        ValueError: alphas are not two numbers.

    Source: arXiv:2411.13010, equation 12, with β = 1/2.
    """
    require(tuple(alphas.shape) == (2,), "xielu", "alphas must be two numbers", alphas=alphas.shape)
    y: Tensor = _xielu(x, alphas)
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
_relu2glu = _registered("relu2glu", ("gate", "up"), reference.relu2glu_forward, reference.relu2glu_backward)
_relu2 = _registered("relu2", ("x",), reference.relu2_forward, lambda grad_y, x, _needs: [reference.relu2_backward(grad_y, x)])
_gelu = _registered("gelu", ("x",), reference.gelu_forward, lambda grad_y, x, _needs: [reference.gelu_backward(grad_y, x)])


def _run_xielu(given: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    if runs_triton(given[0]):
        from megakernels.ops.activation import kernel_xielu  # noqa: PLC0415

        return (kernel_xielu.forward(*given),)
    return (reference.xielu_forward(*given),)


def _run_xielu_backward(grad_y: Tensor, given: tuple[Tensor, Tensor], needs: list[bool]) -> Sequence[Tensor | None]:
    if runs_triton(given[0]):
        from megakernels.ops.activation import kernel_xielu  # noqa: PLC0415

        return kernel_xielu.backward(grad_y, *given, needs)
    return reference.xielu_backward(grad_y, *given, needs)


_xielu = operation(
    "xielu", {"x": Tensor, "alphas": Tensor}, lambda x, alphas: (x, alphas),
    outputs=("y",), saved=(), gradients=("x", "alphas"),
    forward=_run_xielu, backward=_run_xielu_backward, fake=lambda given: (fake_like(given[0]),),
)[0]  # fmt: skip
