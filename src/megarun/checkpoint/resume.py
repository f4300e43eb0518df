"""Resuming from a checkpoint: selects it, checks that it fits the plan, and loads its state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.tensors import Inventory, layer_names
from megaplan.spec.local import delayed_weights
from megaplan.spec.models import Spec
from megaplan.terminal.output import report
from megarun.checkpoint.adapters import check_adapters, is_adapter
from megarun.checkpoint.base import BaseWeight, base_weights
from megarun.checkpoint.compatible import check_compatible
from megarun.checkpoint.index import INDEX
from megarun.checkpoint.lines import Line, Place, by_line, next_line
from megarun.checkpoint.manifest import FOLDER, MANIFEST, OLD_FORMAT, Manifest, damaged_files, finished, folder_name, read_manifest
from megarun.checkpoint.pieces import Pieces, PiecesLoadPlanner
from megarun.checkpoint.state import GENERATOR, OPTIMIZER, generator_state, model_state, optimizer_state
from megarun.checkpoint.storage import CheckpointReader, first_reason
from megarun.checkpoint.sums import known_sums, learn
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import Run
from megarun.parallel.groups.delayed import HISTORY, is_scaling
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
    """The newest undamaged checkpoint of a run, on the newest line with an undamaged one. Collective.

    Args:
        run: Folder of the run.
        group: gloo group of all ranks.
        damaged: Set to which damaged checkpoints are added; they are reported on stderr and skipped.
        line: If given, only checkpoints on this line.
    """
    for path in _candidates(run, line, damaged, group):
        found = verified(path, group)
        if isinstance(found, Found):
            return found
        wrong = found
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
        report([diagnostic(code, detail, location, severity=severity)])


def verified(path: AnyPath, group: dist.ProcessGroup) -> Found | str:
    """The checkpoint, or a description of its damage. Collective: each rank sums a share of the files, and knows the sums of all."""
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        wrong = damaged_files(path, manifest, (dist.get_rank(), dist.get_world_size()))
    except StorageError:  # this error ends the job: the contents are unknown
        raise
    except MegaplanError as error:
        wrong = [error.diagnostics[0].detail]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (wrong, manifest.text() if manifest is not None else "", known_sums(path)), group=group)
    lines = sorted({line for of_rank, _, _ in everyone for line in of_rank})
    if not lines and len({text for _, text, _ in everyone}) > 1:
        lines = [f"{MANIFEST}: the ranks have read different contents"]
    for _, _, sums in everyone:
        learn(sums)
    return "\n".join(lines) if lines or manifest is None else Found(path, manifest)


def _candidates(run: AnyPath, line: Line | None, damaged: set[AnyPath], group: dist.ProcessGroup) -> list[AnyPath]:
    """Checkpoints not known to be damaged, newest first, as rank 0 sees the folder, so that ranks agree despite file-system delays."""
    names: list[list[str]] = [[]]
    if dist.get_rank() == 0:
        found = [each for each in finished(run) if each.path not in damaged]
        if line is not None:
            found = [each for each in found if each.place is not None and each.place.leads_to(Place(line, each.step))]
        names = [[each.path.name for of_line in by_line(found) for each in of_line]]
    dist.broadcast_object_list(names, src=0, group=group)
    return [run / FOLDER / name for name in names[0]]


def load_checkpoint(found: Found, trainer: Trainer, run: Run, *, weights_only: bool, group: dist.ProcessGroup) -> tuple[int, DataProgress]:
    """Load a checkpoint into a trainer; returns steps and data progress (new with `weights_only`). Collective.

    Raises:
        MegaplanError: MP641 if it belongs to another model, MP642 if optimizer state is missing, MP648 if its batches differ, MP653 if
            its data differs, MP644 if it cannot be read.
    """
    job = run.job
    check_compatible(found.path, found.manifest, run, weights_only=weights_only)
    if not weights_only and found.manifest.data is None:
        detail = f"format = {OLD_FORMAT!r}: this format does not record its data, so --data cannot be checked"
        _report("MP655", detail, Location(file=str(found.path)), Severity.NOTE)
    items = model_state(trainer, job.inventory)
    bases: list[BaseWeight] = []
    if not weights_only:
        trainer.optimizers.make_states()
        items += optimizer_state(trainer, job.inventory)
        if found.manifest.world_size == job.spec.mesh.world_size:
            items += generator_state(trainer)

    def select() -> dict[str, Pieces]:
        if weights_only and job.spec.lora is not None and job.spec.lora.base is not None:
            saved = CheckpointReader(found.path, found.manifest).read_metadata().state_dict_metadata
            bases.extend(base_weights(trainer, job.inventory, saved))
        parts = tuple(f"{base.name}." for base in bases)
        kept = [each for each in items if not each[0].startswith(parts)] if parts else items
        return _wanted([*kept, *((base.name, base.pieces) for base in bases)], found, job.spec, weights_only=weights_only)

    wanted = _agreed(select, group)
    _note_new_scaling(found, job.spec, job.inventory)
    planner = PiecesLoadPlanner()
    try:
        load(dict(wanted), storage_reader=CheckpointReader(found.path, found.manifest), planner=planner, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise refusal(UNREADABLE, f"{found.path}: {first_reason(error)}", file=str(found.path)) from None
    _restore_copies(items, wanted, trainer)
    for base in bases:
        base.fill(trainer.mesh)
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


def _wanted(items: list[tuple[str, Pieces]], found: Found, spec: Spec, *, weights_only: bool) -> dict[str, Pieces]:
    """The pieces to read by name; a tensor that two stages of a rank share occurs once.

    With `weights_only` a checkpoint without any adapter is a base to start from: adapters keep their initial values.
    """
    path = found.path
    metadata = CheckpointReader(path, found.manifest).read_metadata().state_dict_metadata
    saved = {name: tuple(tensor.size) for name, tensor in metadata.items()}  # type: ignore[union-attr]
    wanted: dict[str, Pieces] = {}
    for name, pieces in items:
        if name in saved and _fits(name, saved[name], pieces):
            wanted.setdefault(name, pieces)
    check_adapters(path, found.manifest, spec, saved)
    from_base = weights_only and not any(is_adapter(name) for name in saved)
    missing = sorted({name for name, _ in items if name not in saved and not _may_be_missing(name)})
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


def _fits(name: str, saved: tuple[int, ...], pieces: Pieces) -> bool:
    """False for a history of delayed scaling with another length; such a history starts again."""
    return not is_scaling(name) or saved == tuple(pieces.shape)


def _may_be_missing(name: str) -> bool:
    """True for the generators of ranks and the state of delayed scaling, without which a run continues."""
    return name.startswith(GENERATOR) or is_scaling(name)


def _note_new_scaling(found: Found, spec: Spec, inventory: Inventory) -> None:
    """Report once where delayed scaling begins again: the checkpoint is of another recipe, or has a history of another length."""
    recipe = spec.precision.recipe
    if recipe is None or dist.get_rank():
        return
    blocks = [name for name in (*layer_names(len(inventory.layers)), "head") if delayed_weights(spec, inventory, name)]
    metadata = CheckpointReader(found.path, found.manifest).read_metadata().state_dict_metadata
    saved = {name: metadata.get(f"{name}.{HISTORY}") for name in blocks}
    lengths = {name: 0 if each is None else int(each.size[1]) for name, each in saved.items()}  # type: ignore[union-attr]
    new = [name for name, length in lengths.items() if length != recipe.amax_history]
    if new:
        detail = f"precision.recipe.amax_history = {recipe.amax_history}, the checkpoint's of {new[0]} = {lengths[new[0]]}"
        more = f", and {len(new) - 1} blocks more" if len(new) > 1 else ""
        _report("MP679", detail + more, Location(file=str(found.path)), Severity.NOTE)


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
