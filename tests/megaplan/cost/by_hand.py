"""Times by hand: the roofline at half the peaks, and bytes of products and elementwise passes."""

from typing import get_args

from megaplan.blocks.work import OpWork
from megaplan.cost.values import LayerTime
from megaplan.families.registry import Rated

T, SEQ, H = 8192, 4096, 4096  # tokens of two sequences, one sequence, hidden
PERCENT, LAUNCH_NS, STEP_NS = 50, 1000, 700
HALF_SPEED = {
    "efficiency_percent": dict.fromkeys(get_args(Rated), PERCENT),
    "launch_ns": LAUNCH_NS,
    "recurrence_step_ns": STEP_NS,
}
FAMILIES = "AMERD"


def op_ns(flops: int = 0, moved: int = 0, steps: int = 0, peak: int = 989 * 10**12) -> int:
    """The roofline of one pass: FLOPs and bytes of the whole microbatch, at half the peaks of the data sheet."""
    compute = -(-flops * 10**9 * 100 // (peak * PERCENT))
    memory = -(-moved * 10**9 * 100 // (4_800 * 10**9 * PERCENT))
    return max(compute, memory, steps * STEP_NS) + LAUNCH_NS


def bf16(elements_per_token: int) -> int:
    return 2 * T * elements_per_token


def fp32(elements_per_token: int) -> int:
    return 4 * T * elements_per_token


def linears(*widths: tuple[int, int]) -> LayerTime:
    """Each product reads bf16 operands and its bf16 weight; W adds into an fp32 gradient, read and written."""
    forward = sum(op_ns(2 * i * o * T, bf16(i + o) + 2 * i * o) for i, o in widths)
    weight = sum(op_ns(2 * i * o * T, bf16(i + o) + 2 * 4 * i * o) for i, o in widths)
    return LayerTime(forward, forward, weight)


def elementwise(forward: int, backward: int) -> LayerTime:
    return LayerTime(op_ns(moved=forward), op_ns(moved=backward))


def residual_norm() -> LayerTime:
    return elementwise(bf16(4 * H) + fp32(1), bf16(4 * H) + fp32(1))


def executed_flops(op: OpWork) -> int:
    return op.work.forward + op.work.input_grad + op.work.weight_grad
