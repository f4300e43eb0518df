"""The lines that describe a job."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megaplan.inventory.towers import tower_parameters
from megaplan.spec.models import Spec, Towers
from megaplan.spec.pattern import LETTERS
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import wrap


def header_lines(spec: Spec, letters: Sequence[str], parameters: int, active_parameters: int) -> Iterator[StyledLine]:
    """Lines as (text, style): name, model, mesh and batch."""
    mesh, batch, schedule = spec.mesh, spec.batch, spec.schedule
    yield spec.name, "bold"
    active = f", {active_parameters:,} active" if active_parameters != parameters else ""
    yield f"  {family_counts(letters)}", ""
    yield f"  {parameters:,} parameters{active}", ""
    if spec.model.towers is not None:
        yield f"  towers: {_towers(spec, spec.model.towers)}", ""
    if spec.lora is not None:
        chosen = ", ".join(spec.lora.families or ("all linears of layers",))
        packed = "" if spec.lora.base is None else f", linears in {spec.lora.base}"
        yield f"  adapters of rank {spec.lora.rank:,}, alpha {spec.lora.alpha:g}, on {chosen}; the rest is frozen{packed}", ""
    degrees = mesh.degrees_text
    yield f"  {counted(mesh.world_size, 'rank')}{f': {degrees}' if degrees else ''}", ""
    size = f"{counted(batch.micro_batch_size, 'sequence')} of {batch.seq_length:,} tokens"
    steps = f", {schedule.steps_per_update:,} times per update" if schedule.steps_per_update > 1 else ""
    yield f"  {schedule.kind}, {counted(schedule.num_microbatches, 'microbatch')} of {size}{steps}", ""
    yield f"  {spec.global_batch_tokens:,} tokens per step", ""
    yield from ((line, "") for line in wrap(f"  {_software(spec)}", indent="    "))


def _towers(spec: Spec, towers: Towers) -> str:
    """`vision 303,177,728 frozen, projector 9,437,184 trained; on the first stage, 1 image a sequence, of 576 tokens`."""
    parts = [f"{name} {size:,} {'trained' if towers.trains(name) else 'frozen'}" for name, size in tower_parameters(towers).items()]
    how = "not priced"
    if towers.stated is not None:
        encoder, projection = towers.stated
        tokens = counted(encoder.patches // projection.patches_per_token, "token")
        how = f"{counted(spec.batch.images, 'image')} per sequence, of {encoder.patches:,} patches and {tokens}"
    return f"{', '.join(parts)}; on the first stage, {how}"


def _software(spec: Spec) -> str:
    """`host megarun, triton kernels; bf16, gradients fp32; muon and adamw`."""
    host, precision, optimizer = spec.host, spec.precision, spec.optimizer
    others = {letter: dtype for letter, dtype in precision.families.items() if dtype != precision.params}
    dtypes = "".join(f", {letter} {dtype}" for letter, dtype in sorted(others.items()))
    one = optimizer.matrix == optimizer.other or spec.lora is not None
    both = optimizer.other if one else f"{optimizer.matrix} and {optimizer.other}"
    return f"host {host.kind.name}, {host.kind.describe(host)}; {precision.params}{dtypes}, gradients {precision.grads}; {both}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`, `16 microbatches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def family_counts(letters: Sequence[str]) -> str:
    """`52 layers = 13 A + 13 M + 22 E + 4 R`."""
    counts = Counter(letters)
    parts = [f"{counts[letter]} {letter}" for letter in LETTERS if counts[letter]]
    return f"{len(letters)} layers = {' + '.join(parts)}"
