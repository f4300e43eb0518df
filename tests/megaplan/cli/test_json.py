"""JSON that others script against: exact keys, exact sums, one document."""

import json

import pytest

from megaplan.columns import Column, Phase

COLUMNS = {column.key for column in Column}
RANK = {
    "ranks",
    "coordinate",
    "parameters",
    "columns",
    "cells",
    "phases",
    "peak_bytes",
    "peak_phase",
    "headroom_bytes",
    "fits",
    "allocated_bytes",
    "host_bytes",
    "reserved_bytes",
    "device_bytes",
    "routing",
}


def document(ran):
    assert ran.err == ""
    return json.loads(ran.out)


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("name", ["nam56r-8xh200", "llama-3.1-8b", "mixtral-8x7b", "mamba-codestral-7b", "tiny-hybrid-pp2"])
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_estimate(megaplan, name, suffix):
    found = document(megaplan("estimate", f"plans/{name}{suffix}", "--json"))
    assert list(found) == [
        "format",
        "totals",
        "fits",
        "verdict",
        "most_reserved_bytes",
        "largest_micro_batch",
        "device",
        "host_bytes_per_node",
        "stages",
        "ranks",
        "time",
        "traffic",
        "serving",
        "diagnostics",
    ]
    assert all(set(row) == {"axis", "what", "ranks", "link", "rank_bytes", "total_bytes"} for row in found["traffic"])
    assert found["format"] == "megaplan.estimate/1"
    assert set(found["totals"]) == {"parameters", "active_parameters"}
    device = found["device"]
    assert set(device) == {"name", "capacity_bytes", "reserve_bytes", "reserve", "usable_bytes"}
    assert device["reserve_bytes"] == sum(device["reserve"].values())
    assert device["usable_bytes"] == device["capacity_bytes"] - device["reserve_bytes"]
    for stage in found["stages"]:
        assert set(stage) == {"stage", "pp_rank", "chunk", "layers", "parameters"}
    seen = []
    for rank in found["ranks"]:
        assert set(rank) == RANK
        seen += rank["ranks"]
        assert set(rank["columns"]) == COLUMNS
        assert set(rank["cells"]) == set(Phase)
        assert all(set(cells) == COLUMNS for cells in rank["cells"].values())
        assert rank["phases"] == {phase: sum(cells.values()) for phase, cells in rank["cells"].items()}
        assert rank["peak_bytes"] == max(rank["phases"].values()) == rank["phases"][rank["peak_phase"]]
        assert rank["columns"] == rank["cells"][rank["peak_phase"]]
        assert rank["headroom_bytes"] == device["usable_bytes"] - rank["peak_bytes"]
        assert rank["fits"] == (rank["headroom_bytes"] >= 0)
        assert rank["allocated_bytes"] == rank["peak_bytes"] - rank["columns"]["overhead_bytes"]
        assert rank["reserved_bytes"] == rank["peak_bytes"]
        assert rank["device_bytes"] == rank["peak_bytes"] + device["reserve_bytes"]
        assert (rank["routing"] is not None) == (name == "mixtral-8x7b")  # the one bundled plan that spreads its experts
        assert set(rank["coordinate"]) == {"pp", "dp_replicate", "dp_shard", "cp", "tp"}
    assert sorted(seen) == list(range(len(seen)))
    assert found["fits"] == all(rank["fits"] for rank in found["ranks"])
    assert [rank["peak_bytes"] for rank in found["ranks"]] == sorted((rank["peak_bytes"] for rank in found["ranks"]), reverse=True)
    for item in found["diagnostics"]:
        assert set(item) == {"code", "severity", "summary", "detail", "location", "hints"}
        assert set(item["location"]) == {"file", "line", "column", "key"}
    if found["serving"] is not None:
        sums = {"kv_cache_bytes", "recurrent_state_bytes", "parameters_bytes", "total", "fits"}
        assert set(found["serving"]) == {*sums, "tp", "pp", "ep", "ranks", "times"}  # each of these plans has several stages
        times = found["serving"]["times"]
        assert set(times) == {"decode_ns", "prefill_ns", "batch_size", "num_devices", "low", "high", "tokens_per_second"}
        assert times["tokens_per_second"] == pytest.approx(times["batch_size"] / times["decode_ns"] * 1e9)


def test_a_spec_and_its_plan_are_estimated_alike(megaplan):
    spec, plan = (document(megaplan("estimate", f"plans/nam56r-8xh200.{suffix}", "--json")) for suffix in ("yaml", "json"))
    spec.pop("diagnostics")
    plan.pop("diagnostics")
    assert spec == plan


def test_one_rank(megaplan):
    found = document(megaplan("estimate", "plans/nam56r-8xh200.yaml", "--json", "--rank", "5"))
    [rank] = found["ranks"]
    assert 5 in rank["ranks"]


@pytest.mark.parametrize(("skew", "stated", "reason"), [(1, 4.0, "largest possible"), (2, 2.0, "moe.routing_skew")])
def test_balanced_and_skewed_routing_stand_side_by_side(megaplan, skew, stated, reason):
    spread = ("--set", "mesh.ep=4", "--set", f"model.moe.routing_skew={skew}")
    [rank, *_] = document(megaplan("estimate", "plans/mixtral-8x7b.yaml", "--json", *spread))["ranks"]
    routing = rank["routing"]
    assert (routing["skew"], routing["skew_reason"]) == (stated, reason)
    assert routing["balanced_allocated_bytes"] < routing["skewed_allocated_bytes"]
    assert rank["allocated_bytes"] == routing["balanced_allocated_bytes" if skew == 1 else "skewed_allocated_bytes"]


