"""metrics.jsonl: one object a step, and one for each decision about a bad step, written by rank 0."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from megaplan.cost.model import model_costs
from megaplan.spec.device import device_of
from megarun.bad_steps import Decision
from megarun.errors import refusal
from megarun.evaluation import Evaluated
from megarun.job import Job
from megarun.memory import RankMemory
from megarun.model.step_sums import Routed
from megarun.tensorboard import Board

FILE_NAME = "metrics.jsonl"


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
class Utilisation:
    """What a job's throughput is measured by.

    Attributes:
        flops_per_token: Model FLOPs of one token's forward and backward.
        peak_flops: FLOPs a second of all planned devices; None where it does not run on such.
    """

    flops_per_token: int
    peak_flops: int | None

    @classmethod
    def of(cls, job: Job, device: torch.device) -> Utilisation:
        """Of a job that runs on devices of a kind."""
        spec = job.spec
        peak = device_of(spec.device).peak_flops[spec.precision.params].value * spec.mesh.world_size
        return cls(model_costs(spec, job.inventory).model_flops, peak if device.type == "cuda" else None)

    def rates(self, tokens_per_second: float) -> tuple[float, float | None]:
        """Model FLOPs a second, and the part of the peak that they are."""
        rate = self.flops_per_token * tokens_per_second
        return rate, None if self.peak_flops is None else rate / self.peak_flops


class MetricsFile:
    """Appends lines to metrics.jsonl, which must be new unless the run is resumed; on ranks other than 0 it writes nothing."""

    def __init__(self, folder: Path, rank: int, *, resumed: bool = False, tensorboard: bool = False) -> None:
        self._path, self._writes, self._resumed, self._shows = folder / FILE_NAME, rank == 0, resumed, tensorboard
        self._file: TextIO | None = None
        self._board: Board | None = None

    def __enter__(self) -> MetricsFile:
        if self._writes:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a" if self._resumed else "x", encoding="utf-8")
            except FileExistsError:
                hint = f"--out {self._path.parent}-2"
                raise refusal("MP608", f"{self._path} exists", hints=(hint,), file=str(self._path.parent)) from None
            except OSError as error:
                raise refusal("MP608", f"{self._path}: {error.strerror}", file=str(self._path.parent)) from None
            if self._shows:
                self._board = Board(self._path.parent)
        return self

    def write(self, metrics: StepMetrics | Evaluated | Decision | RankMemory) -> None:
        """One more line, at once on disk."""
        if self._file is not None:
            line = asdict(metrics)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            if self._board is not None:
                self._board.write(line)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
