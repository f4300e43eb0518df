"""`megaplan rl`: numbers that follow from each other, the schema, the search, and other commands' use of the section."""

import json
import re
import shlex

import pytest

from megaplan.plan.make import make_plan
from megaplan.spec.load import load_spec

SPEC = "plans/llama-3.1-8b-rl.yaml"
SPLIT = ("--set", "post_training.placement=split", "--set", "post_training.rollout.gpus=8")


def document(ran):
    assert ran.err == ""
    assert ran.status == 0
    return json.loads(ran.out)


def test_an_iteration_is_the_sum_of_its_phases(megaplan):
    found = document(megaplan("rl", SPEC, "--json"))
    assert found["iteration_seconds"]["value"] == pytest.approx(sum(phase["seconds"]["value"] for phase in found["times"]))
    assert found["peak_bytes"] == max(phase["total_bytes"] for phase in found["memory"])
    peak = next(phase for phase in found["memory"] if phase["name"] == found["peak_phase"])
    assert peak["columns"][found["peak_column"]] == max(peak["columns"].values())
    assert found["tokens"] == pytest.approx(64 * 32 * (130 + found["lengths"]["mean"]))


def test_split_pools_wait_for_each_other_or_work_together(megaplan):
    waiting, together = (document(megaplan("rl", SPEC, *SPLIT, "--json", "--set", f"post_training.staleness={stale}")) for stale in (0, 1))
    assert [pool["num_devices"] for pool in waiting["pools"]] == [16, 8]
    assert together["iteration_seconds"]["value"] < waiting["iteration_seconds"]["value"]
    for found in (waiting, together):
        for pool in found["pools"]:
            assert pool["idle_share"] == pytest.approx(1 - pool["busy_seconds"] / found["iteration_seconds"]["value"])
    assert min(pool["idle_share"] for pool in together["pools"]) == pytest.approx(0)


def test_text_names_the_peak_and_explains_columns(megaplan):
    shown = megaplan("rl", SPEC, "--explain", "--figures")
    assert shown.status == 0
    for part in ("device peak", "host peak", "iteration", "kv_cache", "host_processes", "memory_fraction · capacity", "host_step_seconds"):
        assert part in " ".join(shown.out.split())
    assert "rollout.sleep" in megaplan("explain", "host_engine_parameters").out


def test_a_plan_that_does_not_fit_exits_1(megaplan):
    assert megaplan("rl", SPEC, "--set", "post_training.host_memory=10GiB").status == 1


def test_the_schema_describes_every_value(megaplan):
    schema = document(megaplan("schema", "rl"))
    assert schema["properties"]["format"]["const"] == "megaplan.rl/1"
    assert set(document(megaplan("rl", SPEC, "--json"))) == set(schema["properties"])
    assert "PostTraining" in document(megaplan("schema", "spec"))["$defs"]


def test_a_plan_has_the_section_outside_its_digest(megaplan, here):
    plain = make_plan(load_spec(str(here / SPEC), ("post_training=null",)).spec)
    planned = make_plan(load_spec(str(here / SPEC)).spec)
    assert plain.digests == planned.digests
    megaplan("split", SPEC, "-o", "plan.json")
    assert document(megaplan("rl", "plan.json", "--json"))["microbatches"] == document(megaplan("rl", SPEC, "--json"))["microbatches"]


def test_a_search_lists_plans_that_fit_the_shortest_first(megaplan):
    found = document(megaplan("rl", SPEC, "--search", "--gpus", "8", "--top", "3", "--json"))
    seconds = [row["iteration_seconds"] for row in found["rows"]]
    assert seconds == sorted(seconds)
    assert {row["training_devices"] for row in found["rows"]} == {8}
    best = found["rows"][0]
    again = document(megaplan("rl", SPEC, "--json", *(word for change in best["changes"] for word in ("--set", change))))
    assert again["iteration_seconds"]["value"] == pytest.approx(best["iteration_seconds"])
    assert again["peak_bytes"] == best["peak_bytes"]


@pytest.mark.parametrize(
    "subject", ["llama-3.1-8b.json", "tiny-hybrid.yaml", "tiny-hybrid-pp2.json", "mixtral-8x7b.yaml", "nam56r-8xh200.json"]
)
def test_the_hint_for_a_spec_without_the_section_works_when_pasted(megaplan, subject):
    ran = megaplan("rl", f"plans/{subject}")
    assert "error[MP851]" in ran.err
    section, example = re.findall(r"^hint: (.*)$", ran.err, re.MULTILINE)[:2]
    again = megaplan("rl", f"plans/{subject}", *shlex.split(section), "--json")
    assert "error[" not in again.err
    assert json.loads(again.out)["format"] == "megaplan.rl/1"
    assert megaplan(*shlex.split(example)[1:3]).status == 0


def test_the_best_plan_of_a_search_can_be_pasted(megaplan):
    """The command has one word for each change, whatever a change holds, and gives the iteration of the first row."""
    words = ("rl", SPEC, "--search", "--gpus", "8", "--top", "1")
    (command,) = [line.split("megaplan ", 1)[1] for line in megaplan(*words).out.splitlines() if "--set" in line]
    row = json.loads(megaplan(*words, "--json").out)["rows"][0]
    found = json.loads(megaplan(*shlex.split(command), "--json").out)
    assert found["iteration_seconds"]["value"] == pytest.approx(row["iteration_seconds"])


def test_a_search_on_fewer_devices_than_the_specs_own_engine_has_finds_plans(megaplan):
    """The degrees of the spec's engine are searched, too: they refuse no training pool."""
    found = document(megaplan("rl", SPEC, "--set", "post_training.rollout.tp=16", "--search", "--gpus", "8", "--top", "1", "--json"))
    assert found["num_evaluated"] > 0
    assert found["rows"]
