"""Forward and backward of one optimizer step: torch's pipeline schedule, or one stage accumulating microbatches in order."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from megakernels.cross_entropy import cross_entropy
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage
from megarun.parallel.mesh import RankMesh
from megarun.parallel.order import check_order


class Runner(Protocol):
    """Runs the microbatches of one step and leaves summed gradients on the parameters."""

    def forward_backward(self, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """The loss of this rank's microbatches, fp64, 0 on a stage without the head.

        Args:
            tokens: int64 [num_microbatches · micro_batch_size, T] on the first stage.
            labels: The same shape on the last stage: each token's successor.
        """
        ...


def build_runner(stage: Stage, spec: Spec, mesh: RankMesh) -> Runner:
    """The runner of a sharded stage; collective over the pipeline group where there is one."""
    return PipelineRunner(stage, spec, mesh) if mesh.size("pp") > 1 else AccumulatingRunner(stage, spec, mesh)


def batch_loss(spec: Spec, mesh: RankMesh) -> BatchLoss:
    """The criterion of this job: divides by the tokens of the whole batch, over all microbatches and data ranks."""
    sequences = spec.batch.micro_batch_size * spec.schedule.num_microbatches * mesh.num_data_ranks
    return BatchLoss(sequences * spec.batch.seq_length)


class BatchLoss(nn.Module):
    """Summed cross-entropy of a microbatch over the tokens of the whole batch: microbatches and ranks simply add up."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [B, T, V] and labels [B, T] -> fp32 scalar."""
        return cross_entropy(logits.flatten(0, 1), labels.flatten()) / self.num_tokens


class AccumulatingRunner:
    """One stage: forward and backward of each microbatch in turn, each one reduced into the gradient shards."""

    def __init__(self, stage: Stage, spec: Spec, mesh: RankMesh) -> None:
        self._stage, self._loss, self._device = stage, batch_loss(spec, mesh), mesh.device
        self._num_microbatches = spec.schedule.num_microbatches

    def forward_backward(self, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """See `Runner`; one stage is first and last."""
        if tokens is None or labels is None:
            raise ValueError("a single stage needs tokens and labels")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        pairs = zip(tokens.chunk(self._num_microbatches), labels.chunk(self._num_microbatches), strict=True)
        for microbatch_tokens, microbatch_labels in pairs:
            loss = self._loss(self._stage(microbatch_tokens), microbatch_labels)
            torch.autograd.backward(loss)
            total += loss.detach()
        return total


class PipelineRunner:
    """torch's schedule over the stages of the pp axis.

    Shapes are stated, so that torch infers none by running the model, and the outputs of the last stage are not collected.
    """

    def __init__(self, stage: Stage, spec: Spec, mesh: RankMesh) -> None:
        self._device = mesh.device
        shape = (spec.batch.micro_batch_size, spec.batch.seq_length)
        dtype = TORCH_DTYPES[spec.precision.params]

        def stream(width: int) -> Tensor:
            return torch.empty((*shape, width), dtype=dtype, device="meta", requires_grad=True)

        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden, vocab = spec.model.hidden_size, spec.model.vocab_size
        torch_stage = PipelineStage(
            stage,
            mesh.coordinate["pp"],
            mesh.size("pp"),
            mesh.device,
            input_args=tokens if stage.embeds else stream(hidden),
            output_args=stream(vocab) if stage.predicts else stream(hidden),
            group=mesh.axes["pp"].get_group(),
        )
        num_microbatches = spec.schedule.num_microbatches
        check_order(Schedule1F1B, mesh.coordinate["pp"], spec)
        self._schedule = Schedule1F1B(torch_stage, num_microbatches, loss_fn=batch_loss(spec, mesh), scale_grads=False)

    def forward_backward(self, tokens: Tensor | None, labels: Tensor | None) -> Tensor:
        """See `Runner`."""
        losses: list[Tensor] = []
        inputs = () if tokens is None else (tokens,)
        self._schedule.step(*inputs, target=labels, losses=None if labels is None else losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total
