"""`megaplan run`: numbers that follow from each other, the section `run`, the schema, and refusals."""

import json
import re

import pytest

from megaplan.goodput.figures import figures
from megaplan.plan.make import make_plan
from megaplan.spec.load import load_spec
from megaplan.spec.models import Run

SPEC = "plans/llama-3.1-8b.yaml"


SUSTAINED = figures()["sustained"].value


def document(ran):
    assert ran.err == ""
    assert ran.status == 0
    return json.loads(ran.out)


def test_numbers_follow_from_each_other(megaplan):
    found = document(
        megaplan("run", SPEC, "--tokens", "1T", "--price", "2.5", "--power", "0.7kW", "--pue", "1.2", "--carbon", "0.4", "--json")
    )
    assert found["steps"] == -(-(10**12) // found["tokens_of_step"])
    days, hours = found["days"]["value"], found["device_hours"]["value"]
    assert hours == pytest.approx(days * 24 * found["num_devices"])
    assert days * 86400 * found["goodput"] == pytest.approx(found["steps"] * found["mean_step_seconds"]["value"])
    assert found["mean_step_seconds"]["value"] == pytest.approx(found["step_seconds"]["value"] / SUSTAINED)
    assert sum(found["days_by_cause"].values()) == pytest.approx(days)
    assert found["cost"]["value"] == pytest.approx(2.5 * hours)
    assert found["energy_kwh"]["value"] == pytest.approx(hours * 0.7 * 1.2)
    assert found["joules_per_token"]["value"] == pytest.approx(found["energy_kwh"]["value"] * 3.6e6 / 1e12)
    assert found["carbon_kg"]["value"] == pytest.approx(0.4 * found["energy_kwh"]["value"])
    assert found["goodput"] + sum(found["losses"].values()) == pytest.approx(1.0)
    for name in ("days", "device_hours", "cost", "energy_kwh", "carbon_kg"):
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    saved = found["checkpoints"]
    assert saved["whole_bytes"] == sum(stage["bytes"] for stage in saved["ranks"])
    assert [each["name"] for each in saved["classes"]] == ["local", "parallel", "s3"]


def test_options_are_the_keys_of_the_section(megaplan):
    flags = {f"--{key.replace('_', '-')}" for key in Run.model_fields}
    shown = megaplan("run", "--help").out
    assert [flag for flag in sorted(flags) if flag not in shown] == []


def test_a_section_says_the_same_as_options(megaplan, here):
    text = (here / SPEC).read_text()
    (here / "spec.yaml").write_text(text + "\nrun: {tokens: 300B, mtbf: 10000h, price: 2.5, interval: 20min, spares: 1}\n")
    options = ("--tokens", "300B", "--mtbf", "10000h", "--price", "2.5", "--interval", "20min", "--spares", "1")
    assert document(megaplan("run", "spec.yaml", "--json")) == document(megaplan("run", SPEC, *options, "--json"))


def test_a_plan_has_the_section_outside_its_digest(megaplan, here):
    plain = make_plan(load_spec(str(here / SPEC)).spec)
    planned = make_plan(load_spec(str(here / SPEC), ("run.tokens=2T",)).spec)
    assert plain.digests == planned.digests
    assert "run" not in plain.inputs
    assert planned.inputs["run"] == {"tokens": 2 * 10**12}
    megaplan("split", SPEC, "--set", "run={tokens: 2T, mtbf: 12.5h}", "-o", "plan.json")
    megaplan("split", SPEC, "-o", "other.json")
    assert document(megaplan("run", "plan.json", "--json"))["tokens"] == 2 * 10**12
    assert "run.tokens" in megaplan("diff", "other.json", "plan.json").out
    assert megaplan("check", "plan.json").status == 0


def test_training_steps_give_the_tokens_by_default(megaplan):
    found = document(megaplan("run", SPEC, "--set", "training.steps=500", "--json"))
    assert found["steps"] == 500
    assert found["tokens"] == 500 * found["tokens_of_step"]


def test_a_measured_step_has_no_interval(megaplan):
    words = ("run", SPEC, "--tokens", "1T", "--step", "3.5s")
    found = document(megaplan(*words, "--sustained", "1", "--json"))
    assert found["step_seconds"] == {"value": 3.5, "low": 3.5, "high": 3.5}
    assert found["days"]["low"] == found["days"]["high"]
    longer = document(megaplan(*words, "--json"))
    assert longer["step_seconds"] == found["step_seconds"]
    assert longer["mean_step_seconds"]["value"] == pytest.approx(3.5 / SUSTAINED)
    assert longer["days"]["low"] <= longer["days"]["value"] < longer["days"]["high"]


def test_the_schema_describes_what_is_printed(megaplan):
    schema = document(megaplan("schema", "run"))
    found = document(megaplan("run", SPEC, "--tokens", "1T", "--json"))

    def same_keys(value, part):
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        if "anyOf" in part:
            part = next(each for each in part["anyOf"] if (each.get("type") == "null") == (value is None))
            if value is not None:
                return same_keys(value, part)
        if isinstance(value, dict):
            assert list(value) == list(part["properties"])
            assert all(each["description"] for each in part["properties"].values())
            for key, each in value.items():
                same_keys(each, part["properties"][key])
        elif isinstance(value, list):
            for each in value:
                same_keys(each, part["items"])
        return None

    same_keys(found, schema)
    assert schema["properties"]["format"]["const"] == found["format"]


def test_without_a_price_there_is_no_cost(megaplan):
    ran = megaplan("run", SPEC, "--tokens", "1T")
    assert "cost" not in ran.out
    assert ran.err == ""


def test_figures_are_printed_with_their_sources(megaplan):
    assert "mtbf_hours" not in megaplan("run", SPEC, "--tokens", "1T").out
    shown = megaplan("run", SPEC, "--tokens", "1T", "--mtbf", "9999h", "--figures").out
    assert "mtbf: 9,999 h of one device (given)" in shown
    assert "docs/reference/faults.md" in shown


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--tokens", "2X"), "MP470", "unknown unit 'X'"),
        (("--tokens", "1.5"), "MP124", "run.tokens"),
        (("--mtbf", "soon"), "MP470", "not a quantity"),
        (("--interval", "-5min"), "MP470", "run.interval"),
        (("--node-bandwidth", "5 apples"), "MP470", "run.node_bandwidth"),
        (("--spares", "1.5"), "MP124", "run.spares"),
        (("--storage", "tape"), "MP123", "parallel"),
        (("--price", "free"), "MP125", "run.price"),
        (("--hangs", "2"), "MP130", "at most 1"),
        (("--mtbf", "1ms"), "MP472", "interruption every"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(megaplan, words, code, text):
    ran = megaplan("run", "plans/tiny-hybrid.yaml", *words)
    assert ran.status == 2
    assert code in ran.err
    assert text in ran.err


@pytest.mark.parametrize("given", [("--mtbf", "1h"), ("--mtbf", "20h", "--node-bandwidth", "1MB/s"), ("--mtbf", "100h", "--step", "9d")])
def test_a_run_that_never_ends_is_refused_with_a_time_between_interruptions_in_which_it_does(megaplan, given):
    """No figure of such a run is finite or means anything; the hint leads to one that ends."""
    words = ("run", "plans/llama-3.1-8b-rl.yaml", "--tokens", "20B", "--set", "mesh.dp_shard=128")
    refused = megaplan(*words, *given)
    assert (refused.status, "MP472" in refused.err) == (2, True)
    (hours,) = re.findall(r"--mtbf (\d+)h", refused.err)
    found = json.loads(megaplan(*words, *given, "--mtbf", f"{hours}h", "--json").out)
    assert 0 < found["goodput"] < 1
    assert found["days"]["low"] <= found["days"]["value"] <= found["days"]["high"] < 1e7


def test_every_end_of_a_run_saves_after_the_same_steps(megaplan):
    """An interval in seconds is a number of steps, whichever end of their interval the steps have."""
    words = ("--tokens", "20B", "--step", "1000s", "--mtbf", "200h", "--interval", "1560s", "--set", "mesh.dp_shard=128")
    found = json.loads(megaplan("run", "plans/llama-3.1-8b-rl.yaml", *words, "--json").out)
    assert found["days"]["low"] < found["days"]["value"] < found["days"]["high"]


def test_a_step_without_a_time_is_refused_and_a_measured_one_accepted(megaplan):
    words = ("run", "plans/tiny-hybrid-pp2.yaml", "--set", "schedule.num_microbatches=60000", "--tokens", "100B")
    ran = megaplan(*words)
    assert ran.status == 2
    assert "MP471" in ran.err
    assert "--step" in ran.err
    assert document(megaplan(*words, "--step", "90s", "--json"))["step_seconds"]["value"] == 90


def test_a_given_interval_is_kept_by_the_other_changes(megaplan):
    found = document(megaplan("run", SPEC, "--tokens", "1T", "--mtbf", "200h", "--interval", "3h", "--json"))
    (best,) = (gain for gain in found["gains"] if gain["name"].startswith("a save every"))
    (faster,) = (gain for gain in found["gains"] if gain["name"].startswith("detection"))
    assert best["goodput"] > found["goodput"] + 0.01
    assert found["goodput"] < faster["goodput"] < found["goodput"] + 0.01


def test_copies_in_memory_are_priced(megaplan):
    """Four states a rank in a node's memory, in `run` and in `estimate`; a recovery repeats a step at most."""
    nodes = (SPEC, "--set", "mesh.dp_replicate=4")
    words = (*nodes, "--set", "run.save=memory")
    found, plain = (document(megaplan("run", *each, "--tokens", "1T", "--mtbf", "200h", "--json")) for each in (words, nodes))
    assert found["checkpoints"]["node_host_bytes"] == 4 * plain["checkpoints"]["node_host_bytes"]
    assert found["interval"]["steps"] == 1
    assert not any(gain["name"].startswith(("copies", "a save")) for gain in found["gains"])
    copies = next(gain for gain in plain["gains"] if gain["name"].startswith("copies"))
    assert plain["goodput"] < found["goodput"] == copies["goodput"]
    estimated, without = (document(megaplan("estimate", *each, "--json"))["host_bytes_per_node"] for each in (words, nodes))
    assert (estimated, without) == (found["checkpoints"]["node_host_bytes"], 0)
    assert "host, copies" in megaplan("estimate", *words).out


def test_a_run_that_does_not_fit_says_so(megaplan):
    words = ("run", SPEC, "--tokens", "1T", "--set", "batch.micro_batch_size=16")
    ran = megaplan(*words)
    assert ran.status == 1
    assert "DOES NOT FIT" in ran.out
    assert json.loads(megaplan(*words, "--json").out)["fits"] is False


def test_rollouts_of_a_post_training_plan_are_left_out_by_name(megaplan):
    ran = megaplan("run", "plans/llama-3.1-8b-rl.json", "--tokens", "1B")
    assert "megaplan rl" in ran.out
    assert document(megaplan("run", "plans/llama-3.1-8b-rl.json", "--tokens", "1B", "--json"))["rollouts_left_out"] is True
    assert document(megaplan("run", SPEC, "--tokens", "1B", "--json"))["rollouts_left_out"] is False
    assert "megaplan rl" not in megaplan("run", SPEC, "--tokens", "1B").out
