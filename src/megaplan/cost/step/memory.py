"""Memory-bound kernels: norms, residuals, activations, rotary, logits, casts, permutation and gradient accumulation, by their bytes."""

from typing import Any


def moved_seconds(moved: Any, bandwidth: Any, factor: Any) -> Any:
    """Seconds of memory-bound kernels: f · B / W.

    Args:
        moved: B, bytes if every operand is read once and every result written once.
        bandwidth: W, reached bytes per second of memory.
        factor: f, ratio of the bytes that the framework's kernels move to B.

    Source: counting operands.
    """
    return factor * moved / bandwidth
