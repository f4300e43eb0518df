"""Memory-bound kernels: norms, residuals, activations, rotary, logits, casts, permutation and gradient accumulation, by their bytes."""

from __future__ import annotations

from typing import Any

from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger

NORM_FORWARD, NORM_BACKWARD, NORM_AGAIN = 10.0, 12.0, 5.0
"""Bytes of a hidden element around a block: norm and residual, their gradients, and the norm alone when it runs again."""
LOGIT_BYTES = 6.0
"""Of a logit and pass: bf16 logits and their fp32 statistics and gradient."""
ROUTER_BYTES = 16.0
"""Of an expert and token: scores, probabilities, choice and map in fp32."""
PERMUTE_PASSES = 4.0
"""Rows are read and written before the experts and after them."""


def moved_seconds(moved: Any, bandwidth: Any, factor: Any) -> Any:
    """Seconds of memory-bound kernels: f · B / W.

    Args:
        moved: B, bytes if every operand is read once and every result written once.
        bandwidth: W, reached bytes per second of memory.
        factor: f, how much more the framework's kernels move.

    Source: counting operands.
    """
    return factor * moved / bandwidth


def norms(ledger: Ledger, tokens: float, hidden: int, again: float) -> None:
    """Norm and residual of a block on the rank's own tokens."""
    ledger.move(FORWARD, tokens * hidden * NORM_FORWARD)
    ledger.move(BACKWARD, tokens * hidden * (NORM_BACKWARD + again * NORM_AGAIN))


def activation(ledger: Ledger, rows: float, width: float, *, gated: bool, again: float) -> None:
    """Elementwise activation of an MLP or of experts in bf16; a gated one reads two and writes one, backward reads three and writes two."""
    forward, backward = (6.0, 10.0) if gated else (4.0, 6.0)
    ledger.move(FORWARD, rows * width * forward)
    ledger.move(BACKWARD, rows * width * (backward + again * forward))


def permutation(ledger: Ledger, rows: float, width: int, again: float) -> None:
    """Routed rows sorted to experts and back, bf16; backward the same, and forward again where experts run again."""
    moved = rows * width * 2.0 * PERMUTE_PASSES
    ledger.move(FORWARD, moved, "permute")
    ledger.move(BACKWARD, moved * (1 + again), "permute")


def router(ledger: Ledger, tokens: float, hidden: int, num_experts: int) -> None:
    """Scores, choice and map of a router."""
    ledger.move(FORWARD, tokens * (2.0 * hidden + ROUTER_BYTES * num_experts))
    ledger.move(BACKWARD, tokens * (4.0 * hidden + ROUTER_BYTES * num_experts))
