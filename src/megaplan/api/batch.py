"""The global batch of a search: stated by an argument, the source or a change, or assumed for a model's config."""

from megaplan.api.load import LoadedJob
from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.scalars import MAX_MICROBATCHES

SEQUENCES_PER_GPU = 4
"""Sequences of the global batch for each GPU if nothing states the batch of an imported model."""


def batch_of(job: LoadedJob, gpus: int, given: int | None = None) -> tuple[int, bool]:
    """Sequences of a step, and True if an argument, the source or a change states them; else `SEQUENCES_PER_GPU` for each GPU.

    Raises:
        MegaplanError: MP495, more than a search takes.
    """
    stated = given if given is not None else _stated(job)
    batch = SEQUENCES_PER_GPU * gpus if stated is None else stated
    if batch > MAX_MICROBATCHES:
        raise refuse("MP495", f"global batch {batch}, and at most {MAX_MICROBATCHES:,} sequences are searched", file=job.name)
    return batch, stated is not None


def open_batch(job: LoadedJob, gpus: int, given: int | None) -> tuple[int | None, tuple[Diagnostic, ...]]:
    """The global batch that a search sets (None to keep the job's), and the notes of reading the job.

    MP821 among these notes means that no batch is given.

    Raises:
        MegaplanError: MP495, more than a search takes.
    """
    if given is None and (not job.is_model or _stated(job) is not None):
        return None, job.read_diagnostics
    batch, stated = batch_of(job, gpus, given)
    parts = {} if stated else {f"--global-batch {batch}": assumed(batch)}
    keys = {text.partition("=")[0].strip() for text in job.changes}
    length = job.spec.batch.seq_length
    if job.is_model and not keys & {"batch", "batch.seq_length"}:
        parts[f"--seq {length}"] = f"batch.seq_length = {length:,} until set"
    notes = (diagnostic("MP821", "\n".join(parts.values()), Location(job.name), (" ".join(parts),), Severity.NOTE),) if parts else ()
    return batch, (*notes, *(each for each in job.read_diagnostics if each.code != "MP821"))


def one_by_one(job: LoadedJob, batch: int) -> tuple[str, ...]:
    """The changes that give a search a global batch, which its layouts divide."""
    updates = () if job.spec.schedule.steps_per_update == 1 else ("schedule.steps_per_update=1",)
    return "batch.micro_batch_size=1", f"schedule.num_microbatches={batch}", *updates


def assumed(batch: int) -> str:
    """The note that no global batch is given."""
    return f"global batch {batch}, {SEQUENCES_PER_GPU} sequences per GPU, until --global-batch sets it"


def _stated(job: LoadedJob) -> int | None:
    """The global batch if the source or a change states a part of it."""
    spec = job.spec
    given = {"num_microbatches", "steps_per_update"} & spec.schedule.model_fields_set
    keys = {text.partition("=")[0].strip() for text in job.changes}
    return spec.global_batch_size if given or "batch.micro_batch_size" in keys else None
