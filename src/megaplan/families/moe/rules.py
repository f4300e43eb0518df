"""What must fit in `model.moe`: choices and factors within the number of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import Checked
from megaplan.families.moe.section import MixtureOfExperts


def moe_rules(checked: Checked, moe: MixtureOfExperts) -> Iterator[Diagnostic]:
    """MP704, MP705, MP715."""
    if moe.shared_gate and not moe.shared_ffn_hidden_size:
        detail = "moe.shared_gate = true, moe.shared_ffn_hidden_size = 0: there is no shared expert"
        yield checked.error("MP715", detail, "model.moe.shared_gate", "give shared_ffn_hidden_size, or shared_gate: false")
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
