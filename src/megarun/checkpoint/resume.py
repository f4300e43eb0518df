"""Resuming from a checkpoint: selects it, checks that it fits the plan, and loads its state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity, render_diagnostic
from megaplan.spec.models import Spec
from megarun.checkpoint.adapters import check_adapters, is_adapter
from megarun.checkpoint.compatible import check_compatible
from megarun.checkpoint.index import INDEX
from megarun.checkpoint.lines import Line, Place, by_line, next_line
from megarun.checkpoint.manifest import FOLDER, OLD_FORMAT, Manifest, damaged_files, finished, folder_name, read_manifest
from megarun.checkpoint.pieces import Pieces, PiecesLoadPlanner
from megarun.checkpoint.state import GENERATOR, OPTIMIZER, generator_state, model_state, optimizer_state
from megarun.checkpoint.storage import CheckpointReader, first_reason
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import Run
from megarun.remote import AnyPath, StorageError

UNREADABLE = "MP644"
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    path: AnyPath
    manifest: Manifest

    def within(self, run: AnyPath) -> bool:
        """True if it is one of the run's own checkpoints."""
        return self.path.resolve().parent == (run / FOLDER).resolve()


def newest_complete(run: AnyPath, group: dist.ProcessGroup, damaged: set[AnyPath], line: Line | None = None) -> Found | None:
    """The newest undamaged checkpoint of a run, on the newest line that has one. Collective.

    Args:
        run: Folder of the run.
        group: gloo group of all ranks.
        damaged: Set to which damaged checkpoints are added; they are reported on stderr and skipped.
        line: If given, only checkpoints on this line.
    """
    for path in _candidates(run, line, damaged, group):
        wrong = damage(path, group)
        if wrong is None:
            return Found(path, read_manifest(path))
        damaged.add(path)
        report_skipped(path, wrong)
    return None


def report_skipped(path: AnyPath, wrong: str) -> None:
    """Report on stderr that a checkpoint is not used, once for all ranks."""
    _report("MP646", wrong, Location(file=str(path)), Severity.WARNING)


def begin_line(run: AnyPath, found: Found | None, step: int, group: dist.ProcessGroup) -> Line:
    """The line of the run's new checkpoints; checkpoints on other lines are reported on stderr. Collective.

    Args:
        run: Folder of the run.
        found: Checkpoint that the run continues; None if it continues none.
        step: Optimizer steps done.
        group: gloo group of all ranks.
    """
    lines: list[Line | None] = [None]
    if dist.get_rank() == 0:
        start = found.manifest.place if found is not None and found.within(run) else None
        lines[0], left = next_line(finished(run), start, step)
        if left:
            names = [each.path.name for each in left]
            shown = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
            where = f"this run continues from {folder_name(step)}" if start is not None else "this run starts from step 0"
            detail = f"{where}; checkpoints on other lines: {shown}\nonly a save of the same step replaces one of them"
            _report("MP654", detail, Location(file=str(run / FOLDER)), Severity.WARNING)
    dist.broadcast_object_list(lines, src=0, group=group)
    assert lines[0] is not None  # rank 0 has one
    return lines[0]


def _report(code: str, detail: str, location: Location, severity: Severity) -> None:
    """Report a diagnostic on stderr, once for all ranks."""
    if dist.get_rank() == 0:
        sys.stderr.write(render_diagnostic(diagnostic(code, detail, location, severity=severity)) + "\n")


def damage(path: AnyPath, group: dist.ProcessGroup) -> str | None:
    """Description of a checkpoint's damage; None if it is complete. Collective: each rank reads a share of the files."""
    try:
        wrong = damaged_files(path, read_manifest(path), (dist.get_rank(), dist.get_world_size()))
    except StorageError:  # ends the job: what is there is unknown
        raise
    except MegaplanError as error:
        wrong = [error.diagnostics[0].detail]
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong, group=group)
    lines = sorted({line for of_rank in everyone for line in of_rank or ()})
    return "\n".join(lines) or None


def _candidates(run: AnyPath, line: Line | None, damaged: set[AnyPath], group: dist.ProcessGroup) -> list[AnyPath]:
    """Checkpoints not known to be damaged, newest first, as rank 0 sees the folder, so that ranks with a delayed file system agree."""
    names: list[list[str]] = [[]]
    if dist.get_rank() == 0:
        found = [each for each in finished(run) if each.path not in damaged]
        if line is not None:
            found = [each for each in found if each.place is not None and each.place.leads_to(Place(line, each.step))]
        names = [[each.path.name for of_line in by_line(found) for each in of_line]]
    dist.broadcast_object_list(names, src=0, group=group)
    return [run / FOLDER / name for name in names[0]]


