"""The router: two torch ops for each of its two scores, without and with the inputs of the router losses."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels._common import (
    accumulator_dtype,
    chooses_triton,
    join,
    only_needed,
    operation,
    register_scratch,
    require,
    types_of,
)
from megakernels._common.device import module_for
from megakernels._common.operations import declare
from megakernels.ops.moe import scores
from megakernels.ops.moe.scores import Router
from megakernels.ops.moe.sizes import route_backward_scratch_bytes

GRADIENTS = ("x", "weight", "bias", "correction")


def route(
    x: Tensor, weight: Tensor,
    top_k: int, normalize: bool,
    *, bias: Tensor | None = None, correction: Tensor | None = None,
    sigmoid: bool = False, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Chooses each token's experts: fp32 logits, softmax over all experts or sigmoid of each, the k largest.

    Args:
        x: [N, h].
        weight: [E, h].
        top_k: k, experts per token.
        normalize: True if a token's k weights are divided by their sum.
        bias: [E], added to the logits, or None.
        correction: [E], added to the scores for the choice alone, or None; of any dtype; its gradient is zero.
        sigmoid: True if scores are sigmoids of the logits.
        num_groups: equal groups of experts, of which a token chooses top_groups before it chooses experts; 1 for none.
        top_groups: groups that each token chooses: by their best score, of sigmoid scores by the sum of their best two.
        scale: factor of the weights.

    Returns:
        weights fp32 [N, k] in descending order of the scores with their correction, indices int32 [N, k], and probs fp32 [N, E] (fp64 for
        fp32 where x is fp64): each token's scores over their sum. Indices and probs have no gradient.

    Saves:
        probs: the returned softmax scores.
        indices: the returned indices.
        logits: fp32 [N, E], of sigmoid scores.

    Scratch:
        Backward: the gradient of the logits, 4 bytes each; of bf16 inputs also two copies of the weight, then its gradient in two fp32
        parts.

    Triton:
        One kernel forward and one backward between products of the GEMM library, which multiplies bf16 into fp32.

    Raises:
        ValueError: shapes do not fit, top_k is not in 1 … E, or the chosen groups have fewer than top_k experts.

    Source: arXiv:2401.04088, section 2.1; fp32 routing, arXiv:2101.03961, section 2.4; sigmoid scores and groups, arXiv:2412.19437,
    equations 12 to 16; correction, arXiv:2408.15664; groups by their best score, arXiv:2405.04434, section 2.2.2.
    """
    given = Router(x, weight, bias, correction, top_k, normalize, num_groups, top_groups, scale)
    require_router("route", given, sigmoid=sigmoid)
    weights, indices, probs = (_route_sigmoid if sigmoid else _route)(*given)[:3]
    return weights, indices, probs


