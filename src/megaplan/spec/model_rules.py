"""Dimensions of the model that must fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megaplan.errors import Diagnostic
from megaplan.spec.context import Checked, divisors, mamba_width, remainder, use_one_of
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Mamba2, Mamba3
from megaplan.spec.wording import plural, series


def model_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP332, MP701 … MP713."""
    yield from _attention(checked)
    yield from _attention_layers(checked)
    yield from _mamba(checked)
    yield from _mamba_angles(checked)
    yield from _time_steps(checked)
    yield from _experts(checked)
    yield from _features(checked)


def _attention(checked: Checked) -> Iterator[Diagnostic]:
    attention = checked.spec.model.attention
    if isinstance(attention, GroupedQueryAttention):
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % kv_heads:
            detail = remainder("attention.num_heads", heads, "attention.num_kv_heads", kv_heads)
            yield checked.error("MP701", detail, "model.attention.num_kv_heads", use_one_of(divisors(heads)))
        in_depths = checked.spec.model.features.mtp is not None  # their attention rotates whatever the layers' does
        rotates = in_depths or checked.pattern is None or checked.count("A") > len(attention.nope_layers)
        if attention.head_dim % 2 and rotates:
            yield _odd(checked, "head_dim", attention.head_dim)
    if isinstance(attention, LatentAttention):
        if attention.qk_rope_head_dim % 2:
            yield _odd(checked, "qk_rope_head_dim", attention.qk_rope_head_dim)
        if attention.indexer is not None and attention.q_lora_rank is None:
            detail = "attention.q_lora_rank = null, and attention.indexer is given"
            yield checked.error("MP707", detail, "model.attention.indexer", "give attention.q_lora_rank, or remove attention.indexer")
        if attention.indexer is not None and attention.indexer.head_dim < attention.qk_rope_head_dim:
            width, rotated = attention.indexer.head_dim, attention.qk_rope_head_dim
            detail = f"attention.indexer.head_dim = {width}, attention.qk_rope_head_dim = {rotated}, and {width} < {rotated}"
            yield checked.error("MP712", detail, "model.attention.indexer.head_dim", f"head_dim: {rotated}")


def _odd(checked: Checked, name: str, width: int) -> Diagnostic:
    detail = f"attention.{name} = {width}, and {width} % 2 = 1"
    return checked.error("MP708", detail, f"model.attention.{name}", f"{name}: {width + 1}")


def _attention_layers(checked: Checked) -> Iterator[Diagnostic]:
    attention = checked.spec.model.attention
    if attention is None:
        return
    lists = {"model.attention.nope_layers": attention.nope_layers, "model.attention.full_layers": attention.full_layers}
    if attention.full_layers and attention.window_size is None:
        detail = f"attention.full_layers = {list(attention.full_layers)}, attention.window_size = null"
        yield checked.error("MP713", detail, "model.attention.full_layers", "give attention.window_size, or remove attention.full_layers")
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        lists["model.attention.indexer.layers"] = attention.indexer.layers
    for key, layers in lists.items():
        yield from rising(checked, key, layers)
        if checked.pattern is not None:
            yield from _not_attention(checked, key, layers, checked.pattern.layers)


def _not_attention(checked: Checked, key: str, layers: tuple[int, ...], letters: str) -> Iterator[Diagnostic]:
    wrong = [
        f"layer {layer} is {letters[layer]}" if layer < len(letters) else f"layer {layer} is beyond the last, {len(letters) - 1}"
        for layer in layers
        if layer >= len(letters) or letters[layer] != "A"
    ]
    if wrong:
        legal = [str(index) for index, letter in enumerate(letters) if letter == "A"]
        shown = ", ".join(legal[:16]) + (" …" if len(legal) > 16 else "")
        faults = series(wrong[:6], "and") + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        yield checked.error("MP706", f"{key.removeprefix('model.')}: {faults}", key, f"the A layers are {shown or 'none'}")


def rising(checked: Checked, key: str, numbers: tuple[int, ...]) -> Iterator[Diagnostic]:
    """MP332 if a list of layers or cuts is not strictly rising."""
    for before, after in pairwise(numbers):
        if after <= before:
            detail = f"{key.removeprefix('model.')}: {after} follows {before}"
            in_order = sorted(set(numbers))
            hint = f"{key.rpartition('.')[2]}: {in_order}" if len(in_order) <= 24 else "sort the list and remove repetitions"
            yield checked.error("MP332", detail, key, hint)
            return