def load_checkpoint(found: Found, trainer: Trainer, run: Run, *, weights_only: bool, group: dist.ProcessGroup) -> tuple[int, DataProgress]:
    """Load a checkpoint into a trainer; returns steps done and data progress (those of a new run with `weights_only`). Collective.

    Raises:
        MegaplanError: MP641 if it belongs to another model, MP642 if optimizer state is missing, MP648 if its batches differ, MP653 if
            its data differs, MP644 if it cannot be read.
    """
    job = run.job
    check_compatible(found.path, found.manifest, run, weights_only=weights_only)
    if not weights_only and found.manifest.data is None:
        detail = f"format = {OLD_FORMAT!r}: --data cannot be compared with the checkpoint's"
        _report("MP655", detail, Location(file=str(found.path)), Severity.NOTE)
    items = model_state(trainer, job.inventory)
    if not weights_only:
        trainer.optimizers.make_states()
        items += optimizer_state(trainer, job.inventory)
        if found.manifest.world_size == job.spec.mesh.world_size:
            items += generator_state(trainer)
    wanted = _agreed(lambda: _wanted(items, found.path, job.spec, weights_only=weights_only), group)
    planner = PiecesLoadPlanner()
    try:
        load(dict(wanted), storage_reader=CheckpointReader(found.path), planner=planner, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise refusal(UNREADABLE, f"{found.path}: {first_reason(error)}", file=str(found.path)) from None
    _restore_copies(items, wanted, trainer)
    return (0, START) if weights_only else (found.manifest.step, found.manifest.data_progress)


def _agreed(action: Callable[[], dict[str, Pieces]], group: dist.ProcessGroup) -> dict[str, Pieces]:
    """The action's result; the first failing rank's error on every rank, because the others would wait for it. Collective."""
    result: dict[str, Pieces] = {}
    failed: tuple[Diagnostic, ...] = ()
    try:
        result = action()
    except MegaplanError as error:
        failed = error.diagnostics
    everyone: list[tuple[Diagnostic, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, failed, group=group)
    for of_rank in everyone:
        if of_rank:
            raise MegaplanError(of_rank)
    return result


def _wanted(items: list[tuple[str, Pieces]], path: AnyPath, spec: Spec, *, weights_only: bool) -> dict[str, Pieces]:
    """The pieces to read by name; a tensor that two stages of a rank share occurs once.

    With `weights_only` a checkpoint without any adapter is a base to start from: adapters keep their initial values.
    """
    metadata = CheckpointReader(path).read_metadata().state_dict_metadata
    saved = {name: tuple(tensor.size) for name, tensor in metadata.items()}  # type: ignore[union-attr]
    wanted: dict[str, Pieces] = {}
    for name, pieces in items:
        if name in saved:
            wanted.setdefault(name, pieces)
    check_adapters(path, spec, saved)
    from_base = weights_only and not any(is_adapter(name) for name in saved)
    missing = sorted({name for name, _ in items if name not in saved and not name.startswith(GENERATOR)})
    missing = [name for name in missing if not (from_base and is_adapter(name))]
    if missing:
        lost = [name for name in missing if name.startswith(OPTIMIZER) or is_adapter(name)]
        detail = f"{path / INDEX}: {len(missing)} tensors are missing, the first {missing[0]}"
        hints = ("megarun train PLAN … --weights-only    # parameters only, from step 0",) if len(lost) == len(missing) else ()
        raise refusal("MP642", detail, hints=hints, file=str(path))
    for name, pieces in wanted.items():
        if saved[name] != tuple(pieces.shape):
            raise refusal("MP644", f"{path / INDEX}: {name} = {list(saved[name])}, the plan's = {list(pieces.shape)}", file=str(path))
    return wanted


def _restore_copies(items: list[tuple[str, Pieces]], wanted: dict[str, Pieces], trainer: Trainer) -> None:
    """Copy tensors that two stages of a rank share, which were read once, to the second stage; set the random generators."""
    for name, pieces in items:
        if name in wanted and pieces is not wanted[name]:
            pieces.local.copy_(wanted[name].local)
    prefix = f"{GENERATOR}.{trainer.mesh.rank}"
    if f"{prefix}.cpu" in wanted:
        torch.set_rng_state(wanted[f"{prefix}.cpu"].local)
    if f"{prefix}.cuda" in wanted:
        torch.cuda.set_rng_state(wanted[f"{prefix}.cuda"].local, trainer.mesh.device)
