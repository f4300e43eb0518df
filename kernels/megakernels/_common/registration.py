"""Combine two `torch.library` custom ops, forward and backward, into one differentiable operation.

The backward op's signature declares everything that autograd saves: an argument `grad_NAME` is the gradient of output NAME, `needs`
gives the required gradients, and every other argument is an input or output of the forward op under the same name. The tensors among
them are exactly the saved set; other values are constants. Nothing else is saved. An argument may be a list of tensors:
`needs` has a place for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

GRADIENT_PREFIX = "grad_"
NEEDS = "needs"
SAVED: dict[str, tuple[str, ...]] = {}
"""Saved set of each differentiable operation by its name in `torch.ops`: the tensors saved for backward, inputs first."""


def join(
    forward: CustomOpDef,
    backward: CustomOpDef,
    *,
    outputs: Sequence[str],
    gradients: Sequence[str],
    same_gradient: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Registers `backward` as the autograd formula of `forward`.

    Args:
        forward: Op that returns one tensor or a tuple of tensors.
        backward: Op of output gradients, saved tensors, constants and `needs: list[bool]`, as the module describes; it returns only the
            required gradients, in the order of `gradients`.
        outputs: Name of each tensor that `forward` returns. Those without a `grad_NAME` argument in `backward` are not differentiable.
        gradients: Names of the forward arguments that have a gradient. If all of them are saved, the backward's fake implementation is
            also registered: contiguous gradients with their inputs' shapes and dtypes. Otherwise the caller registers it.
        same_gradient: Further forward arguments, each with the name in `gradients` whose gradient it shares, as the terms of an addition.
    """
    names = [argument.name for argument in _arguments(forward)]
    carried = [argument for argument in _arguments(backward) if argument.name != NEEDS and not argument.name.startswith(GRADIENT_PREFIX)]
    saved = [argument.name for argument in carried if "Tensor" in str(argument.type)]
    SAVED[str(forward._opoverload)] = tuple(saved)
    listed = any("List[Tensor]" in str(argument.type) for argument in _arguments(forward))
    constants = [argument.name for argument in carried if argument.name not in saved]
    order = [argument.name for argument in _arguments(backward)]
    differentiable = [name for name in outputs if GRADIENT_PREFIX + name in order]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        values = dict(zip(names, inputs, strict=True)) | dict(zip(outputs, results, strict=True))
        kept = [values[name] for name in saved]
        if listed:
            ctx.lengths = [len(each) if isinstance(each, list) else None for each in kept]
            kept = _flat(kept)
        ctx.save_for_backward(*kept)
        ctx.constants = {name: values[name] for name in constants}
        if len(differentiable) < len(outputs):
            ctx.mark_non_differentiable(*[values[name] for name in outputs if name not in differentiable])
            ctx.set_materialize_grads(False)  # else autograd would allocate zeros for outputs that have no gradient
        ctx.made = [(values[name].shape, values[name].dtype, values[name].device) for name in outputs]

    def run_backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Any, ...]:
        wanted = dict(zip(names, ctx.needs_input_grad, strict=True))  # a list has one entry for each of its tensors
        if all(gradient is None for gradient in output_gradients):
            return tuple([[None] * len(each) if isinstance(each, list) else None for each in wanted.values()])
        kept = _grouped(ctx.saved_tensors, ctx.lengths) if listed else ctx.saved_tensors
        values: dict[str, Any] = dict(zip(saved, kept, strict=True)) | ctx.constants
        for name, gradient, (shape, dtype, device) in zip(outputs, output_gradients, ctx.made, strict=True):
            unused = gradient is None and name in differentiable
            values[GRADIENT_PREFIX + name] = torch.zeros(shape, dtype=dtype, device=device) if unused else gradient
        needs = [wanted[name] or any(wanted[other] for other, same in same_gradient.items() if same == name) for name in gradients]
        values[NEEDS] = _flat(needs) if listed else needs
        made = backward(*[values[name] for name in order])
        computed = (name for name, need in zip(gradients, needs, strict=True) if need)
        found = dict(zip(computed, _placed(made, needs) if listed else made, strict=True))
        return tuple([found.get(same_gradient.get(name, name)) if wanted[name] else None for name in names])

    forward.register_autograd(run_backward, setup_context=setup_context)
    if set(gradients) <= set(saved):

        def fake_backward(*arguments: Any) -> list[Tensor]:
            values = dict(zip(order, arguments, strict=True))
            inputs = _flat([values[name] for name in gradients])
            return [fake_like(each) for each, need in zip(inputs, values[NEEDS], strict=True) if need]

        backward.register_fake(fake_backward)


def _flat(values: Iterable[Any]) -> list[Any]:
    """The values, with lists flattened."""
    return list(chain.from_iterable(each if isinstance(each, list) else (each,) for each in values))


def _grouped(tensors: Iterable[Tensor], lengths: Iterable[int | None]) -> list[Any]:
    """Tensors by argument; `lengths`: of each argument that is a list, None for one tensor."""
    left = iter(tensors)
    return [next(left) if length is None else list(islice(left, length)) for length in lengths]


def _placed(made: Iterable[Tensor], needs: Iterable[bool | list[bool]]) -> list[Any]:
    """Gradients of the arguments that need one; in a list, None for tensors that do not."""
    left = iter(made)
    return [[next(left) if one else None for one in need] if isinstance(need, list) else next(left) for need in needs if need]


def only_needed(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """The gradients that were computed, as the backward op returns them."""
    return [gradient for gradient in gradients if gradient is not None]


def fake_like(tensor: Tensor) -> Tensor:
    """A contiguous uninitialised tensor with the shape, dtype and device of `tensor`, whatever its strides."""
    return tensor.new_empty(tensor.shape)


def _arguments(op: CustomOpDef) -> Sequence[Any]:
    arguments: Sequence[Any] = op._opoverload._schema.arguments
    return arguments