def test_a_compared_estimate_is_the_other_one_s_worst_rank(megaplan):
    words = ("estimate", "plans/tiny-hybrid-pp2.yaml", "--json")
    both = document(megaplan(*words, "--compare", "batch.micro_batch_size=4", "--compare", "host.kernels=triton"))["compared"]
    alone = document(megaplan(*words, "--set", "batch.micro_batch_size=4", "--set", "host.kernels=triton"))
    assert both["set"] == ["batch.micro_batch_size=4", "host.kernels=triton"]
    worst = alone["ranks"][0]
    assert {key: both[key] for key in ("ranks", "peak_bytes", "columns", "phases")} == {
        key: worst[key] for key in ("ranks", "peak_bytes", "columns", "phases")
    }
    assert "compared" not in alone


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "nothing.yaml", "--json"),
        ("estimate", "-", "--json", "--compare", "mesh.tp=2"),
        ("estimate", "plans/tiny-hybrid.yaml", "--json", "--set", "mesh.tp=3"),
        ("estimate", "plans/tiny-hybrid.yaml", "--json", "--bogus"),
        ("split", "plans/tiny-hybrid.json", "--json"),
        ("split", "plans/tiny-hybrid-pp2.yaml", "--json", "--set", "split.forbid=[1,2,3,4,5,6,7,8]"),
        ("show", "plans/tiny-hybrid.yaml", "--json"),
        ("diff", "plans/tiny-hybrid.json", "nothing.json", "--format", "json"),
        ("diff", "plans/tiny-hybrid.json", "nothing.json", "--format=json"),
        ("check", "nothing.json", "--json"),
    ],
)
def test_a_failure_is_one_document_on_stdout(megaplan, words):
    ran = megaplan(*words)
    assert ran.status in (1, 2)
    found = document(ran)
    assert found["format"] == "megaplan.error/1"
    assert found["diagnostics"]
    for item in found["diagnostics"]:
        assert set(item) == {"code", "severity", "summary", "detail", "location", "hints"}


def test_split_show_check(megaplan, here):
    split = document(megaplan("split", "plans/tiny-hybrid-pp2.yaml", "--json", "-o", "plan.json"))
    plan = json.loads((here / "plan.json").read_text())
    assert split["format"] == "megaplan.partition/1"
    assert split["digests"] == plan["digests"]
    assert [stage["layers"] for stage in split["stages"]] == [stage["layers"] for stage in plan["decisions"]["stages"]]
    assert document(megaplan("show", "plan.json", "--json")) == plan
    check = document(megaplan("check", "plan.json", "--json"))
    assert check.pop("time")["calibration"] == "uncalibrated"
    expected = {"passes": True, "strict": False, "diagnostics": [], "optimum": None, "failed_on": []}
    assert check == {"format": "megaplan.check/1", **expected}


@pytest.mark.requirement("R-53")
def test_diff(megaplan):
    ran = megaplan("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json", "--format", "json")
    assert ran.status == 1
    found = document(ran)
    assert found["format"] == "megaplan.diff/1"
    assert not found["same"]
    assert found["moves"]
    for move in found["moves"]:
        assert len(move["letters"]) == move["layers"][1] - move["layers"][0]
    for rank in found["ranks"]:
        change = sum(pair["after"] - pair["before"] for pair in rank["columns"].values())
        assert change == rank["after"]["peak_bytes"] - rank["before"]["peak_bytes"]


@pytest.mark.requirement("R-53")
def test_markdown_is_fit_for_a_comment(megaplan, here):
    ran = megaplan("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json", "--format", "markdown")
    lines = ran.out.splitlines()
    assert lines[0] == "<!-- megaplan diff -->"
    assert lines[1].startswith("### megaplan: ")
    assert ran.out.count("<details>") == ran.out.count("</details>")
    assert len(ran.out) < 65_536


@pytest.mark.requirement("R-53")
def test_a_markdown_diff_of_a_large_job_is_cut_off_visibly(megaplan):
    large = ("model.pattern=ADDDADDDA", "model.num_layers=256", "mesh.pp=128", "schedule.num_microbatches=128", "split.mode=equal")
    words = [word for value in large for word in ("--set", value)]
    assert megaplan("split", "plans/llama-3.1-8b.yaml", *words, "-o", "a.json").status == 0
    assert megaplan("split", "plans/llama-3.1-8b.yaml", *words, "--set", "model.hidden_size=8192", "-o", "b.json").status == 0
    ran = megaplan("diff", "a.json", "b.json", "--format", "markdown")
    assert ran.status == 1
    assert len(ran.out) < 65_536
    assert "**Truncated:**" in ran.out
    assert ran.out.count("<details>") == ran.out.count("</details>")


@pytest.mark.parametrize("document_name", ["spec", "plan"])
def test_schema(megaplan, document_name):
    found = document(megaplan("schema", document_name))
    assert found["$schema"].startswith("https://json-schema.org/")
    assert "format" in found["properties"]
    assert found["additionalProperties"] is False
    if document_name == "spec":
        assert all(prop["description"] for prop in found["properties"].values())
