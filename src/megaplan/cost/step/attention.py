"""The attention core: FLOPs of visible pairs at a rate that falls where there are few query blocks."""

from __future__ import annotations

from typing import Any

from megaplan.cost.step.ledger import BACKWARD, FORWARD, AttentionCore, Ledger
from megaplan.cost.step.workload import AttentionShape, StepWorkload

BLOCK_ROWS = 128
BACKWARD_FLOPS = 2.5
"""Backward makes q kᵀ again and has four more products: five where forward has two."""
DOCUMENT_WASTE = BLOCK_ROWS
"""Keys beside a document's own that whole blocks on its diagonal compute."""
WINDOW_WASTE = 1.5
"""Of a window's pairs, what whole blocks compute beside them."""
NARROW, WIDE_BACKWARD = 0.88, 0.8
"""Heads outside 100 to 200 wide; backward of keys wider than 160."""


def attention_seconds(flops: Any, blocks: Any, width: Any, num_sms: Any, rate: Any, spread: Any) -> Any:
    """Seconds of an attention kernel: F / (R · w · b / (b + c · SMs)).

    Args:
        flops: F.
        blocks: b, query blocks of 128 rows times heads.
        width: w, share of the rate at these head widths.
        num_sms: Multiprocessors.
        rate: R, reached FLOPs per second with many blocks.
        spread: c, multiprocessors' worth of blocks that uneven causal blocks leave idle.

    Source: the form fitted to MooreThreads/SimuMax's sdp_fwd and sdp_bwd tables, A100 and B200.
    """
    return flops / (rate * width * blocks / (blocks + spread * num_sms))


def core(ledger: Ledger, work: StepWorkload, shape: AttentionShape, again: float) -> None:
    """Forward and backward of the core, on this rank's heads and queries; forward `again` times in backward."""
    seq, cp, tp, micro = work.batch.seq, work.mesh.cp, work.mesh.tp, work.batch.micro
    heads = shape.num_heads / tp
    document = work.batch.document
    pairs = seq * (min(seq, document + DOCUMENT_WASTE) if document else seq) / 2
    windowed = seq * min(shape.window, seq / 2) * WINDOW_WASTE if shape.window else pairs
    seen = pairs * (1 - shape.window_share) + windowed * shape.window_share
    flops = 2.0 * micro * heads * (shape.key_dim + shape.value_dim) * seen / cp
    blocks = micro * heads * seq / cp / BLOCK_ROWS
    width = 1.0 if 100 <= shape.key_dim <= 200 else NARROW
    forward = AttentionCore(FORWARD, 0, flops, blocks, width, work.machine.num_sms, 1.0)
    ledger.attention.append(forward)
    if again:
        ledger.attention.append(forward._replace(run=BACKWARD, times=again))
    width *= WIDE_BACKWARD if shape.key_dim > 160 else 1.0
    ledger.attention.append(AttentionCore(BACKWARD, 1, BACKWARD_FLOPS * flops, blocks, width, work.machine.num_sms, 1.0))
