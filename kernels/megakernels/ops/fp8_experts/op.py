"""Routed experts whose products multiply in eight bits, forward and backward.

Two operations without an autograd formula, since the caller decides how the input is saved. Copies are e4m3 with scales that are powers
of two, as those of `fp8_linears`; each matrix of a product is quantised once, for all experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernels._common import fake_like, register_cost, register_scratch, types_of
from megakernels._common.operations import declare
from megakernels.ops.fp8_experts import cost, inputs, run, sizes
from megakernels.ops.fp8_experts.facts import turned_columns
from megakernels.ops.fp8_experts.reference import FORMAT
from megakernels.ops.moe.inputs import Experts

__all__ = ["fp8_experts", "fp8_experts_backward"]


def fp8_experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor,
    activation: str, scaling: str, keeps: bool,
    *, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    limit: float | None = None, packed: Sequence[Tensor | None] = (), numbers: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """`routed_experts` with all products in eight bits.

    Args:
        x: [N, h], fp32 or bf16.
        weights: fp32 [N, k].
        rows: int32 [N·k], the pairs token·k + slot sorted by expert: a permutation.
        counts: int32 [E], rows of each expert; they sum to N·k.
        gate: [E, F, h] for swiglu and geglu, else None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, geglu, relu2 or gelu.
        scaling: tensor: one scale each for x, for the activated rows, and for each bank; rows: one scale per row of them.
            Backward scales columns, of an expert's rows or matrix, where it sums over rows. delayed has scales as tensor does, which are
            given. mxfp8 and nvfp4 have scales of blocks, and their products are emulated (`fp8_linear.blocks`).
        keeps: True to return x's copy for the weight gradients; not with block scales.
        gate_bias: [E, F] or None, as the next two.
        up_bias: [E, F].
        down_bias: [E, h].
        limit: limit of the clamped swiglu, or None.
        packed: packed rows of gate, up and down, then their largest magnitudes (`packed.Stack`), None for each that is not; or empty.
        numbers: fp32 [3, 3] of gate if there is one, up and down under scaling delayed: those of a product's rows, matrices and output's
            gradient, whose largest magnitudes are raised (`fp8_linear.delayed`); gate or, without one, up has those of x. Empty otherwise.

    Returns:
        y [N, h]; gate_out [N·k, F] with a gate; up_out [N·k, F], with their biases. If it keeps them, e4m3 [h, N·k and what fills each
        expert's rows to a multiple of 16, at least 16], and scales fp32 [E·h].

    Scratch:
        Copies of the rows, and of one bank at a time; the activated rows, and their products until they are summed.

    Triton:
        The copies of `fp8_quantize`, the rows' gathered; one kernel for the activation, one for the bias of down, sum of slots. The
        products are torch's scaled product of groups in bf16 on Hopper; otherwise one for each expert.

    Raises:
        ValueError: shapes, dtypes or activation do not fit, or 16 does not divide F and h.

    Source: arXiv:2211.15841 (dropless experts); pytorch, `aten/src/ATen/native/cuda/GroupMMCommon.cuh` (what groups are aligned to).
    """
    given = Experts(x, weights, rows, counts, gate, up, down, gate_bias, up_bias, down_bias, activation, limit)
    inputs.check_forward(given, scaling, numbers, keeps=keeps)
    further = gate_bias, up_bias, down_bias, limit, list(packed), list(numbers)
    found: list[Tensor] = _fp8_experts(*given[:7], activation, scaling, keeps, *further)
    return found


def fp8_experts_backward(
    grad_y: Tensor, x: Tensor, scales: Tensor | None, weights: Tensor, rows: Tensor, counts: Tensor, gate_out: Tensor | None,
    up_out: Tensor, gate: Tensor | None, up: Tensor, down: Tensor,
    activation: str, scaling: str,
    *, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    limit: float | None = None, packed: Sequence[Tensor | None] = (), numbers: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """The gradients of `fp8_experts`; outputs' gradients multiply as e4m3, the one format of torch's scaled product of groups.

    Args:
        grad_y: [N, h].
        x: [N, h], or with its scales the copy that `fp8_experts` returned.
        scales: fp32 [E·h] if x is quantised; None otherwise.
        weights: fp32 [N, k].
        rows: int32 [N·k].
        counts: int32 [E].
        gate_out: [N·k, F] with a gate, else None.
        up_out: [N·k, F].
        gate: [E, F, h] or None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, geglu, relu2 or gelu.
        scaling: tensor, rows, delayed, mxfp8, nvfp4 or fp8_blockwise.
        gate_bias: [E, F] or None, as the next two.
        up_bias: [E, F].
        down_bias: [E, h].
        limit: limit of the clamped swiglu, or None.
        packed: packed rows of gate, up and down, then their largest magnitudes (`packed.Stack`), None for each that is not; or empty.
        numbers: fp32 [3, 3] of gate if there is one, up and down under scaling delayed: those of a product's rows, matrices and output's
            gradient, whose largest magnitudes are raised (`fp8_linear.delayed`); gate or, without one, up has those of x. Empty otherwise.

    Returns:
        Gradients of x, weights, gate if there is one, up, down, and of existing biases, in this order. An expert with no rows
        gets zeros.

    Scratch:
        The gradients of the first products' outputs and the activated rows, copies of both operands of one product at a time, and the rows'
        gradients until they are summed.

    Triton:
        The copies of `fp8_quantize`, and one kernel for each that is transposed; one kernel for what is between the products, one for the
        gradient of each bias, sum of slots.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    given = Experts(x, weights, rows, counts, gate, up, down, gate_bias, up_bias, down_bias, activation, limit)
    inputs.check_backward(grad_y, given, scales, scaling, numbers)
    found: list[Tensor] = _fp8_experts_backward(
        *(grad_y, x, scales, weights, rows, counts, gate_out, up_out, gate, up, down, activation, scaling),
        *(gate_bias, up_bias, down_bias, limit, list(packed), list(numbers)),
    )
    return found


TYPES = types_of(Experts) | {"scaling": str, "keeps": bool, "grad_y": Tensor, "scales": Tensor | None}
TYPES |= {"gate_out": Tensor | None, "up_out": Tensor, "packed": Sequence[Tensor | None], "numbers": Sequence[Tensor]}
OPTIONAL = ("gate_bias", "up_bias", "down_bias", "limit", "packed", "numbers")
FORWARD = ("x", "weights", "rows", "counts", "gate", "up", "down", "activation", "scaling", "keeps", *OPTIONAL)
BACKWARD = (
    *("grad_y", "x", "scales", "weights", "rows", "counts", "gate_out", "up_out", "gate", "up", "down", "activation", "scaling"),
    *OPTIONAL,
)
"""Arguments of the torch ops, in order."""


def _given(values: dict[str, Any]) -> Experts:
    return Experts(**{name: values[name] for name in Experts._fields})


def _forward(values: dict[str, Any]) -> list[Tensor]:
    return run.forward(_given(values), values["scaling"], values["packed"], values["numbers"], keeps=values["keeps"])


def _backward(values: dict[str, Any]) -> list[Tensor]:
    of_forward = values["scales"], values["gate_out"], values["up_out"]
    return run.backward(values["grad_y"], _given(values), *of_forward, values["scaling"], values["packed"], values["numbers"])


def _fake(*arguments: Any) -> list[Tensor]:
    values = dict(zip(FORWARD, arguments, strict=True))
    x, rows, (num_experts, width, hidden) = values["x"], values["rows"].shape[0], values["up"].shape
    made = [fake_like(x), *(x.new_empty((rows, width)) for _ in range(1 if values["gate"] is None else 2))]
    if values["keeps"]:
        made.append(x.new_empty((hidden, turned_columns(rows, num_experts)), dtype=FORMAT))
        made.append(x.new_empty(num_experts * hidden, dtype=torch.float32))
    return made


def _fake_backward(*arguments: Any) -> list[Tensor]:
    values = dict(zip(BACKWARD, arguments, strict=True))
    made = (values[name] for name in ("grad_y", "weights", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"))
    return [fake_like(each) for each in made if each is not None]


_fp8_experts = declare("fp8_experts", _forward, {name: TYPES[name] for name in FORWARD}, list[Tensor], ("numbers",))
_fp8_experts_backward = declare("fp8_experts_backward", _backward, {name: TYPES[name] for name in BACKWARD}, list[Tensor], ("numbers",))
_fp8_experts.register_fake(_fake)
_fp8_experts_backward.register_fake(_fake_backward)
register_cost(_fp8_experts, lambda *values: cost.forward_cost(dict(zip(FORWARD, values, strict=True))))
register_cost(_fp8_experts_backward, lambda *values: cost.backward_cost(dict(zip(BACKWARD, values, strict=True))))
register_scratch(_fp8_experts, lambda *values: sizes.forward_scratch(dict(zip(FORWARD, values, strict=True))))
register_scratch(_fp8_experts_backward, lambda *values: sizes.backward_scratch(dict(zip(BACKWARD, values, strict=True))))
