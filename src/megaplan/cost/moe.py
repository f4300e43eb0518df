"""Work of E blocks: router, dispatch, chosen experts, combine, shared expert."""

from __future__ import annotations

from megaplan.cost.ops import FP32_BYTES, linear, mlp, residual_norm
from megaplan.cost.work import Work, Workload
from megaplan.spec.models import MixtureOfExperts


def routing(load: Workload, moe: MixtureOfExperts, hidden_size: int) -> Work:
    """Router product, dispatch and combine.

    A token's row is read and written k times by dispatch and summed from k rows by combine; backward takes the same ways back. The fp32
    probabilities of all experts are written and read.

    Source: arXiv:1701.06538, section 2 (routing); counting operands.
    """
    rows = moe.top_k
    dispatch = 2 * rows + (rows + 1)
    combine = 2 * (rows + 1)
    moved = (dispatch + combine) * hidden_size * load.itemsize + 2 * moe.num_experts * FP32_BYTES
    return linear(load, hidden_size, moe.num_experts) + Work(moved=moved)


def moe_block(load: Workload, moe: MixtureOfExperts, hidden_size: int) -> Work:
    """One E block, pre-norm and residual included: `top_k` experts a token, and the shared expert.

    Every routed row is counted, dropless or not: a capacity factor that drops tokens makes this an upper bound, and skew moves work between
    ranks, not in total.

    Source: arXiv:2401.04088, section 2.1; arXiv:2401.06066, equation 9 (shared expert).
    """
    chosen = mlp(load, hidden_size, moe.ffn_hidden_size, moe.activation) * moe.top_k
    work = residual_norm(load, hidden_size) + routing(load, moe, hidden_size) + chosen
    if moe.shared_ffn_hidden_size:
        work += mlp(load, hidden_size, moe.shared_ffn_hidden_size, moe.activation)
    return work
