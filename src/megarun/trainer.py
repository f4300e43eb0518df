"""One rank's training state and its optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarun.build import build_stage, materialise
from megarun.errors import refusal
from megarun.initialise import initialise
from megarun.job import Job
from megarun.model.stage import Stage
from megarun.optim.build import Optimizers
from megarun.optim.clip import clip_gradients
from megarun.parallel.fsdp import shard_stage
from megarun.parallel.mesh import RankMesh
from megarun.parallel.pipeline import build_runner
from megarun.parallel.recompute import recompute_stage
from megarun.parallel.shared import SharedGradients


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step measured, the same on every rank.

    Attributes:
        loss: Nats per token over the whole global batch.
        gradient_norm: Of the whole model, before clipping.
    """

    loss: float
    gradient_norm: float


def sharded_stage(job: Job, mesh: RankMesh) -> Stage:
    """This rank's stage on the meta device, with its recompute, wrapped by FSDP2."""
    stage = build_stage(job.spec, job.inventory, job.slot(mesh.coordinate["pp"]))
    recompute_stage(stage, job.spec, job.inventory)
    shard_stage(stage, job.spec, mesh)
    return stage


class Trainer:
    """A rank's stage, sharded and filled, with its schedule and optimizers.

    Built in the plan's code order (R-55): pipeline split, recompute, FSDP2 bottom up, storage and fill, then the optimizers. Collective.
    """

    def __init__(self, job: Job, mesh: RankMesh, stage: Stage | None = None) -> None:
        """Build everything a step needs.

        Args:
            job: What to train.
            mesh: This rank's place.
            stage: `sharded_stage(job, mesh)`, if that has been built already.
        """
        spec = job.spec
        slot = job.slot(mesh.coordinate["pp"])
        self.mesh, self._spec = mesh, spec
        self.stage = stage if stage is not None else sharded_stage(job, mesh)
        materialise(self.stage, mesh.device)
        self.fill(job)
        self._shared = SharedGradients(job.layout, mesh)
        self._runner = build_runner(self.stage, spec, mesh)
        self.optimizers = Optimizers(self.stage, job.inventory, spec)
        named = list(self.stage.named_parameters())
        copied = tuple(f"{block}." for block in slot.copies)
        self._owned = [p for name, p in named if not name.startswith(copied)] if copied else [p for _, p in named]
        self._copies = [p for name, p in named if copied and name.startswith(copied)]

    def fill(self, job: Job) -> None:
        """Give every parameter its first value."""
        initialise(self.stage, job.inventory, job.spec.training.seed)

    def read(self, scalar: Tensor) -> float:
        """A scalar's value on the host, which waits for the device; the one place where a step looks at numbers."""
        return float(scalar)

    def accumulate_gradients(self, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """Forward and backward of this rank's microbatches: its part of the loss, fp64; gradients are whole sums on every shard."""
        partial = self._runner.forward_backward(tokens, labels)
        self._shared.reduce(self.stage)
        return partial

    def step(self, step: int, tokens: Tensor | None, labels: Tensor | None) -> StepResult:
        """Forward, backward and update of 0-based `step` on this rank's rows.

        Raises:
            MegaplanError: MP607 if the loss or the gradient norm is not finite; parameters are as before the step.
        """
        partial = self.accumulate_gradients(tokens, labels)
        norm = clip_gradients(self._owned, self._copies, self.mesh, self._spec.training.gradient_clip, self.read)
        loss = self.read(self.mesh.sum(partial, "pp", "dp_replicate", "dp_shard"))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise refusal("MP607", f"step {step + 1}: loss = {loss}, gradient norm = {norm}", "training.learning_rate")
        self.optimizers.step(step)
        return StepResult(loss, norm)

    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state on this rank: what lives between two steps."""
        tensors = [*self.stage.parameters(), *self.stage.buffers(), *self.optimizers.state_tensors()]
        storages = {storage.data_ptr(): storage.nbytes() for storage in (_local(tensor).untyped_storage() for tensor in tensors)}
        return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
