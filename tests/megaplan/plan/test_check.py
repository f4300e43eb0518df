"""`check`: failures and warnings."""

import contextlib
import json

import pytest

from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.partition.choose import choose_cuts
from megaplan.plan.canonical import dumps
from megaplan.plan.check import check_plan
from megaplan.plan.digests import plan_digest
from megaplan.plan.make import make_plan, plan_text
from megaplan.plan.read import parse_plan
from megaplan.spec.load import load_spec


def checked(document):
    text = document if isinstance(document, str) else dumps(document)
    return check_plan(parse_plan(text, "plan.json"), "plan.json")


def codes(result):
    return [found.code for found in result.findings]


def leaves(value, path):
    """The path of every scalar below `path`."""
    if not isinstance(value, dict | list):
        yield path
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, (*path, key))


@pytest.fixture
def document(planned):
    return json.loads(plan_text(planned("tiny-hybrid-pp2")))


def test_an_untouched_plan_has_no_findings(document):
    result = checked(document)
    assert codes(result) == []
    assert result.passes(strict=True)


def test_a_search_for_cuts_that_ended_with_its_work_is_no_change(monkeypatch):
    """The same search gets further from the cuts that it has reached, if they are its baseline."""
    spec = load_spec("plans/nam56r-8xh200.yaml", ["mesh.pp=4", "mesh.vpp=1", "schedule.kind=1f1b"]).spec
    inventory, plan = build_inventory(spec), None
    for replays in range(1, 40):
        monkeypatch.setattr("megaplan.partition.step.MAX_ACTIONS", replays * spec.num_actions // 3)
        cuts = choose_cuts(spec, inventory)
        if choose_cuts(spec, inventory, baseline=cuts.spans).spans != cuts.spans:
            plan = make_plan(spec, cuts=cuts)
            break
    assert plan is not None, "no limit of work leaves cuts that a further search improves"
    assert codes(checked(plan_text(plan))) == []


def test_a_drift_of_estimates_warns_and_fails_only_when_strict(document):
    rank = document["estimates"]["ranks"][0]
    rank["columns"]["overhead_bytes"] += 1
    rank["phases"][rank["peak_phase"]] += 1
    rank["peak_bytes"] += 1
    rank["headroom_bytes"] -= 1
    result = checked(document)
    assert codes(result) == ["MP411"]
    assert "overhead_bytes" in result.findings[0].detail
    assert result.passes(strict=False)
    assert not result.passes(strict=True)


def test_no_forged_value_of_the_estimates_passes_a_strict_check(document):
    passed = []
    for path in list(leaves(document["estimates"], ("estimates",))):
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        honest = parent[path[-1]]
        parent[path[-1]] = {bool: not honest, int: 7 if honest != 7 else 8, str: f"{honest}x"}.get(type(honest), 0)
        with contextlib.suppress(MegaplanError):  # its type alone is refused
            passed += [path] if checked(document).passes(strict=True) else []
        parent[path[-1]] = honest
    assert passed == []


def test_a_changed_decision_fails(document):
    assert document["decisions"]["split"]["mode"] == "weighted"
    certificate = document["decisions"]["split"]["certificate"]
    certificate |= {"lower_bound": certificate["value"] - 1, "gap": 1, "optimal": False}  # as a weaker solver would have left it
    document["digests"]["plan"] = plan_digest(document["inputs"], document["decisions"])
    result = checked(document)
    assert codes(result) == ["MP410"]
    assert "split.certificate.lower_bound" in result.findings[0].detail
    assert not result.passes(strict=False)


def test_a_digest_that_does_not_match_fails(document):
    document["decisions"]["split"]["certificate"]["lower_bound"] -= 1
    assert codes(checked(document)) == ["MP406", "MP410"]


@pytest.mark.requirement("R-25")
def test_a_stale_reason_fails_until_it_is_written_anew(planned):
    manual = ("split.mode=manual", "split.reason=R begins a stage", "split.spans=[[0,4],[4,9]]")
    spec = planned("tiny-hybrid-pp2", *manual, "schedule.num_microbatches=8").spec
    result = checked(plan_text(make_plan(spec, baseline=planned("tiny-hybrid-pp2", *manual))))
    assert codes(result) == ["MP412"]
    assert "schedule" in result.findings[0].detail
    assert "R begins a stage" in result.findings[0].detail
    assert codes(checked(plan_text(make_plan(spec)))) == []


@pytest.mark.requirement("R-25")
def test_a_manual_split_is_weighed_against_the_best_one(planned):
    manual = ("split.mode=manual", "split.reason=R begins a stage", "split.spans=[[0,4],[4,9]]")
    plan, best = planned("tiny-hybrid-pp2", *manual), planned("tiny-hybrid-pp2", "split.objective=bottleneck")
    gain = checked(plan_text(plan)).gain
    assert gain.cuts == tuple(stage.layers[0] for stage in best.decisions.stages[1:])
    assert gain.bottleneck == (plan.decisions.split.certificate.value, best.decisions.split.certificate.value)
    assert gain.bottleneck[0] > gain.bottleneck[1]
    assert gain.peak_bytes == tuple(max(rank.peak_bytes for rank in each.estimates.ranks) for each in (plan, best))
    assert gain.step_ns[0] != gain.step_ns[1]
    assert checked(plan_text(best)).gain is None


def test_a_plan_that_fitted_and_no_longer_fits_fails(planned):
    large = json.loads(plan_text(planned("llama-3.1-8b", "batch.micro_batch_size=16")))
    assert not large["estimates"]["fits"]
    for rank in large["estimates"]["ranks"]:
        rank["columns"] = dict.fromkeys(rank["columns"], 0)
        rank["phases"] = dict.fromkeys(rank["phases"], 0)
        rank |= {"peak_bytes": 0, "headroom_bytes": large["estimates"]["device"]["usable_bytes"], "fits": True}
    large["estimates"]["fits"] = True
    result = checked(large)
    assert codes(result) == ["MP413"]
    assert "over by" in result.findings[0].detail
