"""The lines of metrics.jsonl, a dataclass each: its fields are the keys that docs/reference/metrics.md lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megarun.model.step_sums import Routed


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: 1-based: optimizer steps done.
        loss: Nats per token over the global batch, without the losses below.
        balance_loss: What the routers' load balancing adds to it, over all E layers, its coefficient included.
        z_loss: Likewise their z-loss.
        further_loss: What predicting further tokens adds to it, its weight included.
        tokens: Of the step's global batch.
        tokens_per_second: All ranks together.
        model_flops_per_second: All ranks together, repeated work left out.
        mfu: Of the planned devices' peak in the dtype of `precision.params`; None on CPU.
        allocated_bytes: Of the rank with most.
        allocated_basis: `peak`: the step's peak of torch's device allocator. `resident`: on CPU, which counts no allocations, the
            parameters, buffers and optimizer state that live between steps.
        grad_norm: Before clipping.
        learning_rate: AdamW's; Muon's follows the same schedule.
        step_seconds: Wall clock, data included.
        data_seconds: Part of it: reading rows and handing them to the device, on rank 0's host.
        router_load: By index of each E layer, rows of its busiest expert over the mean of all, in the whole batch.
        router_entropy: Likewise the mean entropy of its routing distribution, in nats.
        idle_experts: Likewise how many of its experts got no row.
    """

    step: int
    loss: float
    balance_loss: float
    z_loss: float
    further_loss: float
    tokens: int
    tokens_per_second: float
    model_flops_per_second: float
    mfu: float | None
    allocated_bytes: int
    allocated_basis: str
    grad_norm: float
    learning_rate: float
    step_seconds: float
    data_seconds: float
    router_load: dict[str, float]
    router_entropy: dict[str, float]
    idle_experts: dict[str, int]


def routing_keys(routed: Routed) -> dict[str, Any]:
    """The keys of a step's line that have an entry for each E layer."""
    layers = {str(routing.layer): routing for routing in routed.layers}
    return {
        "router_load": {layer: routing.load for layer, routing in layers.items()},
        "router_entropy": {layer: routing.entropy for layer, routing in layers.items()},
        "idle_experts": {layer: routing.num_idle for layer, routing in layers.items()},
    }


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer steps done.
        evaluation_loss: Nats per label over all batches, main prediction alone.
        tokens: Of all batches.
        seconds: Wall clock.
    """

    step: int
    evaluation_loss: float
    evaluation_tokens: int
    evaluation_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of metrics.jsonl about a bad step.

    Attributes:
        decision: skip: the batch is left out; rewind: back to a checkpoint; stop: the run ends.
        step: 1-based: the one that was not made.
        reason: What is bad.
        loss: None where it is not finite.
        grad_norm: Likewise.
        batches: What is left out from now on and was not before, half-open.
        next_step: 1-based: the one that is made next.
    """

    decision: Literal["skip", "rewind", "stop"]
    step: int
    reason: str
    loss: float | None
    grad_norm: float | None
    batches: tuple[int, int]
    next_step: int

    def text(self) -> str:
        """For a person."""
        first, stop = self.batches
        which = f"batch {first}" if stop == first + 1 else f"batches {first} to {stop - 1}"
        what = {"skip": f"skipped {which}", "rewind": f"back to step {self.next_step - 1}, without {which}", "stop": "the run ends"}
        return f"step {self.step}: {self.reason}: {what[self.decision]}"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One line of metrics.jsonl, after the second step: the first that is like all later ones.

    Attributes:
        step: Optimizer steps done.
        rank_allocated_bytes: Of each rank; basis as in `StepMetrics`.
        rank_planned_bytes: The estimate's peak of a steady step on each rank, without allocator rounding; None on CPU, whose basis is what
            lives between steps.
    """

    step: int
    rank_allocated_bytes: list[int]
    rank_planned_bytes: list[int] | None
