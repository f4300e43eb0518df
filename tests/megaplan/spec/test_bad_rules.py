"""Rules across keys: each refusal shows its equation, its place, and a repair."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from spec_samples import Accepted, Edit, Refused

from megaplan.errors import Severity

CASES = yaml.safe_load(Path(__file__).with_name("bad_rules.yaml").read_text(encoding="utf-8"))


def split(text: str) -> Edit:
    return ("{mode: weighted}", text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_one_broken_rule(refused: Refused, case: dict[str, Any]) -> None:
    (found,) = [item for item in refused(*case["edits"]) if item.severity is Severity.ERROR]
    assert [found.code, found.location.key, found.location.line] == case["found"]
    assert case["shows"] in found.detail
    assert case.get("hint", found.hints[0]) in found.hints


def test_rules_are_reported_together_errors_first(refused: Refused) -> None:
    found = refused(
        ("num_kv_heads: 2", "num_kv_heads: 3"), ("tp: 1", "tp: 3"), ("num_microbatches: 4", "num_microbatches: 1"), split("{pin: [0]}")
    )
    assert [item.code for item in found] == ["MP701", "MP201", "MP202", "MP311", "MP327", "MP209"]


@pytest.mark.parametrize(
    ("edit", "key", "shows"),
    [
        (split("{mode: weighted}\ntraining: {learning_rate: 1.0e+18}"), "training.learning_rate", "= 1e+18"),
        (split("{mode: weighted}\ntraining: {muon_learning_rate: 1.5}"), "training.muon_learning_rate", "= 1.5"),
        (("num_groups: 2}", "num_groups: 2, conv_kernel: 65536}"), "model.mamba.conv_kernel", "taps never meet a token"),
    ],
)
def test_a_value_that_does_not_train_is_warned_of(accepted: Accepted, edit: Edit, key: str, shows: str) -> None:
    (found,) = [item for item in accepted(edit).diagnostics if item.code == "MP729"]
    assert (found.severity, found.location.key) == (Severity.WARNING, key)
    assert shows in found.detail


def test_rates_and_kernels_in_use_are_not_warned_of(accepted: Accepted) -> None:
    loaded = accepted(split("{mode: weighted}\ntraining: {learning_rate: 1.0, muon_learning_rate: 0.02}"))
    assert not [item for item in loaded.diagnostics if item.code == "MP729"]


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("kind", ["zbv", "dualpipev"])
def test_v_schedules_have_two_slots_a_rank(refused: Refused, kind: str) -> None:
    found = {item.code: item for item in refused(("kind: 1f1b", f"kind: {kind}"))}
    assert "2 · pp = 4 slots, rank i owning slots i and 3 − i, and mesh.vpp = 1" in found["MP313"].detail


@pytest.mark.parametrize("kind", ["zbv", "dualpipev"])
def test_v_schedules_are_accepted(accepted: Accepted, kind: str) -> None:
    assert accepted(("kind: 1f1b", f"kind: {kind}"), ("vpp: 1", "vpp: 2")).spec.schedule.kind == kind


@pytest.mark.requirement("R-67")
def test_full_recompute_is_accepted_where_the_family_allows_it(accepted: Accepted) -> None:
    edits = ("split:", "recompute: {default: full, blocks: {E: selective, M: selective}}\nsplit:")
    assert accepted(edits).spec.recompute.default == "full"


def test_a_factor_at_its_bound_is_accepted(accepted: Accepted) -> None:
    moe = accepted(("top_k: 2", "top_k: 2, routing_skew: 8, capacity_factor: 8")).spec.model.moe
    assert moe is not None
    assert (moe.routing_skew, moe.capacity_factor) == (8.0, 8.0)


def test_an_odd_head_is_accepted_where_no_layer_rotates_it(accepted: Accepted) -> None:
    assert accepted(("head_dim: 16}", "head_dim: 15, nope_layers: [0, 5]}")).spec.model.attention is not None


def test_a_pattern_cut_short_warns(accepted: Accepted) -> None:
    (found,) = accepted(("AMERD", "AMERDAMERDA")).diagnostics
    assert (found.code, found.severity, found.location.line) == ("MP309", Severity.WARNING, 4)
    assert found.hints[0] == "pattern: AMERDAMERD"
