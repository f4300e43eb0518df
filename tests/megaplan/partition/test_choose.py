"""`choose_cuts`: modes, certificate, warnings, refusals, staleness."""

from itertools import pairwise
from typing import Any

import pytest

from megaplan.errors import MegaplanError, Severity
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.partition.invariants import invariant_digests, stale_reasons
from megaplan.partition.values import Cuts, StackCosts, equal_cuts, stack_costs
from megaplan.schedules import MAX_REPLAYED, num_actions
from megaplan.spec.models import Spec

SECTIONS: dict[str, Any] = {
    "A": {"attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}},
    "M": {"mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16}},
    "E": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}},
    "R": {"recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 16, "value_dim": 16}},
    "D": {"mlp": {"ffn_hidden_size": 128}},
}


def make_spec(pattern: str, num_layers: int, pp: int = 2, vpp: int = 1, features: dict[str, Any] | None = None, **split: Any) -> Spec:
    model: dict[str, Any] = {"pattern": pattern, "num_layers": num_layers, "hidden_size": 64, "vocab_size": 256}
    for letter in set(pattern) - {"|"}:
        model |= SECTIONS[letter]
    kind = "interleaved_1f1b" if vpp > 1 else "1f1b"
    document = {
        "format": "megaplan.spec/1",
        "name": "t",
        "model": model | {"features": features or {}},
        "mesh": {"pp": pp, "vpp": vpp},
        "schedule": {"kind": kind, "num_microbatches": 8},
        "batch": {"micro_batch_size": 1, "seq_length": 32},
        "split": {"objective": "bottleneck"} | split,
    }
    return Spec.model_validate(document)


def changed(spec: Spec, **sections: Any) -> Spec:
    document = spec.as_document()
    for name, section in sections.items():
        document[name] = {**document[name], **section}
    return Spec.model_validate(document)


def choose(spec: Spec, **arguments: Any) -> Cuts:
    return choose_cuts(spec, build_inventory(spec), **arguments)


def codes(spec: Spec, **arguments: Any) -> list[str]:
    with pytest.raises(MegaplanError) as refusal:
        choose(spec, **arguments)
    return [found.code for found in refusal.value.diagnostics]


@pytest.mark.requirement("R-21")
@pytest.mark.requirement("R-23")
@pytest.mark.parametrize(
    ("num_layers", "num_slots", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 2, [2, 1]),
        (5, 5, [1] * 5),
        (7, 1, [7]),
    ],
)
def test_equal_spares_the_edge_stages(num_layers: int, num_slots: int, sizes: list[int]) -> None:
    edges = (0, *equal_cuts(num_layers, num_slots), num_layers)
    assert [stop - start for start, stop in pairwise(edges)] == sizes


def test_equal_refuses_empty_slots() -> None:
    with pytest.raises(ValueError, match="3 layers cannot fill 4 slots"):
        equal_cuts(3, 4)


@pytest.mark.requirement("R-29")
def test_weighted_certificate_is_attained_and_equal_shows_its_gap() -> None:
    features = {"mtp": {"depth": 1, "ffn_hidden_size": 4096}}
    weighted = choose(make_spec("AD", 16, features=features))
    assert (weighted.mode, weighted.objective, weighted.reason) == ("weighted", "bottleneck", None)
    assert weighted.certificate.value == max(weighted.certificate.costs) == weighted.certificate.lower_bound
    assert weighted.certificate.optimal
    equal = choose(make_spec("AD", 16, features=features, mode="equal"))
    assert equal.spans == ((0, 8), (8, 16))
    assert equal.certificate.lower_bound == weighted.certificate.value
    assert equal.certificate.gap == equal.certificate.value - weighted.certificate.value > 0
    assert not equal.certificate.optimal


@pytest.mark.requirement("R-23")
def test_the_ends_cost_what_stands_there() -> None:
    spec = make_spec("AD", 4, features={"ngram": {"num_tables": 2, "num_rows": 100, "dim": 8}, "mtp": {"depth": 2, "ffn_hidden_size": 128}})
    costs = stack_costs(spec, build_inventory(spec))
    assert costs.first == 6 * 16 * 64
    assert costs.last > 3 * 6 * 64 * 256
    assert costs.of_slots(((0, 1), (1, 4))) == (costs.first + costs.layers[0], sum(costs.layers[1:]) + costs.last)
    plain = make_spec("AD", 4)
    assert stack_costs(plain, build_inventory(plain)).last == 8 * 64 * 256
    assert stack_costs(plain, build_inventory(plain)).first == 0


