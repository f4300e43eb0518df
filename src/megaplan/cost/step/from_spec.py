"""A spec's step as a workload: its model, mesh, batch, device and cuts, and the software that its host is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megaplan.cost.step.blocks import kinds_in
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Recomputed, Software, StageShape, TimedStep
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Inventory
from megaplan.spec.device import device_of
from megaplan.spec.models import LatentAttention, Mamba2, Spec
from megaplan.spec.pattern import parse_pattern

NODE = 8
"""Devices of a node: domains up to this size end with the node, larger ones join nodes."""


_NAMES = {"R": "matrix recurrences"}
"""Of families, where a reader of step times knows another name than the title."""


def unpriced(spec: Spec) -> str | None:
    """What of a spec the step-time model has no term for; None if it can be timed."""
    model = spec.model
    letters = set(parse_pattern(model.pattern, model.num_layers).layers)
    untimed = [family for letter, family in FAMILIES.items() if letter in letters and not family.timed]
    if untimed:
        return f"{_NAMES.get(untimed[0].letter, f'{untimed[0].title} blocks')} ({untimed[0].letter})"
    if "M" in letters and not isinstance(model.mamba, Mamba2):
        return f"model.mamba.kind {model.mamba.kind}" if model.mamba is not None else "M blocks"
    if isinstance(model.attention, LatentAttention) and model.attention.indexer is not None:
        return "sparse attention's indexer"
    features = model.features
    given = [name for name in type(features).model_fields if getattr(features, name) is not None]
    if features.mtp is not None and _depths_are_layers(spec, letters):
        given.remove("mtp")
    return f"model.features.{given[0]}" if given else None


def _depths_are_layers(spec: Spec, letters: set[str]) -> bool:
    """Whether prediction depths have the blocks that the model has: an A block, and experts, or an MLP where it has no experts."""
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
        spec: A checked spec that `unpriced` has nothing against.
        inventory: Its inventory.
        spans: Its cuts: one half-open span of layers for each slot.
        owners: The pipeline rank of each slot.
        how: The framework, and what backward runs again: see `step_of`.
        machine: Its device's figures; from the spec if None.
    """
    mesh, schedule = spec.mesh, spec.schedule
    degrees = MeshShape(mesh.world_size, mesh.tp, mesh.pp, mesh.vpp, mesh.cp, mesh.ep, mesh.etp, mesh.data_ranks)
    batch = BatchShape(spec.batch.micro_batch_size, spec.batch.seq_length, schedule.microbatches_per_update)
    stages = _stages(kinds_in(inventory).layers, spans, owners)
    return TimedStep(spec, inventory, degrees, batch, how[0], machine or machine_of(spec), stages, how[1])


def step_of(spec: Spec) -> tuple[Software, Recomputed]:
    """The software of a spec whose host this model times, and what backward runs again under its policies."""
    of_host = spec.host.kind.step
    assert of_host is not None
    found: tuple[Software, Recomputed] = of_host(spec)
    return found


def low_dtype(spec: Spec) -> str:
    """The dtype of linears in the step model's words: one scale a tensor or a row is fp8, one a block of 128 is priced as mxfp8."""
    recipe = spec.precision.recipe
    if recipe is None:
        return "fp8" if spec.precision.params is DType.FP8 else "bf16"
    return {"fp8_blockwise": "mxfp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}.get(recipe.name, "fp8")


def machine_of(spec: Spec) -> Machine:
    """The device's figures, with what the spec gives in their place."""
    device = device_of(spec.device)
    domain = device.domain.value
    if spec.device.domain is None and domain <= NODE:
        domain = min(domain, spec.device.per_node)
    reached = {str(dtype): share for dtype, share in spec.device.reached.items()}
    return replace(Machine.of(device), domain=domain, reached=reached)


def _stages(kinds: Sequence[str], spans: Sequence[tuple[int, int]], owners: Sequence[int]) -> tuple[StageShape, ...]:
    """Stages by what they hold, those that are alike together; the first slot has the embedding and the last the head."""
    held: dict[int, Counter[str]] = {rank: Counter() for rank in owners}
    for (start, stop), rank in zip(spans, owners, strict=True):
        held[rank].update(kinds[start:stop])
    alike: Counter[tuple[tuple[tuple[str, int], ...], bool, bool]] = Counter()
    for rank, blocks in held.items():
        alike[tuple(sorted(blocks.items())), rank == owners[0], rank == owners[-1]] += 1
    return tuple(
        StageShape(float(count), {kind: float(number) for kind, number in blocks}, first, last)
        for (blocks, first, last), count in alike.items()
    )


@lru_cache(maxsize=64)
def letters_of(pattern: str, num_layers: int) -> str:
    """The expanded pattern."""
    return parse_pattern(pattern, num_layers).layers
