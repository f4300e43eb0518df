"""Mamba-2's chunked scan: products of chunks and states at a rate of its own, and bytes of its operands."""

from __future__ import annotations

from typing import Any

from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger, Scan
from megaplan.cost.step.workload import MambaShape, StepWorkload

CHUNK = 128
BACKWARD_WORK = 2.5


def scan_seconds(flops: Any, moved: Any, rate: Any, bandwidth: Any) -> Any:
    """Seconds of a scan: F / R + B / W.

    Args:
        flops: F, of a chunk's products: C Bᵀ, its product with x, states and their outputs.
        moved: B, bytes of x, B, C, outputs and states.
        rate: R, reached FLOPs per second.
        bandwidth: W, reached bytes per second of memory.

    Source: arXiv:2405.21060, section 6, counting products of chunks.
    """
    return flops / rate + moved / bandwidth


def scan(ledger: Ledger, work: StepWorkload, shape: MambaShape, again: float) -> None:
    """The scan and its convolution, forward and backward."""
    tokens, inner = work.tokens / work.mesh.tp, shape.num_heads * shape.head_dim
    states = shape.num_groups * shape.state_dim
    flops = tokens * (2.0 * CHUNK * states + 2.0 * CHUNK * inner + 4.0 * inner * shape.state_dim)
    moved = tokens * (4.0 * (inner + 2 * states) + 18.0 * inner)
    ledger.scans.append(Scan(FORWARD, flops, moved))
    times = BACKWARD_WORK * (1 + again / BACKWARD_WORK)
    ledger.scans.append(Scan(BACKWARD, flops * times, moved * times))