def route_scored(
    x: Tensor, weight: Tensor,
    top_k: int, normalize: bool, num_sequences: int,
    *, bias: Tensor | None = None, correction: Tensor | None = None,
    sigmoid: bool = False, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`route`, with the inputs of the router losses.

    Args:
        x: [N, h], num_sequences equal runs of rows.
        weight: [E, h].
        top_k: k, experts per token.
        normalize: True if a token's k weights are divided by their sum.
        num_sequences: B, whose loads are counted separately.
        bias: see `route`, for this argument and those that follow.
        correction: [E] or None.
        sigmoid: True if scores are sigmoids of the logits.
        num_groups: equal groups of experts.
        top_groups: groups that each token chooses.
        scale: factor of the weights.

    Returns:
        weights fp32 [N, k], indices int32 [N, k], probs fp32 [N, E], log Σ exp of the logits fp32 [N], and load int32 [B, E], a sequence's
        rows for each expert (fp64 for fp32 where x is fp64). Indices and load have no gradient.

    Saves:
        probs: the returned softmax scores.
        indices: the returned indices.
        logits: fp32 [N, E], of sigmoid scores.

    Scratch:
        Backward: see `route`.

    Triton:
        As `route`, and a sum of the tiles' loads.

    Raises:
        ValueError: shapes do not fit, top_k is not in 1 … E, or the chosen groups have fewer than top_k experts.
    """
    given = Router(x, weight, bias, correction, top_k, normalize, num_groups, top_groups, scale)
    require_router("route_scored", given, sigmoid=sigmoid)
    fits = num_sequences > 0 and x.shape[0] % num_sequences == 0
    require(fits, "route_scored", "x must be [N,h], and num_sequences divide N", x=x.shape, num_sequences=num_sequences)
    op = _route_scored_sigmoid if sigmoid else _route_scored
    weights, indices, probs, log_sums, load = op(*given, num_sequences)[:5]
    return weights, indices, probs, log_sums, load


def require_router(name: str, given: Router, *, sigmoid: bool) -> None:
    """Refuse operands and counts of a router that do not fit.

    Raises:
        ValueError: shapes do not fit, top_k is not in 1 … E, or the chosen groups have fewer than top_k experts.
    """
    x, weight, bias, correction, top_k = given[:5]
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1]
    require(fits, name, "x must be [N,h], weight [E,h]", x=x.shape, weight=weight.shape)
    num_experts = weight.shape[0]
    for each, value in (("bias", bias), ("correction", correction)):
        require(value is None or value.shape == (num_experts,), name, f"{each} must be [E]", weight=weight.shape, given=_shape(value))
    require(1 <= top_k <= num_experts, name, "top_k must be in 1 … E", top_k=top_k, E=num_experts)
    groups, chosen = given.num_groups, given.top_groups
    require(groups >= 1 and num_experts % groups == 0, name, "num_groups must divide E", num_groups=groups, E=num_experts)
    size = num_experts // groups
    fits = 1 <= chosen <= groups and top_k <= chosen * size and (groups == 1 or not sigmoid or size >= scores.BEST_OF_GROUP)
    require(fits, name, "the chosen groups must have top_k experts", num_groups=groups, top_groups=chosen, top_k=top_k, E=num_experts)


def _shape(value: Tensor | None) -> Any:
    return None if value is None else value.shape


def _made(given: Router, num_scores: int) -> tuple[Tensor, ...]:
    """Weights, indices and arrays of scores, uninitialised."""
    x, dtype = given.x, accumulator_dtype(given.x.dtype)
    chosen, all_experts = (x.shape[0], given.top_k), (x.shape[0], given.weight.shape[0])
    arrays = (x.new_empty(all_experts, dtype=dtype) for _ in range(num_scores))
    return x.new_empty(chosen, dtype=dtype), x.new_empty(chosen, dtype=torch.int32), *arrays


def _module(given: Router) -> ModuleType:
    """The kernels or plain torch."""
    return module_for(given.x, scores, "kernel_route")


def _backward_scratch(given: Router, needs: Sequence[bool]) -> int:
    return route_backward_scratch_bytes(given, needs) if chooses_triton(given.x) else 0


def _registered(name: str, *, is_sigmoid: bool) -> CustomOpDef:
    """Register the op of a score: backward reads probs or logits, and the indices."""
    outputs = (*_OUTPUTS, "logits") if is_sigmoid else _OUTPUTS

    def run(given: Router) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _module(given).route_forward(given, None, is_sigmoid=is_sigmoid)
        return made[: len(outputs)]

    def run_backward(grad_weights: Tensor, given: Router, kept: Tensor, indices: Tensor, needs: list[bool]) -> Sequence[Tensor | None]:
        grads = grad_weights, None, None
        found: Sequence[Tensor | None] = _module(given).route_backward(grads, given, kept, indices, needs, is_sigmoid=is_sigmoid)
        return found

    return operation(
        name,
        types_of(Router),
        Router,
        outputs=outputs,
        saved=(outputs[-1], "indices"),
        gradients=GRADIENTS,
        forward=run,
        backward=run_backward,
        fake=lambda given: _made(given, len(outputs) - 2),
        backward_scratch=lambda _, given, *made: _backward_scratch(given, made[-1]),
    )[0]


_OUTPUTS = ("weights", "indices", "probs")
_route = _registered("route", is_sigmoid=False)
_route_sigmoid = _registered("route_sigmoid", is_sigmoid=True)


def _registered_scored(name: str, *, is_sigmoid: bool) -> CustomOpDef:
    """Register the op of a score with the inputs of the router losses."""
    arguments, outputs = types_of(Router), (*_OUTPUTS, "log_sums", "load")
    names, kept = tuple(arguments), "logits" if is_sigmoid else "probs"

    def run(values: dict[str, Any]) -> tuple[Tensor, ...]:
        given = Router(*(values[each] for each in names))
        made = _module(given).route_forward(given, values["num_sequences"], is_sigmoid=is_sigmoid)
        weights, indices, probs, logits, log_sums, load = made
        return weights, indices, probs, log_sums, load, *((logits,) if is_sigmoid else ())

    def fake(*values: Any) -> tuple[Tensor, ...]:
        given, num_sequences = Router(*values[:-1]), values[-1]
        weights, indices, probs, *logits = _made(given, 2 if is_sigmoid else 1)
        load = given.x.new_empty((num_sequences, given.weight.shape[0]), dtype=torch.int32)
        return weights, indices, probs, probs.new_empty(probs.shape[:1]), load, *logits

    def run_backward(values: dict[str, Any]) -> list[Tensor]:
        given = Router(*(values[each] for each in names))
        of_outputs = tuple(values[f"grad_{each}"] for each in ("weights", "probs", "log_sums"))
        saved = values[kept], values["indices"], values["needs"]
        return only_needed(_module(given).route_backward(of_outputs, given, *saved, is_sigmoid=is_sigmoid))

    made = 6 if is_sigmoid else 5
    op = declare(name, run, {**arguments, "num_sequences": int}, tuple[(Tensor,) * made])  # type: ignore[misc]
    op.register_fake(fake)
    grads = {f"grad_{each}": Tensor for each in ("weights", "probs", "log_sums")}
    tensors = {each: kind for each, kind in arguments.items() if kind in (Tensor, Tensor | None)}
    numbers = {each: kind for each, kind in arguments.items() if each not in tensors}
    of_backward = {**grads, **tensors, kept: Tensor, "indices": Tensor, **numbers, "needs": list[bool]}

    def scratch(*operands: Any) -> int:
        values = dict(zip(of_backward, operands, strict=True))
        return _backward_scratch(Router(*(values[each] for each in names)), values["needs"])

    joined = declare(f"{name}_backward", run_backward, of_backward, list[Tensor])
    join(op, joined, outputs=(*outputs, "logits")[:made], gradients=GRADIENTS)
    register_scratch(joined, scratch)
    return op


_route_scored = _registered_scored("route_scored", is_sigmoid=False)
_route_scored_sigmoid = _registered_scored("route_scored_sigmoid", is_sigmoid=True)
