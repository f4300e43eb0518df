"""Forward and backward of one optimizer step: torch's pipeline schedule, or one stage accumulating microbatches in order."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from megaplan.schedules import SCHEDULES
from megaplan.spec.models import Spec
from megarun.data.batches import Batch
from megarun.data.images import num_labels
from megarun.model.stage import Stage
from megarun.model.step_sums import start_sums
from megarun.parallel.apply.interleaved import interleave_pairs
from megarun.parallel.apply.mirrored import HALVES, ScheduleDualPipe
from megarun.parallel.apply.order import check_order
from megarun.parallel.apply.pipeline_stage import pipeline_stage
from megarun.parallel.apply.planned import SchedulePaired1F1B
from megarun.parallel.apply.whole import whole_state
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.tensor import TensorParallel, tensor_parallel
from megarun.parallel.groups.tensor_vocabulary import summed_cross_entropy


class Runner(Protocol):
    """Runs the microbatches of one step and accumulates their gradients in the parameters."""

    @property
    def loss(self) -> "BatchLoss":
        """Criterion of a microbatch."""
        ...

    def forward_backward(self, batch: Batch) -> Tensor:
        """The loss of this rank's microbatches, fp64, 0 on a stage without the head."""
        ...


OWN: dict[str, type[PipelineScheduleMulti]] = {"dualpipe": ScheduleDualPipe, "paired_1f1b": SchedulePaired1F1B}
"""Classes of schedules that torch does not have."""


def schedule_class(kind: str) -> type[PipelineScheduleSingle | PipelineScheduleMulti]:
    """Torch's class of a schedule, or megarun's of one that torch does not have."""
    name = SCHEDULES[kind].torch_name
    found: type[PipelineScheduleSingle | PipelineScheduleMulti] = OWN[kind] if name is None else get_schedule_class(name)
    return found


def build_runner(stages: Sequence[Stage], spec: Spec, mesh: RankMesh) -> Runner:
    """The runner of a rank's sharded stages, by chunk; collective over the pipeline group if there is one."""
    return PipelineRunner(stages, spec, mesh) if mesh.size("pp") > 1 else AccumulatingRunner(stages[0], spec, mesh)


def batch_loss(spec: Spec, mesh: RankMesh) -> "BatchLoss":
    """The criterion of this job: divides by the labels of the global batch, over all microbatches of an update and all data ranks.

    With packed rows, whose number of labels differs, each update sets its own divisor.
    """
    tp = tensor_parallel(mesh)
    return BatchLoss(num_labels(spec), tp if spec.mesh.vocab_parallel and tp.degree > 1 else None)


