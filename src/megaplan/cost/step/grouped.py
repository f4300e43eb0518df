"""Grouped products of routed experts, one launch for all local experts."""

from typing import Any

from megakernels.ops.activation.facts import activation
from megakernels.ops.moe.facts import ExpertSizes
from megaplan.blocks.work import OpWork
from megaplan.cost.step import launch
from megaplan.cost.step.gemm import ELEMENT_BYTES, JOIN
from megaplan.cost.step.ledger import BACKWARD, FORWARD, GroupedProduct, Ledger
from megaplan.cost.step.workload import TimedStep


def grouped_seconds(
    flops: Any,
    weight_bytes: Any,
    row_bytes: Any,
    rows: Any,
    depth: Any,
    rate: Any,
    bandwidth: Any,
    share: Any,
    half_rows: Any,
    half_depth: Any,
    weight_share: Any,
) -> Any:
    """Seconds of grouped products: ((F / (R · s · m/(m + m0) · K/(K + k0)))^1.7 + ((Bw/w + Br) / W)^1.7)^(1/1.7).

    Args:
        flops: F, FLOPs of all local experts.
        weight_bytes: Bw, bytes of weights read, or of gradients read and written.
        row_bytes: Br, bytes of rows read and written.
        rows: m, rows of one expert.
        depth: K.
        rate: R, reached FLOPs per second of a large dense product.
        bandwidth: W, reached bytes per second of memory.
        share: s, largest share of the dense rate that grouped kernels reach; at most 1.
        half_rows: m0, number of rows with half of that rate.
        half_depth: k0, as in a dense product.
        weight_share: w, share of the memory rate at which weights are read.

    Source: the form fitted to MooreThreads/SimuMax's group_matmul table, B200.
    """
    compute = flops / (rate * share * rows / (rows + half_rows) * depth / (depth + half_depth))
    return (compute**JOIN + ((weight_bytes / weight_share + row_bytes) / bandwidth) ** JOIN) ** (1 / JOIN)


BIAS_BYTES = 12.0, 16.0
"""Bytes per element of the last linear's rows that its bias moves: the product with the router's weight, the sum and their concatenation;
in backward both products with the gradient, both sums, and the split (NVIDIA/Megatron-LM@d98e8a64, `TEGroupedMLP._apply_bias`)."""
MULTIPLES = {"fp8": 16, "mxfp8": 32, "nvfp4": 32}
"""Multiple to which the rows of an expert are padded, by dtype (`moe_router_padding_for_quantization` of Megatron-Core)."""


def padding(work: TimedStep) -> float:
    """Ratio of the rows that experts compute to routed rows: under a fixed capacity, or padded to a multiple on every rank.

    The padding is half a multiple on average.
    """
    moe = work.spec.model.moe
    assert moe is not None
    multiple = MULTIPLES.get(work.software.dtype, 1) if work.software.padded_rows else 1
    routed = work.tokens / work.mesh.tp * moe.top_k / moe.num_experts
    return (moe.capacity_factor or 1.0) * (1 + (multiple - 1) / 2 / routed)


def busiest(work: TimedStep, skew: float) -> float:
    """Ratio of the busiest expert rank's rows to the even share for a layer with this skew; 1 with a fixed capacity."""
    moe = work.spec.model.moe
    assert moe is not None
    return 1.0 if skew == 1.0 or moe.capacity_factor is not None else float(moe.busiest_share(skew, work.mesh.ep))


def experts(ledger: Ledger, work: TimedStep, op: OpWork, bank: ExpertSizes, tokens: float, again: float) -> None:
    """Add both linears of all local experts on routed rows, and the activation between them unless the products apply it.

    Args:
        ledger: Ledger of the block.
        work: The step.
        op: The operation of the experts.
        bank: Sizes of the experts.
        tokens: Tokens of the rank.
        again: Times that backward runs the forward products again.
    """
    rows = tokens * bank.slots * work.mesh.etp * padding(work) * busiest(work, op.skew or 1.0)
    fused = launch.experts_fused(work.software)
    if bank.bias and launch.expert_by_expert(work.software):
        for run, moved in zip((FORWARD, BACKWARD), BIAS_BYTES, strict=True):
            ledger.move(run, moved * rows * bank.hidden)
    activated = activation(bank.width, bank.itemsize, gated=bank.gated)
    trained = op.work.weight_grad > 0
    _linear(ledger, work, bank, rows, bank.width * (1 + bank.gated), bank.hidden, again, (True, not fused), trained=trained)
    _linear(ledger, work, bank, rows, bank.hidden, bank.width, again, (not fused, True), trained=trained)
    if fused:
        ledger.move(BACKWARD, rows * bank.width * (1 + bank.gated) * bank.itemsize)  # no activation kernel; the backward reads its input
    else:
        ledger.move(FORWARD, rows * activated.moved_forward)
        repeated = 1.0 if "moe_act" in work.recomputed.modules else again
        ledger.move(BACKWARD, rows * (activated.moved_input + repeated * activated.moved_forward))


def _linear(
    ledger: Ledger,
    work: TimedStep,
    bank: ExpertSizes,
    rows: float,
    columns: int,
    depth: int,
    again: float,
    casts: tuple[bool, bool],
    *,
    trained: bool,
) -> None:
    """Add one linear of all local experts: forward, input and weight gradient, and casts.

    Args:
        ledger: Ledger of the block.
        work: The step.
        bank: Sizes of the experts.
        rows: Routed rows of this rank.
        columns: Width of the result.
        depth: Width of the input.
        again: Times that backward runs the forward product again.
        casts: True for the input, and for the gradient, if a separate kernel casts it.
        trained: True if the weights have gradients.
    """
    dtype, per_expert = work.software.dtype, rows / bank.experts
    flops, weights, moved = 2.0 * rows * columns * depth, float(bank.experts * columns * depth), 2.0 * rows * (columns + depth)
    size = ELEMENT_BYTES[dtype]
    forward = GroupedProduct(FORWARD, dtype, flops, size * weights, moved, per_expert, depth, 1.0)
    ledger.grouped.append(forward)
    if again:
        ledger.grouped.append(forward._replace(run=BACKWARD, times=again))
    ledger.grouped.append(forward._replace(run=BACKWARD, depth=columns))
    if trained:
        ledger.grouped.append(forward._replace(run=BACKWARD, weight_bytes=8.0 * weights, depth=per_expert))
    if dtype != "bf16":
        ledger.move(FORWARD, 4.0 * rows * depth * casts[0], f"cast.rows.{dtype}")
        ledger.move(BACKWARD, 4.0 * rows * columns * casts[1], f"cast.rows.{dtype}")