@pytest.mark.requirement("R-26")
def test_interleaving_balances_chunks() -> None:
    cuts = choose(make_spec("AD", 24, pp=2, vpp=3))
    assert len(cuts.spans) == 6
    assert [
        slot.pp_rank for slot in build_layout(make_spec("AD", 24, pp=2, vpp=3), build_inventory(make_spec("AD", 24)), cuts.spans).slots
    ] == [0, 1] * 3


def test_given_costs_replace_flops() -> None:
    cuts = choose(make_spec("AD", 4), costs=StackCosts((9, 1, 1, 1), unit="ns"))
    assert cuts.spans == ((0, 1), (1, 4))
    assert (cuts.certificate.costs, cuts.certificate.unit) == ((9, 3), "ns")


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize("pattern", ["ADA|DAD", "ADADAD"])
def test_manual_is_followed_and_remembers_why(pattern: str) -> None:
    spans: Spans | None = None if "|" in pattern else ((0, 3), (3, 6))
    spec = make_spec(pattern, 6, mode="manual", spans=spans, reason="the loader wants it", protects=["side_embeddings"])
    cuts = choose(spec)
    assert cuts.spans == ((0, 3), (3, 6))
    assert (cuts.mode, cuts.objective, cuts.reason, cuts.protects) == ("manual", None, "the loader wants it", ("side_embeddings",))
    assert cuts.decided_against == invariant_digests(spec, build_inventory(spec))
    assert cuts.certificate.costs == stack_costs(spec, build_inventory(spec)).of_slots(cuts.spans)


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"spans": ((0, 3), (3, 6))}, ["MP323"]),
        ({"spans": ((0, 3), (3, 6)), "reason": " "}, ["MP323"]),
        ({"reason": "r"}, ["MP321"]),
        ({}, ["MP323", "MP321"]),
        ({"reason": "r", "spans": ((0, 6),)}, ["MP324"]),
        ({"reason": "r", "spans": ((0, 3), (3, 6)), "forbid": (3,)}, ["MP331"]),
        ({"reason": "r", "spans": ((0, 3), (3, 6)), "together": ((2, 4),)}, ["MP331"]),
        ({"reason": "r", "spans": ((0, 3), (3, 6)), "pin": (2,)}, ["MP331"]),
    ],
)
def test_a_manual_split_that_cannot_stand_is_refused_with_all_its_faults(split: dict[str, Any], expected: list[str]) -> None:
    assert codes(make_spec("ADADAD", 6, mode="manual", **split)) == expected


def test_two_statements_of_a_manual_split_are_refused() -> None:
    assert codes(make_spec("ADA|DAD", 6, mode="manual", spans=((0, 3), (3, 6)), reason="r")) == ["MP322"]


@pytest.mark.requirement("R-24")
def test_equal_cuts_do_not_give_way_to_constraints() -> None:
    assert codes(make_spec("AD", 8, mode="equal", forbid=(4,))) == ["MP335"]
    assert choose(make_spec("AD", 8, mode="weighted", forbid=(4,))).spans[0][1] != 4


def test_faults_of_schedule_and_constraints_are_reported_together() -> None:
    spec = changed(make_spec("AD", 8, pin=(9,)), schedule={"num_microbatches": 1})
    assert codes(spec) == ["MP311", "MP327"]


def test_the_baseline_of_equally_good_cuts_is_kept() -> None:
    costs = StackCosts((9, 1, 1, 1, 1))
    spec = make_spec("D", 5, pp=3)
    assert choose(spec, costs=costs).spans == ((0, 1), (1, 3), (3, 5))
    kept = choose(spec, costs=costs, baseline=((0, 1), (1, 4), (4, 5)))
    assert kept.spans == ((0, 1), (1, 4), (4, 5))
    assert kept.diagnostics == ()


def test_planning_again_with_itself_as_baseline_changes_nothing() -> None:
    spec = make_spec("AEMEAEMR", 40, pp=4, vpp=2)
    first = choose(spec)
    assert choose(spec, baseline=first.spans) == first


def test_a_baseline_of_another_size_warns() -> None:
    (warning,) = choose(make_spec("AD", 8), baseline=((0, 8),)).diagnostics
    assert (warning.code, warning.severity) == ("MP339", Severity.WARNING)
    assert "1 slots, this spec 2" in warning.detail