def _mamba(checked: Checked) -> Iterator[Diagnostic]:
    model = checked.spec.model
    mamba = model.mamba
    if mamba is None:
        return
    width = mamba_width(model)
    if width is None:
        inner = mamba.expand * model.hidden_size
        detail = (
            f"mamba.expand · hidden_size = {mamba.expand} · {model.hidden_size} = {inner}, mamba.head_dim = {mamba.head_dim}, "
            f"and {inner} % {mamba.head_dim} = {inner % mamba.head_dim}"
        )
        own_count = ("or give mamba.num_heads",) if isinstance(mamba, Mamba2) else ()
        yield checked.error("MP702", detail, "model.mamba.head_dim", use_one_of(divisors(inner)), *own_count)
        return
    name, heads = width
    if heads % mamba.num_groups:
        detail = remainder(name, heads, "mamba.num_groups", mamba.num_groups)
        yield checked.error("MP703", detail, "model.mamba.num_groups", use_one_of(divisors(heads)))


def _mamba_angles(checked: Checked) -> Iterator[Diagnostic]:
    mamba = checked.spec.model.mamba
    if isinstance(mamba, Mamba3) and 2 * mamba.num_angles > mamba.state_dim:
        turned = f"2 · {mamba.num_angles} > {mamba.state_dim}"
        detail = f"mamba.num_angles = {mamba.num_angles}, mamba.state_dim = {mamba.state_dim}, and {turned}"
        yield checked.error("MP711", detail, "model.mamba.num_angles", f"use at most {mamba.state_dim // 2}")


def _time_steps(checked: Checked) -> Iterator[Diagnostic]:
    mamba = checked.spec.model.mamba
    if isinstance(mamba, Mamba2) and mamba.time_step_max is not None and mamba.time_step_min >= mamba.time_step_max:
        least, most = mamba.time_step_min, mamba.time_step_max
        detail = f"mamba.time_step_min = {least:g}, mamba.time_step_max = {most:g}, and {least:g} >= {most:g}"
        yield checked.error("MP714", detail, "model.mamba.time_step_max", "time_step_max: null")


def _experts(checked: Checked) -> Iterator[Diagnostic]:
    moe = checked.spec.model.moe
    if moe is None:
        return
    if moe.top_k > moe.num_experts:
        detail = f"moe.top_k = {moe.top_k}, moe.num_experts = {moe.num_experts}, and {moe.top_k} > {moe.num_experts}"
        yield checked.error("MP704", detail, "model.moe.top_k", f"use at most {moe.num_experts}")
        return
    for name in ("routing_skew", "capacity_factor"):
        factor = getattr(moe, name)
        if factor is not None and factor * moe.top_k > moe.num_experts:
            most = moe.num_experts / moe.top_k
            share = f"moe.num_experts / moe.top_k = {moe.num_experts} / {moe.top_k} = {most:g}"
            detail = f"moe.{name} = {factor:g}, {share}, and {factor:g} > {most:g}"
            yield checked.error("MP705", detail, f"model.moe.{name}", f"use at most {most:g}")


def _features(checked: Checked) -> Iterator[Diagnostic]:
    features = checked.spec.model.features
    for name in ("mtp", "relation_bias"):
        if getattr(features, name) is not None and checked.pattern is not None and not checked.has("A"):
            detail = f"features.{name} is given, and the {plural(len(checked.pattern.layers), 'layer')} have no A"
            yield checked.error("MP709", detail, f"model.features.{name}", f"remove features.{name}, or add A to the pattern")
    ngram = features.ngram
    if ngram is not None and ngram.num_rows < ngram.num_tables:
        rows, tables = ngram.num_rows, ngram.num_tables
        detail = f"features.ngram.num_rows = {rows}, features.ngram.num_tables = {tables}, and {rows} < {tables}"
        yield checked.error("MP710", detail, "model.features.ngram.num_rows", "num_rows counts the rows of all tables together")