class BatchLoss(nn.Module):
    """Summed cross-entropy of a microbatch divided by the tokens of the global batch, so that microbatches and ranks are summed.

    Attributes:
        num_tokens: The divisor.
        loss_scale: Factor of the result, a power of two.
    """

    def __init__(self, num_tokens: int, slices: TensorParallel | None = None) -> None:
        """Args: tokens of the global batch, and the TP group if the vocabulary is sharded."""
        super().__init__()
        self.num_tokens, self._slices, self.loss_scale = num_tokens, slices, 1.0
        self._held: Tensor | None = None

    def forward(self, output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """The last stage's output and labels [B, T] -> fp32 scalar: of local tokens, or of all if the vocabulary is sharded.

        Args:
            output: Logits [B, T, V], with the summed multi-token prediction loss if the model has one; or the summed loss, from a stage
                that computes it.
            labels: int64 [B, T].
        """
        if isinstance(output, Tensor) and output.dim() == 0:
            return self._divided(output)
        logits, further = output if isinstance(output, tuple) else (output, None)
        loss = summed_cross_entropy(self._slices, logits, labels)
        return self._divided(loss if further is None else loss + further)

    def divide_by(self, num_tokens: int) -> None:
        """Set the divisor of the microbatches that follow."""
        self.num_tokens = num_tokens
        if self._held is not None:
            # on CUDA torch multiplies by the reciprocal of a number, in fp32: aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu
            value = np.float32(num_tokens)
            self._held.fill_(float(np.float32(1) / value if self._held.is_cuda else value))

    def hold(self, device: torch.device) -> None:
        """Read the divisor from the device from now on: a recorded graph has the numbers of its recording."""
        self._held = torch.ones((), dtype=torch.float32, device=device)
        self.divide_by(self.num_tokens)

    def let_go(self) -> None:
        """Undo `hold`."""
        self._held = None

    def held_tensors(self) -> list[Tensor]:
        """The divisor of the loss, if it is on the device."""
        return [] if self._held is None else [self._held]

    def _divided(self, loss: Tensor) -> Tensor:
        if self._held is None:
            divided = loss / self.num_tokens
            return divided if self.loss_scale == 1 else divided * self.loss_scale
        return loss * self._held if self._held.is_cuda else loss / self._held


class AccumulatingRunner:
    """One stage: forward and backward of each microbatch in order, each reduced into the gradient shards.

    Attributes:
        stage: The stage.
        loss: Criterion of a microbatch.
        device: The rank's device.
        num_microbatches: Microbatches of a step.
    """

    def __init__(self, stage: Stage, spec: Spec, mesh: RankMesh) -> None:
        self.stage, self.loss, self.device = stage, batch_loss(spec, mesh), mesh.device
        self.num_microbatches = spec.schedule.microbatches_per_update

    def forward_backward(self, batch: Batch) -> Tensor:
        """See `Runner`; one stage is first and last."""
        self.begin()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if batch.packed is not None:
            self.loss.num_tokens = batch.packed.num_targets
        whole = whole_state(self.stage)
        for index in range(self.num_microbatches):
            if whole is not None and index == self.num_microbatches - 1:
                whole.sum_next()
            total += self.microbatch(batch.part(index, self.num_microbatches))
        end_sums([self.stage])
        return total

    def begin(self) -> None:
        """Reset the sums over the microbatches of a step."""
        start_sums([self.stage])

    def microbatch(self, part: Batch) -> Tensor:
        """Forward and backward of one microbatch; returns its part of the loss, fp32."""
        if part.tokens is None or part.labels is None:
            raise ValueError("a single stage needs tokens and labels")
        loss = self.loss(self.stage(part.tokens, **part.keyword_inputs()), part.labels)
        torch.autograd.backward(loss)
        found: Tensor = loss.detach()
        return found


class PipelineRunner:
    """torch's schedule over the stages of the pp axis, one or several on each rank, run `schedule.steps_per_update` times.

    Unsharded gradients are kept between these steps, and the last one reduces them: bitwise equal to one step of all microbatches, with
    one reduction per update, and without gradient shards in addition to the unsharded gradients. Receive buffers exist for one step.

    Shapes are stated, so that torch infers none by running the model, and the outputs of the last stage are not collected.
    """

    def __init__(self, stages: Sequence[Stage], spec: Spec, mesh: RankMesh) -> None:
        self._device, self._modules = mesh.device, stages
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # otherwise every rank prints its whole order after the error
        kind = schedule_class(spec.schedule.kind)
        check_order(kind, mesh.coordinate["pp"], spec)
        several = issubclass(kind, PipelineScheduleMulti)
        self._stages, self._num_steps = [pipeline_stage(stage, spec, mesh) for stage in stages], spec.schedule.steps_per_update
        torch_stages: Any = self._stages
        self._copies, self._num_parts = spec.num_copies, spec.mesh.num_slots
        self.loss = batch_loss(spec, mesh)
        self._schedule = kind(
            torch_stages if several else torch_stages[0],
            spec.schedule.num_microbatches // self._copies,
            loss_fn=self.loss,
            scale_grads=False,
        )
        if several:
            leave_gathering_to_fsdp(self._schedule)
        if spec.interleaves_pairs:
            interleave_pairs(self._schedule, stages, mesh.device)

    def forward_backward(self, batch: Batch) -> Tensor:
        """See `Runner`."""
        start_sums(self._modules)
        if batch.packed is not None:
            self.loss.num_tokens = batch.packed.num_targets
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for step in range(self._num_steps):
            for stage in self._stages:
                stage.reduces = step == self._num_steps - 1
            losses: list[Tensor] = []
            tokens, labels, keywords = self._inputs(batch.part(step, self._num_steps))
            inputs = () if tokens is None else (tokens,)
            reported = None if labels is None else losses
            # torch splits keyword inputs by microbatch for every stage
            self._schedule.step(*inputs, target=labels, losses=reported, return_outputs=False, **keywords)
            for loss in losses:
                total += loss.detach()
        end_sums(self._modules)
        return total

    def _inputs(self, part: Batch) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
        """Tokens, labels and keyword inputs of a step; with two copies of the model, half of the rows for each."""
        if self._copies == 1:
            return part.tokens, part.labels, part.keyword_inputs()
        halves, tokens, labels = [part.part(copy, self._copies) for copy in range(self._copies)], None, None
        for stage in self._modules:
            own = halves[stage.index // self._num_parts]
            tokens, labels = own.tokens if stage.embeds else tokens, own.labels if stage.predicts else labels
        return tokens, labels, {HALVES: tuple(half.keyword_inputs() for half in halves)}


def end_sums(stages: Sequence[Stage]) -> None:
    """Make the device wait for the sums of gradients over data ranks."""
    for stage in stages:
        whole = whole_state(stage)
        if whole is not None:
            whole.end_sums()


def leave_gathering_to_fsdp(schedule: Any) -> None:
    """Make FSDP2 gather each layer when it runs and free it by `sharding.reshard_after_forward`, under every schedule.

    torch's runtime for several stages per rank would gather complete stages before their first microbatch, ignoring that key, with every
    layer's all-gather output alive at the same time, and free them between two uses.
    """

    def gather(action: Any, ctx: Any) -> None:
        ctx.schedule_ref.unsharded_stages.add(action.stage_index)

    def free(action: Any, ctx: Any) -> None:
        ctx.schedule_ref.unsharded_stages.remove(action.stage_index)

    schedule.register_custom_function(schedules.UNSHARD, gather)
    schedule.register_custom_function(schedules.RESHARD, free)
