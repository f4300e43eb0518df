"""`megaplan costs`, and `--costs` of split, estimate and check."""

import io
import json
import sys
from pathlib import Path

import pytest

from megaplan.plan.digests import plan_digest

SPEC = "plans/tiny-hybrid-pp2.yaml"


@pytest.fixture
def costs(megaplan, here) -> Path:
    """A costs file of the spec, written by the command."""
    ran = megaplan("costs", SPEC, "-o", "costs.json")
    assert ran.status == 0, ran.err
    assert "wrote costs.json: 9 layers" in ran.out
    return here / "costs.json"


def stages(ran) -> list[list[int]]:
    return [stage["layers"] for stage in json.loads(ran.out)["stages"]]


def slow_first_layer(path: Path) -> None:
    document = json.loads(path.read_text())
    document["layers"][0]["forward_ns"] = 10**10
    path.write_text(json.dumps(document))


def test_the_file_goes_to_stdout_without_a_target(megaplan, costs):
    assert megaplan("costs", SPEC).out == costs.read_text()
    assert megaplan("costs", SPEC, "-o", "costs.json").status == 2
    assert megaplan("costs", SPEC, "-o", "costs.json", "--force").status == 0


def test_a_hugging_face_config_is_a_spec(megaplan, here):
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    (here / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    ran = megaplan("costs", "config.json", "--set", "mesh.pp=2", "--set", "schedule.num_microbatches=2", "-o", "measured.json")
    assert (ran.status, "MP821" in ran.err) == (0, True)
    assert len(json.loads((here / "measured.json").read_text())["layers"]) == 4
    split = megaplan("split", "config.json", "--set", "mesh.pp=2", "--set", "schedule.num_microbatches=2", "--costs", "measured.json")
    assert split.status == 0, split.err


def test_an_override_changes_the_times(megaplan, costs):
    slower = json.loads(megaplan("costs", SPEC, "--set", "batch.micro_batch_size=64").out)
    before = json.loads(costs.read_text())
    assert all(new["forward_ns"] > old["forward_ns"] for new, old in zip(slower["layers"], before["layers"], strict=True))


def test_split_cuts_by_the_file_and_records_it(megaplan, costs):
    ran = megaplan("split", SPEC, "--objective", "bottleneck", "--costs", "costs.json", "--json")
    assert json.loads(ran.out)["split"]["certificate"]["optimal"]
    ran = megaplan("split", SPEC, "--costs", "costs.json", "-o", "plan.json", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)["split"]
    assert (found["certificate"]["unit"], found["certificate"]["measures"]) == ("ns", "step")
    assert found["costs"].startswith("sha256:")
    slow_first_layer(costs)
    again = megaplan("split", SPEC, "--costs", "costs.json", "--json")
    assert stages(again) == [[0, 1], [1, 9]]
    assert json.loads(again.out)["split"]["costs"] != found["costs"]


def test_estimate_cuts_a_spec_by_the_file_and_keeps_a_plan_s_cuts(megaplan, costs):
    slow_first_layer(costs)
    assert megaplan("estimate", SPEC, "--costs", "costs.json").out != megaplan("estimate", SPEC).out
    megaplan("split", SPEC, "--costs", "costs.json", "-o", "plan.json")
    by_file, by_plan = megaplan("estimate", SPEC, "--costs", "costs.json", "--json"), megaplan("estimate", "plan.json", "--json")
    assert json.loads(by_file.out)["ranks"] == json.loads(by_plan.out)["ranks"]
    refused = megaplan("estimate", "plan.json", "--costs", "costs.json")
    assert (refused.status, "MP481" in refused.err) == (2, True)


def test_check_knows_the_file_that_a_plan_was_cut_by(megaplan, costs):
    megaplan("split", SPEC, "--costs", "costs.json", "-o", "plan.json")
    right = megaplan("check", "plan.json", "--costs", "costs.json", "--strict")
    assert (right.status, right.err) == (0, "")
    without = megaplan("check", "plan.json")
    assert (without.status, "warning[MP415]" in without.err) == (0, True)
    assert megaplan("check", "plan.json", "--strict").status == 1
    slow_first_layer(costs)
    other = megaplan("check", "plan.json", "--costs", "costs.json")
    assert (other.status, "error[MP414]" in other.err, "error[MP410]" in other.err) == (1, True, True)


def test_a_plan_by_flops_was_not_cut_by_a_file(megaplan, costs):
    ran = megaplan("check", "plans/tiny-hybrid-pp2.json", "--costs", "costs.json")
    assert ran.status == 1
    assert "the plan   no costs file" in ran.err


def test_a_plan_by_costs_is_shown_and_compared_without_the_file(megaplan, costs):
    slow_first_layer(costs)
    megaplan("split", SPEC, "--costs", "costs.json", "-o", "plan.json")
    assert "s, lower bound" in " ".join(megaplan("show", "plan.json").out.split())
    assert "MP415" in megaplan("show", "plan.json", "--set", "batch.micro_batch_size=2").err
    difference = megaplan("diff", "plans/tiny-hybrid-pp2.json", "plan.json", "--format", "json")
    assert "split.costs" in difference.out


def test_costs_of_another_unit_contradict_the_file(megaplan, costs, here):
    megaplan("split", SPEC, "--costs", "costs.json", "-o", "plan.json")
    document = json.loads((here / "plan.json").read_text())
    document["decisions"]["split"]["certificate"]["unit"] = "flops_per_token"
    document["digests"]["plan"] = plan_digest(document["inputs"], document["decisions"])
    (here / "plan.json").write_text(json.dumps(document))
    ran = megaplan("estimate", "plan.json")
    assert (ran.status, "MP407" in ran.err, "costs file" in ran.err) == (2, True, True)


@pytest.mark.requirement("R-25")
def test_a_manual_split_weighed_by_a_file_is_not_stale_without_it(megaplan, costs):
    manual = ("--set", "split.spans=[[0,4],[4,9]]", "--set", "split.reason=R begins a stage", "--mode", "manual")
    assert megaplan("split", SPEC, *manual, "--costs", "costs.json", "-o", "plan.json").status == 0
    assert "MP412" not in megaplan("check", "plan.json").err
    assert megaplan("check", "plan.json", "--costs", "costs.json").err == ""
    slow_first_layer(costs)
    assert "MP412" in megaplan("check", "plan.json", "--costs", "costs.json").err


@pytest.mark.parametrize("command", ["split", "estimate"])
def test_a_wrong_file_is_an_error(megaplan, here, command):
    (here / "costs.json").write_text('{"format": "megaplan.costs/1"}')
    ran = megaplan(command, SPEC, "--costs", "costs.json")
    assert (ran.status, ran.out) == (2, "")
    assert "error[MP341]" in ran.err


@pytest.mark.parametrize("command", ["split", "estimate"])
def test_standard_input_is_one_file(megaplan, costs, here, monkeypatch, command):
    def stdin(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    stdin(costs.read_text())
    assert megaplan(command, SPEC, "--costs", "-").status == 0
    stdin((here / SPEC).read_text())
    ran = megaplan(command, "-", "--costs", "-")
    assert (ran.status, "error[MP480]" in ran.err) == (2, True)
