"""Forward-only execution of batches for evaluation, with any placement of stages.

torch's `eval()` of the training schedule is not used: with a V schedule it needs gradients that were not computed, every change between
training and evaluation reallocates receive buffers and metadata, and its runtime refuses a schedule without backwards. A microbatch passes
from stage to stage; a rank with one stage starts the next microbatch meanwhile, one with several chunks waits for it to return.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megaplan.schedules import placement, slot_owner
from megaplan.spec.models import Spec
from megarun.data.batches import Batch
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage
from megarun.parallel.apply.gradients import parameter_groups
from megarun.parallel.apply.pipeline import batch_loss
from megarun.parallel.apply.whole import whole_state
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.shapes import boundary_shape


class ForwardRunner:
    """Runs the stages of a rank forward, without side effects on training."""

    def __init__(self, stages: Sequence[Stage], spec: Spec, mesh: RankMesh) -> None:
        self._stages, self._mesh, self._loss = stages, mesh, batch_loss(spec, mesh)
        self._num_microbatches, self._placement = spec.schedule.microbatches_per_update, placement(spec.schedule.kind)
        self._pp = spec.mesh.pp
        self._run = [stage for stage in stages if stage.index < spec.mesh.num_slots]  # only the first of two copies of the model
        self._spec, self._dtype = spec, TORCH_DTYPES[spec.precision.params]

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """This rank's part of the batch's loss, fp64: nats per label of the global batch, 0 on a rank without the head. Collective."""
        if batch.packed is not None:
            self._loss.num_tokens = batch.packed.num_targets
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for loss in self._losses(batch):
            total += loss
        return total

    def nats(self, batch: Batch) -> tuple[Tensor, int]:
        """This rank's part of the nats of all labels of the global batch, fp64, and the number of these labels. Collective."""
        loss = self.loss(batch)
        return loss * self._loss.num_tokens, self._loss.num_tokens

    def reshard(self) -> None:
        """Free the gathered parameters, because the optimizer will change their shards; also those that a layer has gathered for a depth.

        An evaluation does not run the prediction depths, so an all-gather that the last layer has started for them (`_gather_ahead`) has to
        end here: otherwise the next step would use its outdated values.
        """
        for stage in self._stages:
            whole = whole_state(stage)
            if whole is not None:
                whole.release()
            for group in parameter_groups(stage):
                if group._all_gather_result is not None:
                    group.wait_for_unshard()
                for parameter in group.fsdp_params:  # the shards that `sharding.reshard_size` keeps for the backward
                    parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _losses(self, batch: Batch) -> Iterator[Tensor]:
        count = self._num_microbatches
        sent: list[tuple[dist.Work, Tensor]] = []  # keep a reference to each tensor until its send completes
        for index in range(count):
            kept = None
            part = batch.part(index, count)
            keywords = part.keyword_inputs()
            for stage in self._run:
                x = part.tokens if stage.embeds else self._arrived(stage) if kept is None else kept
                kept, output = None, stage(x, **keywords)
                if stage.predicts:
                    if part.labels is None:
                        raise ValueError("the last stage needs labels")
                    yield self._loss(output, part.labels)
                elif self._owner(stage.index + 1) == self._mesh.coordinate["pp"]:
                    kept = output
                else:
                    sent.append((self._send(output, self._owner(stage.index + 1)), output))
            sent = [(work, message) for work, message in sent if not work.is_completed()]
        for work, _ in sent:
            work.wait()

    def _owner(self, slot: int) -> int:
        return slot_owner(self._placement, slot, self._pp)[0]

    def _arrived(self, stage: Stage) -> Tensor:
        x = torch.empty(boundary_shape(self._spec, stage.span[0]), dtype=self._dtype, device=self._mesh.device)
        dist.recv(x, group=self._group, group_src=self._owner(stage.index - 1))
        return x

    def _send(self, output: Tensor, owner: int) -> dist.Work:
        work: dist.Work | None = dist.isend(output, group=self._group, group_dst=owner)
        assert work is not None  # this rank is a member of the group
        return work

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._mesh.axes["pp"].get_group()
