"""Rules of `model.moe`: choices and factors within the number of experts."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec, divisors, use_one_of
from megaplan.families.moe.section import MixtureOfExperts


def moe_rules(checked: CheckedSpec, moe: MixtureOfExperts) -> Iterator[Diagnostic]:
    """Yields MP704, MP705 and MP715."""
    if moe.shared_gate and not moe.shared_ffn_hidden_size:
        detail = "moe.shared_gate = true, moe.shared_ffn_hidden_size = 0: there is no shared expert"
        yield checked.error("MP715", detail, "model.moe.shared_gate", "give shared_ffn_hidden_size, or shared_gate: false")
    if moe.own_norms and (not moe.shared_ffn_hidden_size or moe.null_experts):
        detail = f"moe.own_norms = true, moe.shared_ffn_hidden_size = {moe.shared_ffn_hidden_size}, moe.null_experts = {moe.null_experts}"
        yield checked.error("MP715", f"{detail}: norms belong to a shared expert, too", "model.moe.own_norms", "own_norms: false")
    yield from _groups(checked, moe)
    yield from _choices(checked, moe)
    if moe.swiglu_limit is not None and moe.activation != "swiglu":
        detail = f"moe.swiglu_limit = {moe.swiglu_limit:g}, moe.activation = {moe.activation}: the limit is one of swiglu"
        yield checked.error("MP715", detail, "model.moe.swiglu_limit", "give activation: swiglu, or swiglu_limit: null")
    if moe.expert_bias_rate and not moe.expert_bias:
        detail = f"moe.expert_bias_rate = {moe.expert_bias_rate:g}, moe.expert_bias = false: there is no bias"
        yield checked.error("MP715", detail, "model.moe.expert_bias_rate", "give expert_bias: true, or expert_bias_rate: 0.0")
    if moe.expert_bias and moe.score_correction:
        detail = "moe.expert_bias = true, moe.score_correction = true: both are added to the scores for the choice"
        yield checked.error("MP715", detail, "model.moe.expert_bias", "give one of them")
    if moe.top_k > moe.num_experts:
        detail = f"moe.top_k = {moe.top_k}, moe.num_experts = {moe.num_experts}, and {moe.top_k} > {moe.num_experts}"
        yield checked.error("MP704", detail, "model.moe.top_k", f"use at most {moe.num_experts}")
        return
    if isinstance(moe.routing_skew, tuple) and checked.letters is not None and len(moe.routing_skew) != checked.count("E"):
        detail = f"moe.routing_skew has {len(moe.routing_skew)} entries, and the pattern has {checked.count('E')} E layers"
        yield checked.error(
            "MP930", detail, "model.moe.routing_skew", "routing_skew: {first: 12, rest: 1.2}, or one entry for each E layer"
        )
        return
    for name, factor in (("routing_skew", moe.largest_skew), ("capacity_factor", moe.capacity_factor)):
        if factor is not None and factor * moe.top_k > moe.num_choices:
            most, nulls = moe.num_choices / moe.top_k, f" + {moe.null_experts}" if moe.null_experts else ""
            share = f"moe.num_experts{nulls} / moe.top_k = {moe.num_choices} / {moe.top_k} = {most:g}"
            detail = f"moe.{name} = {factor:g}, {share}, and {factor:g} > {most:g}"
            yield checked.error("MP705", detail, f"model.moe.{name}", f"use at most {most:g}")


def _choices(checked: CheckedSpec, moe: MixtureOfExperts) -> Iterator[Diagnostic]:
    """Checks that null experts and experts that choose have no option of the other kind of choice."""
    if moe.null_experts and moe.num_groups > 1:
        detail = f"moe.null_experts = {moe.null_experts}, moe.num_groups = {moe.num_groups}: null experts are in no group"
        yield checked.error("MP715", detail, "model.moe.null_experts", "give null_experts: 0, or num_groups: 1")
    if not moe.expert_choice:
        return
    given = {
        "null_experts": moe.null_experts > 0,
        "num_groups": moe.num_groups > 1,
        "expert_bias": moe.expert_bias,
        "score_correction": moe.score_correction,
        "balance_loss_coefficient": moe.balance_loss_coefficient > 0,
        "capacity_drop": moe.capacity_drop != "score",
    }
    for name in (name for name, is_given in given.items() if is_given):
        detail = f"moe.expert_choice = true, moe.{name} = {getattr(moe, name)}: it is one of experts that tokens choose"
        yield checked.error("MP715", detail, f"model.moe.{name}", f"leave {name} out, or give expert_choice: false")


def _groups(checked: CheckedSpec, moe: MixtureOfExperts) -> Iterator[Diagnostic]:
    """Checks that groups have equal sizes, and that the chosen groups have enough experts."""
    experts, groups, key = moe.num_experts, moe.num_groups, "model.moe.num_groups"
    if experts % groups:
        detail = f"moe.num_groups = {groups} does not divide moe.num_experts = {experts}"
        yield checked.error("MP715", detail, key, use_one_of(divisors(experts)))
        return
    if moe.score == "sigmoid" and groups > 1 and experts // groups < 2:
        detail = f"moe.num_groups = {groups}, moe.num_experts = {experts}: sigmoid scores judge a group by its best two experts"
        yield checked.error("MP715", detail, key, f"use at most {experts // 2}")
    if moe.top_groups > groups:
        detail = f"moe.top_groups = {moe.top_groups}, moe.num_groups = {groups}, and {moe.top_groups} > {groups}"
        yield checked.error("MP715", detail, "model.moe.top_groups", f"use at most {groups}")
    elif moe.top_groups < groups and moe.top_k > moe.top_groups * (experts // groups):
        most = moe.top_groups * (experts // groups)
        detail = f"moe.top_k = {moe.top_k}, but moe.top_groups = {moe.top_groups} groups have {most} experts"
        yield checked.error("MP715", detail, "model.moe.top_groups", f"use at least {-(-moe.top_k * groups // experts)}")