@pytest.mark.requirement("R-24")
@pytest.mark.requirement("R-14")
@pytest.mark.parametrize(
    ("pattern", "cut", "code", "words"),
    [
        ("AEEA", 2, "MP337", r"layers [1, 3) are a run of 2 E blocks, and cut 2 puts layers 1 and 2 on slots 0 and 1, pp ranks 0 and 1"),
        ("ARRR", 3, "MP338", r"layers [1, 4) are a run of 3 R blocks, and cut 3 puts layers 2 and 3 on slots 0 and 1, pp ranks 0 and 1"),
        ("AEEA", 1, None, ""),
        ("AEEA", 3, None, ""),
        ("AERA", 2, None, ""),
        ("AAMM", 3, None, ""),
        ("ADDD", 2, None, ""),
    ],
)
def test_a_cut_inside_a_run_of_experts_or_recurrences_warns(pattern: str, cut: int, code: str | None, words: str) -> None:
    text = f"{pattern[:cut]}|{pattern[cut:]}"
    warnings = choose(make_spec(text, 4, mode="manual", reason="r")).diagnostics
    assert [found.code for found in warnings] == ([code] if code else [])
    assert all(found.severity is Severity.WARNING and found.detail == words for found in warnings)


@pytest.mark.requirement("R-24")
def test_the_hint_of_a_warning_removes_it() -> None:
    spec = make_spec("AEEA", 4, mode="manual", spans=((0, 2), (2, 4)), reason="r")
    assert "split: {together: [[1, 3]]}" in choose(spec).diagnostics[0].hints
    assert choose(make_spec("AEEA", 4, together=((1, 3),))).diagnostics == ()


def test_a_run_that_cannot_stay_whole_gets_no_such_hint() -> None:
    warnings = choose(make_spec("R", 4)).diagnostics
    assert [found.hints for found in warnings] == [("megaplan explain MP338",)]


STALE: list[tuple[dict[str, Any], list[str]]] = [
    ({"schedule": {"num_microbatches": 16}}, ["schedule"]),
    ({"mesh": {"pp": 3}}, ["schedule"]),
    ({"recompute": {"blocks": {"R": "selective"}}}, ["recurrent_handling"]),
    ({"batch": {"seq_length": 64}}, ["costs_A"]),
    ({"batch": {"micro_batch_size": 2}}, []),
    ({"mesh": {"dp_shard": 4}}, []),
    ({"training": {"steps": 5}}, []),
]


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize(("change", "stale"), STALE)
def test_a_change_makes_stale_what_rests_on_it(change: dict[str, Any], stale: list[str]) -> None:
    spec = make_spec("AEDR", 8)
    then = invariant_digests(spec, build_inventory(spec))
    now = changed(spec, **change)
    assert list(stale_reasons(then, now, build_inventory(now))) == stale


@pytest.mark.requirement("R-25")
@pytest.mark.parametrize(
    ("model", "stale"),
    [
        ({"features": {"structure": {"num_categories": 9, "bottleneck": 4}}}, ["side_embeddings"]),
        ({"features": {"mtp": {"depth": 1, "ffn_hidden_size": 64}}}, ["auxiliary_losses", "costs_head"]),
        ({"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96}}, ["auxiliary_losses", "costs_E"]),
        ({"mlp": {"ffn_hidden_size": 256}}, ["costs_D"]),
        ({"pattern": "AERD"}, ["costs_D", "costs_R", "recurrent_handling"]),
        ({"vocab_size": 512}, ["costs_head"]),
        ({"pattern": "AEDD", "recurrent": None}, ["costs_D", "costs_R", "recurrent_handling"]),
    ],
)
def test_a_change_of_the_model_makes_stale_what_rests_on_it(model: dict[str, Any], stale: list[str]) -> None:
    spec = make_spec("AEDR", 8)
    then = invariant_digests(spec, build_inventory(spec))
    now = changed(spec, model=model)
    assert list(stale_reasons(then, now, build_inventory(now))) == stale


def test_a_step_that_is_too_long_to_replay_is_cut_by_its_bottleneck() -> None:
    """And says so once; one microbatch fewer is cut by its step."""
    spec = make_spec("AMED", 12, mode="weighted", objective="step_time")
    most = MAX_REPLAYED // num_actions(2, 1, 1)
    long = changed(spec, schedule={"num_microbatches": most + 1})
    cuts, by_bottleneck = choose(long), choose(changed(long, split={"objective": "bottleneck"}))
    assert (cuts.objective, cuts.certificate, cuts.spans) == ("bottleneck", by_bottleneck.certificate, by_bottleneck.spans)
    (note,) = [found for found in cuts.diagnostics if found.code == "MP315"]
    assert f"up to {num_actions(2, 1, most + 1):,} actions" in note.detail
    assert note.severity is Severity.NOTE
    replayed = choose(changed(spec, schedule={"num_microbatches": most}))
    assert replayed.objective == replayed.certificate.objective == "step_time"
    assert "MP315" not in [found.code for found in replayed.diagnostics]
