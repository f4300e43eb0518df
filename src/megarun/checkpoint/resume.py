"""Reading a checkpoint under this plan: which one, whether it may be, and its state into place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity, render_diagnostic
from megarun.checkpoint.compatible import check_compatible
from megarun.checkpoint.manifest import FOLDER, INDEX, Manifest, damaged_files, list_checkpoints, read_manifest
from megarun.checkpoint.pieces import Pieces, PiecesLoadPlanner
from megarun.checkpoint.state import GENERATOR, OPTIMIZER, generator_state, model_state, optimizer_state
from megarun.checkpoint.storage import CheckpointReader, first_reason
from megarun.course import START, Course
from megarun.errors import refusal
from megarun.prepare import Run
from megarun.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    manifest: Manifest


def newest_whole(run: Path, group: dist.ProcessGroup) -> Found | None:
    """The newest checkpoint of a run that is as it was written; damaged ones are said on stderr and passed over. Collective."""
    for path in _names(list_checkpoints(run), run, group):
        wrong = damage(path, group)
        if wrong is None:
            return Found(path, read_manifest(path))
        if dist.get_rank() == 0:
            sys.stderr.write(render_diagnostic(diagnostic("MP646", wrong, Location(file=str(path)), severity=Severity.WARNING)) + "\n")
    return None


def damage(path: Path, group: dist.ProcessGroup) -> str | None:
    """What is wrong with a checkpoint, in words; None if nothing is. Collective: each rank reads its share of the files."""
    try:
        wrong = damaged_files(path, read_manifest(path), (dist.get_rank(), dist.get_world_size()))
    except MegaplanError as error:
        wrong = [error.diagnostics[0].detail]
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong, group=group)
    lines = sorted({line for of_rank in everyone for line in of_rank or ()})
    return "\n".join(lines) or None


def _names(found: list[Path], run: Path, group: dist.ProcessGroup) -> list[Path]:
    """Rank 0's list, so that ranks whose file system lags agree."""
    names = [[path.name for path in found]]
    dist.broadcast_object_list(names, src=0, group=group)
    return [run / FOLDER / name for name in names[0]]


def load_checkpoint(found: Found, trainer: Trainer, run: Run, *, weights_only: bool, group: dist.ProcessGroup) -> tuple[int, Course]:
    """Read a checkpoint into a trainer; the number of steps done and their course, as of a new run for weights only. Collective.

    Raises:
        MegaplanError: MP641 and MP642 if it is another model's or lacks optimizer state, MP647 if its batches were others, MP644 if it
            cannot be read.
    """
    job = run.job
    check_compatible(found.path, found.manifest, run, weights_only=weights_only)
    items = model_state(trainer, job.inventory)
    if not weights_only:
        trainer.optimizers.make_states()
        items += optimizer_state(trainer, job.inventory)
        if found.manifest.world_size == job.spec.mesh.world_size:
            items += generator_state(trainer)
    reader = CheckpointReader(found.path)
    saved = {name: tuple(tensor.size) for name, tensor in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
    wanted = _wanted(items, saved, found.path)
    planner = PiecesLoadPlanner()
    try:
        load(dict(wanted), storage_reader=reader, planner=planner, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise refusal("MP644", f"{found.path}: {first_reason(error)}", file=str(found.path)) from None
    _hand_on(items, wanted, trainer)
    return (0, START) if weights_only else (found.manifest.step, found.manifest.course)


def _wanted(items: list[tuple[str, Pieces]], saved: dict[str, tuple[int, ...]], path: Path) -> dict[str, Pieces]:
    wanted: dict[str, Pieces] = {}
    for name, pieces in items:
        if name in saved:
            wanted.setdefault(name, pieces)
    missing = sorted({name for name, _ in items if name not in saved and not name.startswith(GENERATOR)})
    if missing:
        lost = [name for name in missing if name.startswith(OPTIMIZER)]
        detail = f"{path / INDEX}: {len(missing)} tensors are missing, the first {missing[0]}"
        hints = ("megarun train PLAN … --weights-only    # parameters alone, step 0",) if len(lost) == len(missing) else ()
        raise refusal("MP642", detail, hints=hints, file=str(path))
    for name, pieces in wanted.items():
        if saved[name] != tuple(pieces.shape):
            raise refusal("MP644", f"{path / INDEX}: {name} = {list(saved[name])}, the plan's is {list(pieces.shape)}", file=str(path))
    return wanted


def _hand_on(items: list[tuple[str, Pieces]], wanted: dict[str, Pieces], trainer: Trainer) -> None:
    """What two stages of a rank hold was read once; generators take what was read."""
    for name, pieces in items:
        if name in wanted and pieces is not wanted[name]:
            pieces.local.copy_(wanted[name].local)
    prefix = f"{GENERATOR}.{trainer.mesh.rank}"
    if f"{prefix}.cpu" in wanted:
        torch.set_rng_state(wanted[f"{prefix}.cpu"].local)
    if f"{prefix}.cuda" in wanted:
        torch.cuda.set_rng_state(wanted[f"{prefix}.cuda"].local, trainer.mesh.device)
