"""Operations declared by a record of their arguments, so that each argument list is written once.

An operation with many arguments has a NamedTuple of them, in the order of its torch op; the functions that compute it take the record. The
torch ops are derived from it. With T the record's tensors, N its constants and S the outputs that backward reads:

    NAME             (T and N in the record's order) -> outputs
    NAME_backward    (gradient of the first output, T, S, N, needs) -> the wanted gradients
    NAME_piece       (state, T and N in the record's order, outputs) -> the state after the piece; writes the outputs
    NAME_piece_backward    (gradient of the state after it, of the first output, T, S, N, gradients) -> gradient of the state before it
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

from megakernels._common.cost import Cost, register_cost
from megakernels._common.registration import GRADIENT_PREFIX, NEEDS, fake_like, join
from megakernels._common.scratch import register_scratch

Types = Mapping[str, Any]
"""Arguments by name, each with its type as `torch.library` reads it."""


def types_of(record: type) -> dict[str, Any]:
    """The fields of a record."""
    return get_type_hints(record)


def declare(name: str, run: Callable[[dict[str, Any]], Any], arguments: Types, returns: Any, mutates: Sequence[str] = ()) -> CustomOpDef:
    """The torch op `megakernels::name` with these arguments; `run` takes their values by name."""

    def body(*values: Any) -> Any:
        return run(dict(zip(arguments, values, strict=True)))

    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for each, kind in arguments.items()]
    body.__signature__ = Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return custom_op(f"megakernels::{name}", body, mutates_args=tuple(mutates))


def operation(
    name: str, arguments: Types,
    bind: Callable[..., Any],
    *, outputs: Sequence[str], saved: Sequence[str], gradients: Sequence[str],
    forward: Callable[[Any], tuple[Tensor, ...]], backward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[[Any], tuple[Tensor, ...]],
    differentiable: bool = True,
    forward_scratch: Callable[[Any], int] | None = None, backward_scratch: Callable[..., int] | None = None,
    forward_cost: Callable[..., Cost] | None = None, backward_cost: Callable[..., Cost] | None = None,
) -> tuple[CustomOpDef, CustomOpDef]:  # fmt: skip
    """Registers an operation and its backward.

    Args:
        name: Name of the torch op.
        arguments: Arguments of the torch op, which are passed to `bind`.
        bind: Function from these to the argument of `forward`, `fake` and `forward_scratch`.
        outputs: Name of each result of `forward`; the first has a gradient.
        saved: Outputs that backward reads.
        gradients: Arguments that have a gradient, in the order of the backward's results.
        forward: Function that computes the outputs.
        backward: Function of the gradient of the first output, the result of `bind`, the saved outputs in order and, if the operation is
            differentiable, the required gradients; returns all gradients, None or any value for those not required.
        fake: Function that returns the outputs, uninitialised.
        differentiable: True if autograd calls the backward. If not, the backward has no `needs` and is called explicitly.
        forward_scratch: Function for the scratch bytes of `forward`, as in `register_scratch`.
        backward_scratch: Function for the scratch bytes of `backward`, with its arguments.
        forward_cost: Function for the cost of the kernels of `forward`, with its arguments, as in `register_cost`.
        backward_cost: Function for the cost of the kernels of `backward`, with its arguments.
    """
    tensors, numbers = _parted(arguments)
    grad = GRADIENT_PREFIX + outputs[0]
    needs = {NEEDS: list[bool]} if differentiable else {}
    of_backward = {grad: Tensor} | tensors | dict.fromkeys(saved, Tensor) | numbers | needs

    def given(values: Mapping[str, Any]) -> Any:
        return bind(**{each: values[each] for each in arguments})

    def operands(values: Mapping[str, Any]) -> tuple[Any, ...]:
        return values[grad], given(values), *(values[each] for each in (*saved, *needs))

    def run(values: dict[str, Any]) -> Any:
        made = forward(given(values))
        return made if len(outputs) > 1 else made[0]

    def run_backward(values: dict[str, Any]) -> list[Tensor]:
        found = zip(backward(*operands(values)), values.get(NEEDS, (True,) * len(gradients)), strict=True)
        return [gradient for gradient, need in found if need and gradient is not None]

    def fake_outputs(*values: Any) -> Any:
        made = fake(given(dict(zip(arguments, values, strict=True))))
        return made if len(outputs) > 1 else made[0]

    def fake_gradients(*values: Any) -> list[Tensor]:
        named = dict(zip(of_backward, values, strict=True))
        return [fake_like(named[each]) for each in gradients if named[each] is not None]

    returns = tuple[(Tensor,) * len(outputs)] if len(outputs) > 1 else Tensor  # type: ignore[misc]
    op = declare(name, run, arguments, returns)
    backward_op = declare(f"{name}_backward", run_backward, of_backward, list[Tensor])
    op.register_fake(fake_outputs)
    if differentiable:
        join(op, backward_op, outputs=outputs, gradients=gradients)
    else:
        backward_op.register_fake(fake_gradients)
    if forward_scratch is not None:
        register_scratch(op, lambda *values: forward_scratch(given(dict(zip(arguments, values, strict=True)))))
    if backward_scratch is not None:
        register_scratch(backward_op, lambda *values: backward_scratch(*operands(dict(zip(of_backward, values, strict=True)))))
    if forward_cost is not None:
        register_cost(op, lambda *values: forward_cost(given(dict(zip(arguments, values, strict=True)))))
    if backward_cost is not None:
        register_cost(backward_op, lambda *values: backward_cost(*operands(dict(zip(of_backward, values, strict=True)))))
    return op, backward_op


def piece(
    name: str, arguments: Types,
    bind: Callable[..., Any],
    *, made: Sequence[str], gradients: Sequence[str], summed: Sequence[str],
    forward: Callable[..., tuple[Tensor, ...]], backward: Callable[..., tuple[Sequence[Tensor | None], Tensor]],
    forward_scratch: Callable[..., int] | None = None, backward_scratch: Callable[..., int] | None = None,
    forward_cost: Callable[..., Cost] | None = None, backward_cost: Callable[..., Cost] | None = None,
) -> tuple[CustomOpDef, CustomOpDef]:  # fmt: skip
    """Registers a recurrence over a piece of a sequence, from an initial to the final state, and its backward.

    Neither has an autograd formula: both write into parts of tensors of the caller, so that groups of heads are processed one after
    another.

    Args:
        name: Name of the recurrence; the torch ops are `name_piece` and `name_piece_backward`.
        arguments: Arguments of the torch op without the state and the written outputs, which are those of `bind`.
        bind: Function from these to the argument of `forward` and `backward`.
        made: Names of the outputs of `forward` before the last state, which the op writes; backward reads all except the first.
        gradients: Arguments that have a gradient, in the order of the backward's results; a caller that gives None for one drops it.
        summed: Inputs among them whose gradients are accumulated; all others are overwritten.
        forward: Function of the initial state and the result of `bind` that returns the outputs and the last state.
        backward: Function of the gradients of the last state and of the first output, the result of `bind`, and the other outputs, that
            returns the gradients and the initial state's gradient.
        forward_scratch: Function for the scratch bytes of the op, with the arguments of `forward`.
        backward_scratch: Function for the scratch bytes of `backward`, with its arguments.
        forward_cost: Function for the cost of the kernels of `forward`, with its arguments, as in `register_cost`.
        backward_cost: Function for the cost of the kernels of `backward`, with its arguments.
    """
    tensors, numbers = _parted(arguments)
    saved, grad = made[1:], GRADIENT_PREFIX + made[0]
    totals = {GRADIENT_PREFIX + each: Tensor | None for each in gradients}
    of_forward = {"state": Tensor} | dict(arguments) | dict.fromkeys(made, Tensor)
    of_backward = {"grad_last": Tensor, grad: Tensor} | tensors | dict.fromkeys(saved, Tensor) | numbers | totals

    def given(values: Mapping[str, Any]) -> Any:
        return bind(**{each: values[each] for each in arguments})

    def forward_operands(values: tuple[Any, ...]) -> tuple[Any, ...]:
        named = dict(zip(of_forward, values, strict=True))
        return named["state"], given(named)

    def operands(values: Mapping[str, Any]) -> tuple[Any, ...]:
        return values["grad_last"], values[grad], given(values), *(values[each] for each in saved)

    def run(values: dict[str, Any]) -> Tensor:
        *results, last = forward(values["state"], given(values))
        for each, result in zip(made, results, strict=True):
            values[each].copy_(result)
        return last.contiguous()

    def run_backward(values: dict[str, Any]) -> Tensor:
        found, before = backward(*operands(values))
        for each, part in zip(gradients, found, strict=True):
            total = values[GRADIENT_PREFIX + each]
            if total is not None and part is not None:
                total.add_(part) if each in summed else total.copy_(part)
        return before.contiguous()

    op = declare(f"{name}_piece", run, of_forward, Tensor, made)
    backward_op = declare(f"{name}_piece_backward", run_backward, of_backward, Tensor, tuple(totals))
    op.register_fake(lambda state, *_: fake_like(state))
    backward_op.register_fake(lambda grad_last, *_: fake_like(grad_last))
    if forward_scratch is not None:
        register_scratch(op, lambda *values: forward_scratch(*forward_operands(values)))
    if backward_scratch is not None:
        register_scratch(backward_op, lambda *values: backward_scratch(*operands(dict(zip(of_backward, values, strict=True)))))
    if forward_cost is not None:
        register_cost(op, lambda *values: forward_cost(*forward_operands(values)))
    if backward_cost is not None:
        register_cost(backward_op, lambda *values: backward_cost(*operands(dict(zip(of_backward, values, strict=True)))))
    return op, backward_op


def _parted(arguments: Types) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensor arguments, including optional ones, and all others."""
    tensors = {name: kind for name, kind in arguments.items() if kind in (Tensor, Tensor | None)}
    return tensors, {name: kind for name, kind in arguments.items() if name not in tensors}
