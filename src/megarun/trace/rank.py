"""`trace_rank`: the memory of one rank of a job by phase, column and storage."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megaplan.budget.values import Cells
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.towers import tower_sizes
from megaplan.inventory.towers import PROJECTOR
from megaplan.spec.models import SIDES
from megaplan.spec.step_graphs import replays_graphs, replays_update
from megarun.data.batches import Batch, Packed
from megarun.dtypes import TORCH_DTYPES
from megarun.engine.phases import PhasedTrainer
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.model.stage import Stage
from megarun.parallel.apply.graphs import GraphedRunner
from megarun.parallel.apply.offload import host_bytes
from megarun.parallel.apply.pipeline import AccumulatingRunner
from megarun.parallel.groups.mesh import RankMesh, build_mesh
from megarun.parallel.groups.shapes import residual_shape, token_shape
from megarun.trace.fake import lone_rank, no_cycle_collection, static_shapes
from megarun.trace.kept import FirstForward, compare_kept
from megarun.trace.kinds import Kind
from megarun.trace.owners import Owners
from megarun.trace.places import Places
from megarun.trace.rows import group_rows
from megarun.trace.values import Difference, Kept, RankTrace, Row

NUM_STEPS = 2
"""Number of traced steps: the first, which creates optimizer state, and a steady one."""
RESIDENT = (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.RECEIVE_BUFFER, Kind.INPUT, Kind.LIBRARY)
"""Kinds of storages that may be alive between two steps."""
FINITE = 1e9
"""Value returned for a loss or norm: finite, and above every clipping threshold, so that gradients are clipped."""


class TraceRecorder:
    """Runs the operations that a CUDA graph would record once, in a separate pool; replays do nothing, since they allocate nothing."""

    def __init__(self, owners: Owners) -> None:
        self._owners, self._pool, self._began = owners, torch.cpu.Stream(), False

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `megarun.parallel.apply.graphs.Recorder`."""
        if not self._began:
            self._began = True
            self._owners.enter_stream()
        with torch.cpu.stream(self._pool):
            work()
        return lambda: None

    def drop(self) -> None:
        """Called after a failure, which ends the trace: its bytes would differ from the recording's."""
        raise RuntimeError("a microbatch or an update could not be recorded")


