"""The size of a job as its owner states it: GPUs, device, global batch and length, from which mesh and microbatches follow."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
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
        """`KEY=VALUE` texts of what has a key of its own."""
        device = () if self.device is None else (f"device.name={self.device}",)
        return (*device, *(() if self.seq_length is None else (f"batch.seq_length={self.seq_length}",)))


def load_sized(source: Source, changes: Sequence[str], size: JobSize, *, costs: FilePath | None = None) -> LoadedJob:
    """A job of a stated size.

    If the source decides no mesh, a quick search chooses mesh, micro-batch and recompute; otherwise `dp_shard` follows from the GPUs.

    Args:
        source: A source of `megaplan.load`.
        changes: `KEY=VALUE` texts; a degree of the mesh among them rules the search out.
        size: The stated size.
        costs: A costs file.

    Raises:
        MegaplanError: Those of `megaplan.load`; MP495, the size and the mesh contradict each other.
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
    return load(job, *mesh, *_microbatches(load(job, *mesh), size, gpus))


def _decides_mesh(job: LoadedJob, texts: Sequence[str]) -> bool:
    """True if the source or a change has a degree of the mesh."""
    return "mesh" in job.spec.model_fields_set or any(text.partition("=")[0].strip().lower() in _DEGREES for text in texts)


def _scaled(job: LoadedJob, gpus: int) -> tuple[str, ...]:
    """The change of `mesh.dp_shard` that gives the GPUs.

    Raises:
        MegaplanError: MP495, the other degrees do not divide them.
    """
    mesh = job.spec.mesh
    rest = mesh.world_size // mesh.dp_shard
    if gpus % rest:
        sizes = [max(1, gpus // rest) * rest, (gpus // rest + 1) * rest]
        detail = f"{gpus} GPUs, and pp · dp_replicate · cp · tp = {mesh.pp} · {mesh.dp_replicate} · {mesh.cp} · {mesh.tp} = {rest}"
        raise refuse("MP495", detail, *(f"--gpus {size}" for size in dict.fromkeys(sizes)), file=job.name)
    return () if gpus == mesh.world_size else (f"mesh.dp_shard={gpus // rest}",)


def _microbatches(job: LoadedJob, size: JobSize, gpus: int) -> tuple[str, ...]:
    """The change of `schedule.num_microbatches` that gives the global batch; none where nothing states it.

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
    return (f"schedule.num_microbatches={size.global_batch // each}",)


def _searched(job: LoadedJob, size: JobSize, gpus: int, costs: FilePath | None) -> LoadedJob:
    """The job with the layout of a quick search, or sharded over all GPUs if nothing fits."""
    batch, stated = batch_of(job, gpus, size.global_batch)
    chosen = _best(load(job, *one_by_one(job, batch)), gpus)
    if chosen is None:
        ranks = gpus if batch % gpus == 0 else 1
        chosen = (f"mesh.dp_shard={gpus}", "batch.micro_batch_size=1", f"schedule.num_microbatches={max(1, batch // ranks)}")
        said = f"no layout of the quick search fits on {gpus} GPUs"
    else:
        said = f"the layout is the best of a quick search over {gpus} GPUs, with {FREE_PERCENT}% of each free where a layout leaves that"
    found = load(job, *chosen) if costs is None else load(job, *chosen, costs=costs)
    mark = "" if stated else f"; {assumed(batch)}"
    words = " ".join(f"--set {shlex.quote(text)}" for text in chosen if not _is_neutral(text))
    note = diagnostic("MP824", f"{said}{mark}", Location(job.name), (_search_command(job, gpus, size), words), Severity.NOTE)
    return replace(found, read_diagnostics=(note, *found.read_diagnostics))


def _search_command(job: LoadedJob, gpus: int, size: JobSize) -> str:
    """The search over the layouts of the same job."""
    given = (("--devices", gpus), ("--device", size.device), ("--global-batch", size.global_batch), ("--seq", size.seq_length))
    texts = (text for text in job.changes if text not in size.changes)
    words = [*(str(word) for pair in given if pair[1] is not None for word in pair), *(word for text in texts for word in ("--set", text))]
    return shlex.join(["megaplan", "search", job.name, *words])


def _is_neutral(text: str) -> bool:
    """True for a decision that a spec without the key has too."""
    key, _, value = text.partition("=")
    return (key.startswith("mesh.") and value in ("1", "false")) or text in ("recompute.default=none", "recompute.blocks={}")


def _best(job: LoadedJob, gpus: int) -> tuple[str, ...] | None:
    """Changes of the best layout of a quick search, with `FREE_PERCENT` free if a layout has it; None if none fits or none is searched."""
    if job.spec.host.kind.floors is None:
        return None
    from megaplan.api.search import search  # noqa: PLC0415  (only for a job without a mesh)

    free = FREE_PERCENT * device_of(job.spec.device).capacity.value // 100
    for headroom_bytes in (free, 0):
        found = search(
            job, devices=gpus, vary=_FIRST_LOOK, headroom_bytes=headroom_bytes, top=1, processes=1, seconds=_FIRST_LOOK_SECONDS / 2
        )
        if found.best is not None:
            return found.best.changes
    return None
