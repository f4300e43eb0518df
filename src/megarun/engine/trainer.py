"""One rank's training state and its optimizer step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megakernels import use_kernels, use_libraries
from megaplan.families.moe import EXPERTS
from megaplan.inventory.tensors import Inventory, Outside, Owner, ParamTensor
from megaplan.spec.models import Spec
from megaplan.spec.pattern import depth_blocks
from megarun.data.batches import Batch
from megarun.data.images import num_labels
from megarun.data.progress import START
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.model.stage import Stage
from megarun.model.step_sums import Routed, move_biases, routing_table, sum_further
from megarun.optim.build import Optimizers
from megarun.optim.clip import clip_factor, gradient_norm
from megarun.parallel.apply.compile import compile_stage
from megarun.parallel.apply.fsdp import shard_stage
from megarun.parallel.apply.gradients import keep_gradient_dtype
from megarun.parallel.apply.graphs import GraphedRunner, graphed
from megarun.parallel.apply.offload import HostPool, offload_stage
from megarun.parallel.apply.pipeline import build_runner
from megarun.parallel.apply.recompute import recompute_stage
from megarun.parallel.groups.context import context_parallel
from megarun.parallel.groups.delayed import DelayedUpdates
from megarun.parallel.groups.expert import expert_parallel
from megarun.parallel.groups.local import local
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.shared_gradients import SharedGradients, sum_replicated
from megarun.parallel.groups.tensor import tensor_parallel

NOT_ROUTED = Routed()
"""Routing result of a model without E layers."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one step, equal on every rank.

    Attributes:
        loss: Loss over the global batch, nats per token.
        gradient_norm: Global gradient norm before clipping.
        routed: Routing statistics and router losses.
        further_loss: Multi-token prediction loss, including its weight.
    """

    loss: float
    gradient_norm: float
    routed: Routed = NOT_ROUTED
    further_loss: float = 0.0


def sharded_stages(job: Job, mesh: RankMesh, *, measured: bool = True, compiled: bool = False) -> tuple[Stage, ...]:
    """This rank's stages, by chunk, on the meta device: the TP and EP parts, with recompute and FSDP2 applied.

    Args:
        job: Job to train.
        mesh: This rank's position in the mesh.
        measured: True if expert row counts are read from tensors; else the spec states them.
        compiled: True if blocks are compiled by torch.compile.
    """
    tp, ep = tensor_parallel(mesh), expert_parallel(job.spec, mesh, measured=measured)
    cp = context_parallel(mesh, gathers_latents=job.spec.mesh.gathers_latents)
    stages = tuple(build_stage(job.spec, job.inventory, slot, tp, ep, cp) for slot in job.slots(mesh.coordinate["pp"]))
    pool = HostPool(mesh.device)
    for stage in stages:
        recompute_stage(stage, job.spec, job.inventory)
        offload_stage(stage, job.spec, job.inventory, pool)
        if compiled:
            compile_stage(stage)
        shard_stage(stage, job.spec, mesh)
    return stages


def router_modules(spec: Spec, inventory: Inventory) -> list[str]:
    """The modules of all E blocks of the model, layers first: `layers.2`, `mtp.0.mlp`."""
    found = [f"layers.{index}" for index, block in enumerate(inventory.layers) if block.family == EXPERTS.letter]
    mtp = spec.model.features.mtp
    if mtp is not None:
        names = [block.name for block in depth_blocks(spec.model) if block.family is EXPERTS]
        found += [f"{Outside.MTP}.{depth}.{name}" for depth in range(mtp.depth) for name in names]
    return found


def _is_copy(tensor: ParamTensor, mesh: RankMesh) -> bool:
    """True for a parameter that another slice of the same experts has too: the bias added to the sum of slices."""
    return tensor.owner is Owner.EXPERT_PARALLEL and tensor.tp_dim is None and mesh.expert_coordinate["etp"] > 0


class Trainer:
    """A rank's stages, sharded and initialised, with their schedule and optimizers.

    Built in the plan's code order (R-55): pipeline split, TP, recompute, FSDP2 bottom up, materialisation, initialisation, optimizers.
    Collective.
    """

    def __init__(self, job: Job, mesh: RankMesh, stages: tuple[Stage, ...] | None = None) -> None:
        """Build stages, schedule and optimizers.

        Args:
            job: Job to train.
            mesh: This rank's position in the mesh.
            stages: Result of `sharded_stages(job, mesh)` if already built.
        """
        spec = job.spec
        use_kernels(spec.host.kernels)
        use_libraries(spec.host.libraries)
        self.mesh, self._spec = mesh, spec
        self.stages = stages if stages is not None else sharded_stages(job, mesh)
        for stage in self.stages:
            materialise(stage, mesh.device)
            keep_gradient_dtype(stage, spec)
        self.fill(job)
        self._shared = SharedGradients(job.layout, mesh)
        self._runner = graphed(build_runner(self.stages, spec, mesh), spec, mesh.device)
        self._tp, self._cp = tensor_parallel(mesh), context_parallel(mesh)
        self.optimizers = Optimizers(self.stages, job.inventory, spec, self._tp, expert_parallel(spec, mesh).slices)
        self._routers = router_modules(spec, job.inventory)
        self._sums: list[list[float]] = []
        self._delayed = self._delayed_updates(spec)
        self.scales_losses, self._scale = spec.precision.scales_losses, 1.0
        self.scale_losses(START.loss_scale)
        self._norm = 0.0  # the norm of gradients that were measured and not yet applied
        self._owned: list[nn.Parameter] = []
        self._replicated: list[tuple[str, nn.Parameter]] = []
        self._dense: list[tuple[str, nn.Parameter]] = []
        copies = spec.sharding.copies
        first, first_bank = (not copies or mesh.coordinate["dp_shard"] == 0), (not copies or mesh.expert_coordinate["efsdp"] == 0)
        tensors = dict(job.inventory.tensors())
        for stage, slot in zip(self.stages, job.slots(mesh.coordinate["pp"]), strict=True):
            for name, parameter in stage.named_parameters():
                if not parameter.requires_grad:
                    continue
                tensor = tensors[name]
                replicated = tensor.owner is Owner.REPLICATED
                dense = tensor.owner is not Owner.EXPERT_PARALLEL
                counted = (
                    not (replicated and self._tp.index > 0) and (not dense or self._cp.index == 0) and (first if dense else first_bank)
                )
                counted = counted and not _is_copy(tensor, mesh)
                copied = any(name.startswith(f"{block}.") for block in slot.copies) or not counted
                if not copied:
                    self._owned.append(parameter)
                if replicated:
                    self._replicated.append((name, parameter))
                if dense:
                    self._dense.append((name, parameter))

    def fill(self, job: Job) -> None:
        """Initialise every parameter."""
        for stage in self.stages:
            initialise(stage, job.inventory, job.spec.training.seed, self.mesh)

    def _delayed_updates(self, spec: Spec) -> DelayedUpdates:
        """Updates of delayed scaling, of stages in the model's order, which differs between the ranks with copies of a stage."""
        in_order = sorted(self.stages, key=lambda stage: stage.span)
        return DelayedUpdates([stage.delayed for stage in in_order if stage.delayed is not None], self.mesh, spec.num_copies)

    def take_note(self) -> str | None:
        """A message for the log that was not returned before; None if there is none."""
        return self._runner.take_note() if isinstance(self._runner, GraphedRunner) else None

    def scale_losses(self, scale: float) -> None:
        """Multiply losses by a power of two where gradients are in fp16; measured losses and applied gradients are divided by it."""
        if self.scales_losses:
            self._scale = scale
            for module in (self._runner.loss, *(module for stage in self.stages for module in stage.modules())):
                if hasattr(module, "loss_scale"):
                    module.loss_scale = scale  # type: ignore[assignment]  # no module

    def read_all(self, values: Tensor) -> list[float]:
        """The values of a vector [n] on the host: the one device synchronisation of a step outside E blocks."""
        found: list[float] = values.tolist()
        return found

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Forward and backward of this rank's microbatches; returns its part of the loss, fp64. Gradients are reduced into the shards."""
        partial = self._runner.forward_backward(batch)
        if self._scale != 1:
            partial /= self._scale
        self._shared.reduce(self.stages)
        sum_replicated(self._replicated, self._tp)
        sum_replicated(self._dense, self._cp)
        return partial

    def step(self, step: int, batch: Batch) -> StepResult:
        """`measure` and `update` of 0-based `step`.

        Raises:
            MegaplanError: MP607 if the loss or the gradient norm is not finite; parameters are unchanged.
        """
        result = self.measure(batch)
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            detail = f"step {step + 1}: loss = {result.loss}, gradient norm = {result.gradient_norm}"
            raise refusal("MP607", detail, "training.learning_rate")
        self.update(step)
        return result

    def measure(self, batch: Batch) -> StepResult:
        """Forward and backward on this rank's rows, and the gradients' norm; parameters are unchanged."""
        partial = self.accumulate_gradients(batch)
        wanted = [gradient_norm(self._owned, self.mesh).reshape(1)]
        if self._spec.model.features.mtp is not None:
            further = sum_further(self.stages, self.mesh.device)
            further /= batch.packed.num_targets if batch.packed else num_labels(self._spec)
            partial = partial - further
            wanted.append(self.reduced_loss(further).reshape(1))
        wanted.append(self.reduced_loss(partial).reshape(1))
        table = self._routing()
        values = self.read_all(torch.cat(wanted if table is None else [*wanted, table.flatten()]))
        (norm, *losses), sums = values[: len(wanted)], values[len(wanted) :]
        self._norm = norm / self._scale
        return StepResult(losses[-1], self._norm, self._routed(sums), losses[0] if len(losses) > 1 else 0.0)

    def update(self, step: int) -> None:
        """Clip the measured gradients, update by them, free them, and move factors and experts' biases by the step; `step` is 0-based."""
        factor, self._norm = clip_factor(self._norm, self._spec.training.gradient_clip) / self._scale, 0.0
        if isinstance(self._runner, GraphedRunner):
            self._runner.update(self.optimizers.update, self.optimizers.numbers(step, factor))
        else:
            self.optimizers.step(step, factor)
        self._delayed.update(step)
        moe = self._spec.model.moe
        if moe is not None and moe.expert_bias_rate:
            move_biases(self.stages, self._routers, self._sums, moe.expert_bias_rate)

    def drop_gradients(self) -> None:
        """Free the gradients and recorded values of a step without an update."""
        self._norm = 0.0
        self._delayed.drop()
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)

    def reduced_loss(self, partial: Tensor) -> Tensor:
        """The loss of the global batch, summed over the ranks' parts."""
        # with `vocab_parallel` every TP rank has the loss of all tokens of its group, otherwise of its local tokens
        tokens_of = () if self._spec.mesh.vocab_parallel else ("tp",)
        return self.mesh.sum(partial, "pp", "dp_replicate", "dp_shard", "cp", *tokens_of)

    def _routing(self) -> Tensor | None:
        """Routing sums of all stages over all tokens of the step, fp64 [E layers, sums]; None without routers."""
        moe = self._spec.model.moe
        if moe is None:
            return None
        table = routing_table(self.stages, self._routers, moe.num_choices, self.mesh.device)
        return self.mesh.sum(table, "pp", "dp_replicate", "dp_shard", "cp", "tp")

    def _routed(self, sums: list[float]) -> Routed:
        """Routing statistics from the values of `_routing`, a layer after another."""
        moe, layers = self._spec.model.moe, self._routers
        if moe is None:
            return NOT_ROUTED
        width = len(sums) // max(1, len(layers))
        self._sums = [sums[index * width : (index + 1) * width] for index in range(len(layers))]
        return Routed.of(layers, self._sums, moe.slots)

    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state on this rank, which persist between steps."""
        held = [tensor for stage in self.stages for tensor in (*stage.parameters(), *stage.buffers())]
        tensors = [*held, *self.optimizers.state_tensors()]
        storages = {storage.data_ptr(): storage.nbytes() for storage in (local(tensor).untyped_storage() for tensor in tensors)}
        return sum(storages.values())
