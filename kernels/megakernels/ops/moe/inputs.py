"""The arguments of the experts' MLPs, and the registration of an operation with them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common import Cost, fake_like, operation, require, types_of

GATED = ("swiglu", "geglu")
UNGATED = ("relu2", "gelu")
GRADIENTS = ("x", "weights", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
OF_GATE = ("gate", "gate_bias", "limit")
"""Arguments that an operation without a gate does not have."""


class Experts(NamedTuple):
    """The arguments of `experts` and `routed_experts`, as they document them."""

    x: Tensor
    weights: Tensor
    rows: Tensor
    counts: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    limit: float | None


Made = tuple[Tensor, Tensor | None, Tensor]
"""The result, gate_out (None without a gate) and up_out."""


def require_experts(operation: str, given: Experts) -> None:
    """Refuse an expert bank whose shapes do not match each other or x [..., h].

    Raises:
        ValueError: shapes, dtypes or activation do not fit.
    """
    x, counts, gate, up, down, activation = given.x, given.counts, given.gate, given.up, given.down, given.activation
    gate_shape = None if gate is None else gate.shape
    known = activation in (UNGATED if gate is None else GATED)
    require(known, operation, "swiglu and geglu take a gate, relu2 and gelu take none", activation=activation, gate=gate_shape)
    require(given.limit is None or activation == "swiglu", operation, "swiglu alone has a limit", activation=activation, limit=given.limit)
    num_experts, width, hidden = up.shape
    fits = x.shape[-1] == hidden and counts.shape == (num_experts,)
    require(fits, operation, "x must be [...,h], counts [E], up [E,F,h]", x=x.shape, counts=counts.shape, up=up.shape)
    fits = down.shape == (num_experts, hidden, width) and (gate is None or gate.shape == up.shape)
    require(fits, operation, "down must be [E,h,F], gate as up", up=up.shape, down=down.shape, gate=gate_shape)
    same = x.dtype == up.dtype == down.dtype and (gate is None or gate.dtype == x.dtype)
    require(same, operation, "x and the matrices must have one dtype", x=x.dtype, up=up.dtype, down=down.dtype)
    biases = {"gate": given.gate_bias, "up": given.up_bias, "down": given.down_bias}
    widths = {"gate": width, "up": width, "down": hidden}
    fits = all(bias is None or bias.shape == (num_experts, widths[name]) for name, bias in biases.items())
    fits = fits and (given.gate_bias is None or gate is not None)
    shapes = {f"{name}_bias": None if bias is None else bias.shape for name, bias in biases.items()}
    require(fits, operation, "biases must be [E,F], down's [E,h]", up=up.shape, **shapes)


def experts_operation(
    name: str,
    forward: Callable[[Experts], Made],
    backward: Callable[[Tensor, Experts, Tensor | None, Tensor, Sequence[bool]], Sequence[Tensor | None]],
    forward_scratch: Callable[[Experts], int] | None = None,
    backward_scratch: Callable[[Experts, Sequence[bool]], int] | None = None,
    forward_cost: Callable[[Experts], Cost] | None = None,
    backward_cost: Callable[[Experts, Sequence[bool]], Cost] | None = None,
) -> Callable[[Experts], Tensor]:
    """Registers `name`, and `name_gated` for experts with a gate: two torch ops, so that each saves exactly its own tensors.

    Args:
        name: Name of the torch op without a gate.
        forward: Function that computes the result and the saved outputs.
        backward: Function of the gradient of the result, the arguments, gate_out and up_out, and the required gradients of `GRADIENTS`;
            returns these gradients.
        forward_scratch: Function for the scratch bytes of `forward`.
        backward_scratch: Function for the scratch bytes of `backward`, of the arguments and the required gradients.
        forward_cost: Function for the cost of the kernels of `forward`.
        backward_cost: Function for the cost of the kernels of `backward`, with the arguments of `backward_scratch`.

    Returns:
        A function of the arguments that runs the op with or without a gate.
    """
    functions = (forward_scratch, backward_scratch, forward_cost, backward_cost)
    plain = _registered(name, False, {*OF_GATE}, forward, backward, *functions)
    gated = _registered(f"{name}_gated", True, set(), forward, backward, *functions)

    def run(given: Experts) -> Tensor:
        left_out = OF_GATE if given.gate is None else ()
        values = (each for name, each in zip(Experts._fields, given, strict=True) if name not in left_out)
        y: Tensor = (plain if given.gate is None else gated)(*values)[0]
        return y

    return run


def _given(absent: set[str], **values: Any) -> Experts:
    return Experts(**(values | dict.fromkeys(absent)))


def _registered(
    name: str, gated: bool, absent: set[str],
    forward: Callable[[Experts], Made],
    backward: Callable[[Tensor, Experts, Tensor | None, Tensor, Sequence[bool]], Sequence[Tensor | None]],
    forward_scratch: Callable[[Experts], int] | None, backward_scratch: Callable[[Experts, Sequence[bool]], int] | None,
    forward_cost: Callable[[Experts], Cost] | None, backward_cost: Callable[[Experts, Sequence[bool]], Cost] | None,
) -> CustomOpDef:  # fmt: skip
    arguments = {each: Tensor if each == "gate" else kind for each, kind in types_of(Experts).items() if each not in absent}
    gradients = [each for each in GRADIENTS if each in arguments]

    def wanted(needs: Sequence[bool]) -> tuple[bool, ...]:
        found = dict(zip(gradients, needs, strict=True))
        return tuple(found.get(each, False) for each in GRADIENTS)

    def run(given: Experts) -> tuple[Tensor, ...]:
        return tuple(each for each in forward(given) if each is not None)

    def run_backward(grad_y: Tensor, given: Experts, *made: Any) -> Sequence[Tensor | None]:
        *saved, needs = made
        found = backward(grad_y, given, saved[0] if gated else None, saved[-1], wanted(needs))
        by_name = dict(zip(GRADIENTS, found, strict=True))
        return [by_name.get(each) for each in gradients]

    def fake(given: Experts) -> tuple[Tensor, ...]:
        inner = (given.rows.shape[0], given.up.shape[1])
        return fake_like(given.x), *(given.x.new_empty(inner) for _ in range(1 + gated))

    saved = ("gate_out", "up_out") if gated else ("up_out",)
    return operation(
        name,
        arguments,
        partial(_given, absent),
        outputs=("y", *saved),
        saved=saved,
        gradients=gradients,
        forward=run,
        backward=run_backward,
        fake=fake,
        forward_scratch=forward_scratch,
        backward_scratch=None if backward_scratch is None else lambda _, given, *made: backward_scratch(given, wanted(made[-1])),
        forward_cost=forward_cost,
        backward_cost=None if backward_cost is None else lambda _, given, *made: backward_cost(given, wanted(made[-1])),
    )[0]
