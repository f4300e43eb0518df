"""The size of a job as its owner states it: GPUs, device, global batch and length, from which mesh and microbatches follow."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from megaplan.api.batch import assumed, batch_of, one_by_one
from megaplan.api.load import FilePath, LoadedJob, Source, load
from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Location, Severity
from megaplan.spec.host import device_of
from megaplan.spec.layout import Mesh

_FIRST_LOOK = ("recompute", "batch")
"""Settings that a quick search varies in addition to the mesh."""
_FIRST_LOOK_SECONDS = 4.0
"""Time limit of the quick search, which most models do not need."""
FREE_PERCENT = 6
"""Percent of a device that a quick search leaves free if a layout can; a measured run reserved up to 5.4 % more than its estimate."""
_DEGREES = frozenset({"mesh", *(f"mesh.{name}" for name in Mesh.model_fields)})
_KEPT = ("batch.micro_batch_size", "schedule.kind", "sharding.reshard_after_forward", "host.kernels", "precision.grads")
"""Keys that a quick search decides, unless a change states them."""


class JobSize(NamedTuple):
    """A job's size; None where nothing states it.

    Attributes:
        gpus: GPUs of the job.
        device: Name of the device, in any case: `h100`.
        global_batch: Sequences of one optimizer step.
        seq_length: Tokens of a sequence.
    """

    gpus: int | None = None
    device: str | None = None
    global_batch: int | None = None
    seq_length: int | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """`KEY=VALUE` texts of the settings that have a key."""
        device = () if self.device is None else (f"device.name={self.device}",)
        return (*device, *(() if self.seq_length is None else (f"batch.seq_length={self.seq_length}",)))


def load_sized(source: Source, changes: Sequence[str], size: JobSize, *, costs: FilePath | None = None) -> LoadedJob:
    """A job of a stated size.

    If the source decides no mesh, a quick search chooses mesh, micro-batch and recompute; otherwise `dp_shard` follows from the GPUs.

    Args:
        source: A source of `megaplan.load`.
        changes: `KEY=VALUE` texts; if one is a degree of the mesh, there is no search; a search keeps the other stated keys.
        size: The stated size.
        costs: A costs file.

    Raises:
        MegaplanError: Errors of `megaplan.load`; MP495, the size contradicts the mesh or the microbatches.
    """
    texts = [*changes, *size.changes]
    job = load(source, *texts, costs=costs)
    if size.gpus is None and size.global_batch is None:
        return job
    gpus = job.spec.mesh.world_size if size.gpus is None else size.gpus
    if gpus < 1 or (size.global_batch is not None and size.global_batch < 1):
        raise refuse("MP495", f"{gpus} GPUs, global batch {size.global_batch}: both are at least 1", "--gpus 8 --global-batch 64")
    if job.plan is None and not _decides_mesh(job, texts):
        return _searched(job, size, gpus, costs)
    mesh = _scaled(job, gpus)
    return replace(load(job, *mesh, *_microbatches(load(job, *mesh), size, gpus)), sized=())


def _decides_mesh(job: LoadedJob, texts: Sequence[str]) -> bool:
    """True if the source or a change has a degree of the mesh."""
    return "mesh" in job.spec.model_fields_set or any(text.partition("=")[0].strip().lower() in _DEGREES for text in texts)


def _scaled(job: LoadedJob, gpus: int) -> tuple[str, ...]:
    """The change of `mesh.dp_shard` that gives the GPUs.

    Raises:
        MegaplanError: MP495, the other degrees do not divide them, or a change states another `mesh.dp_shard`.
    """
    mesh = job.spec.mesh
    rest = mesh.world_size // mesh.dp_shard
    if gpus % rest:
        sizes = [max(1, gpus // rest) * rest, (gpus // rest + 1) * rest]
        detail = f"{gpus} GPUs, and pp · dp_replicate · cp · tp = {mesh.pp} · {mesh.dp_replicate} · {mesh.cp} · {mesh.tp} = {rest}"
        raise refuse("MP495", detail, *(f"--gpus {size}" for size in dict.fromkeys(sizes)), file=job.name)
    if gpus == mesh.world_size:
        return ()
    found = f"mesh.dp_shard={gpus // rest}"
    if _is_changed(job, "mesh.dp_shard"):
        detail = f"{gpus} GPUs, and mesh.dp_shard = {mesh.dp_shard} with the other degrees gives {mesh.world_size}"
        raise refuse("MP495", detail, f"--gpus {mesh.world_size}", f"--set {found}", file=job.name)
    return (found,)


def _is_changed(job: LoadedJob, key: str) -> bool:
    """True if a change of the command states a key, directly or as part of its section."""
    section, _, name = key.partition(".")
    keys = {text.partition("=")[0].strip().lower() for text in job.changes}
    return key in keys or (section in keys and name in getattr(job.spec, section).model_fields_set)


def _microbatches(job: LoadedJob, size: JobSize, gpus: int) -> tuple[str, ...]:
    """The change of `schedule.num_microbatches` that gives the global batch; None if no global batch is given.

    Raises:
        MegaplanError: MP495, data ranks and micro-batch do not divide it.
    """
    if size.global_batch is None:
        return ()
    spec = job.spec
    each = spec.batch.micro_batch_size * spec.mesh.data_ranks * spec.schedule.steps_per_update
    if size.global_batch % each:
        near = max(1, round(size.global_batch / each)) * each
        detail = f"global batch {size.global_batch}, and micro_batch_size · data ranks · steps_per_update = {each} on {gpus} GPUs"
        raise refuse("MP495", detail, f"--global-batch {near}", file=job.name)
    number, own = size.global_batch // each, spec.schedule.num_microbatches
    if number != own and _is_changed(job, "schedule.num_microbatches"):
        detail = f"global batch {size.global_batch}, and schedule.num_microbatches = {own} on {gpus} GPUs gives {own * each}"
        raise refuse("MP495", detail, f"--global-batch {own * each}", f"--set schedule.num_microbatches={number}", file=job.name)
    return (f"schedule.num_microbatches={number}",)


def _searched(job: LoadedJob, size: JobSize, gpus: int, costs: FilePath | None) -> LoadedJob:
    """The job with the layout of a quick search, or sharded over all GPUs if nothing fits."""
    batch, stated = batch_of(job, gpus, size.global_batch)
    updates, kept = job.spec.schedule.steps_per_update, _kept(job)
    if batch % updates:
        detail = f"global batch {batch}, and schedule.steps_per_update = {updates}: {batch} % {updates} = {batch % updates}"
        raise refuse("MP495", detail, f"--global-batch {-(-batch // updates) * updates}", file=job.name)
    if size.global_batch is not None and _is_changed(job, "schedule.num_microbatches"):
        number = job.spec.schedule.num_microbatches
        detail = f"global batch {batch}, and schedule.num_microbatches = {number}: without a mesh a quick search decides the microbatches"
        raise refuse("MP495", detail, f"--set mesh.dp_shard={gpus}", file=job.name)
    chosen = _best(load(job, *one_by_one(job, batch // updates)), gpus, kept)
    if chosen is None:
        micro = job.spec.batch.micro_batch_size if "batch.micro_batch_size" in dict(kept) else 1
        ranks = gpus if batch % (gpus * updates * micro) == 0 else 1
        number = max(1, batch // (ranks * updates * micro))
        chosen = (f"mesh.dp_shard={gpus}", f"batch.micro_batch_size={micro}", f"schedule.num_microbatches={number}")
        said = f"no layout of the quick search fits on {gpus} GPUs"
    else:
        said = f"the layout is the best of a quick search over {gpus} GPUs, with {FREE_PERCENT}% of each free where a layout leaves that"
    found = load(job, *chosen) if costs is None else load(job, *chosen, costs=costs)
    mark = "" if stated else f"; {assumed(batch)}"
    sized = tuple(text for text in chosen if not _is_neutral(text) or _is_changed(job, text.partition("=")[0]))
    if not any(text.startswith("mesh.") for text in sized):  # a given degree excludes any other search
        sized = (f"mesh.dp_shard={gpus}", *sized)
    words = " ".join(f"--set {shlex.quote(text)}" for text in sized)
    note = diagnostic("MP824", f"{said}{mark}", Location(job.name), (_search_command(job, gpus, size), words), Severity.NOTE)
    return replace(found, read_diagnostics=(note, *found.read_diagnostics), sized=sized)


def _search_command(job: LoadedJob, gpus: int, size: JobSize) -> str:
    """The search over the layouts of the same job, with the same values kept."""
    from megaplan.exploration.space import FIXABLE  # noqa: PLC0415  (only for a job without a mesh)

    given = (("--devices", gpus), ("--device", size.device), ("--global-batch", size.global_batch), ("--seq", size.seq_length))
    words = [str(word) for pair in given if pair[1] is not None for word in pair]
    for text in (text for text in job.changes if text not in size.changes):
        words += ["--fix" if text.partition("=")[0].strip() in FIXABLE else "--set", text]
    return shlex.join(["megaplan", "search", job.name, *words])


def _is_neutral(text: str) -> bool:
    """True for a decision that a spec without the key has too."""
    key, _, value = text.partition("=")
    return (key.startswith("mesh.") and value in ("1", "false")) or text in ("recompute.default=none", "recompute.blocks={}")


def _kept(job: LoadedJob) -> tuple[tuple[str, object], ...]:
    """The keys that a quick search would decide and that a change states, with their values."""
    found = ((key, getattr(getattr(job.spec, key.partition(".")[0]), key.partition(".")[2])) for key in _KEPT if _is_changed(job, key))
    return tuple((key, str(value) if isinstance(value, Enum) else value) for key, value in found)


def _best(job: LoadedJob, gpus: int, kept: Sequence[tuple[str, object]]) -> tuple[str, ...] | None:
    """Changes of the best layout of a quick search, with `FREE_PERCENT` free if a layout has it; None if none fits or none is searched."""
    if job.spec.host.kind.floors is None:
        return None
    from megaplan.api.search import search  # noqa: PLC0415  (only for a job without a mesh)

    decides = any(text.partition("=")[0].strip().lower().startswith("recompute") for text in job.changes)
    vary = [word for word in _FIRST_LOOK if word != "recompute" or not decides]
    free = FREE_PERCENT * device_of(job.spec.device).capacity.value // 100
    for headroom_bytes in (free, 0):
        found = search(
            job, devices=gpus, fix=dict(kept), vary=vary, headroom_bytes=headroom_bytes, top=1, processes=1, seconds=_FIRST_LOOK_SECONDS / 2
        )
        if found.best is not None:
            return found.best.changes
    return None
