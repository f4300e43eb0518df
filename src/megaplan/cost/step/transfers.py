"""Transfers that a block waits for: tensor groups, expert exchange, context rings and pipeline hops, and what of them work hides."""

from __future__ import annotations

from typing import Any

from megaplan.cost.step.grouped import filled_up
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.workload import TimedStep
from megaplan.families.family import Exchanges

SHORT_RING = 0.85
"""Ranks' worth of a ring's bandwidth that filling it takes."""


def transfer_seconds(moved: Any, calls: Any, bandwidth: Any, latency: Any, exposed: Any) -> Any:
    """Seconds that work waits for collectives: x · (B / W + n · l).

    Args:
        moved: B, bytes that a rank sends.
        calls: n, collectives, or steps of a ring.
        bandwidth: W, reached bytes per second of the slowest link that the group uses.
        latency: l, seconds of a step beside its bytes.
        exposed: x, share that nothing hides; 1 without overlap.

    Source: NCCL's tuning model, latency and bandwidth terms.
    """
    return exposed * (moved / bandwidth + calls * latency)


def tensor(ledger: Ledger, work: TimedStep, again: float = 0.0) -> None:
    """A sharded block gathers its input and scatters its output; backward does both in reverse and gathers the input once more.

    Source: arXiv:2205.05198, section 4.2.2.
    """
    moved = _ring(work)
    if moved:
        ledger.transfer(FORWARD, "tensor", 2 * moved, 2)
        ledger.transfer(BACKWARD, "tensor", (3 + 2 * again) * moved, 3 + 2 * again)


def tensor_head(ledger: Ledger, work: TimedStep) -> None:
    """The head gathers its input; backward scatters its gradient and gathers the input again."""
    moved = _ring(work)
    ledger.transfer(FORWARD, "tensor", moved, 1)
    ledger.transfer(BACKWARD, "tensor", 2 * moved, 2)


def _ring(work: TimedStep) -> float:
    """Bytes that a rank of the tensor group sends to gather or scatter the stream, as a long ring would: (n − 1) slices of bf16."""
    return work.tokens / work.mesh.tp * work.spec.model.hidden_size * 2.0 * (work.mesh.tp - 1) * short_ring(work.mesh.tp)


def short_ring(ranks: float) -> float:
    """How much longer a byte takes in a ring of a few ranks of a domain than in a long one: (n + 0.85) / n.

    Source: NCCL's all-gather on two, four and eight H200 (ai-dynamo/aiconfigurator): 59, 72 and 77 % of the link.
    """
    return (ranks + SHORT_RING) / ranks


def context(ledger: Ledger, work: TimedStep, width: int, again: float) -> None:
    """A ring passes keys and values (`width` of all heads) of a rank's tokens to every other one, backward with their gradients."""
    ranks = work.mesh.cp
    if ranks > 1:
        moved = work.tokens * 2.0 * width / work.mesh.tp * (ranks - 1)
        ledger.transfer(FORWARD, "context", moved, ranks - 1)
        ledger.transfer(BACKWARD, "context", 2 * moved * (1 + 0.5 * again), 2 * (ranks - 1))


def copies(ranks: float, top_k: float, *, distinct: bool) -> float:
    """Copies of a token that are sent: top_k, or to `n (1 − (1 − 1/n)^k)` distinct ranks or domains under uniform routing."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k) if distinct else float(top_k)


def neighbouring_copies(ranks: float, top_k: int, num_experts: int) -> float:
    """Copies where a token's experts are `top_k` neighbours: the ranks that they touch on the mean, `1 + (k − 1) n / E`."""
    return min(ranks, 1 + (top_k - 1) * ranks / num_experts)


def exchange(ledger: Ledger, work: TimedStep, exchanges: Exchanges, again: float) -> None:
    """Dispatch and combine, forward and backward, and forward again where experts run again.

    NCCL's all-to-all sends a row for each expert; DeepEP and HybridEP send a row once to a rank, and once to another domain. Ranks that
    share an expert gather the rows that came to each of them, and scatter their results.

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
    """Rows of a token that go to `ranks` ranks or domains."""
    distinct, moe = work.software.dispatcher != "alltoall", work.spec.model.moe
    if distinct and work.software.neighbours and moe is not None:
        return neighbouring_copies(ranks, exchanges.rows, moe.num_experts)
    return copies(ranks, exchanges.rows * filled_up(work), distinct=distinct)


def near(domain: int, ranks: float, stride: float) -> float:
    """Ranks of a group in one domain if neighbours are `stride` ranks apart; at least 1."""
    return max(1.0, min(ranks, domain / stride))
