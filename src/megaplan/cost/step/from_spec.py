"""A spec's step as a workload: its model, mesh, batch, device and cuts, and the software that its host is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megaplan.cost.step.low_rank import adapters
from megaplan.cost.step.workload import (
    AttentionShape,
    BatchShape,
    ExpertShape,
    Machine,
    MambaShape,
    MeshShape,
    ModelShape,
    Recomputed,
    Software,
    StageShape,
    StepWorkload,
)
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
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


def workload_of(
    spec: Spec,
    spans: Sequence[tuple[int, int]],
    owners: Sequence[int],
    how: tuple[Software, Recomputed],
    like: StepWorkload | None = None,
) -> StepWorkload:
    """One optimizer step of a spec.

    Args:
        spec: A checked spec that `unpriced` has nothing against.
        spans: Its cuts: one half-open span of layers for each slot.
        owners: The pipeline rank of each slot.
        how: The framework, and what backward runs again: see `step_of`.
        like: A step of the same model on the same device, whose description of both is taken.
    """
    mesh, schedule = spec.mesh, spec.schedule
    degrees = MeshShape(mesh.world_size, mesh.tp, mesh.pp, mesh.vpp, mesh.cp, mesh.ep, mesh.etp, mesh.data_ranks)
    batch = BatchShape(spec.batch.micro_batch_size, spec.batch.seq_length, schedule.microbatches_per_update)
    stages = _stages(spec, spans, owners)
    model, machine = (model_shape(spec), machine_of(spec)) if like is None else (like.model, like.machine)
    return StepWorkload(model, degrees, batch, how[0], machine, stages, how[1])


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


def model_shape(spec: Spec) -> ModelShape:
    """The model's dimensions."""
    model = spec.model
    letters = parse_pattern(model.pattern, model.num_layers).layers
    counts = {letter: float(count) for letter, count in Counter(letters).items()}
    activation = model.moe.activation if model.moe is not None else model.mlp.activation if model.mlp is not None else "swiglu"
    experts = None
    if model.moe is not None:
        moe = model.moe
        sizes = (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.shared_ffn_hidden_size)
        experts = ExpertShape(*sizes, latent=moe.latent_size or 0, padding=moe.capacity_factor or 1.0)
    mamba = None
    if isinstance(model.mamba, Mamba2):
        heads = model.mamba.num_heads or model.mamba.expand * model.hidden_size // model.mamba.head_dim
        mamba = MambaShape(heads, model.mamba.head_dim, model.mamba.state_dim, model.mamba.num_groups)
    return ModelShape(
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        tied=model.tie_embeddings,
        gated=activation == "swiglu",
        ffn=model.mlp.ffn_hidden_size if model.mlp is not None else 0,
        counts=counts,
        attention=_attention(spec, counts.get("A", 0.0)),
        experts=experts,
        mamba=mamba,
        mtp=model.features.mtp.depth if model.features.mtp is not None else 0,
        adapters=adapters(spec.lora.rank, spec.lora.adapts) if spec.lora is not None else None,
    )


def machine_of(spec: Spec) -> Machine:
    """The device's figures, with what the spec gives in their place."""
    device = device_of(spec.device)
    domain = device.domain.value
    if spec.device.domain is None and domain <= NODE:
        domain = min(domain, spec.device.per_node)
    reached = {str(dtype): share for dtype, share in spec.device.reached.items()}
    return replace(Machine.of(device), domain=domain, reached=reached)


def _attention(spec: Spec, layers: float) -> AttentionShape | None:
    shape = spec.model.attention
    if shape is None:
        return None
    window = shape.window_size or 0
    share = 1 - len(shape.full_layers) / layers if window and layers else 0.0
    if isinstance(shape, LatentAttention):
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        latent = (shape.q_lora_rank or 0, shape.kv_lora_rank, shape.qk_rope_head_dim)
        return AttentionShape(shape.num_heads, shape.num_heads, width, shape.v_head_dim, *latent, window, share)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    return AttentionShape(*heads, window=window, window_share=share, sinks=shape.sinks)


def _stages(spec: Spec, spans: Sequence[tuple[int, int]], owners: Sequence[int]) -> tuple[StageShape, ...]:
    """Stages by what they hold, those that are alike together; the first slot has the embedding and the last the head."""
    letters = letters_of(spec.model.pattern, spec.model.num_layers)
    held: dict[int, Counter[str]] = {rank: Counter() for rank in owners}
    for (start, stop), rank in zip(spans, owners, strict=True):
        held[rank].update(letters[start:stop])
    alike: Counter[tuple[tuple[tuple[str, int], ...], bool, bool]] = Counter()
    for rank, blocks in held.items():
        alike[tuple(sorted(blocks.items())), rank == owners[0], rank == owners[-1]] += 1
    return tuple(
        StageShape(float(count), {letter: float(number) for letter, number in blocks}, first, last)
        for (blocks, first, last), count in alike.items()
    )


@lru_cache(maxsize=64)
def letters_of(pattern: str, num_layers: int) -> str:
    """The expanded pattern."""
    return parse_pattern(pattern, num_layers).layers