class TracedTrainer(PhasedTrainer):
    """The trainer with reported phases; without values, it neither initialises parameters nor reads tensors."""

    def __init__(self, job: Job, mesh: RankMesh, stages: tuple[Stage, ...], owners: Owners, *, with_values: bool) -> None:
        self._owners, self._with_values = owners, with_values
        super().__init__(job, mesh, stages)
        if replays_graphs(job.spec) and isinstance(self._runner, AccumulatingRunner):
            recorder, whole = TraceRecorder(owners), replays_update(job.spec)
            self._runner = GraphedRunner(self._runner, recorder, whole_step=whole, warm_up_steps=1)
        for stage in stages:
            owners.label_parameters(stage)
        owners.label_resident(self)

    def fill(self, job: Job) -> None:
        """Initialise without counting: it uses host memory."""
        if self._with_values:
            with self._owners.live.paused():
                super().fill(job)

    def read_all(self, values: Tensor) -> list[float]:
        """The values, or placeholders with which the step completes."""
        return super().read_all(values) if self._with_values else [FINITE] * len(values)

    def enter_phase(self, phase: Phase) -> None:
        """Start a new peak for the phase."""
        self._owners.live.enter_phase(phase)

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Forward and backward of a batch whose tensors are labelled."""
        inputs = (
            batch.tokens,
            batch.labels,
            batch.before,
            batch.structure,
            batch.platform,
            batch.classes,
            batch.patches,
            batch.places,
            *batch.following,
            *batch.following_before,
            *batch.following_structure,
            *batch.following_platform,
        )
        self._owners.label((*inputs, batch.packed.starts if batch.packed else None), Kind.INPUT, "batch")
        partial = super().accumulate_gradients(batch)
        if isinstance(self._runner, GraphedRunner):
            self._owners.label(self._runner.held_tensors(), Kind.INPUT, "inputs of the graphs")
        return partial


def trace_rank(job: Job, rank: int, *, workspace_bytes: int = 0) -> RankTrace:
    """Build one rank's modules, wrappers, schedule and optimizers on fake tensors, run two steps, and account for every live byte.

    Needs no GPU, no network and no other process; the default process group must not exist yet.

    Args:
        job: Job that megarun can build (`refuse_unbuilt` has passed).
        rank: Global rank, below the mesh's world size.
        workspace_bytes: Bytes of the GEMM libraries' workspace in torch's allocator on the planned device.
    """
    with lone_rank(rank, job.spec.mesh.world_size), static_shapes():
        return trace_process(job, build_mesh(job.spec.mesh, torch.device("cpu")), workspace_bytes=workspace_bytes)


def trace_process(job: Job, mesh: RankMesh, *, workspace_bytes: int = 0, with_values: bool = False) -> RankTrace:
    """Trace this process's rank in a running process group.

    Args:
        job: Job that megarun can build.
        mesh: This rank's position in the mesh.
        workspace_bytes: See `trace_rank`.
        with_values: True to use real tensors instead of fake ones, to check the trace at small size.
    """
    stages = sharded_stages(job, mesh, measured=with_values)
    places = Places(stages)
    owners = Owners(job.inventory, places, workspace_bytes, fake_only=not with_values)
    first = FirstForward(owners, places, stages)
    with ExitStack() as stack:
        for watched in (no_cycle_collection(), places.watching(), first.watching(), owners.watching()):
            stack.enter_context(watched)
        if not with_values:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(owners.live)
        trainer = TracedTrainer(job, mesh, stages, owners, with_values=with_values)
        for step in range(NUM_STEPS):
            trainer.start_step()
            trainer.step(step, empty_batch(job, trainer))
            owners.label_resident(trainer)
        found = account(
            mesh.rank, job, owners, tuple(first.kept), tuple((name, stage.span[0]) for stage in stages for name in blocks_of(stage))
        )
        host = trainer.optimizers.host
        of_state = 0 if host is None else host.num_bytes
        return replace(found, host_bytes=of_state + host_bytes(stages))


def account(rank: int, job: Job, owners: Owners, kept: tuple[Kept, ...], blocks: tuple[tuple[str, int], ...]) -> RankTrace:
    """Cells and rows of every phase's peak, with the current labels of each storage; call it between two steps.

    Args:
        rank: Global rank.
        job: Traced job.
        owners: Labels of its storages.
        kept: Storages that its first forwards left alive.
        blocks: Names of the inventory blocks that it ran, with the first layer of their stage.
    """
    cells: Cells = {phase: dict.fromkeys(Column, 0) for phase in Phase}
    rows: dict[Phase, tuple[Row, ...]] = {}
    for phase, storages in owners.live.at_peaks().items():
        for record, nbytes in storages:
            cells[phase][owners.column(record)] += nbytes
        rows[phase] = group_rows(storages, owners.column)
    resident = (*RESIDENT, Kind.GRADIENT) if replays_graphs(job.spec) else RESIDENT
    left = [(record, record.nbytes) for record in owners.live.live() if record.kind not in resident and record.nbytes]
    differences = compare_kept(job.spec, job.inventory, blocks, kept)
    for row in group_rows(left, owners.column):
        differences.append(Difference(f"{row.describe()}, is still alive after the step", row.column, 0, row.nbytes))
    reserved = owners.live.reserved(expandable=job.spec.host.expands_segments)
    return RankTrace(rank, cells, rows, kept, tuple(differences), owners.live.num_events, reserved)


def blocks_of(stage: Stage) -> tuple[str, ...]:
    """Inventory blocks that a stage runs; a tied head is `head`."""
    sides = tuple(name for name in SIDES if getattr(stage, name, None) is not None)
    images = (*(name for name, _ in stage.vision.blocks()), PROJECTOR) if stage.vision is not None else ()
    first, last = ("embedding", *sides) if stage.embeds else (), ("final_norm", "head") * stage.predicts
    relations = ("relation_bias",) * (stage.relation_bias is not None)
    depths = (f"mtp.{depth}" for depth in stage.mtp) if stage.looks_ahead else ()
    return *images, *first, *relations, *(f"layers.{index}" for index in stage.layers), *depths, *last


def empty_batch(job: Job, trainer: Trainer) -> Batch:
    """The batch of one step, as from `Batches.at`."""
    spec, features, device = job.spec, job.spec.model.features, trainer.mesh.device
    (rows, length), own = token_shape(spec), residual_shape(spec)[1]

    def zeros(wanted: bool, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor | None:
        return torch.zeros((rows * spec.schedule.microbatches_per_update, *shape), dtype=dtype, device=device) if wanted else None

    embeds, predicts = (any(getattr(stage, does) for stage in trainer.stages) for does in ("embeds", "predicts"))
    starts = zeros(spec.data.packing == "documents", spec.batch.seq_length // spec.mesh.cp, dtype=torch.int32)
    ngram, depth = features.ngram, features.mtp.depth if features.mtp is not None else 0

    def sides(wanted: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        earlier = zeros(wanted and ngram is not None, ngram.max_order - 1 if ngram is not None else 0, own)
        structure, platform = (
            zeros(wanted and each is not None, own, dtype=torch.uint8) for each in (features.structure, features.platform)
        )
        return earlier, structure, platform

    ahead = [sides(predicts and bool(features.sides_ahead)) for _ in range(depth)]
    further: list[Any] = [tuple(each for each in kind if each is not None) for kind in zip(*ahead, strict=True)]
    images, patches, places = tower_sizes(spec), None, None
    if embeds and images is not None:
        count, encoder = rows * spec.schedule.microbatches_per_update * spec.batch.images, images.encoder
        dtype = TORCH_DTYPES[spec.precision.activations]
        patches = torch.zeros((count, images.own_patches, encoder.patch_values), dtype=dtype, device=device)
        places = torch.zeros(count * images.tokens, dtype=torch.int64, device=device)
    return Batch(
        zeros(embeds, length),
        zeros(predicts, length),
        Packed(starts, job.global_batch_tokens) if starts is not None else None,
        *sides(embeds),
        tuple(labels for _ in range(depth) if (labels := zeros(predicts, length)) is not None),
        *further,
    )._replace(classes=zeros(features.relation_bias is not None, spec.batch.seq_length, dtype=torch.uint8), patches=patches, places=places)
