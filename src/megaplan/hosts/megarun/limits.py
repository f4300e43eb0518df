"""Rules of host megarun: options and recipes for which its ledger has no terms."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.family import Family
from megaplan.families.registry import FAMILIES
from megaplan.schedules.registry import PAIRED, SPLIT_BACKWARD
from megaplan.spec.context import Checked
from megaplan.spec.low_precision import LowPrecision
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Model, Spec
from megaplan.spec.settings import given_options
from megaplan.wording import series

OF_MEGATRON = frozenset({
    "model.attention.output_bias", "model.attention.latent_norm",
})  # fmt: skip
"""Options of a model for which only the byte model of Megatron-Core has terms; the output's bias is for latent attention."""

ATTENDS = "fp8_current"
"""The recipe in which megarun's attention core multiplies: delayed scaling would also need a history for the softmax weights."""


def megarun_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP721, MP905, MP906, MP907 and MP908."""
    yield from _options(checked)
    yield from _offload(checked)
    yield from _kept_on_host(checked)
    yield from _recipe(checked)
    yield from _turns(checked)


def _recipe(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse keys of a low-precision recipe for which megarun's ledger has no terms."""
    recipe = checked.spec.precision.recipe
    if recipe is None:
        return
    reasons = list(_wide_attention(checked.spec, recipe)) if recipe.attention else []
    if reasons:
        detail = f"precision.recipe.attention = true, with {series(reasons, 'and')}: megarun's core in eight bits has none of these"
        yield checked.error("MP905", detail, "precision.recipe.attention", "attention: false", "host: {name: megatron}")


def _wide_attention(spec: Spec, recipe: LowPrecision) -> Iterator[str]:
    """Settings of a spec that the eight-bit attention core does not support."""
    attention = spec.model.attention
    if recipe.name != ATTENDS:
        yield f"precision.recipe.name = {recipe.name}"
    if spec.mesh.cp > 1:
        yield f"mesh.cp = {spec.mesh.cp}"
    if spec.model.features.relation_bias is not None:
        yield "model.features.relation_bias"
    if attention is not None and attention.sinks:
        yield "model.attention.sinks"
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        yield "model.attention.indexer"
    if isinstance(attention, GroupedQueryAttention):
        given = {"block_indexer": attention.block_indexer, "compressors": attention.compressors, "shared_keys": attention.shared_keys}
        yield from (f"model.attention.{name}" for name, value in given.items() if value)


def _offload(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse a recorded update if optimizer state is in host memory."""
    host = checked.spec.host
    if host.optimizer_offload is not None and host.graphs == "step":
        detail = (
            f"host.cuda_graphs = step, host.optimizer_offload = {host.optimizer_offload:g}: an update with copies from host "
            "memory cannot be recorded"
        )
        yield checked.error("MP906", detail, "host.cuda_graphs", "cuda_graphs: microbatch", "optimizer_offload: null")


def _kept_on_host(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse activations in host memory if layers share tensors, or if a setting keeps parts of a layer's tensors separately."""
    spec, key = checked.spec, "host.activation_offload"
    model, letters = spec.model, spec.host.activation_offload
    for letter in letters:
        if checked.pattern is not None and not checked.has(letter):
            present = series(list(checked.pattern.counts()), "and")
            yield checked.error("MP721", f"{key} has {letter}, and the pattern's letters are {present}", key, f"remove {letter}")
    if not letters:
        return
    attention, recorded = model.attention, spec.host.graphs != "none"
    caching = [letter for letter in letters if spec.recompute.of(letter) == "selective" and _caches(FAMILIES[letter], model)]
    chooses = getattr(attention, "indexer", None) is not None or bool(getattr(attention, "shared_keys", ()))
    for other, given, fix in (
        ("host.cuda_graphs", recorded, "cuda_graphs: none"),
        ("host.moe_overlap", spec.interleaves_pairs, "moe_overlap: false"),
        ("recompute", bool(caching), f"recompute: {{blocks: {{{', '.join(f'{letter}: none' for letter in caching)}}}}}"),
        ("schedule.kind", spec.mesh.is_pipelined and spec.schedule.kind in SPLIT_BACKWARD, "kind: interleaved_1f1b"),
        ("model.streams", model.streams is not None, "activation_offload: []"),
        ("model.attention_residuals", model.attention_residuals is not None, "activation_offload: []"),
        ("model.parallel_layers", bool(model.parallel_layers), "activation_offload: []"),
        ("model.attention", chooses, "activation_offload: []"),
        ("model.features.relation_bias", model.features.relation_bias is not None, "activation_offload: []"),
        ("model.features.layer_embeddings", model.features.layer_embeddings is not None, "activation_offload: []"),
    ):
        if given:
            yield checked.error("MP908", f"{key} = {', '.join(letters)}, with {other}", key, fix)


def _caches(family: Family, model: Model) -> bool:
    """True if selective recompute of the family keeps results outside of autograd."""
    section = getattr(model, family.section)
    return section is not None and bool(family.selective(section, family.variant(section, 0, 0)).caches)


def _turns(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse pairs in turns without a pair or an exchange, or without points of the exchange in the ledger."""
    spec = checked.spec
    if not spec.interleaves_pairs:
        return
    turns, sent = "moe_overlap: false", spec.mesh.ep > 1 and spec.model.moe is not None
    for key, given, reason, fix in (
        ("schedule.kind", spec.schedule.kind not in PAIRED or spec.mesh.pp == 1, f"only pairs of {', '.join(PAIRED)} take turns", turns),
        ("mesh.ep", not sent, "no rows leave their rank", turns),
        (
            "host.moe_dispatcher",
            spec.host.gathers_tokens,
            "a turn ends where an all-to-all begins, so mesh.ep must be above 1",
            "moe_dispatcher: alltoall",
        ),
        (
            "sharding.reshard_after_forward",
            spec.sharding.reshard_after_forward,
            "layers would be gathered between turns",
            "reshard_after_forward: false",
        ),
    ):
        if given:
            yield checked.error("MP907", f"host.moe_overlap = true, and {reason}", key, fix)


def _options(checked: Checked) -> Iterator[Diagnostic]:
    """Refuse options of a model for which Megatron's byte model has terms and megarun's ledger has none."""
    for option in given_options(checked.spec.model):
        of_grouped = option.key == "model.attention.output_bias" and isinstance(checked.spec.model.attention, GroupedQueryAttention)
        if option.key not in OF_MEGATRON or of_grouped:
            continue
        detail = f"{option.key} = {option.shown}, but megarun's estimate has no terms for it"
        yield checked.error("MP905", detail, option.key, f"{option.key.rpartition('.')[2]}: {option.neutral}", "host: {name: megatron}")
