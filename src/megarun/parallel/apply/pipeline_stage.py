"""torch's pipeline stage for a `Stage`: stated shapes, and a backward that can be split in two."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from megaplan.schedules import SPLIT_BACKWARD, placement, shared_buffers, slot_owner
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage
from megarun.parallel.apply.mirrored import HALVES, stage_number
from megarun.parallel.apply.weight_gradients import WeightGradients, split_linears
from megarun.parallel.apply.whole import whole_state
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.shapes import boundary_shape, logits_shape, token_shape


def pipeline_stage(stage: Stage, spec: Spec, mesh: RankMesh) -> "FullBackwardStage":
    """The stage wrapped for a schedule.

    Shapes of input and output are stated, so that torch infers none by running the model on uninitialised memory.
    """
    dtype = TORCH_DTYPES[spec.precision.params]

    def activation(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)  # the loss, or only the multi-token prediction loss
    start, stop = stage.span
    output = activation(logits_shape(spec) if stage.predicts else boundary_shape(spec, stop))
    if stage.predicts and stage.joins_loss:
        output_args: Any = loss
    else:
        output_args = (output, loss) if stage.looks_ahead else output
    tokens = torch.empty(token_shape(spec), dtype=torch.int64, device="meta")
    kind = SplitStage if spec.schedule.kind in SPLIT_BACKWARD else FullBackwardStage
    degrees, copies = (spec.mesh.pp, spec.mesh.vpp), spec.num_copies
    rank, chunk = slot_owner(placement(spec.schedule.kind), stage.index, spec.mesh.pp)
    made = kind(
        stage,
        stage_number(stage.index, spec.mesh.num_slots),
        copies * spec.mesh.num_slots + copies - 1,
        mesh.device,
        input_args=tokens if stage.embeds else activation(boundary_shape(spec, start)),
        output_args=output_args,
        group=mesh.axes["pp"].get_group(),
    )
    made.input_buffers, made.gradient_buffers = shared_buffers(spec.schedule.kind, *degrees, spec.schedule.num_microbatches)[rank][chunk]
    return made


class FullBackwardStage(PipelineStage):
    """A stage whose gradients are reduced on request, and whose microbatches share receive buffers.

    torch makes a receive buffer for every microbatch, and keeps all for the whole run. Here microbatch m has buffer m modulo their number.

    Attributes:
        input_buffers: Receive buffers of activations; 0 if none is received.
        gradient_buffers: Receive buffers of gradients; 0 if none is received.
        reduces: True if the running schedule step is the last of its update: FSDP2 then reduces over the data ranks and frees the gathered
            parameters. Before, gradients stay unsharded and parameters gathered, as between two microbatches.
    """

    reduces = True
    input_buffers = gradient_buffers = 0

    @property
    def is_first(self) -> bool:
        """True if the stage begins the model, or a copy of it."""
        return bool(self.submod.embeds)

    @property
    def is_last(self) -> bool:
        """True if the stage ends the model, or a copy of it."""
        return bool(self.submod.predicts)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """F of a microbatch; with two copies of the model, with this copy's keyword inputs."""
        if kwargs is not None and HALVES in kwargs:
            kwargs = kwargs[HALVES][self.stage_index >= self.group_size]
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def _prepare_forward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        number = self.input_buffers or num_microbatches
        made = super()._prepare_forward_infra(number, *arguments, **keywords)
        _share(self.args_recv_info, number, num_microbatches)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        number = self.gradient_buffers or num_microbatches
        made = super()._prepare_backward_infra(number, *arguments, **keywords)
        self.chunks = num_microbatches
        _share(self.grad_recv_info, number, num_microbatches)
        return made

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """End a schedule step."""
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)
            whole = whole_state(self.submod)
            if whole is not None:
                whole.release()
                whole.start_sums()


def _share(table: dict[int, Any], number: int, num_microbatches: int) -> None:
    """Assign the first `number` receives of a table to all microbatches cyclically."""
    for microbatch in range(number, num_microbatches):
        table[microbatch] = table[microbatch % number]


class SplitStage(FullBackwardStage):
    """A stage whose backward the schedule can split: I defers weight gradients, W computes them, B is the full backward.

    Tensors passed between the middle stages of a V, neighbours on one rank, are freed after their microbatch. torch would keep them until
    the next step, instead of a receive buffer for each microbatch.
    """

    def __init__(self, submodule: Stage, stage_index: int, num_stages: int, device: torch.device, **keywords: Any) -> None:
        """See `PipelineStage`; the linears of `submodule` are changed to defer weight gradients."""
        split_linears(submodule)
        self._weights, self._nothing = WeightGradients(submodule), torch.empty(0, device=device)
        super().__init__(submodule, stage_index, num_stages, device, dw_builder=self._weights.take, **keywords)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """B or I of a microbatch; B defers no weight gradient."""
        with nullcontext() if full_backward else self._weights.deferring():
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
        self._drop_local(self.args_recv_info, self.stage_index - 1, (bwd_chunk_id,))
        self._drop_local(self.grad_recv_info, self.stage_index + 1, (bwd_chunk_id,))

    def _prepare_forward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        made = super()._prepare_forward_infra(num_microbatches, *arguments, **keywords)
        self._drop_local(self.args_recv_info, self.stage_index - 1, range(num_microbatches))
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        made = super()._prepare_backward_infra(num_microbatches, *arguments, **keywords)
        self._drop_local(self.grad_recv_info, self.stage_index + 1, range(num_microbatches))
        return made

    def _drop_local(self, table: dict[int, Any], neighbour: int, microbatches: Iterable[int]) -> None:
        """Clear the buffers of tensors from a neighbouring stage if it is on this rank."""
        if 0 <= neighbour < self.num_stages and self.stage_index_to_group_rank[neighbour] == self.group_rank:
            for microbatch in microbatches:
                for info in table[microbatch]:
                    info.buffer = self._nothing

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Omit messages of a rank to itself: the middle stages of a V are on one rank, and torch 2.11 with gloo refuses them."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]
