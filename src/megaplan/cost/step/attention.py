"""The attention core: FLOPs of visible pairs at a rate that falls where there are few query blocks."""

from __future__ import annotations

from typing import Any

from megakernels.ops.attention.facts import AttentionSizes
from megaplan.blocks.work import OpWork
from megaplan.cost.step.ledger import BACKWARD, FORWARD, AttentionCore, Ledger
from megaplan.cost.step.workload import TimedStep

BLOCK_ROWS = 128
DOCUMENT_WASTE = BLOCK_ROWS
"""Keys that whole blocks on a document's diagonal compute in addition to its own."""
WINDOW_WASTE = 1.5
"""Pairs that whole blocks compute over the pairs of a window."""
NARROW, WIDE_BACKWARD = 0.88, 0.83
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


def core(ledger: Ledger, work: TimedStep, op: OpWork, sizes: AttentionSizes, again: float) -> None:
    """Forward and backward of the core, on this rank's heads and queries; forward `again` times in backward.

    Documents that are packed into a sequence see themselves alone; a window that is shorter than they are is what a query sees.
    """
    document, positions = work.batch.document, sizes.batch * sizes.queries
    waste = WINDOW_WASTE if sizes.window is not None else 1.0
    if document:
        waste = min(waste, (document + DOCUMENT_WASTE) * positions / 2 / sizes.visible())
    blocks = positions * sizes.heads / BLOCK_ROWS
    width = 1.0 if 100 <= sizes.width <= 200 else NARROW
    forward = AttentionCore(FORWARD, 0, op.work.forward * positions * waste, blocks, width, work.machine.num_sms, 1.0)
    ledger.attention.append(forward)
    if again:
        ledger.attention.append(forward._replace(run=BACKWARD, times=again))
    width *= WIDE_BACKWARD if sizes.width > 160 else 1.0
    flops = op.work.input_grad * positions * waste
    ledger.attention.append(AttentionCore(BACKWARD, 1, flops, blocks, width, work.machine.num_sms, 1.0))
