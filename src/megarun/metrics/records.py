"""The lines of metrics.jsonl, one dataclass per kind; docs/reference/metrics.md lists the fields."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megarun.model.step_sums import Routed


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer steps done (1-based).
        loss: Loss over the global batch in nats per token, without the losses below.
        balance_loss: Load-balancing loss of the routers, over all E layers, including its coefficient.
        z_loss: Z-loss of the routers, over all E layers, including its coefficient.
        further_loss: Multi-token prediction loss, including its weight.
        tokens: Tokens of the step's global batch.
        tokens_per_second: Throughput of all ranks together.
        model_flops_per_second: Model FLOP/s of all ranks together, without recompute.
        mfu: Share of the planned devices' peak in the dtype of `precision.params`; None on CPU.
        allocated_bytes: Allocated bytes of the rank with the most.
        allocated_basis: `peak`: the step's peak of torch's device allocator. `resident`: on CPU, which counts no allocations, the
            parameters, buffers and optimizer state that live between steps.
        grad_norm: Global gradient norm before clipping.
        learning_rate: Learning rate of AdamW; Muon follows the same schedule.
        step_seconds: Wall-clock time of the step in seconds, including data.
        data_seconds: Time in seconds to read rows and copy them to the device, on rank 0; part of step_seconds.
        router_load: Rows of the busiest expert over the mean of all experts, in the global batch, by index of the E layer, or by the
            module of a prediction depth (`mtp.0.mlp`).
        router_entropy: Mean entropy of the routing distribution in nats, by index of the E layer.
        idle_experts: Number of experts without rows, by index of the E layer.
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


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Bits that code a byte of text, which compares models of different tokenizers; infinite for a file without text.

    Args:
        loss: Nats per token, the end of a document included.
        bytes_per_token: UTF-8 bytes of the texts over their tokens.
    """
    return loss / math.log(2) / bytes_per_token if bytes_per_token else math.inf


def routing_keys(routed: Routed) -> dict[str, Any]:
    """The keys of a step's line that have an entry per E layer."""
    layers = {routing.layer: routing for routing in routed.layers}
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
        evaluation_loss: Loss of the main prediction over all batches, nats per label.
        evaluation_bits_per_byte: The loss in bits over the UTF-8 bytes that a token of the held-out file has on average.
        tokens: Number of tokens of all batches.
        seconds: Wall-clock time in seconds.
    """

    step: int
    evaluation_loss: float
    evaluation_bits_per_byte: float
    evaluation_tokens: int
    evaluation_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of metrics.jsonl about a bad step.

    Attributes:
        decision: `skip`: the batch is skipped; `rewind`: the run continues from a checkpoint; `stop`: the run ends.
        step: Number of the bad step (1-based).
        reason: Reason why the step is bad.
        loss: Loss in nats per token; None if not finite.
        grad_norm: Global gradient norm; None if not finite.
        batches: Newly skipped batches, a half-open range.
        next_step: Number of the next step (1-based).
    """

    decision: Literal["skip", "rewind", "stop"]
    step: int
    reason: str
    loss: float | None
    grad_norm: float | None
    batches: tuple[int, int]
    next_step: int

    def text(self) -> str:
        """Description of the decision for messages."""
        first, stop = self.batches
        which = f"batch {first}" if stop == first + 1 else f"batches {first} to {stop - 1}"
        what = {"skip": f"skipped {which}", "rewind": f"rewound to step {self.next_step - 1}, without {which}", "stop": "the run ends"}
        return f"step {self.step}: {self.reason}: {what[self.decision]}"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One line of metrics.jsonl, after the second step, the first with steady-state memory.

    Attributes:
        step: Optimizer steps done.
        rank_allocated_bytes: Allocated bytes of each rank; basis as in `StepMetrics`.
        rank_planned_bytes: Estimated peak of a steady step on each rank, without allocator rounding; None on CPU, where only resident
            bytes are counted.
    """

    step: int
    rank_allocated_bytes: list[int]
    rank_planned_bytes: list[int] | None


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One line of metrics.jsonl, every ten steps of several ranks: means over these steps.

    Attributes:
        step: Optimizer steps done.
        rank_data_seconds: Time for reading rows on each rank.
        rank_compute_seconds: Time of the step without data loading and waiting for other ranks; None on CUDA.
        rank_communication_seconds: Time in collectives, waiting for slower ranks included; None on CUDA.
        slowest_rank: Rank whose time is beyond 1.5 times the median of the other ranks of its stage; None if none is.
        slowest_in: Activity that takes the slowest rank so long, `computing` or `reading data`.
        note: The same as a sentence.
    """

    step: int
    rank_data_seconds: list[float]
    rank_compute_seconds: list[float] | None
    rank_communication_seconds: list[float] | None
    slowest_rank: int | None
    slowest_in: str | None
    note: str | None
