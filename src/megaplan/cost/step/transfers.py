"""Transfers that a block waits for: tensor groups, expert exchange, context rings and pipeline hops."""

from typing import Any

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.gemm import ELEMENT_BYTES
from megaplan.cost.step.grouped import busiest, padding
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.own_modules import modules_of
from megaplan.cost.step.workload import TimedStep
from megaplan.families.family import Exchanges

SHORT_RING = 0.85
"""Time to fill a ring, in multiples of the time of one rank's bytes."""


def transfer_seconds(moved: Any, calls: Any, bandwidth: Any, latency: Any, exposed: Any) -> Any:
    """Seconds that work waits for collectives: x · (B / W + n · l).

    Args:
        moved: B, bytes that a rank sends.
        calls: n, collectives, or steps of a ring.
        bandwidth: W, reached bytes per second of the slowest link that the group uses.
        latency: l, seconds of one collective without its bytes.
        exposed: x, share that no computation hides; 1 without overlap.

    Source: NCCL's tuning model, latency and bandwidth terms.
    """
    return exposed * (moved / bandwidth + calls * latency)


def tensor(ledger: Ledger, work: TimedStep, again: float = 0.0, *, shares: bool = False) -> None:
    """Add the transfers of a sharded block: a gather of its input and a scatter of its output; backward reverses both and gathers again.

    A block that `shares` the previous block's input is gathered and reduced with that block, unless modules reduce its gradient separately.

    Source: arXiv:2205.05198, section 4.2.2; what is gathered in low precision: `gather_along_first_dim` of
    `transformer_engine/pytorch/distributed.py` at d0067d0d, and `grad_output_preprocess` of `module/base.py`.
    """
    moved, gathered, modules = _ring(work), _gathered_share(work), modules_of(work)
    if shares:
        if modules is not None and modules.separate_gradients:
            ledger.transfer(BACKWARD, "tensor", (1 + gathered) * moved, 2)
    elif moved:
        kept = 0 if work.software.sequence_parallel else 1  # the weight gradient reads the gathered input
        ledger.transfer(FORWARD, "tensor", (1 + gathered) * moved, 2)
        ledger.transfer(BACKWARD, "tensor", (1 + (2 - kept) * gathered + (1 + gathered) * again) * moved, 3 - kept + 2 * again)


def saved(ledger: Ledger, work: TimedStep) -> None:
    """Add the gather of a checkpoint that tensor ranks shard, before its layer is recomputed."""
    ledger.transfer(BACKWARD, "tensor", work.recomputed.full * _ring(work), work.recomputed.full)


def _gathered_share(work: TimedStep) -> float:
    """Bytes of a gathered element relative to bf16: Transformer Engine casts a product's input before the gather."""
    dtype = work.software.linear_dtype or work.software.dtype
    return ELEMENT_BYTES[dtype] / ELEMENT_BYTES["bf16"] if framework(work.software.name).kernels == "te" else 1.0


def tensor_head(ledger: Ledger, work: TimedStep) -> None:
    """Add the transfers of the head: it gathers its input; backward scatters the gradient and gathers the input again."""
    moved = _ring(work)
    if work.software.sequence_parallel:
        ledger.transfer(FORWARD, "tensor", moved, 1)
    ledger.transfer(BACKWARD, "tensor", 2 * moved, 2)


def _ring(work: TimedStep) -> float:
    """Bytes that a rank of the tensor group sends to gather or scatter the residual stream: (n − 1) slices of bf16, times `short_ring`."""
    return work.tokens / work.mesh.tp * work.spec.model.hidden_size * 2.0 * (work.mesh.tp - 1) * short_ring(work.mesh.tp)


def short_ring(ranks: float) -> float:
    """Ratio of the time of a byte in a ring of n ranks of a domain to that in a long ring: (n + 0.85) / n.

    Source: NCCL's all-gather on two, four and eight H200 (ai-dynamo/aiconfigurator): 59, 72 and 77 % of the link.
    """
    return (ranks + SHORT_RING) / ranks


def context(ledger: Ledger, work: TimedStep, width: int, again: float) -> None:
    """Add the ring that passes keys and values (`width` over all heads) of each rank to all others; backward also passes gradients."""
    ranks = work.mesh.cp
    if ranks > 1:
        moved = work.tokens * 2.0 * width / work.mesh.tp * (ranks - 1)
        ledger.transfer(FORWARD, "context", moved, ranks - 1)
        ledger.transfer(BACKWARD, "context", 2 * moved * (1 + 0.5 * again), 2 * (ranks - 1))


def copies(ranks: float, top_k: float, *, distinct: bool) -> float:
    """Number of copies of a token that are sent.

    It is top_k; or, if each distinct rank or domain gets one copy, `n (1 − (1 − 1/n)^k)` under uniform routing.
    """
    return ranks * (1 - (1 - 1 / ranks) ** top_k) if distinct else float(top_k)


def neighbouring_copies(ranks: float, top_k: int, num_experts: int) -> float:
    """Number of copies sent of a token whose `top_k` experts are consecutive: the average number of their ranks, `1 + (k − 1) n / E`."""
    return min(ranks, 1 + (top_k - 1) * ranks / num_experts)


def exchange(ledger: Ledger, work: TimedStep, exchanges: Exchanges, again: float) -> None:
    """Add dispatch and combine of forward and backward; recomputed experts repeat the forward's.

    NCCL's all-to-all sends a row to each expert; DeepEP and HybridEP send it once to each rank, and once to each other domain. Ranks that
    share an expert gather each other's received rows, and reduce-scatter their results.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py, dispatch_postprocess and combine_preprocess.
    """
    mesh, row = work.mesh, work.tokens / work.mesh.tp * (exchanges.row_width or work.spec.model.hidden_size) * 2.0
    if mesh.etp > 1:
        moved = row * _sent(work, exchanges, mesh.ep) * (mesh.etp - 1) * short_ring(mesh.etp)
        ledger.transfer(FORWARD, "tensor", 2 * moved, 2)
        ledger.transfer(BACKWARD, "tensor", 2 * moved * (1 + again), 2)
    if mesh.ep == 1:
        return
    inside = near(work.machine.domain, mesh.ep, mesh.etp)
    ranks = mesh.ep / inside if inside < mesh.ep else float(mesh.ep)
    moved = row * _sent(work, exchanges, ranks) * (ranks - 1) / ranks
    ledger.transfer(FORWARD, "exchange", 2 * moved, 2)
    ledger.transfer(BACKWARD, "exchange", 2 * moved * (1 + again), 2)


def _sent(work: TimedStep, exchanges: Exchanges, ranks: float) -> float:
    """Rows of a token that are sent to `ranks` ranks or domains, or that the busiest of them receives.

    With `distinct` each gets a token only once.
    """
    moe, share = work.spec.model.moe, busiest(work, exchanges.skew)
    if work.software.dispatcher == "alltoall":
        return share * copies(ranks, exchanges.rows * padding(work), distinct=False)
    if work.software.neighbours and moe is not None:
        return min(ranks, share * neighbouring_copies(ranks, exchanges.rows, moe.num_experts))
    return min(ranks, share * copies(ranks, exchanges.rows * padding(work), distinct=True))


def near(domain: int, ranks: float, stride: float) -> float:
    """Ranks of a group in one domain if consecutive ones differ by `stride` ranks; at least 1."""
    return max(1.0, min(ranks, domain / stride))
