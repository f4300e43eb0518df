"""The step of a spec as a `TimedStep`: model, mesh, batch, device and cuts, and the software of its host."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megaplan.cost.step.blocks import kinds_in
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Recomputed, Software, StageShape, TimedStep
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Inventory
from megaplan.spec.host import device_of, fabric_size
from megaplan.spec.models import LatentAttention, Mamba2, Spec
from megaplan.spec.pattern import parse_pattern

_NAMES = {"R": "matrix recurrences"}
"""Common names of families, if they differ from the title."""


def unpriced(spec: Spec) -> str | None:
    """The part of a spec for which the step-time model has no term; None if the step can be timed."""
    model = spec.model
    letters = set(parse_pattern(model.pattern, model.num_layers).layers)
    untimed = [family for letter, family in FAMILIES.items() if letter in letters and not family.timed]
    if untimed:
        return f"{_NAMES.get(untimed[0].letter, f'{untimed[0].title} blocks')} ({untimed[0].letter})"
    if "M" in letters and not isinstance(model.mamba, Mamba2):
        return f"model.mamba.kind {model.mamba.kind}" if model.mamba is not None else "M blocks"
    if isinstance(model.attention, LatentAttention) and model.attention.indexer is not None:
        return "sparse attention's indexer"
    if spec.precision.params is DType.FP32:
        return "products in fp32"
    features = model.features
    given = [name for name in type(features).model_fields if getattr(features, name) is not None]
    if features.mtp is not None and _depths_are_layers(spec, letters):
        given.remove("mtp")
    return f"model.features.{given[0]}" if given else None


def _depths_are_layers(spec: Spec, letters: set[str]) -> bool:
    """True if prediction depths have an A block and experts like the model, or an A block and its MLP if the model has no experts."""
    model, mtp = spec.model, spec.model.features.mtp
    assert mtp is not None
    if model.attention is None or mtp.side_embeddings or mtp.letters != ("AE" if "E" in letters else "AD"):
        return False
    return "E" in mtp.letters or (
        model.mlp is not None and (mtp.ffn_hidden_size, mtp.activation) == (model.mlp.ffn_hidden_size, model.mlp.activation)
    )


def timed_step(
    spec: Spec,
    inventory: Inventory,
    spans: Sequence[tuple[int, int]],
    owners: Sequence[int],
    how: tuple[Software, Recomputed],
    machine: Machine | None = None,
) -> TimedStep:
    """One optimizer step of a spec.

    Args:
        spec: A checked spec that can be timed (`unpriced` is None).
        inventory: Inventory of the spec.
        spans: Cuts: one half-open span of layers per slot.
        owners: Pipeline rank of each slot.
        how: The software and the recomputed operations, see `step_of`.
        machine: Figures of the device; None to take them from the spec.
    """
    mesh, schedule = spec.mesh, spec.schedule
    degrees = MeshShape(mesh.world_size, mesh.tp, mesh.pp, mesh.vpp, mesh.cp, mesh.ep, mesh.etp, mesh.data_ranks)
    batch = BatchShape(spec.batch.micro_batch_size, spec.batch.seq_length, schedule.microbatches_per_update)
    stages = _stages(kinds_in(inventory).layers, spans, owners)
    return TimedStep(spec, inventory, degrees, batch, how[0], machine or machine_of(spec), stages, how[1])


def step_of(spec: Spec) -> tuple[Software, Recomputed]:
    """Software of a spec whose host has fitted constants, and the operations that backward runs again under its policies."""
    of_host = spec.host.kind.step
    assert of_host is not None
    found: tuple[Software, Recomputed] = of_host(spec)
    return found


def low_dtype(spec: Spec) -> str:
    """Dtype of linears in the step model: fp8 with one scale per tensor or per row, mxfp8 also for one scale per block of 128."""
    recipe = spec.precision.recipe
    if recipe is None:
        return "fp8" if spec.precision.params is DType.FP8 else "bf16"
    return {"fp8_blockwise": "mxfp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}.get(recipe.name, "fp8")


def machine_of(spec: Spec) -> Machine:
    """Figures of the device; values that the spec gives replace them."""
    device = device_of(spec.device)
    domain = min(device.domain.value, fabric_size(spec.device))
    reached = {str(dtype): share for dtype, share in spec.device.reached.items()}
    return replace(Machine.of(device), domain=domain, reached=reached, step_factor=spec.device.step_factor or 1.0)


def _stages(kinds: Sequence[str], spans: Sequence[tuple[int, int]], owners: Sequence[int]) -> tuple[StageShape, ...]:
    """Stages grouped by their blocks; the first slot has the embedding and the last one the head."""
    held: dict[int, Counter[str]] = {rank: Counter() for rank in owners}
    for (start, stop), rank in zip(spans, owners, strict=True):
        held[rank].update(kinds[start:stop])
    equal: Counter[tuple[tuple[tuple[str, int], ...], bool, bool]] = Counter()
    for rank, blocks in held.items():
        equal[tuple(sorted(blocks.items())), rank == owners[0], rank == owners[-1]] += 1
    return tuple(
        StageShape(float(count), {kind: float(number) for kind, number in blocks}, first, last)
        for (blocks, first, last), count in equal.items()
    )


@lru_cache(maxsize=64)
def letters_of(pattern: str, num_layers: int) -> str:
    """Letters of the expanded pattern."""
    return parse_pattern(pattern, num_layers).layers
