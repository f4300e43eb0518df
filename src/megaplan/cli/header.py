"""The lines that describe a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaplan.cli.stages_text import family_counts
from megaplan.spec.models import Spec

_AXES = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


def header_lines(spec: Spec, letters: Sequence[str], parameters: int, active_parameters: int) -> Iterator[tuple[str, str]]:
    """Lines as (text, style): name, model, mesh and batch."""
    mesh, batch, schedule = spec.mesh, spec.batch, spec.schedule
    yield spec.name, "bold"
    active = f", {active_parameters:,} active" if active_parameters != parameters else ""
    yield f"  {family_counts(letters)}", ""
    yield f"  {parameters:,} parameters{active}", ""
    degrees = " ".join(f"{axis} {getattr(mesh, axis)}" for axis in _AXES if getattr(mesh, axis) > 1)
    yield f"  {counted(mesh.world_size, 'rank')}{f': {degrees}' if degrees else ''}", ""
    size = f"{counted(batch.micro_batch_size, 'sequence')} of {batch.seq_length:,} tokens"
    steps = f", {schedule.steps_per_update:,} times per update" if schedule.steps_per_update > 1 else ""
    yield f"  {schedule.kind}, {counted(schedule.num_microbatches, 'microbatch')} of {size}{steps}", ""
    yield f"  {spec.global_batch_tokens:,} tokens per step", ""


def counted(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`, `16 microbatches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
